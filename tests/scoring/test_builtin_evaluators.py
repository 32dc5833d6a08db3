"""R17, R18, R25 and R28 to R33, R105: the built-in evaluators."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ConfigurationError, Score, ToolCall, ToolInvoked, contains, exact_match, matches, tool_called
from fairtrial.data.session import ChatMessage, PromptExecuted, SessionView, TokenUsage
from fairtrial.errors import NothingToScoreError
from fairtrial.scoring import (
    all_tools_succeeded,
    fuzzy_match,
    json_correctness,
    json_schema,
    json_subset,
    one_of,
    resolve,
    slice_contains,
    token_usage_under,
    tool_call_count,
    tool_calls_match,
    tool_correctness,
    tool_not_called,
    within_tolerance,
)
from fairtrial.scoring.evaluator import marks_of
from fairtrial.scoring.structure import json_diff
from fairtrial.testing import session_of


@dataclass(frozen=True)
class Answer:
    city: str
    people: int


class TestText:
    @pytest.mark.proves("R17")
    def test_exact_match_passes_equal_values_of_any_kind(self) -> None:
        assert exact_match("a", "a") == Score(1.0, True)
        assert exact_match("a", "A") == Score(0.0, False, "expected 'A', got 'a'")
        assert exact_match(Answer("Paris", 2), Answer("Paris", 2)).passed
        assert exact_match(None, None).passed
        for output, expected in ((1, "1"), ("None", None), (Answer("Paris", 2), str(Answer("Paris", 2)))):
            assert not exact_match(output, expected).passed  # Equal as text is not equal.

    def test_exact_match_says_what_was_expected_and_what_came_in_a_few_words(self) -> None:
        assert exact_match("4", 4).reason == "expected 4, got '4'"
        assert exact_match({"a": 1}, {"a": 2}).reason == "expected {'a': 2}, got {'a': 1}"
        beginning = "The same words, over and over. " * 10
        reason = exact_match(f"{beginning}Lyon", f"{beginning}Paris").reason
        assert reason == "expected ...'rds, over and over. Paris', got ...'rds, over and over. Lyon'"
        assert exact_match(beginning, f"{beginning}Paris").reason.startswith(
            "expected ...'rds, over and over. Paris', got "
        )
        assert len(exact_match("x" * 100_000, ["y" * 1000] * 1000).reason) < 700

    def test_exact_match_compares_with_none_if_that_is_expected(self) -> None:
        assert exact_match(None, None).passed
        assert exact_match("Paris", None).reason == "expected None, got 'Paris'"

    def test_contains_says_what_is_missing_and_refuses_a_sample_without_expected(self) -> None:
        assert contains("the capital", "Paris").reason == "expected 'Paris' in 'the capital'"
        assert contains([1, 2], 3).reason == "expected 3 in [1, 2]"
        assert contains([None], None).passed
        for nothing in (None, ""):
            with pytest.raises(TypeError, match="the expected value of contains must be text to search for"):
                contains("Paris", nothing)

    @pytest.mark.proves("R18")
    def test_contains_refuses_an_output_of_none_with_the_remedy(self) -> None:
        with pytest.raises(TypeError, match=r"the task returned None\): return the answer in the task"):
            contains(None, "ham")
        with pytest.raises(TypeError, match=r"needs text or a collection to search in \(the task returned 5\)"):
            contains(5, "ham")

    def test_contains_looks_inside_the_output(self) -> None:
        assert contains("the capital is Paris", "Paris").passed
        assert not contains("the capital", "Paris").passed
        assert contains([1, 2], 2).passed

    def test_one_of_takes_several_accepted_answers(self) -> None:
        assert one_of("b", ["a", "b"]).passed
        assert one_of("c", ["a", "b"]).reason == "'c' is not one of 2 accepted answers"
        for wrong in ("abc", 3, None):
            with pytest.raises(TypeError, match="one_of must be a list of accepted answers"):
                one_of("b", wrong)  # type: ignore[arg-type]

    def test_matches_searches_for_a_regular_expression(self) -> None:
        assert matches(r"\bParis\b")("It is Paris.", None).passed
        assert matches("PARIS", flags=re.IGNORECASE)("It is Paris.", None).passed
        assert matches("x+")("abc", None).reason == "no match for /x+/ in 'abc'"
        assert matches()("a1", r"\d").passed
        assert matches("a+").__name__ == "found"
        assert resolve(matches("a+")).name == "matches(a+)"
        assert marks_of(matches("a", isolate=True)).isolate
        assert not resolve(matches("a", isolate=True)).quick
        with pytest.raises(ConfigurationError, match=r"invalid regular expression /\(/: "):
            matches("(")

    def test_fuzzy_match_measures_similarity(self) -> None:
        score = fuzzy_match(0.7)("kitten", "sitten")
        assert score.value == pytest.approx(5 / 6)
        assert score.passed
        assert not fuzzy_match()("abc", "xyz").passed
        with pytest.raises(ConfigurationError, match=r"must be from 0 to 1 \(got 80\)"):
            fuzzy_match(80)

    @pytest.mark.parametrize(("module", "call"), [("rapidfuzz", "fuzzy_match()"), ("jsonschema", "json_schema({})")])
    def test_a_missing_extra_says_what_to_install(self, child: Any, module: str, call: str) -> None:
        said = child(
            f"import sys; sys.modules['{module}'] = None\nfrom fairtrial import errors, scoring\n"
            f"try: scoring.{call}\nexcept errors.MissingExtraError as error: print(error.extra, error)"
        )
        assert said.startswith("text ")
        assert said.endswith('pip install "fairtrial[text]"')


class TestNumbers:
    @pytest.mark.proves("R25")
    def test_within_tolerance_passes_inside_the_distance_and_falls_over_it(self) -> None:
        close = within_tolerance(2.0)
        assert close(10.0, 10.0) == Score(1.0, True, "difference 0, allowed 2")
        assert close(11.0, 10.0) == Score(0.5, True, "difference 1, allowed 2")
        assert close(12.0, 10.0) == Score(0.0, True, "difference 2, allowed 2")
        assert not close(12.1, 10.0).passed
        assert within_tolerance(0.1, relative=True)(105, 100).value == pytest.approx(0.5)
        assert within_tolerance(0)(3, 3).value == 1.0
        assert within_tolerance(0)(3, 4).value == 0.0

    @pytest.mark.proves("R25")
    def test_an_answer_that_is_no_number_is_wrong_and_a_reference_that_is_none_is_broken(self) -> None:
        close = within_tolerance(1.0)
        assert close(" 3.5 ", 3).passed
        answers: list[Any] = ["about three", None, True, "nan", float("inf"), [], 10**400]
        for answer in answers:
            score = close(answer, 3)
            assert (score.passed, score.reason[:13]) == (False, "not a number:")
        for reference in (None, "x", float("nan"), float("inf"), True):
            with pytest.raises(TypeError, match="must be a finite number"):
                close(3, reference)

    @pytest.mark.parametrize("make", [within_tolerance, lambda tolerance: json_diff(tolerance=tolerance)])
    def test_rounding_errors_do_not_count_and_four_steps_are_rounding(self, make: Any) -> None:
        assert make(0.1)(0.8, 0.7).passed  # 0.8 - 0.7 is a little more than 0.1 in floating point.
        assert make(0.5)(1.5 + 4 * math.ulp(1.5), 1.0).passed
        assert not make(0.5)(1.5 + 5 * math.ulp(1.5), 1.0).passed
        assert not make(0)(0.1 + 0.2, 0.3).passed
        assert not make(1)(10**400, 3).passed

    @pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
    def test_a_tolerance_is_a_finite_number(self, tolerance: float) -> None:
        with pytest.raises(ConfigurationError, match="tolerance"):
            within_tolerance(tolerance)

    @given(
        st.floats(allow_nan=False, allow_infinity=False),
        st.floats(allow_nan=False, allow_infinity=False),
        st.floats(0, allow_infinity=False),
        st.booleans(),
    )
    def test_any_numbers_give_a_score(self, output: float, expected: float, tolerance: float, relative: bool) -> None:
        score = within_tolerance(tolerance, relative=relative)(output, expected)
        assert 0.0 <= score.value <= 1.0
        if score.value > 0:
            assert score.passed
        if output == expected:
            assert score.passed
            assert score.value == 1.0


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


class TestJson:
    @pytest.mark.proves("R25")
    def test_json_subset_lets_the_output_hold_more(self) -> None:
        assert json_subset('{"a": 1, "b": {"c": [1, {"d": 2, "e": 3}]}}', {"b": {"c": [1, {"d": 2}]}}).passed
        assert json_subset(Answer("Paris", 2), {"city": "Paris"}).passed
        assert json_subset({"a": 1.0}, {"a": 1}).passed
        assert json_subset('{"t": "\\u0000\\ufdd0"}', {"t": "\0\ufdd0"}).passed

    @pytest.mark.proves("R25")
    @pytest.mark.parametrize(
        ("output", "expected", "reason"),
        [
            ({"a": {}}, {"a": {"b": 1}}, "missing: $.a.b"),
            ({"a": [1, 2]}, {"a": [1]}, "wrong: $.a has 2 items, expected 1"),
            ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "wrong: $.a[1].b"),
            ({"a": "x"}, {"a": ["x"]}, "wrong: $.a"),
            ({"a": ["x"]}, {"a": "x"}, "wrong: $.a"),
            ({"a": True}, {"a": 1}, "wrong: $.a"),
            ({"a": 0}, {"a": False}, "wrong: $.a"),
            ({"a": None}, {"a": {}}, "wrong: $.a"),
            ("not json", {}, "the output is not JSON: not JSON: Expecting value at column 1"),
            ({"a": 1j}, {}, "the output is not JSON: a builtins.complex"),
        ],
    )
    def test_json_subset_says_what_is_missing_or_wrong(self, output: Any, expected: Any, reason: str) -> None:
        score = json_subset(output, expected)
        assert not score.passed
        assert score.reason.startswith(reason)

    @pytest.mark.proves("R25")
    @given(trees, st.dictionaries(st.text(max_size=2), trees, max_size=3))
    def test_everything_is_a_subset_of_itself_and_of_itself_with_more(self, tree: Any, more: Any) -> None:
        assert json_subset(
            tree if not isinstance(tree, str) else [tree], tree if not isinstance(tree, str) else [tree]
        ).passed
        assert json_subset({**more, "x": tree}, {"x": tree}).passed

    @pytest.mark.proves("R105")
    def test_json_schema_checks_text_and_values(self) -> None:
        schema = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "maxLength": 5}}}
        valid = json_schema(schema)
        assert valid('{"city": "Paris"}', None) == Score(1.0, True)
        assert valid(Answer("Paris", 1), None).passed
        assert valid({"city": "\0\0\0\0\0"}, None).passed
        assert valid('{"city": 3}', None).reason == "$.city: 3 is not of type 'string'"
        assert "'city' is a required property" in valid("{}", None).reason
        assert valid("{", None).reason.startswith("the output is not JSON")
        with pytest.raises(ConfigurationError, match="invalid schema"):
            json_schema({"type": "thing"})

    def test_json_schema_never_fetches_anything(self) -> None:
        with pytest.raises(Exception, match="Unresolvable"):
            json_schema({"$ref": "http://127.0.0.1:9/schema.json"})("{}", None)


def calls(*names: str) -> SessionView:
    return session_of(*(ToolInvoked(name) for name in names))


class TestBehaviour:
    @pytest.mark.proves("R28")
    def test_tool_called(self) -> None:
        assert tool_called("a")(None, None, calls("b", "a", "a")) == Score(1.0, True, "tool 'a' was called 2 times")
        assert tool_called("a")(None, None, calls("b")) == Score(0.0, False, "tool 'a' was called 0 times")

    @pytest.mark.proves("R29")
    def test_tool_not_called(self) -> None:
        assert tool_not_called("a")(None, None, calls("b")) == Score(1.0, True)
        assert tool_not_called("a")(None, None, calls("a")) == Score(0.0, False, "tool 'a' was called 1 time")

    @pytest.mark.proves("R30")
    @pytest.mark.parametrize(
        ("options", "passed"),
        [
            ({}, True),
            ({"min_count": 2}, True),
            ({"min_count": 3}, False),
            ({"max_count": 2}, True),
            ({"max_count": 1}, False),
            ({"min_count": 2, "max_count": 2}, True),
        ],
    )
    def test_tool_call_count(self, options: dict[str, int], passed: bool) -> None:
        score = tool_call_count("a", **options)(None, None, calls("a", "b", "a"))
        assert score.passed is passed
        assert score.reason.startswith("tool 'a' was called 2 times, expected ")

    @pytest.mark.proves("R30")
    @pytest.mark.parametrize("options", [{"min_count": -1}, {"min_count": 2, "max_count": 1}])
    def test_bounds_that_nothing_can_meet_are_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(ConfigurationError, match="min_count must be at most max_count"):
            tool_call_count("a", **options)

    @pytest.mark.proves("R31")
    def test_all_tools_succeeded(self) -> None:
        assert all_tools_succeeded()(None, None, calls()).passed
        view = session_of(ToolInvoked("a", success=True), ToolInvoked("b", error="x"), ToolInvoked("c", success=False))
        assert all_tools_succeeded()(None, None, view) == Score(0.0, False, "failed tools: b, c")

    @pytest.mark.proves("R32")
    def test_token_usage_under(self) -> None:
        view = session_of(PromptExecuted(usage=TokenUsage(10, 5)), PromptExecuted(usage=TokenUsage(1, 1, 1)))
        assert token_usage_under(17)(None, None, view) == Score(1.0, True, "used 17 tokens, limit 17")
        assert not token_usage_under(16)(None, None, view).passed
        unknown = session_of(PromptExecuted(usage=TokenUsage(10, 5)), PromptExecuted())
        with pytest.raises(NothingToScoreError, match="no recorded token usage"):
            token_usage_under(17)(None, None, unknown)
        assert not token_usage_under(14)(None, None, unknown).passed  # Too much already.
        nothing = token_usage_under(17)(None, None, session_of())
        assert nothing.reason == "no model call was recorded; used 0 tokens, limit 17"

    @pytest.mark.proves("R33")
    def test_slice_contains(self) -> None:
        view = session_of(ChatMessage("user", "a"), ChatMessage("user", "b"))
        assert slice_contains(ChatMessage, lambda message: message.text == "a")(None, None, view).passed
        assert slice_contains(ChatMessage, lambda message: True, min_count=2)(None, None, view).passed
        score = slice_contains(ChatMessage, lambda message: True, min_count=3)(None, None, view)
        assert score == Score(0.0, False, "2 matching ChatMessage, needed 3")


def agent(*made: tuple[str, dict[str, Any]]) -> SessionView:
    return session_of(*(ToolInvoked(name, params) for name, params in made))


class TestToolCalls:
    @pytest.mark.proves("R105")
    def test_precision_recall_and_f1_are_metrics(self) -> None:
        view = agent(("a", {"x": 1}), ("b", {}), ("c", {}))
        score = tool_calls_match([ToolCall("a", {"x": 1}), {"name": "c"}])(None, None, view)
        assert score.passed
        assert score.metric("precision") == pytest.approx(2 / 3)
        assert score.metric("recall") == 1.0
        assert score.value == score.metric("f1") == pytest.approx(0.8)
        assert score.reason == "2 of 2 expected calls matched, 3 made"

    @pytest.mark.proves("R105")
    def test_nothing_expected_and_nothing_done_is_right_by_rule(self) -> None:
        nothing: list[Any] = [None, [], ()]
        for expected in nothing:
            score = tool_calls_match()(None, expected, agent())
            assert (score.value, score.passed, score.reason) == (1.0, True, "no calls expected and none made")
            assert [metric.value for metric in score.metrics] == [1.0, 1.0, 1.0]
        made = tool_calls_match([])(None, None, agent(("a", {})))
        assert (made.value, made.passed) == (0.0, False)
        missed = tool_calls_match(["a"])(None, None, agent())
        assert (missed.value, missed.passed, missed.metric("recall")) == (0.0, False, 0.0)

    @pytest.mark.proves("R105")
    @pytest.mark.parametrize(
        ("order", "wanted", "passed"),
        [
            ("exact", ["a", "b", "c"], True),
            ("exact", ["a", "b"], False),
            ("exact", ["b", "a", "c"], False),
            ("in_order", ["a", "c"], True),
            ("in_order", ["c", "a"], False),
            ("any_order", ["c", "a"], True),
            ("any_order", ["c", "c"], False),
        ],
    )
    def test_order_is_exact_kept_or_free(self, order: Any, wanted: list[str], passed: bool) -> None:
        view = calls("a", "b", "c")
        assert tool_calls_match(wanted, order=order)(None, None, view).passed is passed
        if order != "exact":
            assert not tool_calls_match(wanted, order=order, allow_extra=False)(None, None, view).passed

    @pytest.mark.proves("R105")
    @pytest.mark.parametrize(
        ("arguments", "wanted", "passed"),
        [
            ("exact", {"x": 1, "y": [True]}, True),
            ("exact", {"x": 1}, False),
            ("exact", {"x": 1, "y": [1]}, False),
            ("exact", {"x": 1.0, "y": [True]}, True),
            ("subset", {"x": 1}, True),
            ("subset", {"x": 2}, False),
            ("subset", {"z": None}, False),
            ("subset", {"x": True}, False),
            ("ignore", {"x": 7}, True),
            ("exact", None, True),
            ("subset", None, True),
        ],
    )
    def test_arguments_are_equal_among_the_actual_or_ignored(self, arguments: Any, wanted: Any, passed: bool) -> None:
        view = agent(("t", {"x": 1, "y": [True]}))
        match = tool_calls_match([{"name": "t", "arguments": wanted}], arguments=arguments)
        assert match(None, None, view).passed is passed

    @pytest.mark.proves("R105")
    @pytest.mark.parametrize(
        "expected", ["t", {"name": "t"}, ToolCall("t", {"x": 1}), ["t"], [{"name": "t", "params": {"x": 1}}]]
    )
    def test_the_expected_calls_may_be_the_samples_reference(self, expected: Any) -> None:
        score = tool_calls_match()(None, expected, agent(("t", {"x": 1})))
        assert (score.value, score.passed) == (1.0, True)

    def test_what_is_no_call_is_refused(self) -> None:
        for wrong in ([3], [{"tool": "t"}], [{"name": 3}]):
            with pytest.raises(TypeError, match="an expected tool call must be"):
                tool_calls_match()(None, wrong, agent())
        with pytest.raises(ConfigurationError, match="order of tool_calls_match must be"):
            tool_calls_match(order="sorted")  # type: ignore[arg-type]

    @pytest.mark.proves("R105")
    def test_a_call_that_fits_several_is_not_wasted_on_the_wrong_one(self) -> None:
        wanted: list[Any] = ["t", {"name": "t", "arguments": {"x": 1}}]
        score = tool_calls_match(wanted, order="any_order")(None, None, agent(("t", {"x": 1}), ("t", {"x": 2})))
        assert (score.value, score.passed) == (1.0, True)

    def test_an_agent_that_makes_thousands_of_calls_is_scored_all_the_same(self) -> None:
        started = time.process_time()
        for wanted, made in ((1_500, 1_000), (1_000, 1_500)):
            match = tool_calls_match(["t"] * wanted, order="any_order", arguments="ignore")
            score = match(None, None, calls(*["t"] * made))
            assert score.metrics[2].value == pytest.approx(2 * 1_000 / 2_500)
        assert time.process_time() - started < 60

    @given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
    def test_the_orders_are_ever_more_lenient_and_f1_is_symmetric(self, wanted: list[str], made: list[str]) -> None:
        def f1(one: list[str], other: list[str], order: Any) -> float:
            return tool_calls_match(one, order=order)(None, None, calls(*other)).value

        exact, kept, free = (f1(wanted, made, order) for order in ("exact", "in_order", "any_order"))
        assert 0.0 <= exact <= kept <= free <= 1.0
        common = sum(min(wanted.count(name), made.count(name)) for name in "abc")
        assert free == (2 * common / (len(wanted) + len(made)) if wanted or made else 1.0)
        for order in ("exact", "in_order", "any_order"):
            assert f1(wanted, made, order) == f1(made, wanted, order)


class TestByName:
    @pytest.mark.parametrize(
        ("calls", "made", "passed"),
        [
            (["book", "pay"], ["pay", "book"], True),
            (["book", "pay"], ["book"], False),
            (["book"], ["book", "pay"], True),
            ([], [], True),
            ([], ["book"], False),
        ],
    )
    def test_tool_correctness_asks_for_the_expected_tools(
        self, calls: list[str], made: list[str], passed: bool
    ) -> None:
        session = session_of(ChatMessage("user", "go"), *(ToolInvoked(name, {"n": 1}) for name in made))
        assert tool_correctness()("done", calls, session).passed is passed
        assert tool_correctness(calls)("done", None, session).passed is passed

    def test_tool_correctness_compares_order_and_arguments_as_it_is_told(self) -> None:
        session = session_of(ToolInvoked("pay", {"sum": 3, "to": "Ann"}), ToolInvoked("book", {}))
        assert tool_correctness([{"name": "pay", "arguments": {"sum": 3}}])("done", None, session).passed
        assert not tool_correctness([{"name": "pay", "arguments": {"sum": 4}}])("done", None, session).passed
        some = [{"name": "pay", "arguments": {"sum": 3}}]
        assert not tool_correctness(some, arguments="exact")("done", None, session).passed
        assert not tool_correctness(["book", "pay"], order="in_order")("done", None, session).passed
        assert not tool_correctness(["book"], allow_extra=False)("done", None, session).passed

    def test_tool_correctness_of_a_trial_that_recorded_nothing_is_an_error(self) -> None:
        with pytest.raises(NothingToScoreError, match="nothing was recorded"):
            tool_correctness([])("done", None, session_of())
        with pytest.raises(NothingToScoreError, match="the expected tools are None"):
            tool_correctness()("done", None, session_of(ToolInvoked("book")))

    @pytest.mark.parametrize(
        ("output", "passed"),
        [
            ('{"city": "Rome", "people": 3}', True),
            ({"city": "Rome", "people": 3}, True),
            ('{"city": "Rome"}', False),
            ('{"city": "Rome", "people": "3"}', False),
            ('```json\n{"city": "Rome", "people": 3}\n```', False),
            ("Three in Rome.", False),
            ("", False),
        ],
    )
    def test_json_correctness_takes_a_schema_a_type_or_the_expected_value(self, output: Any, passed: bool) -> None:
        schema = {
            "type": "object",
            "required": ["city", "people"],
            "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
        }
        assert json_correctness(schema)(output, None).passed is passed
        assert json_correctness(Answer)(output, None).passed is passed
        assert json_correctness()(output, schema).passed is passed

    def test_json_correctness_without_a_schema_is_an_error(self) -> None:
        with pytest.raises(TypeError, match="must be a JSON Schema"):
            json_correctness()("{}", None)
        with pytest.raises(ConfigurationError, match="invalid schema"):
            json_correctness({"type": "nothing"})
        assert json_correctness({})("[1, 2]", None).passed
