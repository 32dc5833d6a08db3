"""Every record survives the codec unchanged, whatever is in it."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from fairtrial import ChatMessage, Metric, PromptExecuted, Sample, Score, TokenUsage, ToolCall, ToolInvoked, Trajectory
from fairtrial.base.codec import canonical, decode, digest, dumps, from_json, parse_json, to_json
from fairtrial.data import Attachment

HARD_TEXTS = ["", "\0", "\ud800", "\udfff\ud800", "\ufdd0", "\ufdd0nan", "\ufdd0bytes:AA==", "\ufdd00000", "\\u0000"]
texts = st.text(st.characters(codec=None), max_size=12) | st.sampled_from(HARD_TEXTS)  # Lone surrogates included.
huge = st.integers() | st.integers(min_value=10**300, max_value=10**4000)
floats = st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | huge | floats | texts
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
offsets = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
moments = st.datetimes() | st.datetimes(timezones=st.just(UTC) | offsets)


def again[T](value: T, kind: Any = None) -> Any:
    text = dumps(value)
    assert "\0" not in text
    assert "\\u0000" not in text.replace("\\\\", "")
    assert parse_json(text.encode("utf-8")) == parse_json(text)
    return decode(kind or type(value), text)


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, "x")
    NUMBER = 3


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclass(frozen=True, slots=True)
class Box[T]:
    item: T
    rest: tuple[T, ...] = ()


@dataclass(frozen=True, slots=True)
class Crate[T]:
    boxes: list[Box[list[T]]]
    by_name: Mapping[str, Box[T]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Point3(Point):
    z: float = 0.0


@dataclass(frozen=True, slots=True)
class PointBox(Box[Point]):
    label: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    children: tuple[Node, ...] = ()


class Row(TypedDict):
    key: str
    when: NotRequired[datetime]


class Pair(NamedTuple):
    left: int
    right: str = ""


class NamedBox[T](NamedTuple):
    item: T


@dataclass(frozen=True, slots=True)
class Everything:
    text: str
    raw: bytes
    number: float
    whole: int
    flag: bool
    nothing: None
    moment: datetime
    day: date
    clock: time
    span: timedelta
    ident: UUID
    price: Decimal
    path: PurePosixPath
    colour: Colour
    level: Level
    access: Access
    numbers: set[int]
    words: frozenset[str]
    row: Row
    pair: Pair
    choice: Literal["a", 1, True, None]
    by_day: dict[date, int]
    by_number: dict[int, str]
    by_ident: dict[UUID, list[bytes]]
    by_colour: dict[Level, float]
    mixed: int | float | str | bytes | list[str] | None
    shape: Point3 | Point | Node
    moment_or_day: datetime | date
    fixed: tuple[int, str, tuple[()]]
    node: Node


rows = st.fixed_dictionaries({"key": texts}, optional={"when": moments})
points = st.builds(Point, st.integers(), floats)
nodes: st.SearchStrategy[Node] = st.recursive(
    st.builds(Node, texts), lambda inner: st.builds(Node, texts, st.lists(inner, max_size=3).map(tuple)), max_leaves=6
)
everything = st.builds(
    Everything,
    text=texts,
    raw=st.binary(max_size=9),
    number=floats,
    whole=huge,
    flag=st.booleans(),
    nothing=st.none(),
    moment=moments,
    day=st.dates(),
    clock=st.times(),
    span=st.timedeltas(),
    ident=st.uuids(),
    price=st.decimals(allow_nan=False),
    path=st.text(st.characters(codec=None, exclude_characters="/"), min_size=1, max_size=5).map(PurePosixPath),
    colour=st.sampled_from(Colour),
    level=st.sampled_from(Level),
    access=st.sampled_from([Access(0), Access.READ, Access.WRITE, Access.READ | Access.WRITE]),
    numbers=st.sets(st.integers(), max_size=4),
    words=st.frozensets(texts, max_size=4),
    row=rows,
    pair=st.builds(Pair, st.integers(), texts),
    choice=st.sampled_from(["a", 1, True, None]),
    by_day=st.dictionaries(st.dates(), st.integers(), max_size=3),
    by_number=st.dictionaries(st.integers(), texts, max_size=3),
    by_ident=st.dictionaries(st.uuids(), st.lists(st.binary(max_size=3), max_size=2), max_size=2),
    by_colour=st.dictionaries(st.sampled_from(Level), floats),
    mixed=st.none() | huge | floats | texts | st.binary(max_size=4) | st.lists(texts, max_size=2),
    shape=points | st.builds(Point3, st.integers(), floats, floats) | nodes,
    moment_or_day=moments | st.dates(),
    fixed=st.tuples(st.integers(), texts, st.just(())),
    node=nodes,
)


@given(everything)
def test_a_record_of_every_supported_type_survives_unchanged(record: Everything) -> None:
    back = again(record)
    assert back == record
    assert type(back.shape) is type(record.shape)
    assert type(back.moment_or_day) is type(record.moment_or_day)
    assert type(back.choice) is type(record.choice)
    assert dumps(back) == dumps(record)


_calls = st.integers(0, 2**31 - 1)
call_usages = st.builds(TokenUsage, _calls, _calls, _calls, st.none() | st.floats(0, allow_infinity=False))
usages = st.builds(
    TokenUsage, st.integers(0), st.integers(0), st.integers(0), st.none() | st.floats(0, allow_infinity=False)
)
attachments = st.builds(Attachment.of, st.binary(max_size=20), media_type=texts, name=texts)
metadata = st.dictionaries(texts, trees, max_size=3)
metrics = st.builds(Metric, texts.filter(bool), st.floats(-1e9, 1e9), st.floats(0, 1e9), metadata)
scores = st.builds(
    Score,
    st.floats(0, 1),
    st.booleans() | st.none(),
    texts,
    st.lists(metrics, max_size=3, unique_by=lambda metric: metric.name),
    name=texts,
)
calls = st.builds(ToolCall, texts, metadata, texts)
messages = st.builds(
    ChatMessage,
    texts,
    texts | st.lists(texts | attachments, max_size=3).map(tuple),
    st.lists(calls, max_size=2).map(tuple),
    texts,
)
records = st.one_of(
    usages,
    attachments,
    metrics,
    scores,
    calls,
    messages,
    st.builds(Trajectory, st.lists(messages, max_size=3).map(tuple)),
    st.builds(
        ToolInvoked,
        texts,
        metadata,
        trees,
        st.none() | st.booleans(),
        st.none() | texts,
        texts,
        texts,
        st.none() | st.uuids(),
        st.none() | moments,
    ),
    st.builds(PromptExecuted, texts, texts, texts, st.none() | call_usages, st.none() | texts, st.none() | attachments),
    st.builds(Sample, texts.filter(bool), trees, trees, metadata),
)


@pytest.mark.proves("R1", "R8", "R10", "R34")
@given(records)
def test_every_record_of_ours_survives_unchanged(record: object) -> None:
    assert again(record) == record
    frozen = decode(type(record), dumps(record), frozen=True)
    assert frozen == record


@given(trees)
def test_plain_json_survives_with_no_type_at_all(tree: object) -> None:
    assert again(tree, object) == tree
    assert from_json(object, to_json(tree), frozen=True) == tree


@given(st.builds(Sample, texts.filter(bool), points, st.none() | st.lists(st.uuids(), max_size=3), metadata))
def test_a_sample_comes_back_with_the_types_of_its_input_and_reference(sample: Sample[Point, list[UUID]]) -> None:
    back = again(sample, Sample[Point, list[UUID]])
    assert back == sample
    assert type(back.input) is Point


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_survive(value: float) -> None:
    back = again([value, {"k": value}], list[float | dict[str, float]])
    assert repr(back) == repr([value, {"k": value}])
    assert repr(again(value, object)) == repr(value)
    assert repr(again(Decimal(value))) == repr(Decimal(value))


def test_minus_zero_keeps_its_sign() -> None:
    assert math.copysign(1, again(-0.0)) == -1


def test_generic_records_carry_their_parameters_all_the_way_down() -> None:
    crate = Crate([Box([Point(1)], ([Point(2)],))], {"a": Box(Point(3))})
    assert again(crate, Crate[Point]) == crate
    assert again(Box(Box(1)), Box[Box[int]]) == Box(Box(1))


def test_a_subclass_of_a_generic_record_knows_what_it_was_made_of() -> None:
    box = PointBox(Point(1), (Point(2),), "two")
    assert again(box) == box


def test_a_generic_named_tuple_knows_its_parameter() -> None:
    back = again(NamedBox(Point(1)), NamedBox[Point])
    assert back == NamedBox(Point(1))
    assert type(back) is NamedBox


type Tree[T] = T | list[Tree[T]]


def test_recursive_generic_aliases_work() -> None:
    tree: Any = [Point(1), [Point(2), []]]
    assert again(tree, Tree[Point]) == tree


class Model(BaseModel):
    name: str = Field(alias="theName")
    when: datetime
    raw: bytes
    tags: set[str]
    price: Decimal
    level: Level
    nested: list[Model] = []
    number: float = 0.0


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    when: datetime
    text: str
    raw: bytes
    number: float
    tags: frozenset[str] = frozenset()


@pydantic_dataclass(frozen=True)
class PydanticPoint:
    x: int
    when: date


models = st.builds(
    Model,
    theName=texts,
    when=moments,
    raw=st.binary(max_size=5),
    tags=st.sets(texts, max_size=2),
    price=st.decimals(allow_nan=False, allow_infinity=False),
    level=st.sampled_from(Level),
    nested=st.just([]),
    number=floats,
)


@given(models, models)
def test_pydantic_models_survive_aliases_and_bytes_included(model: Model, inner: Model) -> None:
    outer = model.model_copy(update={"nested": [inner]})
    assert again(outer) == outer


@given(
    st.builds(
        StrictModel,
        when=moments,
        text=texts,
        raw=st.binary(max_size=5),
        number=st.floats(allow_nan=False),
        tags=st.frozensets(texts, max_size=2),
    )
)
def test_strict_pydantic_models_survive_too(model: StrictModel) -> None:
    assert again(model) == model


@given(st.builds(PydanticPoint, st.integers(), st.dates()))
def test_pydantic_dataclasses_survive(point: PydanticPoint) -> None:
    assert again(point) == point
    assert again([point], list[PydanticPoint]) == [point]


@given(trees)
def test_the_canonical_form_is_one_for_equal_content(tree: Any) -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return tuple(turned(item) for item in value) if isinstance(value, list) else value

    assert canonical(turned(tree)) == canonical(tree)
    assert digest(turned(tree)) == digest(tree)
    assert canonical(parse_json(canonical(tree))) is not None


@given(trees, trees)
def test_different_content_has_different_canonical_forms(one: object, other: object) -> None:
    same_text = dumps(to_json(one)) == dumps(to_json(other))
    if one != other:
        assert canonical(one) != canonical(other)
    elif same_text:
        assert canonical(one) == canonical(other)


class Name(str):
    __slots__ = ()


class Count(int):
    pass


def written_plainly(value: Any) -> Any:
    """What is encoded, by the rules of the table in `base.codec` and without their implementation."""
    if isinstance(value, enum.Enum):
        return written_plainly(value.value)
    if isinstance(value, str):
        return re.sub("[\0\ufdd0\ud800-\udfff]", lambda found: f"\ufdd0{ord(found[0]):04x}", str.__str__(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "\ufdd0nan" if math.isnan(value) else "\ufdd0inf" if value > 0 else "\ufdd0-inf"
    if isinstance(value, dict):
        return {str(written_plainly(key)): written_plainly(item) for key, item in value.items()}
    if isinstance(value, list):
        return [written_plainly(item) for item in value]
    return int(value) if isinstance(value, Count) else value


def nested(depth: int, leaf: Any) -> Any:
    value = leaf
    for level in range(depth):
        value = [value] if level % 2 else {"inner": value}
    return value


limits = st.sampled_from(
    [-0.0, 0.0, 5e-324, 1.7976931348623157e308, 1e16, 1e-5, 1e22, 2.0**53, 0.1, math.nan, math.inf]
)
subclasses = texts.map(Name) | st.integers().map(Count) | st.sampled_from([*Colour, *Level])
anything = st.recursive(
    scalars | limits | st.floats() | subclasses,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(texts | texts.map(Name), inner, max_size=4)
        | st.dictionaries(st.integers() | st.integers().map(Count) | st.sampled_from(Level), inner, max_size=4)
        | st.builds(nested, st.integers(0, 60), inner)
    ),
    max_leaves=12,
)


@given(anything | texts)
@example("\ud800\0\ufdd0")
@example([-0.0, 1e16, 1e-5, 10**4000, Name("\ud800"), {Count(1): {Level.LOW: "\0"}}])
def test_what_is_written_is_what_the_standard_library_writes_byte_for_byte(value: Any) -> None:
    plain, compact = written_plainly(value), (",", ":")
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=compact)
    assert dumps(value) == text
    sorted_text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=compact, sort_keys=True)
    assert canonical(value) == sorted_text.encode()


@given(st.sets(texts | st.integers() | st.booleans(), max_size=6))
def test_sets_are_written_in_one_order(values: set[Any]) -> None:
    turned = sorted(values, key=repr, reverse=True)
    assert dumps(values) == dumps(frozenset(turned))


def test_sequences_and_mappings_of_any_kind_read_as_the_plain_ones() -> None:
    assert again([1, 2], Sequence[int]) == [1, 2]
    assert again({"a": 1}, Mapping[str, int]) == {"a": 1}
