"""Values that the codec refuses, its error messages, and how it resolves ambiguous types."""

from __future__ import annotations

import collections
import enum
import ipaddress
import json
import sys
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NewType, NotRequired, Required, TypedDict, TypeVar

import numpy as np
import pytest
from annotated_types import Gt
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, HttpUrl, RootModel, SecretStr

from fairtrial.base.codec import canonical, decode, digest, dumps, from_json, parse_json, to_json
from fairtrial.base.codec.escape import parse_long_json
from fairtrial.base.frozen import FrozenDict, FrozenList
from fairtrial.errors import CodecError
from tests.records import changeable

T = TypeVar("T")


def read(kind: Any, tree: Any, *, frozen: bool = False) -> Any:
    return from_json(kind, tree, frozen=frozen)


def problem(kind: Any, tree: Any) -> str:
    with pytest.raises(CodecError) as caught:
        read(kind, tree)
    return str(caught.value)


def test_the_types_of_fields_are_known_where_annotations_are_not_kept_as_text() -> None:
    code = """if True:
        from dataclasses import dataclass
        from typing import NamedTuple

        @dataclass
        class Point:
            at: tuple[int, int]

        class Pair[T](NamedTuple):
            first: T
            points: list[Point]
    """
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, "<string>", "exec", dont_inherit=True), space)
    kind = space["Pair"][date]
    assert read(kind, ["2026-01-02", [{"at": [1, 2]}]]) == (date(2026, 1, 2), [space["Point"]((1, 2))])


@dataclass(frozen=True, slots=True)
class Turn:
    role: Literal["user", "assistant"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Talk:
    turns: list[Turn]
    score: float = 0.0


@dataclass(frozen=True)
class Add:
    left: Expression
    right: Expression
    op: Literal["+"] = "+"


@dataclass(frozen=True)
class Times:
    left: Expression
    right: Expression
    op: Literal["*"] = "*"


type Expression = Add | Times | int


class Suit(enum.StrEnum):
    HEARTS = "h"
    SPADES = "s"


class Power(enum.Flag):
    ON = 1
    FAST = 2


class Loose(TypedDict, total=False):
    a: Required[int]
    b: str


class Tight(TypedDict):
    a: int
    b: NotRequired[str]


class Old(Generic[T]):  # noqa: UP046 - people still write them so
    pass


@dataclass
class OldBox(Generic[T]):  # noqa: UP046
    item: T


@dataclass
class IntBoxAndMore(OldBox[int], Generic[T]):  # noqa: UP046
    more: T


class MyDict(dict[str, int]):
    pass


class GenericRow[V](TypedDict):
    value: V


class PointRow(GenericRow[date]):
    name: str


class TestWhatIsAskedFor:
    @pytest.mark.proves("R6")
    def test_an_int_is_accepted_where_a_float_is_asked_for_and_nothing_else_is_bent(self) -> None:
        assert repr(read(float, 1)) == "1.0"
        assert problem(int, True) == "expected int, got bool (true)"
        assert problem(float, True) == "expected float, got bool (true)"
        assert problem(int, 1.0) == "expected int, got float (1.0)"
        assert problem(int, "1") == 'expected int, got str ("1")'
        assert problem(str, 1) == "expected str, got int (1)"
        assert problem(bool, 1) == "expected bool, got int (1)"
        assert problem(type(None), 0) == "expected null, got int (0)"
        assert problem(float, 10**400) == "the integer is too large for a float"

    @pytest.mark.proves("R6")
    def test_lists_unions_none_and_models_are_supported(self) -> None:
        assert read(list[int] | None, None) is None
        assert read(list[int | str], [1, "a"]) == [1, "a"]
        assert read(dict[str, Turn], {"a": {"role": "user"}}) == {"a": Turn("user")}
        assert problem(list[int], {"a": 1}) == "expected an array, got an object"
        assert problem(dict[str, int], [1]) == "expected an object, got an array"

    def test_errors_lead_to_the_culprit(self) -> None:
        assert problem(Talk, {"turns": [{"role": "user"}, {"role": "admin"}]}) == (
            'at $.turns[1].role: expected one of "user", "assistant", got str ("admin")'
        )
        assert problem(dict[int, int], {"a": 1}) == 'at $.a: expected int as a key, got str ("a")'
        assert problem(tuple[int, str], [1, 2]) == "at $[1]: expected str, got int (2)"
        assert problem(tuple[int, str], [1]) == "expected an array of 2, got an array"
        assert problem(tuple[()], [1]) == "expected an array of 0, got an array"

    @pytest.mark.proves("R6")
    def test_misspelt_and_missing_fields_are_named(self) -> None:
        assert problem(Talk, {"turn": []}) == "Talk has no field 'turn'; did you mean 'turns'?"
        assert problem(Talk, {"zzz": []}) == "Talk has no field 'zzz'; Talk has turns, score"
        assert problem(Talk, {}) == "Talk needs the field 'turns'"
        assert problem(Talk, 3) == "expected an object (Talk), got int (3)"
        assert problem(Tight, {"b": "x"}) == "Tight needs the field 'a'"
        assert problem(Loose, {"b": "x"}) == "Loose needs the field 'a'"

    def test_a_typed_dict_may_lack_what_is_not_required(self) -> None:
        assert read(Loose, {"a": 1}) == read(Tight, {"a": 1}) == {"a": 1}
        assert isinstance(read(Tight, {"a": 1}, frozen=True), FrozenDict)

    def test_long_values_are_shortened_in_messages(self) -> None:
        assert len(problem(int, "x" * 5_000)) < 80
        assert problem(str, 10**50).endswith("...)")

    def test_the_error_of_a_records_own_check_is_reported(self) -> None:
        assert "not a Positive: must be above 0" in problem(Positive, {"n": -1})


@dataclass
class Positive:
    n: int
    seen: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.n <= 0:
            raise ValueError("must be above 0")


@dataclass(init=False)
class Odd:
    a: int

    def __init__(self, b: int) -> None:
        self.a = b


@dataclass
class WithInitVar:
    a: int
    seed: InitVar[int] = 0


class TestUnions:
    def test_the_record_with_exactly_these_fields_is_chosen_whatever_the_order(self) -> None:
        for kind in (Small | Big, Big | Small):
            assert read(kind, to_json(Small(1))) == Small(1)
            assert read(kind, to_json(Big(1))) == Big(1)
        assert read(Big | dict[str, int], {"a": 1, "z": 2}) == {"a": 1, "z": 2}

    def test_deep_unions_are_told_apart_by_their_literals_without_trying_every_path(self) -> None:
        deep: Any = 1
        for _ in range(60):
            deep = Times(1, deep)
        assert decode(Times, dumps(deep)) == deep
        assert read(Add | Times, to_json(Times(Add(1, 2), 3))) == Times(Add(1, 2), 3)

    def test_models_that_ignore_unknown_keys_do_not_swallow_each_other(self) -> None:
        assert read(ModelA | ModelB, {"y": 1}) == ModelB(y=1)
        assert read(Wide | ModelB, {"y": 1}) == ModelB(y=1)
        assert read(Wrapped | ModelB, [1]) == Wrapped([1])

    def test_the_error_is_that_of_the_member_that_got_furthest(self) -> None:
        assert problem(Talk | int, {"turns": [{"role": 3}]}).startswith("at $.turns[0].role: as Talk: expected one of")
        assert problem(int | str, 1.5) == "expected int or str, got float (1.5)"
        assert problem(str | int, 1.5) == "expected str or int, got float (1.5)"
        assert "needs the field" in problem(Talk | None, {})
        assert problem(Loose | Tight, {"c": 1}).startswith("as Loose: Loose has no field 'c'")
        assert problem(Add | Times, {"op": ["+"]}).startswith("at $.op: as Add: expected one of")

    def test_a_strict_model_reads_dates_as_text_and_nothing_else_from_text(self) -> None:
        assert read(Strict, {"when": "2024-05-06", "n": 1}).when == date(2024, 5, 6)
        assert "at $.n: Input should be a valid integer" in problem(Strict, {"when": "2024-05-06", "n": "1"})

    def test_typed_dicts_in_a_union_are_told_apart_by_their_keys(self) -> None:
        assert read(ByName | ByNumber, {"number": 1}) == {"number": 1}
        assert read(ByName | Loose, {"kind": "a", "name": "x"}) == {"kind": "a", "name": "x"}
        assert "as ByName" in problem(ByName | ByNumber, {"kind": [1], "name": "x"})

    def test_the_order_of_a_union_decides_where_nothing_else_can(self) -> None:
        assert read(list[int] | tuple[int, ...], [1]) == [1]
        assert read(Literal["a"] | Small, {"a": 1}) == Small(1)
        assert read(tuple[int, ...] | list[int], [1]) == (1,)

    def test_a_literal_in_a_union_of_records_may_be_an_enum_member(self) -> None:
        assert read(Hearts | Spades, {"suit": "s", "n": 1}) == Spades(1)


@dataclass(frozen=True)
class Small:
    a: int


@dataclass(frozen=True)
class Big:
    a: int
    b: int = 0


@dataclass(frozen=True)
class Hearts:
    n: int
    suit: Literal[Suit.HEARTS] = Suit.HEARTS


@dataclass(frozen=True)
class Spades:
    n: int
    suit: Literal[Suit.SPADES] = Suit.SPADES


class ModelA(BaseModel):
    x: int = 0


class ModelB(BaseModel):
    y: int


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    when: date
    n: int


class ByName(TypedDict):
    kind: NotRequired[Literal["a"]]
    name: str


class ByNumber(TypedDict):
    number: int


class Wide(BaseModel):
    model_config = ConfigDict(extra="allow")


class Wrapped(RootModel[list[int]]):
    pass


class TestKindsOfTypes:
    def test_enums_are_read_by_value(self) -> None:
        assert read(Suit, "h") is Suit.HEARTS
        assert 'expected one of "h", "s" (Suit), got str ("x")' in problem(Suit, "x")
        assert read(Power, 3) == Power.ON | Power.FAST
        assert "(Power)" in problem(Power, 8)
        assert read(dict[Suit, int], {"h": 1}) == {Suit.HEARTS: 1}

    def test_integer_keys_are_read_only_as_they_are_written(self) -> None:
        assert read(dict[int, int], {"-1": 1}) == {-1: 1}
        for key in ("1_0", " 1", "+1", "01"):
            assert "as a key" in problem(dict[int, int], {key: 1})

    def test_dates_durations_and_decimals_are_text(self) -> None:
        assert read(timedelta, "P1DT2H3M4.5S") == timedelta(days=1, hours=2, minutes=3, seconds=4.5)
        assert read(timedelta, "-PT1S") == timedelta(seconds=-1)
        for bad in ("P", "PT", "1", "P1Y", "P99999999999D", "P1DT"):
            assert "timedelta as text" in problem(timedelta, bad)
        assert dumps(timedelta.min) == '"-P999999999D"'
        assert read(Decimal, 1.1) == Decimal("1.1")
        assert read(Decimal, 3) == Decimal(3)
        assert "Decimal as text" in problem(Decimal, "x")
        assert "Decimal as text" in problem(Decimal, True)
        assert "date as text" in problem(date, 5)
        assert "UUID as text" in problem(__import__("uuid").UUID, "5")

    def test_bytes_may_be_plain_base64_written_by_people(self) -> None:
        assert read(bytes, "aGk=") == b"hi"
        for bad in ("a", "aG k=", "aGk=!", 1):
            assert "bytes as base64" in problem(bytes, bad)
        for bad in ("a", "aG k=", "aGk=!"):
            assert "damaged bytes" in problem(bytes, f"\ufdd0bytes:{bad}")

    @pytest.mark.parametrize("text", ["[1]", "[1]\n", " [1]", "\t[1] \r\n"])
    def test_space_around_a_value_is_ignored(self, text: str) -> None:
        assert parse_json(text) == [1]

    @pytest.mark.parametrize("text", ["[1]\u00a0", "[1]\f", "[1] 2", "[1]]"])
    def test_nothing_else_may_follow_a_value(self, text: str) -> None:
        with pytest.raises(CodecError):
            parse_json(text)

    def test_a_key_that_occurs_twice_is_named_where_keys_must_be_unique(self) -> None:
        assert parse_json('{"a": 1, "b": 2, "b": 3}') == {"a": 1, "b": 3}
        with pytest.raises(CodecError, match="'b' occurs twice in one object"):
            parse_json('{"a": 1, "b": 2, "b": 3}', unique_keys=True)

    def test_lists_can_be_changed_unless_they_are_asked_for_frozen(self) -> None:
        for kind in (list[int], Any):
            assert type(from_json(kind, [1])) is type(decode(kind, "[1]")) is list
            assert type(from_json(kind, [1], frozen=True)) is type(decode(kind, "[1]", frozen=True)) is FrozenList

    def test_annotations_in_words_are_passed_over_and_constraints_are_checked(self) -> None:
        assert read(Annotated[int, "how many"], 3) == 3
        assert read(Annotated[int, ["unhashable"]], 3) == 3
        assert read(list[Annotated[int, ["unhashable"]]], [3]) == [3]
        assert "greater than 0" in problem(Annotated[int, Gt(0)], 0)
        assert read(Annotated[int, AfterValidator(lambda n: n + 1)], 1) == 2

    def test_a_constrained_container_is_still_frozen_when_asked_to_be(self) -> None:
        kind = Annotated[dict[str, set[int]], AfterValidator(lambda value: value)]
        frozen = read(kind, {"a": [1]}, frozen=True)
        assert isinstance(frozen, FrozenDict)
        assert isinstance(read(Annotated[set[int], AfterValidator(set)], [1], frozen=True), frozenset)
        assert isinstance(read(Annotated[tuple[list[int], ...], Gt(())], [[1]], frozen=True)[0], FrozenList)

    def test_pydantic_says_what_it_cannot_check(self) -> None:
        assert "pydantic cannot check" in problem(Annotated[MyDict, Gt(0)], {})

    def test_new_types_and_old_style_generics_work(self) -> None:
        assert read(NewType("Count", int), 3) == 3
        back = read(IntBoxAndMore[date], {"item": 1, "more": "2024-01-02"})
        assert back == IntBoxAndMore(1, date(2024, 1, 2))
        assert "expected int" in problem(IntBoxAndMore[str], {"item": "x", "more": "y"})
        assert read(OldBox, {"item": {"a": 1}}).item == {"a": 1}
        assert read(PointRow, {"value": "2024-01-02", "name": "n"}) == {"value": date(2024, 1, 2), "name": "n"}

    def test_collections_are_made_as_the_type_says(self) -> None:
        assert type(read(collections.OrderedDict[str, int], {"a": 1})) is collections.OrderedDict
        assert type(read(collections.Counter[str], {"a": 1})) is collections.Counter
        assert "not a defaultdict" in problem(collections.defaultdict[str, int], {"a": 1})
        assert "not a set" in problem(set[Any], [[1]])
        assert read(tuple, [1, 2]) == (1, 2)
        assert read(dict, {"a": [1]}) == {"a": [1]}
        assert read(list, [{"a": 1}]) == [{"a": 1}]
        assert read(collections.namedtuple("P", "a b"), [1, 2]) == (1, 2)

    def test_a_type_with_nothing_in_json_is_refused_by_name(self) -> None:
        for kind in (complex, Old, Callable[[int], int], "text", 5):
            assert "is not a type that can be read from JSON" in problem(kind, 1)

    def test_a_record_that_cannot_be_made_from_its_fields_says_so(self) -> None:
        assert "its __init__ takes no 'a'" in problem(Odd, {"a": 1})
        assert read(WithInitVar, {"a": 1}) == WithInitVar(1)

    def test_annotations_that_name_something_local_are_explained(self) -> None:
        @dataclass
        class Inner:
            a: int

        @dataclass
        class Outer:
            inner: Inner

        assert "define what it names at module level" in problem(Outer, {"inner": {"a": 1}})

    def test_classes_inside_classes_are_found(self) -> None:
        assert read(Outside, {"inside": {"a": 1}}) == Outside(Outside.Inside(1))

    def test_models_with_addresses_and_links_are_encoded_and_secrets_are_refused(self) -> None:
        link = Linked(url=HttpUrl("https://example.org/a"), host=ipaddress.IPv4Address("127.0.0.1"))
        assert decode(Linked, dumps(link)) == link
        assert read(ipaddress.IPv4Address, "127.0.0.1") == link.host
        with pytest.raises(CodecError, match="SecretStr cannot be encoded"):
            dumps(Secret(key=SecretStr("x")))

    def test_a_models_complaint_becomes_ours(self) -> None:
        assert problem(ModelB, {"y": "a"}).startswith("at $.y: Input should be a valid integer")


@dataclass
class Outside:
    @dataclass
    class Inside:
        a: int

    inside: Inside


class Linked(BaseModel):
    url: HttpUrl
    host: ipaddress.IPv4Address


class Secret(BaseModel):
    key: SecretStr


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


class TestWriting:
    def test_a_value_that_cannot_be_encoded_is_refused_with_its_path(self) -> None:
        with pytest.raises(CodecError, match=r"at \$\.a\[1\]: a builtins.object cannot be encoded as JSON"):
            to_json({"a": [1, object()]})
        with pytest.raises(CodecError, match=r"at \$\.turns\[0\]: a builtins\.complex"):
            to_json(Talk([1j]))  # type: ignore[list-item]

    def test_keys_are_text_or_ints_and_never_meet(self) -> None:
        assert to_json({1: "a", Suit.HEARTS: "b", date(2024, 1, 2): "c"}) == {"1": "a", "h": "b", "2024-01-02": "c"}
        for key in (1.5, None, True, (1,), b"x"):
            with pytest.raises(CodecError, match="cannot be a key in JSON"):
                to_json({key: 1})
            with pytest.raises(CodecError, match="cannot be a key in JSON"):
                canonical({key: 1})
        with pytest.raises(CodecError, match=r"differ as JSON text \(got '1' twice\)"):
            to_json({1: "a", "1": "b"})

    def test_what_contains_itself_is_refused(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        for write in (to_json, dumps, canonical, digest):
            with pytest.raises(CodecError, match="nested too deeply"):
                write(loop)

    def test_integers_have_a_limit_and_it_is_named(self) -> None:
        limit = sys.get_int_max_str_digits()
        assert decode(int, dumps(10 ** (limit - 1))) == 10 ** (limit - 1)
        for write in (to_json, dumps, canonical):
            with pytest.raises(CodecError, match=f"more than {limit} digits"):
                write([10**limit])

    def test_the_tree_shares_nothing_with_the_value(self) -> None:
        value = {"a": [1]}
        tree = to_json(value)
        value["a"].append(2)
        assert tree == {"a": [1]}

    def test_numbers_and_arrays_of_numpy_are_written_as_numbers(self) -> None:
        value = [np.float64(1.5), np.int64(2), np.bool_(True), np.array([1.0, 2.0])]
        assert to_json(value) == [1.5, 2, True, [1.0, 2.0]]

    def test_subclasses_are_written_as_what_they_hold(self) -> None:
        class Celsius(float):
            pass

        assert to_json([Loud("a"), Celsius(2.0), bytearray(b"x"), Path("a/b")]) == [
            "a",
            2.0,
            to_json(b"x"),
            "a/b",
        ]

    def test_a_time_zone_is_encoded_as_its_offset(self) -> None:
        assert decode(datetime, dumps(datetime(2024, 1, 2, tzinfo=UTC))) == datetime(2024, 1, 2, tzinfo=UTC)


class TestParsing:
    def test_invalid_json_is_refused_with_its_position(self) -> None:
        cases: list[tuple[str | bytes, str]] = [
            ("{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
            ("[1,\n2", "not JSON: Expecting ',' delimiter at line 2 column 2"),
            (b"\xff", "not UTF-8: invalid start byte at byte 0"),
            ("[NaN]", "NaN is not JSON"),
            ("[-Infinity]", "-Infinity is not JSON"),
            ("1" * 5_000, "not supported as JSON"),
            ("[" * 200_000, "nested too deeply"),
        ]
        for text, words in cases:
            with pytest.raises(CodecError) as caught:
                parse_json(text)
            assert words in str(caught.value)

    def test_reading_what_is_nested_too_deeply_is_refused(self) -> None:
        deep: Any = []
        for _ in range(sys.getrecursionlimit()):
            deep = [deep]
        assert problem(object, deep) == "nested too deeply"

    def test_a_damaged_key_is_refused(self) -> None:
        assert "is not a key" in problem(object, {"\ufdd0nan": 1})

    def test_every_error_survives_being_copied_with_its_path(self) -> None:
        with pytest.raises(CodecError) as caught:
            read(list[int], ["a"])
        assert caught.value.args == (caught.value.problem, (0,))


def test_records_cannot_be_changed() -> None:
    assert changeable("base") == {"RunProgress"}


JSON_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)


class TestLongJson:
    """Long texts are read by another parser; spaces make any text a long one."""

    @given(JSON_TREES, st.booleans())
    def test_a_long_text_is_read_as_json_reads_it(self, tree: Any, ascii_only: bool) -> None:
        text = json.dumps(tree, ensure_ascii=ascii_only) + " " * 300_000
        assert repr(parse_long_json(text)) == repr(json.loads(text))

    @pytest.mark.parametrize(
        "text",
        [
            '{"a": 1, "b": 2, "a": 3}', "[1e400, -1e400, -0, -0.0]", f"[{'9' * 400}, 0.1, 1e-320]",
            "[2.2250738585072011e-308, 9007199254740993, 9007199254740993.0]", '["\\ud800", "\ud800"]',
            "[NaN, Infinity, -Infinity]", "[" * 900 + "]" * 900,
        ],
    )  # fmt: skip
    def test_what_other_parsers_read_differently_is_read_as_json_reads_it(self, text: str) -> None:
        assert repr(parse_long_json(text + " " * 300_000)) == repr(json.loads(text))

    @pytest.mark.parametrize(
        "text", ["[1.]", "[01]", "[1]x", "[nan]", "[+1]", "['a']", '{"a"}', "", '["a\nb"]', "\ufeff[1]"]
    )
    def test_what_is_not_json_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"line|BOM"):
            parse_long_json(text + " " * 300_000)
