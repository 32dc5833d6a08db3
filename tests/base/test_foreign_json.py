"""JSON of other tools, and arrays of rows: what is read, what is refused, and where."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fairtrial.base.codec.escape import parse_foreign_json, parse_json, parse_json_array
from fairtrial.errors import CodecError


def nested(levels: int) -> bytes:
    return b"[" * levels + b"1" + b"]" * levels


def test_constants_and_numbers_that_a_float_has_are_read() -> None:
    value = parse_foreign_json(b'\xef\xbb\xbf{"a": NaN, "b": Infinity, "c": ' + b"9" * 308 + b"}")
    assert math.isnan(value["a"])
    assert (value["b"], value["c"]) == (math.inf, int("9" * 308))


def test_a_number_of_more_digits_is_refused_with_its_line() -> None:
    with pytest.raises(CodecError, match=r"^a number must have at most 308 digits \(got 309\)$"):
        parse_foreign_json(b"[" + b"1" * 309 + b"]")
    with pytest.raises(CodecError, match=r"\(got 310 at line 3\)$"):
        parse_foreign_json(b"[1,\n2,\n" + b"7" * 310 + b"\n]")
    assert parse_foreign_json(b'["' + b"1" * 400 + b'", 5]') == ["1" * 400, 5]  # In a text they are no number.


@pytest.mark.parametrize("levels", [200, 201, 5_000, 100_000])
@pytest.mark.parametrize("outside", [b"%s", b'[\n{"text": "]]] [[[ \\"", "deep":\n%s}]'], ids=["alone", "in a file"])
def test_only_200_levels_are_read(levels: int, outside: bytes) -> None:
    inner = 2 if outside != b"%s" else 0
    content = outside % nested(levels - inner)
    if levels == 200:
        assert parse_foreign_json(content)
        return
    line = " at line 3" if inner else ""
    with pytest.raises(CodecError, match=f"^nested more than 200 levels deep{line}$"):
        parse_foreign_json(content)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not JSON: .* at column 2"),
        (b'{"a": 1,\n oops}', "not JSON: .* at line 2 column 2"),
        (b"\xff", "not UTF-8: invalid start byte at byte 0"),
        (b"", "not JSON: .* at column 1"),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(content: bytes, problem: str) -> None:
    with pytest.raises(CodecError, match=f"^{problem}$"):
        parse_foreign_json(content)


def test_scalars_and_empty_values_have_no_depth() -> None:
    assert [parse_foreign_json(content) for content in (b"1", b'"[[["', b"[]", b"{}", b"null")] == [
        1,
        "[[[",
        [],
        {},
        None,
    ]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (b"[]", []),
        (b" \n[ ] \n", []),
        (b"[1]", [(1, 1)]),
        (b'[\n{"a": 1},\n\n[2],\n"x"]', [(2, {"a": 1}), (4, [2]), (5, "x")]),
        (b"[1, 2 , 3\n]\n", [(1, 1), (1, 2), (1, 3)]),
    ],
)
def test_items_of_an_array_come_with_the_line_they_begin_on(text: bytes, items: list[Any]) -> None:
    assert list(parse_json_array(text)) == items


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a": 1}', "an array of rows was expected"),
        (b"", "an array of rows was expected"),
        (b"[1 2]", "not JSON: Expecting ',' delimiter at column 4"),
        (b"[1,\n2 3]", "not JSON: Expecting ',' delimiter at line 2 column 3"),
        (b"[1] x", "not JSON: Extra data at column 5"),
        (b"[1,", "not JSON: .*"),
        (b"[NaN]", "NaN is not JSON; write null, or leave the field out"),
        (b'[{"a": 1, "a": 2}]', "'a' occurs twice in one object"),
        (b"[\xff]", "not UTF-8: .*"),
        (b"[" + nested(100_000) + b"]", "nested too deeply"),
    ],
)
def test_an_array_that_cannot_be_read_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(CodecError, match=f"^{problem}$"):
        list(parse_json_array(text))


def test_one_field_twice_is_refused_only_where_it_would_be_lost() -> None:
    assert parse_json(b'{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(CodecError, match="'a' occurs twice"):
        parse_json(b'{"a": 1, "b": 1, "a": 2}', unique_keys=True)
    with pytest.raises(CodecError, match="-Infinity is not JSON"):
        parse_json("[-Infinity]")
    with pytest.raises(CodecError, match="not supported as JSON"):
        parse_json(b"9" * 5_000)
