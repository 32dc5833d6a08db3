"""Resuming a run: stored trials are not executed again, and no cost is lost."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, Dataset, EvalSuite, GateRules, Sample, compare, contains, exact_match, gate, matches
from fairtrial.base import metrics
from fairtrial.data.session import PromptExecuted, SessionView, TokenUsage
from fairtrial.errors import RunMismatchError
from fairtrial.reports.figures.metrics import code_versions
from fairtrial.runs.events import EvalRunStarted, ResumeWarning, RunEvent, SampleEvaluated
from fairtrial.store import RunStore, open_store
from fairtrial.trials import EvalConfig, Experiment, TrialContext


def doubles(count: int, *, factor: int = 2) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", i, factor * i) for i in range(count)], name="doubles")


class Counting:
    """A task that counts its calls and fails where it is told to."""

    def __init__(self, *failing: int) -> None:
        self.calls: list[int] = []
        self.failing = set(failing)

    async def __call__(self, given: int) -> int:
        self.calls.append(given)
        if given in self.failing:
            raise ValueError(f"sample {given}")
        return 2 * given


STOPPING = EvalConfig(stop_on_error=True, max_concurrent=1)


@pytest.mark.proves("R108")
async def test_an_unfinished_run_is_resumed_and_executes_only_what_is_missing(store: RunStore) -> None:
    first = Counting(4)
    stopped = await EvalSuite("s", doubles(8), first, exact_match, config=STOPPING, version="1").run(store=store)
    assert stopped.status == "interrupted"
    second = Counting()
    finished = await EvalSuite("s", doubles(8), second, exact_match, version="1").run(store=store)
    assert (finished.run_id, finished.status, finished.total) == (stopped.run_id, "finished", 8)
    assert first.calls == [0, 1, 2, 3, 4]
    assert sorted(second.calls) == [5, 6, 7]
    assert dict(finished.errors) == {"task_error": 1}


def test_a_program_says_once_that_it_resumes_a_run_and_which_trials_it_retries(child: Callable[..., str]) -> None:
    code = """
import sys
from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match

sys.stderr = sys.stdout
dataset = Dataset([Sample(f"s{i}", i, i) for i in range(8)])

def task(given, ctx):
    if given == 4:
        raise ValueError
    return given

for how in ({"resume": "never"}, {}, {"resume": "errors"}):
    config = EvalConfig(stop_on_error=how.get("resume") == "never", max_concurrent=1)
    EvalSuite("study", dataset, task, exact_match, config=config, version="1").run_sync(store="runs.db", **how)
"""
    assert child(code).splitlines() == [
        "resuming run study@1: 5 of 8 trials are stored",
        "retrying 1 trial of run study@1: the others are stored",
    ]


async def test_the_time_of_a_run_is_that_of_its_processes_and_not_the_time_between_them(store: RunStore) -> None:
    failing = EvalSuite("s", doubles(8), Counting(4), exact_match, version="1")
    first = await failing.run(store=store)
    assert first.run.noted.executed_seconds is None
    store.update_run(first.run_id, finished_at=first.run.created_at + 5.0)
    again = await failing.run(store=store, resume="errors")
    assert again.run.took_seconds is not None
    assert again.run.took_seconds == again.run.noted.executed_seconds
    assert 5.0 <= again.run.took_seconds < 65.0
    assert again.run.took_seconds == round(again.run.took_seconds, 3)
    assert again.run.finished_at is not None
    stopped = await EvalSuite("t", doubles(8), Counting(4), exact_match, config=STOPPING, version="1").run(store=store)
    assert stopped.run.noted.executed_seconds is not None
    assert stopped.run.took_seconds is None


async def test_a_finished_run_is_followed_by_a_new_one_and_fresh_always_is(store: RunStore) -> None:
    suite = EvalSuite("s", doubles(3), Counting(), exact_match)
    runs = [await suite.run(store=store), await suite.run(store=store), await suite.run(store=store, resume="never")]
    assert len({report.run_id for report in runs}) == 3
    assert [report.run.number for report in runs] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": doubles(8, factor=3)}, "its dataset has changed"),
        ({"dataset": doubles(8).shuffle(1)}, "its samples are now in another order"),
        ({"experiments": [Experiment("terse")]}, "its experiments were baseline, now terse"),
        ({"experiments": [Experiment(params={"style": "terse"})]}, "the parameters of its experiments have changed"),
        ({"config": EvalConfig(repeats=2)}, "its repeats were 1, now 2"),
        ({"config": EvalConfig(timeout_seconds=1)}, "timeout_seconds was 300.0, now 1"),
        ({"config": EvalConfig(seed=7)}, "seed was 0, now 7"),
        ({"config": EvalConfig(max_retries=1)}, "max_retries was 0, now 1"),
        ({"config": EvalConfig(max_output_bytes=9)}, "max_output_bytes was 16777216, now 9"),
        ({"evaluator": matches("x")}, "its evaluator was exact_match, now matches"),
    ],
    ids=["dataset", "order", "experiments", "params", "repeats", "timeout", "seed", "retries", "bytes", "evaluator"],
)
async def test_a_difference_starts_a_new_run_and_a_named_run_is_refused(change: dict[str, Any], message: str) -> None:
    store = open_store("memory:")
    old = await EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING).run(store=store)
    parts: dict[str, Any] = {"dataset": doubles(8), "config": EvalConfig(), "evaluator": exact_match, **change}
    changed = EvalSuite("s", task=Counting(), **parts)
    with pytest.raises(RunMismatchError, match=f"run {old.run_id} of suite 's' cannot be resumed: {message}"):
        await changed.run(store=store, resume=old.run_id)
    with pytest.raises(RunMismatchError, match=message) as refused:
        await changed.run(store=store, resume=old.run_id, allow_changed_code=True)
    with pytest.warns(ResumeWarning, match=f"did not resume run {old.run_id} .interrupted.: {message}") as warned:
        new = await changed.run(store=store)
    if "evaluator" not in message:
        assert str(refused.value).endswith(
            f"(--resume {old.run_id}), or start a new run with resume='never' (--resume never)"
        )
        assert str(warned[0].message).endswith(f"with resume={old.run_id!r} (--resume {old.run_id})")
    assert new.run_id != old.run_id
    assert (new.status, store.get_run(old.run_id).status) == ("finished", "interrupted")


async def test_concurrency_and_limits_of_a_run_may_change_when_it_is_resumed(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING, version="1").run(store=store)
    config = EvalConfig(max_concurrent=3, max_cost_usd=5.0, grace_seconds=1.0)
    new = await EvalSuite("s", doubles(8), Counting(), exact_match, config=config, version="1").run(store=store)
    assert (new.run_id, new.status) == (old.run_id, "finished")


async def test_changed_code_starts_a_new_run_unless_it_is_forced_and_then_every_report_says_so(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING, version="1").run(store=store)
    changed = EvalSuite("s", doubles(8), Counting(), exact_match, version="2")
    with pytest.raises(
        RunMismatchError, match=r"its code has changed.*, allow_changed_code=True \(--resume \w+ --allow-"
    ):
        await changed.run(store=store, resume=old.run_id)
    with pytest.warns(ResumeWarning, match="its code has changed"):
        new = await changed.run(store=store)
    assert new.run_id != old.run_id
    with pytest.warns(ResumeWarning, match="results of two code versions"):
        report = await changed.run(store=store, resume=old.run_id, allow_changed_code=True)
    assert (report.run_id, report.status) == (old.run_id, "finished")
    assert [result.code for result in report.results] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert code_versions(store, report.run) == 2
    compared, gated = compare(report, new), gate(report, GateRules(min_pass_rate=0.5))
    for shown in (str(report), report.to_markdown(), report.to_html(), str(compared), str(gated)):
        assert "results of two code versions" in " ".join(shown.split())
    assert '"code_versions": 2' in json.dumps(report.to_json())
    again = await changed.run(store=store, resume=old.run_id)  # Both versions are known: nothing differs.
    assert code_versions(store, again.run) == 2


async def test_a_run_stored_without_an_identity_is_resumed_by_what_is_known_of_it(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING, version="1").run(store=store)
    record = replace(store.get_run(old.run_id), run_id="older", identity=None, number=9)
    store.create_run(record)
    report = await EvalSuite("s", doubles(8), Counting(), matches("x"), version="1").run(store=store)
    assert (report.run_id, report.status) == ("older", "finished")
    store.create_run(replace(record, run_id="oldest", number=10))
    with pytest.warns(ResumeWarning, match="its code has changed"):
        fresh = await EvalSuite("s", doubles(8), Counting(), exact_match, version="2").run(store=store)
    assert fresh.run_id != "oldest"


async def test_a_run_without_an_identity_notes_that_its_code_has_changed(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING, version="1").run(store=store)
    for run_id in ("older", "oldest"):
        store.create_run(replace(store.get_run(old.run_id), run_id=run_id, identity=None))
    same = await EvalSuite("s", doubles(8), Counting(), exact_match, version="1").run(store=store, resume="older")
    forced = EvalSuite("s", doubles(8), Counting(), exact_match, version="2")
    changed = await forced.run(store=store, resume="oldest", allow_changed_code=True)
    assert (same.run.noted.code_changed, changed.run.noted.code_changed) == (False, True)
    assert {result.code for result in changed.results} == {0}


async def test_an_imported_run_is_passed_over_and_a_rescoring_is_not_resumed(store: RunStore) -> None:
    suite = EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING, version="1")
    old = await suite.run(store=store)
    store.create_run(replace(store.get_run(old.run_id), run_id="imported", notes={"imported": {}}))
    assert store.get_run("imported").imported
    task = Counting()
    resumed = await EvalSuite("s", doubles(8), task, exact_match, version="1").run(store=store)
    assert (resumed.run_id, sorted(task.calls)) == (old.run_id, [3, 4, 5, 6, 7])
    rescored = await suite.rescore(old.run_id, store=store)
    with pytest.raises(RunMismatchError, match=f"is a rescoring of run {old.run_id}. Resume it with rescore"):
        await suite.run(store=store, resume=rescored.run_id)


async def test_what_the_code_may_read_is_named_if_it_changed(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING, version="1").run(store=store)
    identity = dict(old.run.identity or {})
    store.update_run(old.run_id, identity={**identity, "reads": {"prompt.txt": "1"}})
    named = f"^run {old.run_id} is resumed although prompt.txt changed, which its code may read$"
    with pytest.warns(ResumeWarning, match=named):
        await EvalSuite("s", doubles(8), Counting(), exact_match, version="1").run(store=store)


class Listening:
    """An observer that keeps the events of the start, and looks at the progress of the run with each result."""

    announces_resume = True

    def __init__(self) -> None:
        self.started: list[EvalRunStarted] = []
        self.progress: list[tuple[int, int, float]] = []

    def publish(self, event: RunEvent) -> None:
        if isinstance(event, EvalRunStarted):
            self.started.append(event)
        elif isinstance(event, SampleEvaluated):
            found = metrics.progress_of(event.run_id)
            assert found is not None
            self.progress.append((found.stored, found.outstanding, found.cost_usd))


async def test_a_resumed_run_tells_what_is_stored_retried_and_paid(store: RunStore) -> None:

    def suite(*failing: int, **config: Any) -> EvalSuite[int, int, Any]:
        async def task(given: int, ctx: TrialContext) -> int:
            ctx.session.record(PromptExecuted(usage=TokenUsage(1, 1, cost_usd=1.0)))
            if given in failing:
                raise ValueError
            return 2 * given

        return EvalSuite("s", doubles(4), task, exact_match, version="1", config=EvalConfig(max_concurrent=1, **config))

    first, second, third = Listening(), Listening(), Listening()
    await suite(0, 2, stop_on_error=False).run(store=store, bus=first)
    assert [(event.done, event.retried) for event in first.started] == [(0, 0)]
    assert first.progress[0] == (0, 1, 0.0)  # Later ones depend on when results are committed.
    assert [outstanding for _, outstanding, _ in first.progress] == [1] * 4
    await suite(2).run(store=store, bus=second, resume="errors")
    assert [(event.done, event.retried) for event in second.started] == [(4, 2)]
    assert second.progress[0] == (2, 1, 2.0)  # What is repeated counts neither as stored nor as paid.
    await suite().run(store=store, bus=third, resume="errors")
    assert [(event.done, event.retried) for event in third.started] == [(4, 1)]
    assert third.progress == [(3, 1, 4.0)]


async def test_a_run_of_another_suite_is_not_resumed(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(8), Counting(2), exact_match, config=STOPPING).run(store=store)
    with pytest.raises(RunMismatchError, match=r"belongs to suite 's' \(got 'other'\)"):
        await EvalSuite("other", doubles(8), Counting(), exact_match).run(store=store, resume=old.run_id)


async def test_outputs_without_a_score_are_not_executed_again_for_another_evaluator(store: RunStore) -> None:
    task = Counting()

    def broken(output: int, expected: int) -> bool:
        raise RuntimeError("down")

    old = await EvalSuite("s", doubles(3), task, broken, version="1").run(store=store)
    assert old.status == "unscored"
    fixed = EvalSuite("s", doubles(3), task, exact_match, version="1")
    with pytest.raises(RunMismatchError, match=rf"suite.rescore\('{old.run_id}'\)"):
        await fixed.run(store=store)
    assert len(task.calls) == 3
    assert (await fixed.rescore(old.run_id, store=store)).pass_rate == 1.0


async def test_errors_are_retried_by_changed_code_and_refused_with_another_evaluator(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(4), Counting(3), exact_match, version="1").run(store=store)
    with pytest.raises(RunMismatchError, match="its evaluator was exact_match, now matches"):
        await EvalSuite("s", doubles(4), Counting(), matches("x"), version="2").run(store=store, resume="errors")
    with pytest.warns(ResumeWarning, match="results of two code versions"):
        report = await EvalSuite("s", doubles(4), Counting(), exact_match, version="2").run(
            store=store, resume="errors"
        )
    assert (report.run_id, report.pass_rate_all) == (old.run_id, 1.0)
    assert [result.code for result in report.results] == [0, 0, 0, 1]


async def test_a_run_of_errors_that_changed_code_retries_has_results_of_one_version(store: RunStore) -> None:
    old = await EvalSuite("s", doubles(2), Counting(0, 1), exact_match, version="1").run(store=store)
    with warnings.catch_warnings(action="error", category=ResumeWarning):
        report = await EvalSuite("s", doubles(2), Counting(), exact_match, version="2").run(
            store=store, resume="errors"
        )
    assert (report.run_id, report.pass_rate_all) == (old.run_id, 1.0)
    assert code_versions(store, report.run) == 1


@pytest.mark.parametrize("failing", [4, 8])
async def test_trials_whose_scoring_failed_are_only_scored_again(store: RunStore, failing: int) -> None:
    task = Counting()
    down = threading.Event()
    down.set()

    def judge(output: int, expected: int) -> bool:
        if down.is_set() and expected >= 2 * (8 - failing):
            raise ConnectionError("the judge is down")
        return output == expected

    suite = EvalSuite("s", doubles(8), task, judge, config=EvalConfig(max_concurrent=1), version="1")
    first = await suite.run(store=store)
    assert (first.status, dict(first.errors)) == ("unscored", {"scorer_error": failing})
    assert f"{failing} trials could not be scored" in str(first)
    down.clear()
    second = await suite.run(store=store)
    assert (second.run_id, second.status, second.successful, second.pass_rate) == (first.run_id, "finished", 8, 1.0)
    assert len(task.calls) == 8


async def test_errors_are_tried_again_only_when_asked_and_count_as_a_further_attempt(store: RunStore) -> None:
    config = EvalConfig(stop_on_error=True, max_concurrent=1)
    await EvalSuite("s", doubles(4), Counting(3), exact_match, config=config, version="1").run(store=store)
    task = Counting()
    report = await EvalSuite("s", doubles(4), task, exact_match, version="1").run(store=store, resume="errors")
    assert task.calls == [3]
    assert report.pass_rate_all == 1.0
    assert report.results[3].attempt == 2


async def test_the_errors_of_a_finished_run_are_tried_again_in_that_run(store: RunStore) -> None:
    first = await EvalSuite("s", doubles(4), Counting(1, 3), exact_match, version="1").run(store=store)
    assert (first.status, first.pass_rate_all) == ("finished", 0.5)
    task = Counting()
    second = await EvalSuite("s", doubles(4), task, exact_match, version="1").run(store=store, resume="errors")
    assert (second.run_id, second.status, second.pass_rate_all) == (first.run_id, "finished", 1.0)
    assert sorted(task.calls) == [1, 3]


@dataclass(frozen=True)
class Answer:
    text: str


async def test_rescoring_makes_a_new_run_from_stored_outputs_and_sessions_without_the_task(store: RunStore) -> None:
    calls: list[str] = []

    async def reply(given: str, ctx: TrialContext) -> Answer:
        calls.append(given)
        ctx.session.record(ChatMessage("user", given))
        if given == "broken":
            raise ValueError("broken")
        return Answer(f"The answer is {given}.")

    dataset = Dataset.of({"four": "four", "five": "FIVE", "broken": "x"}, name="words")

    def strict(output: Answer, expected: str) -> bool:
        return output.text == expected

    def loose(output: Answer, expected: str, session: SessionView) -> bool:
        assert isinstance(output, Answer)
        assert session.trajectory.messages
        return expected.lower() in output.text.lower()

    suite = EvalSuite("words", dataset, reply, strict)
    first = await suite.run(store=store)
    assert (first.pass_rate, len(calls)) == (0.0, 3)
    second = await suite.rescore(first.run_id, loose, store=store)
    assert (second.pass_rate, len(calls)) == (1.0, 3)
    assert dict(second.errors) == {"task_error": 1}
    assert (second.run.parent_run, second.run_id != first.run_id) == (first.run_id, True)
    assert second.run.evaluator == "loose"
    assert first.refresh().pass_rate == 0.0
    third = await suite.run(store=store)
    assert third.run_id not in (first.run_id, second.run_id)


async def test_a_rescored_evaluator_that_fails_leaves_scorer_errors(store: RunStore) -> None:
    suite = EvalSuite("s", doubles(2), Counting(), exact_match)
    first = await suite.run(store=store)
    report = await suite.rescore(first.run_id, contains, store=store)
    assert dict(report.errors) == {"scorer_error": 2}


async def test_the_same_results_come_from_a_sqlite_store_opened_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    suite = EvalSuite("s", doubles(8), Counting(4), exact_match, config=STOPPING, version="1")
    first = await suite.run(store=url)
    resumed = EvalSuite("s", doubles(8), Counting(), exact_match, version="1")
    second = await resumed.run(store=url)
    assert (second.run_id, second.total, second.pass_rate) == (first.run_id, 8, 1.0)
    for report in (first, second):
        report.store.close()
