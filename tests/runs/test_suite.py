"""Suites: what is run, in what order, and what is said about it."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import (
    ChatMessage,
    ConfigurationError,
    Dataset,
    EvalConfig,
    EvalReport,
    EvalSuite,
    Experiment,
    Metric,
    PromptExecuted,
    RunMismatchError,
    Sample,
    Score,
    TokenUsage,
    Trajectory,
    TrialContext,
    all_of,
    evaluate,
    evaluate_sync,
    exact_match,
    open_store,
)
from fairtrial.models import ScriptedAdapter
from fairtrial.runs import EvalRunCompleted, EvalRunStarted, RunEvent, SampleEvaluated, TrialStarted, loop_watch

pytestmark = pytest.mark.anyio


def doubles(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", i, 2 * i, {"parity": i % 2}) for i in range(count)], name="doubles")


async def double(given: int) -> int:
    return 2 * given


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []

    def publish(self, event: RunEvent) -> None:
        self.events.append(event)

    def of[T](self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.proves("R40", "R45", "R63", "R86")
async def test_a_suite_runs_every_sample_and_reports() -> None:
    tagged: list[str] = []

    async def talk(given: int, ctx: TrialContext) -> int:
        tagged.append(ctx.session.tags["branch"])
        ctx.session.record(PromptExecuted(usage=TokenUsage(3, 4)))
        return await double(given)

    suite = EvalSuite("doubles", doubles(5), talk, all_of(exact_match))
    report = await suite.run(store="memory:", tags={"branch": "main"})
    assert (report.total, report.planned, report.successful, report.not_run) == (5, 5, 5, 0)
    assert (report.pass_rate, report.pass_rate_all, report.mean_score) == (1.0, 1.0, 1.0)
    assert (report.dataset_name, report.status, report.experiments) == ("doubles", "finished", ("baseline",))
    assert report.config == EvalConfig()
    assert report.mean_latency_ms is not None
    assert [result.sample_id for result in report.results] == ["s0", "s1", "s2", "s3", "s4"]
    assert all(result.success for result in report.results)
    assert (report.scores_by_criterion, report.total_tokens) == ({"exact_match": 1.0}, 35)
    assert (dict(report.run.tags), tagged) == ({"branch": "main"}, ["main"] * 5)
    assert len(report.failed_samples()) == 0


@pytest.mark.proves("R94", "R95", "R7")
async def test_evaluate_takes_samples_a_task_an_evaluator_and_a_config_that_can_be_replaced() -> None:
    config = replace(EvalConfig(), max_samples=3, max_concurrent=2, experiment_name="first")
    report = await evaluate(list(doubles(10)), double, exact_match, config)
    assert (report.total, report.experiments) == (3, ("first",))
    assert report.config["experiment_name"] == "first"
    with pytest.raises(KeyError):
        report.config["no_such_setting"]


@pytest.mark.proves("R94", "R97")
async def test_a_trajectory_scorer_from_reinforcement_learning_works_unchanged() -> None:
    def score_fn(trajectory: Trajectory, sample: Sample[int, int]) -> Score:
        correct = trajectory.messages[-1].content == str(sample.ground_truth)
        return Score(metrics=(Metric("correct", float(correct), weight=1.0), Metric("turns", len(trajectory.messages))))

    report = await evaluate(doubles(4), double, score_fn)
    assert report.summary["mean"] == 1.0
    assert report.scores_by_criterion == {"correct": 1.0, "turns": 2.0}


@pytest.mark.proves("R40", "R43", "R44", "R102")
async def test_errors_are_counted_and_never_become_scores() -> None:
    async def half(given: int) -> int:
        if given % 2:
            raise ValueError("odd")
        return 2 * given if given else -1

    report = await evaluate(doubles(10), half, exact_match)
    assert (report.total, report.successful, dict(report.errors)) == (10, 5, {"task_error": 5})
    assert (report.pass_rate, report.pass_rate_all) == (0.8, 0.4)
    assert [result.sample_id for result in report.failed_samples()] == ["s0"]
    assert len(report.failed_samples()) == 1
    broken = [result for result in report.results if not result.success]
    assert all(result.score is None and result.error == "ValueError: odd" for result in broken)


async def test_with_no_scored_trial_every_rate_is_undefined() -> None:
    async def broken(given: int) -> int:
        raise ValueError

    report = await evaluate(doubles(2), broken, exact_match)
    assert (report.pass_rate, report.mean_score, report.summary["mean"], report.pass_rate_all) == (
        None,
        None,
        None,
        0.0,
    )
    assert "-" in str(report)


@pytest.mark.proves("R106", "R85")
async def test_as_many_trials_are_in_flight_as_allowed_and_no_more() -> None:
    now = most = 0

    async def watch(given: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(0.01)
        now -= 1
        return 2 * given

    await evaluate(doubles(40), watch, exact_match, EvalConfig(max_concurrent=7))
    assert most == 7


async def test_experiments_run_side_by_side_and_have_no_common_rate() -> None:
    async def tuned(given: int, ctx: TrialContext) -> int:
        return 2 * given + int(ctx.experiment.params.get("offset", 0))

    async def other(given: int) -> int:
        return 0

    experiments = [Experiment(), Experiment("off", params={"offset": 1}), Experiment("other", task=other)]
    report = await evaluate(doubles(4), tuned, exact_match, experiments=experiments)
    assert [report[name].pass_rate for name in report.experiments] == [1.0, 0.0, 0.25]
    assert report.total == 12
    for figure in ("pass_rate", "pass_rate_all", "mean_score", "mean_latency_ms", "summary", "scores_by_criterion"):
        with pytest.raises(ValueError, match=rf'3 experiments .* report\["other"\]\.{figure}'):
            getattr(report, figure)
    with pytest.raises(KeyError, match="it has baseline, off, other"):
        report["nope"]
    assert [result.experiment for result in report["off"].results] == ["off"] * 4


async def test_repeats_have_keys_of_their_own_in_sample_major_order() -> None:
    report = await evaluate(doubles(2), double, exact_match, EvalConfig(repeats=3))
    assert [(result.sample_id, result.repeat, result.ordinal) for result in report.results] == [
        ("s0", 0, 0),
        ("s0", 1, 1),
        ("s0", 2, 2),
        ("s1", 0, 3),
        ("s1", 1, 4),
        ("s1", 2, 5),
    ]


@pytest.mark.proves("R85")
async def test_stop_on_error_ends_the_run_and_leaves_it_resumable() -> None:
    async def breaks(given: int) -> int:
        if given == 3:
            raise ValueError("three")
        return 2 * given

    config = EvalConfig(stop_on_error=True, max_concurrent=1)
    report = await EvalSuite("s", doubles(10), breaks, exact_match, config=config).run(store="memory:")
    assert (report.total, report.status) == (4, "interrupted")
    assert "task_error" in str(report.run.notes["stopped"])
    assert "ended early" in str(report)


@pytest.mark.proves("R85")
async def test_the_time_per_sample_and_the_retries_of_a_config_are_those_of_its_trials() -> None:
    calls: list[int] = []

    async def fails(given: int) -> int:
        calls.append(given)
        if given == 1 and calls.count(1) == 1:
            await anyio.sleep(30)
        error = ConnectionError("busy")
        error.retry_after = 0.0  # type: ignore[attr-defined]  # what providers' errors carry
        if given == 0 and calls.count(0) < 3:
            raise error
        return 2 * given

    report = await evaluate(doubles(2), fails, exact_match, EvalConfig(max_retries=2, timeout_seconds=0.2))
    assert sorted(calls) == [0, 0, 0, 1, 1]
    assert [(result.passed, result.attempt) for result in report.results] == [(True, 3), (True, 2)]
    once = await evaluate(doubles(1), lambda given: 1 / 0, exact_match, EvalConfig())
    assert [result.attempt for result in once.results] == [1]


async def test_the_cost_cap_stops_the_run_cleanly() -> None:
    async def costly(given: int, ctx: TrialContext) -> int:
        ctx.session.record(PromptExecuted(usage=TokenUsage(10, 5, cost_usd=0.4)))
        return 2 * given

    config = EvalConfig(max_cost_usd=1.0, max_concurrent=1)
    report = await EvalSuite("s", doubles(10), costly, exact_match, config=config).run(store="memory:")
    assert (report.total, report.status) == (3, "interrupted")
    assert report.cost_usd == pytest.approx(1.2)
    assert report.total_tokens == 45
    store = open_store("memory:")
    for cap, total in ((1.0, 3), (1.0, 3), (2.0, 5), (9.0, 10)):
        capped = EvalConfig(max_cost_usd=cap, max_concurrent=1)
        report = await EvalSuite("s", doubles(10), costly, exact_match, config=capped, version="1").run(store=store)
        assert report.total == total
    assert len(store.runs(suite="s")) == 1
    assert report.status == "finished"


@pytest.mark.proves("R110")
async def test_warm_up_trials_are_executed_and_thrown_away() -> None:
    calls: list[int] = []

    async def count(given: int) -> int:
        calls.append(given)
        return 2 * given

    report = await evaluate(doubles(4), count, exact_match, EvalConfig(warmup=2))
    assert sorted(calls) == [0, 0, 1, 1, 2, 3]
    assert report.total == 4


@pytest.mark.proves("R110")
async def test_a_cold_start_is_over_before_the_first_trial_is_timed() -> None:
    warm = False

    async def starts_cold(given: int) -> int:
        nonlocal warm
        if not warm:
            await anyio.sleep(0.3)
            warm = True
        return 2 * given

    report = await evaluate(doubles(3), starts_cold, exact_match, EvalConfig(warmup=1))
    assert max(result.latency_ms or 0 for result in report.results) < 250


@pytest.mark.proves("R88")
async def test_observers_hear_of_the_run_and_of_every_trial_and_cannot_break_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def publish(self, event: RunEvent) -> None:
            raise RuntimeError("the bus is down")

    recorder = Recorder()
    suite = EvalSuite("s", doubles(3), double, exact_match)
    report = await suite.run(store="memory:", bus=[Broken(), recorder])
    (started,) = recorder.of(EvalRunStarted)
    assert (started.run_id, started.sample_count, started.planned, started.done) == (report.run_id, 3, 3, 0)
    assert len(recorder.of(TrialStarted)) == 3
    assert {event.result.sample_id for event in recorder.of(SampleEvaluated)} == {"s0", "s1", "s2"}
    (completed,) = recorder.of(EvalRunCompleted)
    assert (completed.status, completed.pass_rate, completed.mean_score) == ("finished", 1.0, 1.0)
    assert "the run goes on" in caplog.text


async def test_the_end_of_a_run_of_several_experiments_has_the_figures_of_each_and_no_common_ones() -> None:
    async def zero(given: int) -> int:
        return -1

    recorder = Recorder()
    experiments = [Experiment("right"), Experiment("wrong", task=zero)]
    await EvalSuite("s", doubles(3), double, exact_match, experiments=experiments).run(store="memory:", bus=[recorder])
    (completed,) = recorder.of(EvalRunCompleted)
    assert (completed.pass_rate, completed.mean_score) == (None, None)
    assert {name: figures.pass_rate for name, figures in completed.experiments.items()} == {"right": 1.0, "wrong": 0.0}
    assert completed.experiments["right"].mean_score == 1.0


@pytest.mark.proves("R112", "R100")
async def test_results_stream_out_as_they_come() -> None:
    suite = EvalSuite("s", doubles(6), double, exact_match)
    async with aclosing(suite.stream(store="memory:")) as results:
        seen = [result.sample_id async for result in results]
    assert sorted(seen) == ["s0", "s1", "s2", "s3", "s4", "s5"]


async def test_what_keeps_a_run_from_starting_comes_out_of_its_stream_as_it_is() -> None:
    store = open_store("memory:")
    broken = EvalSuite("s", doubles(3), double, lambda output, expected: 1 / 0)
    assert (await broken.run(store=store)).status == "unscored"
    async with aclosing(EvalSuite("s", doubles(3), double, exact_match).stream(store=store)) as results:
        with pytest.raises(RunMismatchError):
            await anext(results)


@pytest.mark.proves("R112")
async def test_a_stream_that_is_left_early_leaves_a_run_that_can_be_resumed() -> None:
    store = open_store("memory:")
    suite = EvalSuite("s", doubles(50), double, exact_match, config=EvalConfig(max_concurrent=2))
    async with aclosing(suite.stream(store=store)) as results:
        async for _ in results:
            break
    (run,) = store.runs(suite="s")
    assert run.status == "interrupted"
    report = await suite.run(store=store)
    assert (report.run_id, report.total, report.status) == (run.run_id, 50, "finished")


@pytest.mark.proves("R112")
@pytest.mark.parametrize("how", ["break", "error", "cancelled"])
async def test_a_stream_that_is_dropped_hurts_nobody_and_leaves_a_run_that_can_be_resumed(how: str) -> None:
    """Without `aclosing`: as people write it. The caller must not be cancelled."""
    store = open_store("memory:")
    calls: list[int] = []

    ending = overlaps = 0

    async def count(given: int) -> int:
        nonlocal ending, overlaps
        calls.append(given)
        overlaps += ending
        try:
            await anyio.sleep(0.001)
        except anyio.get_cancelled_exc_class():
            ending += 1
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
            ending -= 1
            raise
        return 2 * given

    suite = EvalSuite("s", doubles(50), count, exact_match, config=EvalConfig(max_concurrent=2))

    async def leave() -> None:
        async for _ in suite.stream(store=store):
            if how == "error":
                raise LookupError("a mistake of the caller")
            if how == "break":
                break
            await anyio.sleep(30)

    if how == "error":
        with pytest.raises(LookupError):
            await leave()
    elif how == "break":
        await leave()
    else:
        with anyio.move_on_after(0.2):
            await leave()
    report = await suite.run(store=store)  # At once: it waits for the other to have stopped.
    assert (len(store.runs(suite="s")), report.total, report.status) == (1, 50, "finished")
    assert len(calls) <= 50 + 2  # What was in flight is executed again, nothing else.
    assert overlaps == 0
    await anyio.sleep(0.05)  # A late cancellation would come now.


@pytest.mark.proves("R112")
async def test_a_dropped_stream_stops_its_run_by_itself() -> None:
    store = open_store("memory:")
    suite = EvalSuite("s", doubles(50), double, exact_match, config=EvalConfig(max_concurrent=2))
    async for _ in suite.stream(store=store):
        break
    with anyio.fail_after(10):
        while store.runs(suite="s")[0].status == "running":
            await anyio.lowlevel.checkpoint()
    assert store.runs(suite="s")[0].status == "interrupted"


def test_a_program_that_ends_after_leaving_a_stream_ends_cleanly(child: Callable[..., str], tmp_path: Path) -> None:
    code = """
import anyio, sys
from fairtrial import Dataset, EvalSuite, Sample, exact_match, open_store

async def slow(given):
    await anyio.sleep(0.01)
    return given

async def main():
    suite = EvalSuite("s", Dataset([Sample(f"s{i}", i, i) for i in range(200)]), slow, exact_match)
    async for result in suite.stream(store="runs.db"):
        break

anyio.run(main, backend=sys.argv[1])
(run,) = open_store("runs.db").runs()
print(run.status)
"""
    for backend in ("asyncio", "trio"):
        folder = tmp_path / backend
        folder.mkdir()
        assert child(code, backend, cwd=folder, PYTHONWARNINGS="error") == "interrupted"


async def test_the_lifespan_opens_what_trials_share_once_and_closes_it() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def clients() -> AsyncIterator[str]:
        log.append("open")
        yield "client"
        log.append("closed")

    @contextmanager
    def files() -> Iterator[str]:
        log.append("open")
        yield "client"
        log.append("closed")

    async def use(given: int, ctx: TrialContext) -> int:
        assert ctx.shared == "client"
        return 2 * given

    for lifespan in (clients, files):
        report = await EvalSuite("s", doubles(3), use, exact_match, lifespan=lifespan).run(store="memory:")
        assert report.pass_rate == 1.0
    assert log == ["open", "closed"] * 2


async def test_a_lifespan_that_fails_ends_the_run_with_its_own_error() -> None:
    def broken() -> Any:
        raise OSError("no such host")

    store = open_store("memory:")
    with pytest.raises(OSError, match="no such host"):
        await EvalSuite("s", doubles(3), double, exact_match, lifespan=broken).run(store=store)
    assert store.runs(suite="s")[0].status == "interrupted"


BAD_SUITES: list[tuple[dict[str, Any], str]] = [
    ({"evaluator": None}, "has no evaluator"),
    ({"evaluator": 5}, "must be callable"),
    ({"evaluator": [exact_match, all_of(exact_match)]}, "combine several: all_of.exact_match"),
    ({"experiments": ["big", "small"]}, r"must be Experiment objects .got 'big'.\nwrite .*Experiment.'big'"),
    ({"evaluator": lambda answer: True}, "takes .answer."),
    ({"task": None}, "has no task"),
    ({"task": 5}, "must be callable"),
    ({"task": lambda: 1}, "a task takes"),
    ({"task": lambda a, b, c: 1}, "a task takes"),
    ({"dataset": [1, 2]}, "needs a Dataset"),
    ({"name": "a:b"}, "without ':'"),
    ({"experiments": [Experiment(), Experiment()]}, "share a name"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SUITES, ids=[message for _, message in BAD_SUITES])
async def test_bad_configuration_is_refused_before_the_first_call(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {"name": "s", "dataset": doubles(1), "task": double, "evaluator": exact_match, **change}
    with pytest.raises(ConfigurationError, match=message):
        EvalSuite(**parts)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_concurrent", 0),
        ("max_concurrent", 2.5),
        ("timeout_seconds", 0),
        ("timeout_seconds", float("nan")),
        ("repeats", True),
        ("max_samples", -1),
        ("max_cost_usd", "1"),
    ],
)
async def test_settings_out_of_range_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"EvalConfig.{setting}"):
        EvalConfig(**{setting: value})


@pytest.mark.parametrize("name", ["", "a:b", "a@1", "a/b"])
async def test_an_experiment_needs_a_name_people_can_type(name: str) -> None:
    with pytest.raises(ConfigurationError, match="experiment's name"):
        Experiment(name)


async def test_a_built_in_function_can_be_a_task() -> None:
    report = await evaluate([Sample("a", [1, 2, 3], 3)], len, exact_match)
    assert report.pass_rate == 1.0


async def test_evaluate_makes_a_suites_name_of_any_datasets_name() -> None:
    for name, expected in (("openai/gsm8k", "openai-gsm8k"), ("a: b@2", "a-b-2"), ("/", "dataset"), ("plain", "plain")):
        report = await evaluate(Dataset([Sample("a", 1, 2)], name=name), double, exact_match)
        assert (report.run.suite, report.dataset_name) == (expected, name)


async def test_a_task_that_forgets_to_await_is_told_so() -> None:
    async def forgets(given: int) -> Any:
        return double(given)

    with warnings.catch_warnings(action="ignore"):  # Python says so too, when the coroutine is dropped.
        report = await evaluate(doubles(1), forgets, exact_match)
        gc.collect()
    assert "it was never awaited; write `await` before the call" in str(report.results[0].error)


@pytest.mark.parametrize("blocks", [True, False])
async def test_an_async_task_that_blocks_the_event_loop_is_named_once(
    blocks: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "_ENOUGH_SECONDS", 0.7)
    monkeypatch.setattr(loop_watch, "_STALLS", 1)

    async def asks_a_model(given: int) -> int:
        if blocks:
            time.sleep(0.4)  # noqa: ASYNC251 - the mistake under test
        else:
            await anyio.sleep(0.4)
        return 2 * given

    await evaluate(doubles(5), asks_a_model, exact_match, EvalConfig(max_concurrent=2))
    warned = [record.getMessage() for record in caplog.records if "blocked" in record.getMessage()]
    assert len(warned) == blocks
    if blocks:
        assert "in asks_a_model)" in warned[0]
        assert "Task asks_a_model is async and calls code that blocks" in warned[0]


@pytest.mark.proves("R102")
async def test_a_task_with_a_model_runs_under_both_event_loops() -> None:
    adapter = ScriptedAdapter(["4"], repeat=True)

    async def ask(given: int) -> int:
        return int((await adapter.complete([ChatMessage("user", f"{given} * 2")])).raw)

    report = await evaluate(doubles(4), ask, exact_match)
    assert [result.passed for result in report.results] == [False, False, True, False]
    assert len(adapter.calls) == 4


async def test_an_empty_dataset_makes_an_empty_report() -> None:
    report = await evaluate(Dataset([]), double, exact_match)
    assert (report.total, report.pass_rate, report.status) == (0, None, "finished")
    assert "0 of 0 trials" in str(report)


def test_evaluate_sync_works_from_ordinary_code_and_twice_on_one_event_loop() -> None:
    loops: set[int] = set()

    async def which(given: int) -> int:
        loops.add(threading.get_ident())
        return 2 * given

    for _ in range(2):
        report = evaluate_sync(doubles(3), which, exact_match)
        assert report.pass_rate == 1.0
    assert len(loops) == 1
    assert threading.get_ident() not in loops


async def test_evaluate_sync_works_inside_a_running_event_loop_as_notebooks_have() -> None:
    assert evaluate_sync(doubles(3), double, exact_match).pass_rate == 1.0


@pytest.mark.proves("R47")
async def test_reports_are_sliced_by_metadata_by_metric_and_by_any_function() -> None:
    async def evens_only(given: int) -> int:
        return 2 * given if given % 2 == 0 else 0

    report = await evaluate(doubles(10), evens_only, exact_match)
    by_parity = report.group_by("parity")
    assert {value: (found["n"], found["pass_rate"]) for value, found in by_parity.items()} == {0: (5, 1.0), 1: (5, 0.0)}
    by_size = report.group_by(lambda result: result.ordinal < 5)
    assert {value: found["n"] for value, found in by_size.items()} == {True: 5, False: 5}
    assert set(report.group_by("no_such_key")) == {None}


@pytest.mark.proves("R41", "R42")
async def test_a_result_leads_to_its_sample_its_output_and_its_trajectory() -> None:
    async def talk(given: int, ctx: TrialContext) -> int:
        ctx.session.record(ChatMessage("user", str(given)))
        ctx.session.record(PromptExecuted(usage=TokenUsage(3, 4)))
        return 2 * given

    report = await evaluate(doubles(2), talk, exact_match)
    last = report.results[-1]
    assert (last.output, last.usage.total_tokens) == (2, 7)
    assert last.sample.input == 1
    assert last.sample.metadata == {"parity": 1}
    assert last.trajectory.messages == (ChatMessage("user", "1"),)


@pytest.mark.proves("R42")
async def test_a_results_metadata_is_stored_with_it() -> None:
    async def fails_here(given: int) -> int:
        raise ValueError(given)

    report = await evaluate(doubles(1), fails_here, exact_match)
    assert "in fails_here" in str(report.results[0].metadata["traceback"])


async def test_a_report_is_a_table_a_person_can_read_in_a_terminal_and_in_a_notebook() -> None:
    report = await EvalSuite("doubles", doubles(4), double, exact_match).run(store="memory:")
    text = str(report)
    assert "100.0%" in text
    assert "51.0% to 100.0%" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "<table>" in report._repr_html_()
    assert repr(report).startswith("<EvalReport doubles")


@pytest.mark.proves("R46")
async def test_a_report_gives_mean_spread_and_extremes_and_can_be_saved_and_loaded(tmp_path: Path) -> None:
    values = {0: 0.0, 1: 0.25, 2: 0.5, 3: 1.0}

    def grade(output: int, expected: int) -> float:
        return values[output]

    async def same(given: int) -> int:
        return given

    report = await evaluate(doubles(4), same, grade)
    summary = report.summary
    assert (summary["n"], summary["mean"], summary["min"], summary["max"]) == (4, 0.4375, 0.0, 1.0)
    assert summary["std"] == pytest.approx(0.4269562)
    report.save(tmp_path / "run.db")
    loaded = EvalReport.load(tmp_path / "run.db")
    assert loaded.summary == summary
    assert loaded.config == report.config
    assert [result.output for result in loaded.results] == [0, 1, 2, 3]
    assert loaded.results[2].sample.expected == 4
    loaded.store.close()
    report.export(tmp_path / "results.jsonl")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.proves("R89")
async def test_a_report_of_a_running_run_shows_what_is_stored_so_far() -> None:
    store = open_store("memory:")
    seen: list[tuple[str, int, int]] = []

    async def wait_for_the_first(given: int) -> int:
        if given < 4:
            return 2 * given
        (run,) = store.runs(suite="s")
        with anyio.fail_after(5):
            while (report := EvalReport(store, store.get_run(run.run_id))).total < 4:
                await anyio.lowlevel.checkpoint()  # Another thread commits them.
        seen.append((report.status, report.total, len(list(report.results))))
        return 2 * given

    config = EvalConfig(max_concurrent=1)
    report = await EvalSuite("s", doubles(5), wait_for_the_first, exact_match, config=config).run(store=store)
    assert seen == [("running", 4, 4)]
    assert report.total == 5


@pytest.mark.proves("R89")
async def test_a_running_run_can_be_looked_at_and_refreshed() -> None:
    store = open_store("memory:")
    seen: list[int] = []

    class Peek:
        def publish(self, event: RunEvent) -> None:
            if isinstance(event, EvalRunCompleted):
                seen.append(EvalReport(store, store.get_run(event.run_id)).total)

    report = await EvalSuite("s", doubles(5), double, exact_match).run(store=store, bus=Peek())
    assert seen == [5]
    assert report.refresh().total == 5
