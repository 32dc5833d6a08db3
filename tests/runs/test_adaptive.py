"""Adaptive stopping: in the order of the plan, with valid intervals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Experiment, Sample, Score, compare, exact_match, stats
from fairtrial.base.codec import from_json, to_json
from fairtrial.runs.adaptive import ERROR, FAILED, MISSING, PASSED, Adaptive, follow
from fairtrial.store import RunRecord, RunStore, open_store
from fairtrial.trials import EvalConfig, EvalResult, Outcome, StopWhen, TrialContext, TrialKey

NARROW = StopWhen(narrower_than=0.2, shuffle=False)
DECIDE = StopWhen(decides=("baseline", "terse"), shuffle=False)
PAIR = (Experiment("baseline"), Experiment("terse"))


def outcomes(count: int, rate: float, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [int(rng.random() < rate) for _ in range(count)]


def samples(values: list[int], **metadata: Any) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", value, 1, metadata) for i, value in enumerate(values)], name="outcomes")


async def echo(given: int) -> int:
    return given


def plan(size: int, *experiments: str) -> RunRecord:
    return RunRecord("r", "s", "d", "1", "f", size, experiments or ("baseline",), 1)


def result(ordinal: int, value: float | None, outcome: Outcome = "scored") -> EvalResult:
    score = None if value is None else Score(value)
    return EvalResult(key=TrialKey("r", "baseline", f"s{ordinal}"), ordinal=ordinal, outcome=outcome, score=score)


class TestRules:
    def test_a_rule_is_part_of_the_runs_record(self) -> None:
        for rule in (NARROW, DECIDE):
            config = EvalConfig(stop_when=rule)
            assert from_json(EvalConfig, to_json(config)) == config

    def test_experiments_that_the_run_does_not_have_are_refused(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"must name experiments of the run \(got 'terse'\); it has baseline"
        ):
            EvalSuite("s", samples([1]), echo, exact_match, config=EvalConfig(stop_when=DECIDE))

    async def test_clusters_are_refused_before_the_first_call(self, store: RunStore) -> None:
        calls: list[int] = []

        async def count(given: int) -> int:
            calls.append(given)
            return given

        data = Dataset([*samples([1, 1]), *(Sample(name, 1, 1, {"cluster": "passage 7"}) for name in "ab")])
        suite = EvalSuite("s", data, count, exact_match, config=EvalConfig(stop_when=NARROW))
        with pytest.raises(ConfigurationError, match="sample 'b' is not the first of cluster 'passage 7'"):
            await suite.run(store=store)
        assert (calls, store.runs()) == ([], [])

    async def test_clusters_of_one_sample_each_are_no_clusters_and_the_key_can_be_another(self) -> None:
        data = Dataset([Sample(f"s{i}", 1, 1, {"cluster": i, "repository": i // 2}) for i in range(30)])
        report = await EvalSuite("s", data, echo, exact_match, config=EvalConfig(stop_when=NARROW)).run(store="memory:")
        assert report.adaptive is not None
        for key in ("repository", ""):
            config = EvalConfig(stop_when=NARROW, cluster=key)
            suite = EvalSuite("s", data, echo, exact_match, config=config)
            if key:
                with pytest.raises(ConfigurationError, match="not the first of repository 0"):
                    await suite.run(store="memory:")
            else:
                assert (await suite.run(store="memory:")).adaptive is not None

    async def test_a_graded_score_ends_the_run_with_a_sentence_and_no_interval(self, store: RunStore) -> None:
        def grade(output: int, expected: int) -> float:
            return 1.0 if output else 0.25

        data = samples([1] * 30 + [0] + [1] * 30)
        config = EvalConfig(stop_when=StopWhen(0.05, every=1, shuffle=False), max_concurrent=4)
        with pytest.raises(ConfigurationError, match=r"s30#0 failed with 0\.25: look at verdicts alone"):
            await EvalSuite("s", data, echo, grade, config=config, version="1").run(store=store)
        (run,) = store.runs()
        assert (run.status, run.notes.get("adaptive")) == ("interrupted", None)
        with pytest.raises(ConfigurationError, match=r"failed with 0\.25"):
            await EvalSuite("s", data, echo, grade, config=config, version="1").run(store=store)
        report = await EvalSuite("s", data, echo, grade, version="1").run(store=store)
        assert (report.run_id, report.status, report.total) == (run.run_id, "finished", 61)
        assert report.run.notes.get("adaptive") is None

    async def test_the_verdicts_of_graded_scores_can_be_asked_for(self) -> None:
        def grade(output: int, expected: int) -> float:
            return 0.9 if output else 0.25

        config = EvalConfig(stop_when=replace(NARROW, verdicts=True))
        report = await EvalSuite("s", samples(outcomes(600, 0.9)), echo, grade, config=config).run(store="memory:")
        assert report.status == "stopped"


class TestPrefixes:
    def test_the_order_in_which_results_come_changes_nothing(self) -> None:
        values = outcomes(400, 0.8)
        expected = stats.rate_decision(np.asarray(values, dtype=float), width=0.2, every=10)
        assert expected.stopped
        for seed in range(5):
            late = list(range(400))
            random.Random(seed).shuffle(late)
            adaptive = Adaptive(NARROW, plan(400))
            for ordinal in late:
                adaptive.see(result(ordinal, values[ordinal]))
            note = adaptive.note(400).to_json()
            figures = note["experiments"]["baseline"]
            assert (note["samples"], figures["passed"]) == (expected.looked_at, expected.successes)
            assert (figures["low"], figures["high"]) == (expected.interval.low, expected.interval.high)
            assert note["beyond"] == 400 - expected.looked_at

    def test_pairs_are_decided_as_the_statistics_say(self) -> None:
        one, other = outcomes(500, 0.6, 1), outcomes(500, 0.8, 2)
        expected = stats.pairs_decision(np.subtract(other, one).astype(float), every=10)
        adaptive = Adaptive(DECIDE, plan(500, "baseline", "terse"))
        for index, pair in enumerate(zip(one, other, strict=True)):
            for place, value in enumerate(pair):
                adaptive.take(2 * index + place, PASSED if value else FAILED)
        pair_note = adaptive.note(1000).to_json()["pair"]
        assert expected.verdict == pair_note["verdict"] == "better"
        assert (pair_note["wins"], pair_note["losses"]) == (expected.wins, expected.losses)
        assert pair_note["p_value"] == pytest.approx(expected.p_value)
        assert adaptive.samples == expected.looked_at
        assert adaptive.reason is not None
        assert adaptive.reason.endswith("terse is better than baseline")

    def test_errors_fail_and_what_was_not_scored_is_taken_at_its_worst(self) -> None:
        adaptive = Adaptive(StopWhen(0.01), plan(100))
        kinds: list[Outcome] = ["task_error", "timeout", "scorer_error", "dead_letter"]
        for ordinal in range(100):
            one = result(ordinal, None, kinds[ordinal]) if ordinal < 4 else result(ordinal, 1.0)
            adaptive.see(one)
        figures = adaptive.note(100).to_json()["experiments"]["baseline"]
        assert (figures["passed"], figures["errors"], figures["missing"]) == (96, 2, 2)
        assert figures["estimate"] == 96 / 98
        assert figures["low"] == stats.stopped_by_width(96, 100).low
        assert figures["high"] == stats.stopped_by_width(98, 100).high

    def test_pairs_that_were_not_scored_count_against_the_leader(self) -> None:
        adaptive = Adaptive(replace(DECIDE, every=1), plan(60, "baseline", "terse"))
        for index in range(60):
            adaptive.take(2 * index, MISSING if index < 4 else FAILED if index % 2 else ERROR)
            adaptive.take(2 * index + 1, MISSING if index < 4 else PASSED)
        note = adaptive.note(120).to_json()["pair"]
        assert (note["missing"], note["losses"], note["verdict"]) == (4, 0, "better")
        known = [1.0] * note["wins"]
        martingale = stats.BettingMartingale(known + [-1.0] * 4, known + [1.0] * 4, bounds=(-1, 1))
        assert note["e_value"] == pytest.approx(martingale.capital(0.0))
        assert (note["low"], note["high"]) == (martingale.interval().low, martingale.interval().high)
        assert note["wins"] > 8  # Without the four, 8 wins would have been enough.

    def test_nothing_is_decided_about_equal_systems(self) -> None:
        adaptive = Adaptive(DECIDE, plan(50, "baseline", "terse"))
        for ordinal in range(100):
            adaptive.take(ordinal, PASSED)
        note = adaptive.note(100).to_json()
        assert (note["stopped"], note["reason"], note["pair"]["verdict"], note["pair"]["p_value"]) == (
            False,
            None,
            None,
            1.0,
        )
        assert note["pair"]["low"] < 0 < note["pair"]["high"]

    def test_an_interval_that_is_exactly_as_wide_as_allowed_is_enough(self) -> None:
        def after_ten(rule: StopWhen, *experiments: str) -> Adaptive:
            adaptive = Adaptive(rule, plan(60, *experiments))
            for ordinal in range(10 * max(len(experiments), 1)):
                adaptive.take(ordinal, PASSED)
            return adaptive

        rate = after_ten(StopWhen(0.01)).note(12)
        assert (rate.stopped, rate.reason, rate.samples, rate.planned, rate.beyond) == (False, None, 10, 60, 2)
        figures = rate.experiments["baseline"]
        width = figures.high - figures.low
        enough = after_ten(StopWhen(width))
        assert enough.reason is not None
        assert enough.reason.startswith("adaptive stopping after 10 of 60 samples: the interval of the pass rate is ")
        assert enough.note(10).stopped
        assert after_ten(StopWhen(width - 1e-9)).reason is None
        both = after_ten(StopWhen(width), "baseline", "terse").reason
        assert both is not None
        assert "the interval of every pass rate is" in both

    @pytest.mark.parametrize("count", [2, 3, 4, 7])
    def test_stored_results_are_read_in_pages(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.runs.adaptive._PAGE", 3)
        store = open_store("memory:")
        run = store.create_run(plan(8))
        store.commit("r", [result(ordinal, 1.0) for ordinal in range(count)], dict(enumerate(samples([1] * 8))))
        found = follow(EvalConfig(stop_when=StopWhen(0.01)), run, store, {1}, None)
        assert found is not None
        assert (found.samples, found.horizon) == (1, 1 + 32 * 10)  # The second one is done again.
        found.see(result(1, 0.0))
        assert found.samples == count
        assert follow(EvalConfig(), run, store, frozenset(), None) is None
        near = follow(EvalConfig(stop_when=StopWhen(0.01)), run, store, frozenset(), 5)
        assert near is not None
        assert (near.samples, near.horizon) == (count, count + 5)

    def test_a_prefix_of_nothing_but_missing_scores_has_no_estimate(self) -> None:
        adaptive = Adaptive(DECIDE, plan(1, "baseline", "terse"))
        adaptive.take(0, MISSING)
        adaptive.take(1, MISSING)
        note = adaptive.note(2).to_json()
        assert note["experiments"]["terse"]["estimate"] is None
        assert note["pair"]["estimate"] is None
        assert (note["experiments"]["terse"]["low"], note["experiments"]["terse"]["high"]) == (
            0.0,
            1.0,
        )

    def test_stored_results_are_read_only_as_far_as_the_prefix_goes(self) -> None:
        read: list[int] = []

        def stored() -> Iterator[EvalResult]:
            for ordinal in [*range(10), *range(11, 50)]:
                read.append(ordinal)
                yield result(ordinal, 1.0)

        adaptive = Adaptive(StopWhen(0.01), plan(60), stored=stored())
        adaptive.advance()
        assert (adaptive.samples, read[-1], adaptive.waiting) == (10, 11, 0)
        adaptive.see(result(55, 1.0))
        adaptive.see(result(20, 0.0))  # Done again: what is new counts, what was stored does not.
        adaptive.see(result(10, 1.0))
        assert (adaptive.samples, adaptive.waiting) == (50, 1)
        assert adaptive.note(51).to_json()["experiments"]["baseline"]["passed"] == 49


class TestRuns:
    @pytest.mark.parametrize("workers", [1, 16])
    async def test_slow_failures_do_not_bias_what_the_run_reports(self, workers: int) -> None:
        values = outcomes(600, 0.8, seed=3)
        finished: list[int] = []

        async def slow_to_fail(given: int) -> int:
            if not given:
                await anyio.sleep(0.02)
            finished.append(given)
            return given

        rule = replace(NARROW, every=1)
        config = EvalConfig(stop_when=rule, max_concurrent=workers)
        report = await EvalSuite("s", samples(values), slow_to_fail, exact_match, config=config).run(store="memory:")
        expected = stats.rate_decision(np.asarray(values, dtype=float), width=0.2)
        note: Any = report.run.notes["adaptive"]
        figures = note["experiments"]["baseline"]
        assert report.status == "stopped"
        assert report.run.notes["stopped"] == note["reason"]
        assert (note["samples"], figures["passed"]) == (expected.looked_at, expected.successes)
        assert figures["estimate"] == sum(values[: note["samples"]]) / note["samples"]
        assert note["beyond"] == report.total - note["samples"]
        if workers > 1:  # In order of completion the first results look better than they are.
            naive = stats.rate_decision(np.asarray(finished, dtype=float), width=0.2)
            assert naive.successes / naive.looked_at > figures["estimate"]

    async def test_two_experiments_are_run_until_one_is_better(self) -> None:
        async def answer(given: int, ctx: TrialContext) -> int:
            return 1 if ctx.experiment.name == "terse" else given

        config = EvalConfig(stop_when=DECIDE)
        suite = EvalSuite("s", samples(outcomes(500, 0.5)), answer, exact_match, experiments=PAIR, config=config)
        report = await suite.run(store="memory:")
        note: Any = report.run.notes["adaptive"]
        assert (report.status, note["pair"]["verdict"], note["pair"]["losses"]) == ("stopped", "better", 0)
        assert note["pair"]["e_value"] >= 20
        assert report.not_run > 900
        assert report["terse"].adaptive == note["experiments"]["terse"]
        text = " ".join(str(report.in_detail()).split())
        for shown in (text, " ".join(str(report).split())):
            assert "The run stopped by its own rule: the figures are those of the first" in shown
            assert "Because the run watched its own results, the intervals are wider than usual." in shown
        assert "terse is better than baseline: +" in text
        assert "chance alone does this in at most 1 run of" in text
        assert "0 losses" in text
        assert "The size is likely overstated, because the run stopped when it looked large." in text
        assert "e-value" not in text

    async def test_graded_scores_and_repeats_are_run_until_one_is_better(self) -> None:
        values = random.Random(4)
        grades = [(values.uniform(0.1, 0.5), values.uniform(0.3, 0.9)) for _ in range(300)]

        async def answer(given: int, ctx: TrialContext) -> float:
            return grades[given][ctx.experiment.name == "terse"] - 0.05 * ctx.key.repeat

        data = Dataset([Sample(f"s{i}", i, 1) for i in range(300)], name="grades")
        config = EvalConfig(stop_when=DECIDE, repeats=2)
        suite = EvalSuite("s", data, answer, lambda output, expected: output, experiments=PAIR, config=config)
        report = await suite.run(store="memory:")
        note: Any = report.run.notes["adaptive"]
        differences = [high - low for low, high in grades]
        expected = stats.pairs_decision(differences, every=10)
        assert (note["samples"], note["pair"]["verdict"], report.status) == (expected.looked_at, "better", "stopped")
        assert (note["pair"]["low"], note["pair"]["wins"]) == (pytest.approx(expected.interval.low), expected.wins)
        assert note["pair"]["estimate"] == pytest.approx(np.mean(differences[: expected.looked_at]))
        assert note["beyond"] == report.total - 4 * expected.looked_at
        found = compare(report["baseline"], report["terse"], metrics=["value"])["terse"]["value"]
        assert (found.verdict, found.n) == ("better", expected.looked_at)
        assert found.low == pytest.approx(note["pair"]["low"])
        assert f"terse is better than baseline: +{note['pair']['estimate']:.3f} (" in " ".join(
            str(report.in_detail()).split()
        )

    async def test_a_missing_repeat_is_taken_at_its_worst(self) -> None:
        adaptive = Adaptive(replace(DECIDE, every=1), replace(plan(1, "baseline", "terse"), repeats=2))
        for ordinal, code in enumerate([FAILED, MISSING, PASSED, MISSING]):
            adaptive.take(ordinal, code)
        note = adaptive.note(4).to_json()
        worst = stats.BettingMartingale([0.0], [1.0], bounds=(-1, 1)).interval()
        assert (note["pair"]["low"], note["pair"]["high"]) == (worst.low, worst.high)
        alone = stats.BettingMartingale([0.5], [1.0]).interval()
        assert (note["experiments"]["terse"]["low"], note["experiments"]["terse"]["high"]) == (alone.low, alone.high)
        assert (note["experiments"]["terse"]["n"], note["experiments"]["terse"]["estimate"]) == (1, 1.0)

    async def test_a_run_that_never_knows_enough_is_finished_and_still_says_that_it_looked(self) -> None:
        config = EvalConfig(stop_when=NARROW)
        report = await EvalSuite("s", samples(outcomes(45, 0.5)), echo, exact_match, config=config).run(store="memory:")
        note: Any = report.run.notes["adaptive"]
        assert (report.status, note["stopped"], note["samples"], note["beyond"]) == ("finished", False, 45, 0)
        assert report.run.notes["stopped"] is None
        assert "The run could have stopped by its own rule" in " ".join(str(report).split())

    async def test_a_decision_at_the_last_sample_stops_nothing(self) -> None:
        values = outcomes(600, 0.8)
        enough = stats.rate_decision(np.asarray(values, dtype=float), width=0.2, every=10).looked_at
        config = EvalConfig(stop_when=NARROW)
        report = await EvalSuite("s", samples(values[:enough]), echo, exact_match, config=config).run(store="memory:")
        note: Any = report.run.notes["adaptive"]
        assert (report.status, note["stopped"]) == ("finished", False)
        assert note["reason"] is not None

    async def test_samples_are_taken_in_an_order_drawn_from_the_seed_and_a_resumed_run_keeps_it(self) -> None:
        values = [0] * 60 + [1] * 140  # The hard ones first.
        store = open_store("memory:")
        broken = True
        begun: list[str] = []

        async def sometimes(given: int, ctx: TrialContext) -> int:
            begun.append(ctx.sample.id)
            if broken and len(begun) > 20:
                raise ConnectionError("not now")
            return given

        def suite(**settings: Any) -> EvalSuite:
            config = EvalConfig(stop_when=StopWhen(0.2), max_concurrent=1, **settings)
            return EvalSuite("s", samples(values), sometimes, exact_match, config=config, version="1")

        first = await suite(stop_on_error=True).run(store=store)
        assert begun[:3] != ["s0", "s1", "s2"]
        broken = False
        second = await suite().run(store=store, resume="errors")
        assert (second.run_id, second.status) == (first.run_id, "stopped")
        order = [sample.id for sample in samples(values).shuffle(0)]
        assert list(dict.fromkeys(begun)) == order[: len(set(begun))]
        other = await suite(seed=7).run(store=store)
        assert other.run_id != first.run_id

    async def test_a_sorted_dataset_does_not_mislead_a_run_that_stops_by_width(self) -> None:
        """Thirty percent of samples at .2 come first, then the rest at .95: in file order none of 12 runs covered."""
        covered = 0
        for seed in range(12):
            values = [*outcomes(180, 0.2, seed=seed), *outcomes(420, 0.95, seed=seed)]
            config = EvalConfig(stop_when=StopWhen(0.2), seed=seed)
            report = await EvalSuite("s", samples(values), echo, exact_match, config=config).run(store="memory:")
            figures: Any = report.run.notes["adaptive"]["experiments"]["baseline"]  # type: ignore[index,call-overload]
            assert figures["high"] - figures["low"] <= 0.2
            covered += figures["low"] <= np.mean(values) <= figures["high"]
        assert covered >= 10

    async def test_a_run_resumed_stops_where_it_would_have_stopped(self, store: RunStore) -> None:
        values = outcomes(600, 0.8, seed=5)
        expected = stats.rate_decision(np.asarray(values, dtype=float), width=0.2, every=10)
        failing = {30, 40}

        async def sometimes(given: int, ctx: TrialContext) -> int:
            if int(ctx.sample.id[1:]) in failing:
                raise ConnectionError("not now")
            return given

        def suite(**settings: Any) -> EvalSuite:
            config = EvalConfig(stop_when=NARROW, max_concurrent=4, **settings)
            return EvalSuite("s", samples(values), sometimes, exact_match, config=config, version="1")

        first = await suite(stop_on_error=True).run(store=store)
        note: Any = first.run.notes["adaptive"]
        assert (first.status, note["stopped"], note["reason"]) == ("interrupted", False, None)
        failing.clear()
        second = await suite().run(store=store, resume="errors")
        note = second.run.notes["adaptive"]
        figures = note["experiments"]["baseline"]
        assert (second.run_id, second.status) == (first.run_id, "stopped")
        assert (note["samples"], figures["passed"]) == (expected.looked_at, expected.successes)

    async def test_what_was_decided_before_an_interrupt_needs_no_further_trial(self, store: RunStore) -> None:
        values = [1] * 200
        calls: list[int] = []

        async def count(given: int) -> int:
            calls.append(given)
            return given

        def suite(rule: StopWhen | None, **settings: Any) -> EvalSuite:
            config = EvalConfig(stop_when=rule, max_concurrent=1, warmup=2, **settings)
            return EvalSuite("s", samples(values), count, exact_match, config=config, version="1")

        async with aclosing(suite(None).stream(store=store)) as results:
            async for one in results:
                if one.ordinal == 150:
                    break
        before = len(calls)
        report = await suite(NARROW).run(store=store)
        assert (report.status, len(calls)) == ("stopped", before)
        note: Any = report.run.notes["adaptive"]
        assert note["samples"] < 100
        assert note["beyond"] >= 50

    async def test_trials_do_not_run_far_ahead_of_a_slow_one(self) -> None:
        values = [1] * 500
        slow, most = anyio.Event(), 0

        async def first_is_slow(given: int, ctx: TrialContext) -> int:
            nonlocal most
            position = int(ctx.sample.id[1:])
            most = max(most, position)
            if position == 0:
                await slow.wait()
            return given

        async def release() -> None:
            before = -1
            while most != before or most < 60:  # Until nobody moves any more.
                before = most
                await anyio.sleep(0.05)
            held.append(most)
            slow.set()

        held: list[int] = []
        config = EvalConfig(stop_when=StopWhen(0.001, shuffle=False), max_concurrent=2)
        suite = EvalSuite("s", samples(values), first_is_slow, exact_match, config=config)
        async with anyio.create_task_group() as group:
            group.start_soon(release)
            report = await suite.run(store="memory:")
        assert held == [63]  # 32 rounds of two workers.
        assert (report.status, report.total) == ("finished", 500)

    async def test_waiting_for_a_slow_trial_ends_when_the_run_does(self) -> None:
        async def first_is_slow(given: int, ctx: TrialContext) -> int:
            if ctx.sample.id == "s0":
                await anyio.sleep_forever()
            return given

        config = EvalConfig(
            stop_when=StopWhen(0.01, shuffle=False), max_concurrent=2, timeout_seconds=0.5, stop_on_error=True
        )
        report = await EvalSuite("s", samples([1] * 500), first_is_slow, exact_match, config=config).run(
            store="memory:"
        )
        assert (report.status, dict(report.errors)) == ("interrupted", {"timeout": 1})

    async def test_rescored_outputs_keep_the_figures_for_their_number_of_samples(self, store: RunStore) -> None:
        values = outcomes(600, 0.8)
        suite = EvalSuite("s", samples(values), echo, exact_match, config=EvalConfig(stop_when=NARROW))
        first = await suite.run(store=store)
        second = await suite.rescore(first.run_id, lambda output, expected: 0.25 if output else 0.75, store=store)
        before, after = first.adaptive, second.adaptive
        assert before is not None
        assert after is not None
        assert (after["samples"], after["stopped"]) == (before["samples"], True)
        figures = after["experiments"]["baseline"]
        assert figures["passed"] == before["samples"] - before["experiments"]["baseline"]["passed"]
        assert figures["low"] == stats.stopped_by_width(figures["passed"], figures["n"]).low
        plain = await EvalSuite("t", samples([1]), echo, exact_match).run(store=store)
        assert (await suite.rescore(plain.run_id, exact_match, store=store)).adaptive is None
