"""Values of every kind that the codec reads and writes, with the type by which code would annotate them."""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar
from uuid import UUID

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from fairtrial import Attachment, ChatMessage, Metric, Score, TokenUsage
from tests.fleet.loop_process import Answer

T = TypeVar("T")
DAY = date(2026, 1, 2)


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, "x")


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Item:
    name: str
    when: date | None = None


@dataclass(frozen=True)
class Box(Generic[T]):  # noqa: UP046 - the older way to write a generic class
    value: T


@dataclass(frozen=True)
class Pair[A, B]:
    one: A
    other: list[B] = field(default_factory=list)


class Outer:
    @dataclass(frozen=True)
    class Item:
        name: str


@dataclass
class Node:
    at: datetime
    below: list[Node] = field(default_factory=list)


class Point(NamedTuple):
    x: int
    when: date = DAY


class Row(TypedDict):
    day: date
    text: str


class Model(BaseModel):
    day: date
    items: list[Item] = []


class ModelBox[M](BaseModel):
    value: M


@pydantic_dataclass(frozen=True)
class Checked:
    day: date


UserId = NewType("UserId", str)
type Days = list[date]
type Either = Item | Answer

# The name of the kind, its annotation, values of it.
KINDS: list[tuple[str, Any, list[Any]]] = [
    ("text", str, ["", "a", "\0", "x\ud800", "\ufdd0nan", "2026-01-02"]),
    ("int", int, [0, -1, 10**400]),
    ("float", float, [1.5, -0.0, 1e300]),
    ("infinity", float, [float("inf")]),
    ("bool", bool, [True, False]),
    ("list", list[Any], [[], [1, "a", None, [2.5]]]),
    ("dict", dict[str, Any], [{}, {"a": {"b": [1]}, "\ud800": 1}]),
    ("bytes", bytes, [b"", b"\xff\x00"]),
    ("datetime", datetime, [datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC)]),
    ("datetime with offset", datetime, [datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5, minutes=-30)))]),
    ("date", date, [DAY]),
    ("time", time, [time(1, 2), time(1, 2, 3, 4, UTC)]),
    ("timedelta", timedelta, [timedelta(days=-1, microseconds=1)]),
    ("decimal", Decimal, [Decimal("1.10"), Decimal("1E+3"), Decimal("-0")]),
    ("uuid", UUID, [UUID(int=7)]),
    ("path", Path, [Path("a/b")]),
    ("pure path", PurePosixPath, [PurePosixPath("/a")]),
    ("address", ipaddress.IPv4Address, [ipaddress.IPv4Address("10.0.0.1")]),
    ("enum", Colour, [Colour.RED, Colour.PAIR]),
    ("int enum", Level, [Level.LOW]),
    ("str enum", Word, [Word.YES]),
    ("flag", Right, [Right.READ, Right.READ | Right.WRITE]),
    ("dataclass", Item, [Item("a"), Item("a", DAY)]),
    ("nested class", Outer.Item, [Outer.Item("a")]),
    ("recursive", Node, [Node(datetime(2026, 1, 2), [Node(datetime(2026, 1, 3))])]),
    ("box of int", Box[int], [Box(3)]),
    ("box of text", Box[str], [Box("red"), Box("2026-01-02")]),
    ("box of enum", Box[Colour], [Box(Colour.RED)]),
    ("box of date", Box[date], [Box(DAY)]),
    ("box of box", Box[Box[date]], [Box(Box(DAY))]),
    ("pair", Pair[Colour, date], [Pair(Colour.RED, [DAY])]),
    ("named tuple", Point, [Point(1), Point(2, DAY)]),
    ("typed dict", Row, [Row(day=DAY, text="2026-01-02")]),
    ("model", Model, [Model(day=DAY), Model(day=DAY, items=[Item("a", DAY)])]),
    ("model box of date", ModelBox[date], [ModelBox[date](value=DAY)]),
    ("model box of text", ModelBox[str], [ModelBox[str](value="2026-01-02")]),
    ("pydantic dataclass", Checked, [Checked(DAY)]),
    ("tuple", tuple[int, ...], [(), (1,), (1, 2)]),
    ("pair of types", tuple[str, date], [("2026-01-02", DAY)]),
    ("tuple of items", tuple[Item, ...], [(Item("a"), Item("b", DAY))]),
    ("list of dates", list[date], [[DAY], []]),
    ("list of lists", list[list[Colour]], [[[Colour.RED], []]]),
    ("mixed list", list[int | Item], [[1, Item("a")], [Item("b")]]),
    ("set", set[int], [{3, 1, 2}, set()]),
    ("frozen set", frozenset[date], [frozenset({DAY})]),
    ("set of tuples", set[tuple[int, int]], [{(1, 2), (3, 4)}]),
    ("int keys", dict[int, str], [{1: "a", 2: "b"}]),
    ("enum keys", dict[Word, int], [{Word.YES: 1}]),
    ("uuid keys", dict[UUID, date], [{UUID(int=1): DAY}]),
    ("date keys", dict[date, list[date]], [{DAY: [DAY]}]),
    ("dict of items", dict[str, Item], [{"k": Item("a", DAY)}]),
    ("mixed dict", dict[str, int | Item], [{"k": 1, "i": Item("a")}]),
    ("union", str | date, ["2026-01-02", DAY]),
    ("optional", Item | None, [Item("a")]),
    ("alias", Days, [[DAY]]),
    ("alias of a union", Either, [Item("a"), Answer(1)]),
    ("literal", Literal["a", "b"], ["a"]),
    ("new type", UserId, ["u1"]),
    ("constrained", Annotated[int, Field(gt=0)], [3]),
    ("attachment", Attachment, [Attachment.of(b"\xff", name="a.txt")]),
    ("message", ChatMessage, [ChatMessage("user", "hi")]),
    ("score", Score, [Score(0.5, True, "why", [Metric("m", 0.5)])]),
    ("usage", TokenUsage, [TokenUsage(1, 2, 3)]),
]
