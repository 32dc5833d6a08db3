"""The names of types under which values cross a boundary, and how they are read again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, make_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import PurePosixPath
from types import GenericAlias
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import BaseModel

from fairtrial import Sample, TrialContext
from fairtrial.base.codec import to_json
from fairtrial.base.frozen import FrozenDict, FrozenList
from fairtrial.errors import CodecError
from fairtrial.trials import sample_types
from fairtrial.trials.sample_types import (
    KnownTypes,
    UnknownTypeError,
    changes_parts,
    hints_of,
    input_type_of,
    restores,
    same_name,
    sample_type_names,
    shown,
    value_type_name,
)
from tests.fleet.loop_process import Answer, Problem


class Model(BaseModel):
    value: int


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    left: Any
    right: Any


class Names(list[str]):
    """A list of a class of its own."""


@dataclass(frozen=True)
class Box:
    content: Any
    made: int = field(default=0, init=False)


async def add(problem: Problem) -> Answer:
    return Answer(problem.a + problem.b)


def _answers(given) -> Answer:  # type: ignore[no-untyped-def]
    return Answer(given)


def _with_context(given, ctx: TrialContext) -> str:  # type: ignore[no-untyped-def]
    return str(given)


class _Callable:
    def __call__(self, problem: Problem) -> int:
        return problem.a


HERE = "tests.trials.test_sample_types"


PROBLEM, ANSWER = "tests.fleet.loop_process:Problem", "tests.fleet.loop_process:Answer"


@pytest.mark.parametrize(
    ("value", "kind", "name"),
    [
        ("text", str, ""),
        ([1, 2], list[int], ""),
        ({"a": 1}, dict[str, int], ""),
        ({1: 1}, dict[int, int], ["dict", "int", ""]),
        (Problem(1, 2), Problem, PROBLEM),
        (Problem(1, 2), Problem | None, PROBLEM),
        (Model(value=1), Model, "tests.trials.test_sample_types:Model"),
        ([Problem(1, 2)], list[Problem], ["list", PROBLEM]),
        ([1, Problem(1, 2)], list[int | Problem], ["list", "", PROBLEM]),
        ({"k": Problem(1, 2)}, dict[str, Problem], ["dict", "", PROBLEM]),
        ({"k": 1, "p": Problem(1, 2)}, dict[str, int | Problem], ["dict", "", {"p": PROBLEM}]),
        ((1, 2), tuple[int, ...], "tuple"),
        ((Problem(1, 2),), tuple[Problem, ...], ["tuple", PROBLEM]),
        ({"k": [Answer(1)]}, dict[str, list[Answer]], ["dict", "", ["list", ANSWER]]),
        ({1, 2}, set[int], "set"),
        ({date(2026, 1, 2)}, set[date], ["set", "datetime:date"]),
    ],
)
def test_a_value_is_read_under_the_name_it_is_sent_with(value: Any, kind: Any, name: Any) -> None:
    assert value_type_name(value) == name
    declared, mentioned = KnownTypes(input=kind), KnownTypes(expected=kind)
    for known in (declared, mentioned):  # By the annotation of the place, and by what is mentioned elsewhere.
        assert known.read(name, to_json(value), "input") == value


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (add, Problem),
        (partial(add), Problem),
        (lambda given: given, object),
        (_answers, object),
        (_with_context, object),
        (_Callable(), Problem),
        (len, object),
    ],
)
def test_the_input_of_a_task_has_the_type_of_its_first_parameter(task: Any, kind: Any) -> None:
    assert input_type_of(task) is kind


def test_samples_of_different_types_have_no_common_name() -> None:
    samples = [Sample("a", Problem(1, 2)), Sample("b", Answer(1), Answer(2)), Sample("c", 1)]
    assert sample_type_names(samples) == ("...", ANSWER)
    with pytest.raises(UnknownTypeError, match=r"has type \.\.\., which cannot be resolved"):
        KnownTypes(input=Problem, output=Answer).read("...", {"a": 1, "b": 2}, "input")


def _named(module: str, **fields: Any) -> Any:
    """A class with the name `Item`, as another module would define it."""
    return make_dataclass("Item", list(fields.items()), frozen=True, module=module)


def test_a_name_that_several_types_fit_is_refused_unless_the_place_decides() -> None:
    one, other = _named("shop", name=str), _named("shop", name=str)
    known = KnownTypes(input=one, output=other)
    assert type(known.read("shop:Item", {"name": "a"}, "input")) is one
    assert type(known.read("shop:Item", {"name": "a"}, "output")) is other
    with pytest.raises(UnknownTypeError, match=r"has type shop\.Item, and several types"):
        known.read(["list", "shop:Item"], [{"name": "a"}], "input")


def test_an_evaluator_says_by_name_or_by_position_what_output_and_expected_value_are() -> None:
    one, other = _named("shop", name=str), _named("shop", name=str)

    def by_position(got: Any, wanted: Any) -> bool:
        return bool(got == wanted)

    def by_name(expected: Any, output: Any) -> bool:
        return bool(output == expected)

    def alone(got: Any) -> bool:
        return bool(got)

    by_position.__annotations__ = {"got": one, "wanted": other}
    by_name.__annotations__ = {"output": one, "expected": other}
    for judge in (by_position, by_name):
        known = KnownTypes(evaluator=judge)
        assert type(known.read("shop:Item", {"name": "a"}, "output")) is one
        assert type(known.read("shop:Item", {"name": "a"}, "expected")) is other
    alone.__annotations__ = {"got": one}
    assert type(KnownTypes(evaluator=alone).read("shop:Item", {"name": "a"}, "output")) is one


def test_types_that_any_parameter_mentions_are_known() -> None:
    def of_sample(sample: Sample[Problem, Answer], output: str) -> bool:
        return bool(output)

    def with_default(given: str, ctx: TrialContext, example: Problem = Problem(1, 2)) -> str:  # noqa: B008
        return given

    for known in (KnownTypes(evaluator=of_sample), KnownTypes(with_default)):
        assert known.read(PROBLEM, {"a": 1, "b": 2}, "input") == Problem(1, 2)
    assert KnownTypes(evaluator=of_sample).read(ANSWER, to_json(Answer(3)), "expected") == Answer(3)


def test_classes_of_one_name_in_two_modules_are_told_apart() -> None:
    one, other = _named("shop", name=str), _named("stock", name=str)
    known = KnownTypes(input=GenericAlias(list, one), expected=GenericAlias(list, other))
    for kind in (one, other):
        sent = kind("a")
        for place in ("input", "expected", "output"):
            assert type(known.read(value_type_name(sent), to_json(sent), place)) is kind
    with pytest.raises(UnknownTypeError, match=r"has type mill\.Item, which cannot be resolved"):
        known.read("mill:Item", {"name": "a"}, "input")


def test_a_value_that_would_change_its_type_is_refused() -> None:
    wide = make_dataclass("Wide", [("part", object)], frozen=True, module="shop")
    name = value_type_name(sent := wide(Answer(1)))
    assert shown(name) == "shop.Wide[part: tests.fleet.loop_process.Answer]"
    with pytest.raises(UnknownTypeError, match=r"has type shop\.Wide\[part: tests\.fleet\.loop_process\.Answer\]"):
        KnownTypes(input=wide).read(name, to_json(sent), "input")
    assert KnownTypes(input=wide, output=Answer).read(name, to_json(sent), "input") == sent


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Colour.RED, f"{HERE}:Colour"),
        ([], ""),
        (Names(["a"]), f"{HERE}:Names"),
        (Names([]), f"{HERE}:Names"),
        (Pair(1, date(2026, 1, 2)), [f"{HERE}:Pair", {"right": "datetime:date"}]),
        (Pair(1, 2), f"{HERE}:Pair"),
        (Box(Colour.RED), [f"{HERE}:Box", {"content": f"{HERE}:Colour"}]),
        (Box("red"), f"{HERE}:Box"),
        ({1: "a", "b": "c"}, ["dict", ["", "int"], ""]),
        ({1: Colour.RED, 2: "c"}, ["dict", "int", {"1": f"{HERE}:Colour"}]),
        ({Colour.RED, 3}, ["set", "", f"{HERE}:Colour"]),
        (frozenset({1}), "frozenset"),
        ((1, Decimal("1.5")), ["tuple", "", "decimal:Decimal"]),
        (timedelta(seconds=1), "datetime:timedelta"),
        (PurePosixPath("a"), "pathlib:PurePosixPath"),
        (OrderedDict(a=1), "collections:OrderedDict"),
        (OrderedDict(a=Colour.RED), ["collections:OrderedDict", "", f"{HERE}:Colour"]),
        (FrozenDict({1: 2}), ["dict", "int", ""]),
        (FrozenDict(a=1), ""),
        (FrozenList([1]), ""),
    ],
)
def test_a_name_says_what_a_value_is_made_of(value: Any, name: Any) -> None:
    assert value_type_name(value) == name
    if not isinstance(value, Pair | Names | set | dict):  # These need an annotation; see below for dictionaries.
        assert KnownTypes(values=[value]).read(name, to_json(value), "expected") == value


def test_a_value_that_contains_itself_has_no_name() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CodecError, match="contains itself"):
        value_type_name(loop)


def test_nothing_has_no_type() -> None:
    known = KnownTypes(input=Problem)
    assert known.read(PROBLEM, None, "input") is None
    assert known.read("", {"a": 1}, "input") == {"a": 1}
    assert sample_type_names([Sample("a", 1), Sample("b", 2)]) == ("", "")
    assert sample_type_names([]) == ("", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "JSON"),
        ("*.shop:Item", "shop.Item"),
        (["list", "shop:Item"], "list[shop.Item]"),
        (["dict", "", {"a": "shop:Item", "b": ""}], "dict[a: shop.Item, b: JSON]"),
        (["tuple", "", "int"], "tuple[JSON, int]"),
    ],
    ids=str,
)
def test_a_name_is_shown_as_people_write_it(name: Any, text: str) -> None:
    assert shown(name) == text


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("shop:Item", "shop:Item", True),
        ("shop:Item", "mill:Item", False),
        (["list", "a:B"], ["list", "a:B"], True),
        (["list", "a:B"], ["list", "a:B", "a:B"], False),
        (["list", "a:B"], ["list", "a:C"], False),
        (["list", "a:B"], "list", False),
        ({"a": "x:Y"}, {"a": "x:Y"}, True),
        ({"a": "x:Y"}, {"a": "x:Z"}, False),
        ({"a": "x:Y"}, {"b": "x:Y"}, False),
    ],
)
def test_names_are_the_same_if_all_their_parts_are(one: Any, other: Any, same: bool) -> None:
    assert same_name(one, other) is same
    assert same_name(other, one) is same


def test_a_change_of_parts_is_told_from_another_class() -> None:
    assert changes_parts(["list", "a:B"], "")
    assert changes_parts(["list", "a:B"], ["list", "a:C"])
    assert not changes_parts(["list", "a:B"], ["list", "a:B"])
    assert not changes_parts("a:B", "a:C")


def test_an_output_type_restores_what_has_its_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restores(Answer, ANSWER, Answer(1))
    assert not restores(Answer, PROBLEM, Answer(1))
    assert not restores(Problem, ANSWER, Answer(1))
    assert restores(str, "", "text")
    assert not restores(str, "", 1)
    assert restores(object, "", 1)
    assert not restores(Any, ANSWER, Answer(1))
    annotated = Annotated[Answer, ["metadata that has no hash"]]
    assert restores(annotated, ANSWER, Answer(1))
    assert not restores(annotated, PROBLEM, Answer(1))
    monkeypatch.setattr(sample_types, "_MOST_RESTORED", 2)
    sample_types._RESTORED.clear()
    for _ in range(2):
        for kind in (Answer, Problem, Box):
            assert restores(kind, ANSWER, Answer(1)) is (kind is Answer)
            assert len(sample_types._RESTORED) <= 2


def test_places_are_declared_by_the_task_and_by_the_evaluator() -> None:
    def task(given: Problem) -> Answer:
        return Answer(given.a)

    def by_name(output: object, expected: Colour, input: date) -> bool:
        return True

    def by_position(said: Colour, wanted: date) -> bool:
        return True

    assert not KnownTypes(task).evaluator_reads_input
    assert KnownTypes(task, by_name).evaluator_reads_input
    known = KnownTypes(task, by_name)
    assert known.read(PROBLEM, {"a": 1, "b": 2}, "input") == Problem(1, 2)
    assert known.read(ANSWER, {"value": 1}, "output") == Answer(1)
    assert known.read(f"{HERE}:Colour", "red", "expected") is Colour.RED
    known = KnownTypes(None, by_position)
    assert known.read(f"{HERE}:Colour", "red", "output") is Colour.RED
    assert known.read("datetime:date", "2026-01-02", "expected") == date(2026, 1, 2)
    assert KnownTypes(None, lambda: True).read("datetime:datetime", "2026-01-02T03:04:05", "input") == datetime(
        2026, 1, 2, 3, 4, 5
    )


def test_keys_and_items_are_read_by_their_names() -> None:
    known = KnownTypes(values=[Colour.RED])
    colour = f"{HERE}:Colour"
    assert known.read(["dict", colour, ""], {"red": 1}, "input") == {Colour.RED: 1}
    assert known.read(["dict", "int", {"1": colour}], {"1": "red", "2": "red"}, "input") == {1: Colour.RED, 2: "red"}
    assert known.read(["tuple", "", colour], ["red", "red"], "input") == ("red", Colour.RED)
    for name in (["dict", "shop:Item", ""], ["list", "shop:Item"], "shop:Item"):
        with pytest.raises(UnknownTypeError, match=r"pass input_type=\.\.\., or annotate the task"):
            known.read(name, {"red": 1} if name[0] == "dict" else ["red"], "input")
    with pytest.raises(UnknownTypeError):  # More names than items.
        known.read(["tuple", "", colour], ["red"], "input")


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (str, True), (int | None, True), (list[dict[str, float]], True), (Literal["a"], True), (dict, True),
        (Any, True),
        (dict[int, str], False), (Problem, False), (list[Problem], False), (Problem | None, False), (tuple[int], False),
    ],
    ids=str,
)  # fmt: skip
def test_inputs_that_json_preserves_have_no_type(kind: Any, plain: bool) -> None:
    def task(given: Any) -> None:
        return None

    task.__annotations__["given"] = kind
    assert input_type_of(task) == (object if plain else kind)


def test_annotations_that_cannot_be_read_say_nothing() -> None:
    def task(given: "Missing") -> "Other":  # type: ignore[name-defined]  # noqa: F821, UP037
        return given

    assert hints_of(task) == {}
    assert hints_of(None) == {}
    assert hints_of(partial(partial(add), problem=Problem(1, 2))) == {"problem": Problem, "return": Answer}
