"""R9, R19 to R22 and R24: combinations of evaluators and their laws."""

from __future__ import annotations

import functools
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ConfigurationError, EvalContext, Metric, any_of, evaluator, exact_match, matches, negate, weighted
from fairtrial.data import Sample
from fairtrial.data.session import SessionView, ToolInvoked
from fairtrial.scoring import Case, Score, adapt, all_of, composite, resolve, threshold, tool_called, tool_not_called
from fairtrial.scoring.evaluator import marks_of
from fairtrial.testing import session_of

SESSION = session_of(ToolInvoked("calc"))


def fixed(score: Score, name: str = "fixed") -> Any:
    @evaluator(inline=True, name=name)
    def given_score(output: Any, expected: Any) -> Score:
        return score

    return given_score


async def later(output: Any, expected: Any) -> Score:
    await anyio.lowlevel.checkpoint()
    return Score(0.5, True, "later")


def needs_session(output: Any, expected: Any, session: SessionView) -> Score:
    return Score(1.0, bool(session[ToolInvoked].all()), "seen")


scores = st.builds(Score, st.floats(0, 1), st.booleans(), st.sampled_from(["", "why", "because"]))
members = st.lists(scores.map(fixed), min_size=1, max_size=6)


class TestAllAndAny:
    @pytest.mark.proves("R19")
    def test_all_of_passes_if_all_pass_with_the_mean_and_every_reason(self) -> None:
        both = all_of(
            fixed(Score(1.0, True, "good"), "a"), fixed(Score(0.5, True), "b"), fixed(Score(0.0, True, "fine"))
        )
        assert both(1, 1).value == 0.5
        assert both(1, 1).passed
        assert both(1, 1).reason == "a: good; fixed: fine"
        assert not all_of(exact_match, fixed(Score(1.0, False)))(1, 1).passed

    @pytest.mark.proves("R20")
    def test_any_of_passes_if_one_passes_with_the_largest_value(self) -> None:
        either = any_of(fixed(Score(0.2, True)), fixed(Score(0.9, False)))
        assert (either(1, 1).value, either(1, 1).passed) == (0.9, True)
        assert not any_of(fixed(Score(0.9, False)))(1, 1).passed

    @pytest.mark.proves("R19", "R20", "R24")
    def test_nothing_to_combine_is_refused(self) -> None:
        for combine in (all_of, any_of, composite, weighted):
            with pytest.raises(ConfigurationError, match="must have at least one evaluator"):
                combine()

    @pytest.mark.proves("R19", "R20")
    @given(members, st.randoms())
    def test_values_stay_in_bounds_and_do_not_depend_on_order(self, given_members: list[Any], order: Any) -> None:
        turned = list(given_members)
        order.shuffle(turned)
        for combine in (all_of, any_of, composite_by_score):
            one, other = combine(*given_members)(1, 1), combine(*turned)(1, 1)
            assert 0.0 <= one.value <= 1.0
            assert (one.value, one.passed) == (other.value, other.passed)
        values = [member(1, 1).value for member in given_members]
        assert min(values) - 1e-12 <= all_of(*given_members)(1, 1).value <= max(values) + 1e-12
        assert any_of(*given_members)(1, 1).value == max(values)

    @pytest.mark.proves("R19", "R20")
    @given(members)
    def test_not_all_is_any_not_and_not_any_is_all_not(self, given_members: list[Any]) -> None:
        negated = [negate(member) for member in given_members]
        assert negate(all_of(*given_members))(1, 1).passed is any_of(*negated)(1, 1).passed
        assert negate(any_of(*given_members))(1, 1).passed is all_of(*negated)(1, 1).passed
        assert negate(all_of(*given_members))(1, 1).value == pytest.approx(all_of(*negated)(1, 1).value)

    @given(scores)
    def test_two_negations_cancel(self, score: Score) -> None:
        twice = negate(negate(fixed(score)))(1, 1)
        assert (twice.passed, twice.value) == (score.passed, pytest.approx(score.value, abs=1e-15))
        verdict = "passed" if score.passed else "failed"
        assert twice.reason.endswith(f"fixed {verdict}: {score.reason}" if score.reason else f"fixed {verdict}")

    @given(scores)
    def test_one_member_alone_is_itself(self, score: Score) -> None:
        for combine in (all_of, any_of, composite_by_score):
            alone = combine(fixed(score))(1, 1)
            assert (alone.value, alone.passed, alone.reason) == (score.value, score.passed, score.reason)


def composite_by_score(*given_members: Any) -> Any:
    scorer = composite(*given_members)
    return lambda output, expected: scorer.score_now(Case(Sample("s", None, expected), output))


class TestParts:
    @pytest.mark.proves("R9")
    def test_every_part_is_kept_as_a_metric_of_no_weight_under_its_own_name(self) -> None:
        judge = fixed(Score(0.25, True, metrics=[Metric("tone", 3.0, 2.0, {"why": "x"})]), "judge")
        score = all_of(judge, judge, any_of(exact_match, matches("a")))("a", "a")
        assert {metric.name: metric.value for metric in score.metrics} == {
            "judge": 0.25,
            "judge.tone": 3.0,
            "judge#2": 0.25,
            "judge#2.tone": 3.0,
            "any_of": 1.0,
            "any_of.exact_match": 1.0,
            "any_of.matches(a)": 1.0,
        }
        assert all(metric.weight == 0 for metric in score.metrics)
        assert score.metrics[1].metadata == {"why": "x"}
        assert score.reward == score.value

    @pytest.mark.proves("R9", "R126")
    def test_every_part_keeps_its_verdict_and_reason(self) -> None:
        judge = fixed(Score(0.5, False, "too terse"), "judge")
        inner = all_of(exact_match, fixed(Score(0.8, True, "fine"), "tone"))
        score = all_of(judge, inner, fixed(Score(1.0, True, metrics=[Metric("turns", 3)]), "quick"))("a", "b")
        assert [(m.name, m.value, m.passed, m.reason) for m in score.criteria] == [
            ("judge", 0.5, False, "too terse"),
            ("all_of", 0.4, False, "exact_match: expected 'b', got 'a'"),
            ("all_of.exact_match", 0.0, False, "expected 'b', got 'a'"),
            ("all_of.tone", 0.8, True, "fine"),
            ("quick", 1.0, True, ""),
        ]
        assert [metric.name for metric in score.metrics if metric.passed is None] == ["quick.turns"]

    @pytest.mark.parametrize("combine", [all_of, any_of, composite_by_score])
    def test_the_reason_of_a_failure_names_the_parts_that_failed_and_no_other(self, combine: Any) -> None:
        members = [fixed(Score(0.4, False), "short"), fixed(Score(0.0, False, "no greeting"), "polite")]
        good = [fixed(Score(1.0, True, "used 21 tokens"), "tokens")] if combine is not any_of else []
        score = combine(*good, *members)(1, 1)
        assert score.reason == "short: failed with 0.4; polite: no greeting"

    def test_a_mapping_keeps_the_verdict_of_each_key(self) -> None:
        def grade(output: Any, expected: Any) -> Any:
            return {"polite": True, "short": Score(0.6, False, "12 words")}

        score = resolve(grade).score_now(Case(Sample("s", None), "x"))
        assert [(m.name, m.passed, m.reason) for m in score.criteria] == [
            ("polite", True, ""),
            ("short", False, "12 words"),
        ]
        assert score.reason == "short: 12 words"

    def test_a_metric_of_the_name_and_value_of_its_part_is_that_part(self) -> None:
        judged = Score(0.5, False, "meh", [Metric("judge", 0.5, metadata={"model": "m"}), Metric("votes", 3)])
        score = all_of(fixed(judged, "judge"), exact_match)(1, 1)
        assert [metric.name for metric in score.metrics] == ["judge", "judge.votes", "exact_match"]
        assert score.metrics[0] == Metric("judge", 0.5, 0.0, {"model": "m"}, False, "meh", True, (0.0, 1.0))

    @pytest.mark.proves("R9")
    def test_names_never_collide(self) -> None:
        names = ["a", "a#2", "a", "a.b", "a"]
        inner = Score(1.0, metrics=[Metric("b", 1.0)])
        score = all_of(*(fixed(inner, name) for name in names))(1, 1)
        assert len({metric.name for metric in score.metrics}) == 2 * len(names)

    def test_lambdas_are_numbered(self) -> None:
        score = all_of(lambda o, e: True, lambda o, e: False)(1, 1)
        assert [metric.name for metric in score.metrics] == ["lambda", "lambda#2"]
        assert repr(all_of(exact_match, tool_called("x"))) == "all_of(exact_match, tool_called(x))"


class TestMixing:
    @pytest.mark.proves("R21")
    def test_plain_and_session_aware_members_mix(self) -> None:
        mixed = all_of(exact_match, needs_session, tool_not_called("rm"))
        assert mixed("a", "a", SESSION).passed
        assert not mixed("a", "b", SESSION).passed
        with pytest.raises(TypeError, match=r"all_of\(\.\.\.\) has a member that reads the session"):
            mixed("a", "a")

    @pytest.mark.proves("R21")
    def test_two_arguments_are_enough_where_no_member_needs_a_session(self) -> None:
        assert all_of(exact_match, any_of(exact_match, lambda o, e: False))("a", "a").passed
        assert not resolve(all_of(exact_match)).needs_session
        assert resolve(any_of(all_of(needs_session))).needs_session

    @pytest.mark.proves("R21")
    def test_async_members_wait_together_and_the_order_is_kept(self) -> None:
        both = all_of(later, exact_match, later)

        async def wait() -> Score:
            result: Score = await both("a", "a")
            return result

        for backend in ("asyncio", "trio"):
            score = anyio.run(wait, backend=backend)
            assert [metric.name for metric in score.metrics] == ["later", "exact_match", "later#2"]
            assert score.reason == "later: later; later#2: later"

    def test_async_members_run_at_the_same_time(self) -> None:
        async def meet(output: Any, expected: Any) -> bool:
            arrived.append(1)
            if len(arrived) == 2:
                everyone.set()
            await everyone.wait()
            return True

        arrived: list[int] = []
        everyone = anyio.Event()

        async def wait() -> Score:
            with anyio.fail_after(20):
                result: Score = await all_of(meet, meet)(1, 1)
            return result

        assert anyio.run(wait).passed

    @pytest.mark.proves("R22")
    def test_adapt_gives_a_plain_evaluator_the_parameters_of_a_session_aware_one(self) -> None:
        adapted = adapt(exact_match)
        assert adapted("a", "a", SESSION) == exact_match("a", "a")
        assert (resolve(adapted).name, resolve(adapted).quick) == ("exact_match", True)
        assert marks_of(adapt(matches("a", isolate=True))).isolate
        assert all_of(adapt(exact_match))("a", "a", SESSION).passed

        async def wait() -> Score:
            result: Score = await all_of(adapt(later))(1, 1, SESSION)
            return result

        assert anyio.run(wait).value == 0.5

    @pytest.mark.proves("R24")
    def test_composite_keeps_its_members_apart(self) -> None:
        context = EvalContext("adapter", SESSION, "run")
        sample = Sample("s", "in", "a")
        both = composite(exact_match, fixed(Score(0.5, False, name="own"), "other"), needs_session)
        assert [(score.name, score.value) for score in both(sample, "a", context=context)] == [
            ("exact_match", 1.0),
            ("own", 0.5),
            ("needs_session", 1.0),
        ]
        merged = both.score_now(Case(sample, "a", SESSION))
        assert merged.value == pytest.approx(2.5 / 3)
        assert not merged.passed

        async def wait() -> Any:
            return await composite(exact_match, later)(sample, "a", context=context)

        assert [score.name for score in anyio.run(wait)] == ["exact_match", "later"]

    def test_an_error_says_which_member_raised_it(self) -> None:
        def broken(output: Any, expected: Any) -> Score:
            raise KeyError("x")

        async def broken_later(output: Any, expected: Any) -> Score:
            raise KeyError("y")

        with pytest.raises(KeyError) as caught:
            all_of(exact_match, broken)(1, 1)
        assert caught.value.__notes__ == ["raised by evaluator 'broken'"]

        async def wait() -> None:
            await all_of(later, broken_later, broken)(1, 1)

        with pytest.raises(KeyError, match="y") as caught:
            anyio.run(wait)
        assert caught.value.__notes__ == ["raised by evaluator 'broken_later'"]

    def test_a_combination_is_resolved_once_and_may_be_marked(self) -> None:
        both = all_of(exact_match, tool_called("calc"))
        assert resolve(both) is both
        named = evaluator(name="quality")(both)
        assert resolve(named).name == "quality"
        assert resolve(named).score_now(Case(Sample("s", 1, "a"), "a", SESSION)).passed
        assert resolve(functools.partial(both)).needs_session


class TestWeights:
    @pytest.mark.proves("R10")
    def test_weighted_is_a_reward(self) -> None:
        score = weighted((fixed(Score(1.0), "right"), 3), (fixed(Score(0.0), "polite"), 1))(1, 1)
        assert (score.value, score.reward, score.passed) == (0.75, 0.75, True)
        assert [(metric.name, metric.weight) for metric in score.metrics] == [("right", 3.0), ("polite", 1.0)]
        assert not weighted((fixed(Score(0.5)), 1), pass_at=0.6)(1, 1).passed
        assert weighted((exact_match, 1), (exact_match, 0))(1, 2).value == 0.0

    @given(st.lists(st.tuples(scores.map(fixed), st.floats(1e-6, 1e6)), min_size=1, max_size=5))
    def test_weighted_values_stay_in_bounds(self, given_members: list[Any]) -> None:
        score = weighted(*given_members)(1, 1)
        values = [member(1, 1).value for member, _ in given_members]
        assert min(values) - 1e-9 <= score.value <= max(values) + 1e-9
        assert weighted(*reversed(given_members))(1, 1).value == pytest.approx(score.value)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: weighted((exact_match, 0)),
            lambda: weighted((exact_match, -1), (exact_match, 2)),
            lambda: weighted((exact_match, float("nan"))),
            lambda: weighted((exact_match, float("inf"))),
            lambda: weighted((exact_match, 1), pass_at=2),
            lambda: threshold(exact_match, 1.5),
            lambda: threshold(exact_match, float("nan")),
        ],
    )
    def test_weights_and_thresholds_that_cannot_work_are_refused(self, make: Any) -> None:
        with pytest.raises(ConfigurationError):
            make()

    def test_a_weighted_failure_says_what_was_missed_and_by_whom(self) -> None:
        low, high = fixed(Score(0.2, False, "rude"), "polite"), fixed(Score(0.9), "right")
        assert weighted((low, 3), (high, 1))(1, 1).reason == "weighted mean 0.375 is below 0.5; polite: rude"
        assert weighted((high, 1), (high, 1), pass_at=0.95)(1, 1).reason == "weighted mean 0.9 is below 0.95"
        assert negate(exact_match)(1, 1).reason == "exact_match passed"

    @given(scores, st.floats(0, 1))
    def test_threshold_passes_from_the_value_on(self, score: Score, at: float) -> None:
        found = threshold(fixed(score), at)(1, 1)
        assert (found.value, found.passed) == (score.value, score.value >= at)
        assert found.reason == score.reason if found.passed else "is below" in found.reason
