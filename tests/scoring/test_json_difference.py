"""json_diff: fields compared one by one, with tolerances."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ConfigurationError
from fairtrial.errors import NothingToScoreError
from fairtrial.scoring import json_diff
from fairtrial.scoring.structure import same_json

CASES: list[tuple[Any, Any, float]] = [
    ({"a": 1}, {"a": 1}, 1.0),
    ({"a": 1}, {"a": 2}, 0.0),
    ({"a": 1, "b": 2}, {"a": 1, "b": 3}, 0.5),
    ({"a": 1}, {"a": 1, "b": 3}, 0.5),
    ({"a": 1, "b": 3}, {"a": 1}, 0.5),
    ({"a": 1, "c": 3}, {"a": 1, "b": 3}, 1 / 3),
    ({}, {}, 1.0),
    ([], [], 1.0),
    ({}, [], 0.0),
    ([1, 2, 3], [1, 2, 3], 1.0),
    ([1, 2], [1, 2, 3], 2 / 3),
    ([1, 2, 3, 4], [1, 2], 0.5),
    ([3, 2, 1], [1, 2, 3], 1 / 3),
    ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 1}}}, 1.0),
    ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 1, "d": 3}}}, 0.5),
    ({"a": 5}, {"a": {"b": 1, "c": 2}}, 0.0),
    ({"a": {"b": 1}}, {"a": 5}, 0.0),
    ({"a": None}, {"a": None}, 1.0),
    ({"a": None}, {}, 0.0),
    ({"a": True}, {"a": 1}, 0.0),
    ({"a": 1.0}, {"a": 1}, 1.0),
    ({"a": "1"}, {"a": 1}, 0.0),
    ({"a": []}, {"a": {}}, 0.0),
    ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, 0.5),
    ({"a": [{"b": 1}]}, {"a": [{"b": 1}, {"b": 2, "c": 3}]}, 1 / 3),
    ("x", "x", 1.0),
    (3, 3, 1.0),
    (3, 4, 0.0),
    ({"a.b": 1}, {"a": {"b": 1}}, 0.0),
    ({"a": "é"}, {"a": "é"}, 1.0),
    ({"x": 1, "y": {"z": [1, 2]}}, {"x": 1, "y": {"z": [1, 2]}, "w": 0}, 3 / 4),
]


def flat(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Every field of a tree by its path."""
    if isinstance(tree, dict) and tree:
        return {k: v for key, item in tree.items() for k, v in flat(item, (*path, key)).items()}
    if isinstance(tree, list) and tree:
        return {k: v for place, item in enumerate(tree) for k, v in flat(item, (*path, place)).items()}
    return {path: tree}


@pytest.mark.proves("R157")
@pytest.mark.parametrize(("output", "expected", "value"), CASES)
def test_the_value_is_the_share_of_fields_that_agree(output: Any, expected: Any, value: float) -> None:
    said = json.dumps(output) if isinstance(output, str) else output
    score = json_diff()(said, json.dumps(expected) if isinstance(expected, str) else expected)
    assert score.value == pytest.approx(value)
    assert score.passed == (value == 1.0)


same_shape = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from("ab"),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("xyz"), same_shape), st.dictionaries(st.sampled_from("xyz"), same_shape))
def test_trees_agree_with_flattened_dictionaries(output: dict[str, Any], expected: dict[str, Any]) -> None:
    ours, theirs = flat(output), flat(expected)
    nested = [path for path in ours for other in theirs if path != other and path == other[: len(path)]]
    nested += [path for path in theirs for other in ours if path != other and path == other[: len(path)]]
    if nested:
        return  # A field in place of an object: counted once, not on both sides.
    paths = ours.keys() | theirs.keys()
    same = sum(path in ours and path in theirs and same_json(ours[path], theirs[path]) for path in paths)
    assert json_diff()(output, expected).value == pytest.approx(same / len(paths))


def test_differences_are_named_and_counted_by_kind() -> None:
    score = json_diff()({"a": 1, "c": 3, "d": {"e": "x"}}, {"a": 2, "b": 3, "d": {"e": "x"}})
    assert score.reason == "wrong: $.a is 1, expected 2; missing: $.b; unexpected: $.c"
    assert {metric.name: metric.value for metric in score.metrics} == {"wrong": 1, "missing": 1, "unexpected": 1}
    many = json_diff()({}, {f"f{n}": n for n in range(9)})
    assert many.reason.endswith("missing: $.f4; and 4 more")


@pytest.mark.parametrize(
    ("options", "output", "passed"),
    [
        ({"tolerance": 0.1}, 0.3, True),  # 0.3 - 0.2 is a little more than 0.1 in floating point.
        ({"tolerance": 0.09}, 0.3, False),
        ({"tolerance": 0.5, "relative": True}, 0.3, True),
        ({"tolerance": 0.4, "relative": True}, 0.3, False),
        ({"tolerances": {"$.a[*].b": 0.1}}, 0.3, True),
        ({"tolerances": {"$.a[0].b": 0.1}}, 0.3, True),
        ({"tolerances": {"$.a[1].b": 0.1}}, 0.3, False),
        ({"tolerance": 9, "tolerances": {"$.a[0].b": 0.0}}, 0.3, False),
        ({"ignore": ["$.a[*].b"]}, 0.2, True),
        ({"ignore": ["$.a"]}, 0.2, True),
        ({"tolerance": 1}, True, False),
        ({"tolerance": 1}, "0.2", False),
    ],
)
def test_tolerances_apply_to_numbers_at_their_paths(options: dict[str, Any], output: Any, passed: bool) -> None:
    assert json_diff(**options)({"a": [{"b": output}]}, {"a": [{"b": 0.2}]}).passed is passed


@pytest.mark.parametrize("ignored", ["$.a[*].b", "$.a", "$"])
def test_a_difference_in_which_every_field_is_ignored_is_not_scored(ignored: str) -> None:
    with pytest.raises(NothingToScoreError, match="every field is ignored"):
        json_diff(ignore=[ignored])({"a": [{"b": 0.3}]}, {"a": [{"b": 0.2}]})
    assert json_diff(ignore=["$.a"])({"a": 1, "c": 2}, {"a": 3, "c": 2}).passed


def test_arrays_may_come_in_any_order() -> None:
    loose = json_diff(unordered=["$.tags", "$.rows[*].ids"], tolerance=0.01)
    expected = {"tags": ["a", "b", "c"], "rows": [{"ids": [1, 2]}, {"ids": [3]}]}
    assert loose({"tags": ["c", "a", "b"], "rows": [{"ids": [2.001, 1]}, {"ids": [3]}]}, expected).passed
    assert not loose({"tags": ["c", "a", "b"], "rows": [{"ids": [3]}, {"ids": [1, 2]}]}, expected).passed
    assert loose({"tags": ["c", "x", "a"], "rows": expected["rows"]}, expected).reason == (
        "wrong: $.tags[1] is 'x', expected 'b'"
    )
    assert not json_diff()({"tags": ["b", "a"]}, {"tags": ["a", "b"]}).passed


def test_an_output_that_is_not_json_fails() -> None:
    score = json_diff()("not json", {"a": 1})
    assert (score.value, score.reason) == (0.0, "the output is not JSON: not JSON: Expecting value at column 1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -1}, "a tolerance must be"),
        ({"tolerances": {"$.a": float("nan")}}, "a tolerance must be"),
        ({"pass_at": 0}, "pass_at of json_diff"),
        ({"ignore": ["a.b"]}, r"must begin with \$"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        json_diff(**options)
