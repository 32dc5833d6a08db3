"""Defaults, limits and reasons of built-in evaluators: what passes exactly at a limit, and how long a reason is."""

from __future__ import annotations

from typing import Any

import pytest

from fairtrial import ConfigurationError, Sample, Score, ToolInvoked, all_of, contains, exact_match, threshold, weighted
from fairtrial.scoring import (
    ChoiceQuestion,
    EvalContext,
    all_tools_succeeded,
    bleu,
    chrf,
    extract_choice,
    fuzzy_match,
    json_schema,
    rouge,
    squad,
    tool_call_count,
    tool_called,
    tool_calls_match,
)
from fairtrial.scoring.structure import json_diff
from fairtrial.scoring.text import may_take_long
from fairtrial.testing import session_of

TWO_CALLS = session_of(ToolInvoked("a"), ToolInvoked("a"))


def test_a_value_at_the_limit_passes() -> None:
    gunman = ("police killed the gunman", "police kill the gunman")
    at_limit = rouge(pass_at=0.75)(*gunman)
    assert (at_limit.value, at_limit.passed, at_limit.reason) == (0.75, True, "F1 0.750, needed 0.75")
    assert not rouge(pass_at=0.76)(*gunman).passed
    same = ("the cat sat on the mat", "the cat sat on the mat")
    assert bleu(pass_at=1.0)(*same).passed
    assert chrf(pass_at=1.0)(*same) == Score(1.0, True, "1.000, needed 1")
    assert (rouge()("one two", "one three").passed, rouge()("one", "one two three four").passed) == (True, False)
    assert fuzzy_match()("abcde", "abcdx") == Score(0.8, True, "similarity 0.80, needed 0.80")
    assert not fuzzy_match(0.81)("abcde", "abcdx").passed
    assert squad(pass_at=0.5)("one two", "one three").passed
    assert threshold(half, 0.5)("x", "y").passed
    assert threshold(half, 0.5)("x", "y").reason == ""
    assert threshold(half, 0.51)("x", "y").reason == "half: 0.5 is below 0.51"
    assert weighted((half, 1))("x", "y").passed
    assert weighted((half, 1), pass_at=0.75)("x", "y").reason.startswith("weighted mean 0.5 is below 0.75")
    assert json_diff(pass_at=0.5)({"a": 1, "b": 2}, {"a": 1, "b": 3}).passed
    assert not json_diff()({"a": 1, "b": 2}, {"a": 1, "b": 3}).passed


def half(output: Any, expected: Any) -> float:
    return 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: rouge(pass_at=-0.1),
        lambda: chrf(pass_at=1.1),
        lambda: fuzzy_match(-0.1),
        lambda: fuzzy_match(1.1),
        lambda: threshold(half, 1.1),
        lambda: threshold(half, -0.1),
        lambda: weighted((half, 1), pass_at=1.1),
        lambda: weighted((half, -1), (half, 2)),
        lambda: weighted((half, 0)),
        lambda: squad(pass_at=0.0),
        lambda: squad(pass_at=1.1),
        lambda: json_diff(pass_at=0.0),
        lambda: json_diff(pass_at=1.1),
        lambda: json_diff(ignore=["a"]),
        lambda: all_of(),
    ],
)
def test_options_beyond_their_limits_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()
    for fine in (rouge(pass_at=0.0), fuzzy_match(0.0), fuzzy_match(1.0), threshold(half, 1.0), threshold(half, 0.0)):
        assert callable(fine)
    assert callable(weighted((half, 0), (half, 1), pass_at=1.0))
    assert callable(squad(pass_at=1.0))


def test_counts_of_tool_calls_have_bounds_that_their_reasons_name() -> None:
    def reason(**bounds: int) -> str:
        return tool_call_count("a", **bounds)(None, None, TWO_CALLS).reason.rpartition(", ")[2]

    assert [reason(), reason(min_count=3), reason(max_count=4), reason(min_count=2, max_count=2)] == [
        "expected at least 0",
        "expected at least 3",
        "expected 0 to 4",
        "expected 2 to 2",
    ]
    assert tool_call_count("z")(None, None, TWO_CALLS).passed
    assert tool_called("a")(None, None, session_of(ToolInvoked("a"))).passed
    assert all_tools_succeeded()(None, None, session_of()).reason == "no tool was called"
    assert all_tools_succeeded()(None, None, TWO_CALLS).reason == ""
    with pytest.raises(ConfigurationError, match="min_count must be at most max_count"):
        tool_call_count("a", min_count=1, max_count=0)
    assert tool_call_count("a", max_count=0)(None, None, session_of()).passed


def test_calls_in_the_order_in_which_they_were_asked_for_are_matched_by_default() -> None:
    match = tool_calls_match(["a"])
    assert match(None, None, TWO_CALLS).passed
    assert not tool_calls_match(["a"], allow_extra=False)(None, None, TWO_CALLS).passed
    assert not tool_calls_match(["a"], order="exact")(None, None, TWO_CALLS).passed
    assert not tool_calls_match([])(None, None, TWO_CALLS).passed
    assert [metric.name for metric in match(None, None, TWO_CALLS).metrics] == ["precision", "recall", "f1"]


def test_long_texts_are_shown_from_shortly_before_their_first_difference() -> None:
    # Up to 60 characters are shown, from 20 before the difference; texts of up to 30 from the start.
    assert (
        exact_match("x" * 30 + "a", "x" * 30 + "b").reason
        == f"expected ...{'x' * 20 + 'b'!r}, got ...{'x' * 20 + 'a'!r}"
    )
    assert exact_match("x" * 29 + "a", "x" * 29 + "b").reason == f"expected {'x' * 29 + 'b'!r}, got {'x' * 29 + 'a'!r}"
    assert exact_match("y", "x" * 61).reason == f"expected {'x' * 60!r}..., got 'y'"
    assert exact_match("y", "x" * 60).reason == f"expected {'x' * 60!r}, got 'y'"
    early = exact_match("a" + "x" * 40, "b" + "x" * 40).reason
    assert early == f"expected {'b' + 'x' * 40!r}, got {'a' + 'x' * 40!r}"
    far = exact_match("x" * 20_000 + "a", "x" * 20_000 + "b").reason
    assert far == f"expected ...{'x' * 60!r}..., got ...{'x' * 60!r}..."
    assert contains("x" * 61, "y").reason == f"expected 'y' in {'x' * 60!r}..."


def test_texts_that_are_too_long_to_compare_are_refused() -> None:
    assert fuzzy_match()("x" * 50_000, "x" * 50_000).passed
    with pytest.raises(ValueError, match=r"up to 50,000 characters \(got 50,001\)"):
        fuzzy_match()("x", "x" * 50_001)


def test_reasons_are_limited() -> None:
    schema = json_schema({"type": "string", "maxLength": 1})
    assert len(schema(["x" * 1000], None).reason) == 500
    wrong = squad()("nothing in common", "y" * 100)
    assert wrong.reason == f"F1 0.00 with {'y' * 80!r}"
    different = json_diff()({f"f{n}": 0 for n in range(6)}, {f"f{n}": 1 for n in range(6)})
    assert different.reason.endswith("; and 1 more")
    assert different.reason.count("wrong:") == 5
    five = json_diff()({f"f{n}": 0 for n in range(5)}, {f"f{n}": 1 for n in range(5)})
    assert "more" not in five.reason
    for length, shown in ((58, repr("x" * 58)), (59, f"'{'x' * 56}...")):
        assert json_diff()({"a": "x" * length}, {"a": 1}).reason == f"wrong: $.a is {shown}, expected 1"


def test_an_evaluator_called_with_a_context_takes_the_sample_first() -> None:
    context = EvalContext(None, session_of(), "run")
    (score,) = exact_match(Sample("s", "q", "a"), "a", context=context)
    assert (score.name, score.passed) == ("exact_match", True)
    (missing,) = contains(Sample("s", "q", "a"), "b", context=context)
    assert (missing.name, missing.passed) == ("contains", False)
    wrong: Any = exact_match
    with pytest.raises(TypeError, match=r"the first argument must be a Sample \(got 'a'\)"):
        wrong("a", "a", context=context)


def test_letters_beyond_the_choices_are_no_choice() -> None:
    assert extract_choice("ANSWER: Z") == "Z"
    assert [extract_choice(reply, 3) for reply in ("ANSWER: C", "ANSWER: D", "D", "D) four")] == ["C", None, None, None]
    assert len(ChoiceQuestion("?", tuple(map(str, range(26)))).choices) == 26
    assert extract_choice("yes", 2, ("yes", "Yes.")) is None  # Two choices of the same text.
    listed = ChoiceQuestion("Which?", ("one", "two")).prompt()
    assert listed.startswith("Which?\n\nA) one\nB) two\n\n")


@pytest.mark.parametrize(
    ("pattern", "long_at"),
    [
        ("a", 30_000_000),
        ("a*b", 5_478),  # The square root of 30 million.
        ("a*b*c", 311),  # The cube root.
        ("(?:ab|cd)e", 15_000_000),
        ("(a)?(?(1)b*|c*)", 247),  # The cube root of 15 million: there may be an a.
        ("a{1,3}", 10_000_000),
    ],
)
def test_the_length_from_which_a_search_may_take_long_follows_from_the_repeats(pattern: str, long_at: int) -> None:
    assert not may_take_long(pattern, 0, "x" * (long_at * 99 // 100))
    assert may_take_long(pattern, 0, "x" * (long_at * 101 // 100))
