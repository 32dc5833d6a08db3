"""Scoring the outputs of a stored run again."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, Dataset, EvalSuite, PromptExecuted, Sample, Score, TokenUsage, llm_judge, open_store
from fairtrial.errors import RunMismatchError
from fairtrial.models import ResponseCache, ScriptedAdapter
from fairtrial.scoring import EvalContext, exact_match
from fairtrial.store import RunStore
from fairtrial.store.memory import MemoryStore
from fairtrial.trials import EvalConfig, Experiment, TrialContext, current_trial

ONE = EvalConfig(max_concurrent=1)


def numbers(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{n}", n, n) for n in range(count)], name="numbers")


def same(number: int) -> int:
    return number


class TestTheResponseCache:
    async def test_a_judge_whose_answers_are_cached_is_not_called_again(self, tmp_path: Path, store: RunStore) -> None:
        calls: list[Any] = []

        def reply(messages: Any) -> dict[str, str]:
            calls.append(messages)
            return {"reason": "ok", "rating": "good"}

        adapter = ScriptedAdapter(reply, cache=ResponseCache(tmp_path / "cache.db"))
        dataset = Dataset([Sample(f"s{n}", "same question", "same") for n in range(10)])
        suite = EvalSuite("s", dataset, lambda given: "same answer", llm_judge(adapter, "good?"), config=ONE)
        first = await suite.run(store=store)
        assert len(calls) == 10  # Equal questions about different samples are asked anew.
        for _ in range(4):
            assert (await suite.rescore(first.run_id, store=store)).pass_rate == first.pass_rate
        assert len(calls) == 10

    async def test_a_judge_that_asks_what_the_task_asked_finds_its_own_answer(self, tmp_path: Path) -> None:
        calls: list[Any] = []

        def reply(messages: Any) -> str:
            calls.append(messages)
            return f"answer {len(calls)}"

        adapter = ScriptedAdapter(reply, cache=ResponseCache(tmp_path / "cache.db"))

        async def ask(given: str) -> str:
            return str((await adapter.complete([ChatMessage("user", given)])).output)

        async def judge(sample: Any, output: str, *, context: EvalContext) -> Score:
            answer = await adapter.complete([ChatMessage("user", "q")], session=context.session)
            return Score(1.0, reason=str(answer.output))

        suite = EvalSuite("s", Dataset([Sample("a", "q")]), ask, judge)
        store = open_store("memory:")
        first = await suite.run(store=store)
        second = await suite.rescore(first.run_id, store=store)
        scores = [result.score for report in (first, second) for result in report.results]
        assert [score.reason for score in scores if score is not None] == ["answer 2", "answer 2"]
        assert len(calls) == 2


async def test_what_an_evaluator_opens_is_closed_after_rescoring(store: RunStore) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def resource() -> AsyncIterator[None]:
        events.append("opened")
        yield
        events.append("closed")

    async def judge(output: int, expected: int) -> bool:
        await current_trial().enter(resource())
        return True

    suite = EvalSuite("s", numbers(2), same, judge, config=ONE)
    first = await suite.run(store=store)
    await suite.rescore(first.run_id, store=store)
    assert events == ["opened", "closed"] * 4


class TestWhatEvaluatorsReach:
    async def test_the_adapter_is_there(self, store: RunStore) -> None:
        def judge(sample: Any, output: int, *, context: EvalContext) -> Score:
            assert context.adapter is not None
            return Score(1.0, reason=context.adapter.name)

        suite = EvalSuite("s", numbers(1), same, judge, adapter=ScriptedAdapter(["x"]))
        first = await suite.run(store=store)
        second = await suite.rescore(first.run_id, store=store)
        assert dict(second.errors) == {}
        assert [result.score for result in second.results] == [result.score for result in first.results]

    async def test_parameters_seed_and_lifespan_are_those_of_the_run(self, store: RunStore) -> None:
        seen: list[tuple[Any, ...]] = []

        @asynccontextmanager
        async def lifespan() -> AsyncIterator[str]:
            yield "shared"
            seen.append(("closed",))

        def judge(output: int, expected: int) -> bool:
            trial = current_trial()
            seen.append((trial.experiment.params["limit"], trial.seed, trial.shared))
            return True

        def suite(limit: int, seed: int) -> EvalSuite:
            experiments = [Experiment("other"), Experiment("a", {"limit": limit})]
            config = EvalConfig(max_concurrent=1, seed=seed)
            chosen = experiments if limit == 4 else experiments[1:]
            return EvalSuite("s", numbers(1), same, judge, experiments=chosen, config=config, lifespan=lifespan)

        first = await suite(limit=3, seed=1).run(store=store)
        await suite(limit=4, seed=2).rescore(first.run_id, store=store)
        assert seen[:2] == seen[2:]
        assert seen[0][0] == 3


CHANGED = Dataset([Sample(f"s{n}", n, 7) for n in range(3)])


class TestAnotherSuite:
    @pytest.mark.parametrize(
        ("data", "names", "message"),
        [
            (numbers(3), "ac", "with suite 't': it has experiment 'b', but the suite has a, c"),
            (numbers(2), "ab", "its sample 's2' is not in the suite's dataset (1 of 3 are not)"),
            (CHANGED, "ab", "its sample 's0' differs in the suite's dataset (3 of 3 differ)"),
        ],
        ids=["experiments", "samples", "changed samples"],
    )
    async def test_another_plan_is_refused(self, store: RunStore, data: Any, names: str, message: str) -> None:
        experiments = [Experiment("a"), Experiment("b")]
        first = await EvalSuite("s", numbers(3), same, exact_match, experiments=experiments).run(store=store)
        other = EvalSuite("t", data, same, exact_match, experiments=[Experiment(name) for name in names])
        with pytest.raises(RunMismatchError, match=re.escape(message)):
            await other.rescore(first.run_id, store=store)
        assert len(store.runs()) == 1

    async def test_a_suite_without_experiments_of_its_own_scores_any(self, store: RunStore) -> None:
        experiments = [Experiment("a", {"limit": 1}), Experiment("b", {"limit": 2})]
        first = await EvalSuite("s", numbers(2), same, exact_match, experiments=experiments).run(store=store)

        def judge(output: int, expected: int) -> Score:
            return Score(0.5 if current_trial().experiment.params["limit"] == 1 else 1.0)

        second = await EvalSuite("t", numbers(2), same, judge).rescore(first.run_id, store=store)
        scores = {result.experiment: result.score for result in second.results}
        assert {name: score and score.value for name, score in scores.items()} == {"a": 0.5, "b": 1.0}

    async def test_a_run_of_some_samples_can_be_rescored_with_the_whole_suite(self, store: RunStore) -> None:
        first = await EvalSuite("s", numbers(9).head(4), same, exact_match).run(store=store)
        second = await EvalSuite("s", numbers(9), same, exact_match).rescore(first.run_id, store=store)
        assert (second.status, second.total, second.pass_rate) == ("finished", 4, 1.0)


class TestResuming:
    async def test_scoring_that_failed_is_repeated_by_the_same_call(self, store: RunStore) -> None:
        down = threading.Event()  # Not a value of the evaluator, which would be another one.
        down.set()
        scored: list[int] = []

        def judge(output: int, expected: int) -> bool:
            scored.append(output)
            if output in (1, 2) and down.is_set():
                raise RuntimeError("the judge is down")
            return True

        suite = EvalSuite("s", numbers(4), same, exact_match, version="1")
        first = await suite.run(store=store)
        second = await suite.rescore(first.run_id, judge, store=store)
        assert (second.status, dict(second.errors)) == ("unscored", {"scorer_error": 2})
        down.clear()
        scored.clear()
        third = await suite.rescore(first.run_id, judge, store=store)
        assert (third.run_id, third.status, third.pass_rate_all) == (second.run_id, "finished", 1.0)
        assert sorted(scored) == [1, 2]
        fourth = await suite.rescore(first.run_id, judge, store=store)
        assert fourth.run_id != third.run_id

    async def test_a_repeated_scoring_keeps_the_cost_of_the_one_that_failed(self, store: RunStore) -> None:
        down = threading.Event()
        down.set()

        async def judge(output: int, expected: int) -> bool:
            cost = None if output == 2 else 1.0 if down.is_set() else 0.25
            current_trial().session.record(PromptExecuted(usage=TokenUsage(1, 1, cost_usd=cost)), actor="judge")
            if down.is_set():
                raise RuntimeError("the judge is down")
            return True

        suite = EvalSuite("s", numbers(3), same, exact_match, version="1")
        first = await suite.run(store=store)
        failed = await suite.rescore(first.run_id, judge, store=store)
        assert [result.judge_cost_usd for result in failed.results] == [1.0, 1.0, None]
        down.clear()
        again = await suite.rescore(first.run_id, judge, store=store)
        assert (again.run_id, again.pass_rate_all) == (failed.run_id, 1.0)
        assert [(result.judge_cost_usd, result.unpriced_judge_calls) for result in again.results] == [
            (1.25, 0),
            (1.25, 0),
            (None, 2),
        ]

    async def test_an_interrupted_rescoring_goes_on_where_it_stopped(self, store: RunStore) -> None:
        scored: list[int] = []
        down = threading.Event()
        down.set()

        async def judge(output: int, expected: int) -> bool:
            if len(scored) == 3 and down.is_set():
                raise SystemExit
            scored.append(output)
            return True

        config = EvalConfig(max_concurrent=1, stop_on_error=True)
        suite = EvalSuite("s", numbers(8), same, exact_match, config=config, version="1")
        first = await suite.run(store=store)
        second = await suite.rescore(first.run_id, judge, store=store)
        assert second.status == "interrupted"
        down.clear()
        third = await suite.rescore(first.run_id, judge, store=store)
        assert (third.run_id, third.status, third.total) == (second.run_id, "finished", 8)
        assert sorted(scored) == list(range(8))

    async def test_fresh_starts_another_run(self, store: RunStore) -> None:
        def judge(output: int, expected: int) -> bool:
            raise RuntimeError("no")

        suite = EvalSuite("s", numbers(1), same, exact_match, version="1")
        first = await suite.run(store=store)
        second = await suite.rescore(first.run_id, judge, store=store)
        third = await suite.rescore(first.run_id, judge, store=store, resume="never")
        assert third.run_id != second.run_id


def test_a_killed_rescoring_goes_on_where_it_stopped(tmp_path: Path, child: Any) -> None:
    code = """
import os, sys
from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match, open_store

def judge(output, expected):
    if output == 1200 and sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
    with open("scored.txt", "a") as file:
        print(output, file=file)
    return True

dataset = Dataset([Sample(f"s{n}", n, n) for n in range(1500)])
suite = EvalSuite("s", dataset, lambda n: n, exact_match, config=EvalConfig(max_concurrent=4), version="1")
if sys.argv[1] == "kill":
    run_id = suite.run_sync(store="runs.db").run_id
    open("run.txt", "w").write(run_id)
report = suite.rescore_sync(open("run.txt").read(), judge, store="runs.db")
print(report.status, report.total, report.pass_rate_all, len(open_store("runs.db").runs()))
"""
    with pytest.raises(AssertionError):
        child(code, "kill")
    before = len((tmp_path / "scored.txt").read_text().splitlines())
    assert child(code, "again") == "finished 1500 1.0 2"
    after = len((tmp_path / "scored.txt").read_text().splitlines()) - before
    assert 300 <= after < 1500


class TestLimits:
    async def test_errors_of_tasks_do_not_stop_a_rescoring(self, store: RunStore) -> None:
        def task(number: int) -> int:
            if number == 0:
                raise ValueError("no")
            return number

        config = EvalConfig(max_concurrent=1, max_retries=0)
        first = await EvalSuite("s", numbers(3), task, exact_match, config=config).run(store=store)
        stopping = EvalConfig(max_concurrent=1, stop_on_error=True)
        second = await EvalSuite("s", numbers(3), task, exact_match, config=stopping).rescore(first.run_id, store=store)
        assert (second.status, dict(second.errors), second.total) == ("finished", {"task_error": 1}, 3)


async def test_observers_hear_of_a_rescoring(store: RunStore) -> None:
    events: list[str] = []

    class Bus:
        def publish(self, event: object) -> None:
            events.append(type(event).__name__)

    suite = EvalSuite("s", numbers(2), same, exact_match, config=ONE)
    first = await suite.run(store=store)
    await suite.rescore(first.run_id, store=store, bus=Bus())
    assert events == ["EvalRunStarted", *["TrialStarted", "SampleEvaluated"] * 2, "EvalRunCompleted"]


async def test_no_store_call_blocks_the_event_loop() -> None:
    loop = threading.get_ident()
    blocked: set[str] = set()

    class Watched(MemoryStore):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name.startswith("_") or not callable(found):
                return found

            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == loop and watching:
                    blocked.add(name)
                return found(*args, **kwargs)

            return call

    watching: list[bool] = []
    store = Watched()
    broken = threading.Event()
    broken.set()

    def judge(output: int, expected: int) -> bool:
        if broken.is_set():
            raise RuntimeError("down")
        return True

    suite = EvalSuite("s", numbers(3), same, judge, version="1")
    watching.append(True)
    await suite.run(store=store)
    broken.clear()
    report = await suite.run(store=store)  # Scores what failed.
    await suite.rescore(report.run_id, store=store)
    watching.clear()
    assert blocked <= {"get_run"}  # The report's own look at its run.


class TestRedactedTrials:
    KEY = "q7Rt9xLm2WpZ4vBn"

    async def test_an_altered_output_or_transcript_is_never_scored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SERVICE_API_KEY", self.KEY)
        scored: list[str] = []

        def task(given: str, ctx: TrialContext) -> str:
            if given == "transcript":
                ctx.session.record(ChatMessage("user", self.KEY))
            return self.KEY if given == "output" else given

        def judge(output: str, expected: str) -> Score:
            scored.append(output)
            return Score(1.0, reason=f"because {self.KEY}")

        dataset = Dataset([Sample(name, name, name) for name in ("output", "transcript", "reason")])
        suite = EvalSuite("s", dataset, task, judge, config=ONE, version="1")
        store = open_store("memory:")
        first = await suite.run(store=store)
        assert first.pass_rate_all == 1.0
        assert [result.redacted_parts for result in first.results] == [
            ("output", "reason"),
            ("transcript", "reason"),
            ("reason",),
        ]
        scored.clear()
        second = await suite.rescore(first.run_id, store=store)
        assert scored == ["reason"]
        assert [(result.outcome, result.error) for result in second.results] == [
            ("scorer_error", "its stored output was redacted, so it cannot be rescored; execute the trial again"),
            ("scorer_error", "its stored transcript was redacted, so it cannot be rescored; execute the trial again"),
            ("scored", None),
        ]
        assert second.run.notes["redacted"] == 2
        assert second.status == "finished"  # The same call again would change nothing.

    async def test_an_output_that_was_too_large_for_the_queue_is_never_scored(self, store: RunStore) -> None:
        suite = EvalSuite("s", Dataset([Sample("a", "a", None)]), lambda given: given, exact_match, version="1")
        run = (await suite.run(store=store)).run
        # As a worker delivers a result whose output did not fit.
        large = replace(next(iter(store.results(run.run_id))), output=None, output_json=None, source=None)
        other = store.create_run(replace(run, run_id="large"))
        key = large.key._replace(run_id="large")
        samples = dict(store.samples(run.run_id))
        store.commit(other.run_id, [replace(large, key=key, metadata={"dropped": ["output"]})], samples)
        (result,) = (await suite.rescore("large", store=store)).results
        assert (result.outcome, result.score) == ("scorer_error", None)
        assert result.error == (
            "its output was too large for the queue and is not stored, so it cannot be rescored; "
            "execute the trial again"
        )

    async def test_a_failed_trial_does_not_pass_because_output_and_expected_value_are_redacted(
        self, monkeypatch: pytest.MonkeyPatch, store: RunStore
    ) -> None:
        monkeypatch.setenv("TOKENIZER_NAME", "bert-base-uncased")
        monkeypatch.setenv("KEY_ACCOUNT", "customer-support")
        dataset = Dataset([Sample("a", "q", "bert-base-uncased")])
        suite = EvalSuite("s", dataset, lambda given: "customer-support", exact_match)
        first = await suite.run(store=store)
        second = await suite.rescore(first.run_id, store=store)
        assert (first.pass_rate, second.pass_rate) == (0.0, 0.0)
