"""Suites: what is run, in which order, and the messages about invalid suites."""

from __future__ import annotations

import gc
import re
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import ConfigurationError, Dataset, Metric, Sample, Score, ScriptedAdapter, Session, all_of, exact_match
from fairtrial.data.session import ChatMessage, PromptExecuted, TokenUsage, Trajectory
from fairtrial.runs import EvalRunCompleted, EvalRunStarted, RunEvent, SampleEvaluated, TrialStarted
from fairtrial.runs import suspects as loop_watch
from fairtrial.runs.events import observe_every_run
from fairtrial.store import RunStore
from fairtrial.suites import EvalSuite, evaluate, evaluate_sync
from fairtrial.trials import EvalConfig, Experiment, TrialContext
from tests.records import changeable
from tests.runs.doubles import double, doubles


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
    assert [result.success for result in report.results] == [True, False] * 5
    broken = [result for result in report.results if not result.success]
    assert all(result.score is None and result.error == "ValueError: odd" for result in broken)


async def test_a_report_of_a_task_that_always_raises_names_the_error_and_its_line() -> None:
    def broken(given: int) -> int:
        return given.no_such_attribute  # type: ignore[attr-defined,no-any-return]

    line = broken.__code__.co_firstlineno + 1
    report = await evaluate(doubles(30), broken, exact_match, EvalConfig(max_same_errors=0))
    text = str(report.in_detail())
    error = f"30 x AttributeError: 'int' object has no attribute 'no_such_attribute' (test_suite.py:{line} in broken)"
    assert error in " ".join(text.split())
    assert f"30 x task error: test_suite.py:{line}: AttributeError: 'int' object has no" in str(report)
    assert "no samples" not in text


@pytest.mark.parametrize(("good", "warnings"), [(99, 1), (5, 0), (35, 1)])
async def test_a_run_warns_once_when_the_first_trials_all_end_in_the_same_error(
    good: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(given: int) -> int:
        if given == good:
            return given
        raise ValueError(f"no {given}")

    await evaluate(doubles(60), broken, exact_match, EvalConfig(max_concurrent=1))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == warnings
    if said:
        assert said[0].startswith(
            "the first 20 trials that finished all ended in the same error: ValueError: no 19 (test_suite.py:"
        )
        assert said[0].endswith("run it again with --resume errors (resume='errors')")


@pytest.mark.parametrize("kept", [True, False])
async def test_a_warning_of_equal_scorer_errors_recommends_rescoring_what_is_stored(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, kept: bool
) -> None:
    def broken(output: int, expected: int) -> bool:
        raise ValueError("no")

    config, where = EvalConfig(max_concurrent=1), f"{tmp_path}/runs.db" if kept else "memory:"
    await EvalSuite("s", doubles(20), lambda given: given, broken, config=config).run(store=where)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ("fix the evaluator, then use `fairtrial rescore`" in said) is kept
    assert ("fix the evaluator, and run it again" in said) is not kept


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


async def test_the_cost_cap_stops_the_run_cleanly(store: RunStore) -> None:
    async def costly(given: int, ctx: TrialContext) -> int:
        ctx.session.record(PromptExecuted(usage=TokenUsage(10, 5, cost_usd=0.4)))
        return 2 * given

    config = EvalConfig(max_cost_usd=1.0, max_concurrent=1)
    report = await EvalSuite("s", doubles(10), costly, exact_match, config=config).run(store="memory:")
    assert (report.total, report.status) == (3, "interrupted")
    assert report.cost_usd == pytest.approx(1.2)
    assert report.total_tokens == 45
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


async def test_tags_and_bus_may_be_none_and_a_bus_that_can_receive_nothing_is_refused() -> None:
    suite = EvalSuite("s", doubles(1), double, exact_match)
    assert (await suite.run(store="memory:", tags=None, bus=None)).run.tags == {}
    for useless in (Session(), print, object(), [Recorder(), print]):
        with pytest.raises(ConfigurationError, match=r"bus must be an object with publish\(event\), or several"):
            await suite.run(store="memory:", bus=useless)  # type: ignore[arg-type]


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
    assert "the run continues" in caplog.text


async def test_an_observer_of_every_run_hears_each_once_until_it_is_taken_away() -> None:
    first, second = Recorder(), Recorder()
    suite = EvalSuite("s", doubles(1), double, exact_match)
    for observer in (first, second, None):
        observe_every_run(observer)
        await suite.run(store="memory:")
    assert len(first.of(EvalRunCompleted)) == len(second.of(EvalRunCompleted)) == 1


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


async def test_a_lifespan_that_fails_ends_the_run_with_its_own_error(store: RunStore) -> None:
    def broken() -> Any:
        raise OSError("no such host")

    with pytest.raises(OSError, match="no such host"):
        await EvalSuite("s", doubles(3), double, exact_match, lifespan=broken).run(store=store)
    assert store.runs(suite="s")[0].status == "interrupted"


BAD_SUITES: list[tuple[dict[str, Any], str]] = [
    ({"evaluator": None}, "must have an evaluator"),
    ({"evaluator": 5}, "must be callable"),
    ({"evaluator": [exact_match, all_of(exact_match)]}, "combine several: all_of.exact_match"),
    ({"experiments": ["big", "small"]}, r"must be Experiment objects .got 'big'.\nwrite .*Experiment.'big'"),
    ({"evaluator": lambda answer: True}, "takes .answer."),
    ({"task": None}, "has no task"),
    ({"task": 5}, "must be callable"),
    ({"task": lambda: 1}, "must take .input."),
    ({"task": lambda a, b, c: 1}, "must take .input."),
    ({"dataset": [1, 2]}, "must be a Dataset"),
    ({"name": "a:b"}, "without ':'"),
    ({"name": doubles(1)}, r"must be text .got Dataset.\nthe name comes first, as in EvalSuite.*by keyword"),
    ({"experiments": [Experiment(), Experiment()]}, "must be unique"),
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
    with pytest.raises(ConfigurationError, match="invalid experiment name"):
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
        figures = re.search(r"was blocked for (.*) of (.*) s \(", warned[0])
        assert figures is not None
        assert 0.7 <= float(figures[1]) <= float(figures[2])
        assert "in asks_a_model)" in warned[0]
        assert "Task asks_a_model is async and calls code that blocks" in warned[0]


async def test_an_event_loop_that_is_busy_with_our_own_work_is_not_blamed_on_the_task(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "_ENOUGH_SECONDS", 0.7)
    monkeypatch.setattr(loop_watch, "_STALLS", 1)
    tests = str(Path(__file__).parents[1])
    monkeypatch.setattr(loop_watch, "_OURS", (*loop_watch._OURS, tests))  # As if this file were one of ours.

    async def busy(given: int) -> int:
        time.sleep(0.4)  # noqa: ASYNC251 - in place of our own work
        return 2 * given

    await evaluate(doubles(5), busy, exact_match, EvalConfig(max_concurrent=2))
    assert "blocked" not in caplog.text


@pytest.mark.proves("R102")
async def test_a_task_with_a_model_runs_under_both_event_loops() -> None:
    adapter = ScriptedAdapter(["4"], repeat=True)

    async def ask(given: int) -> int:
        return int((await adapter.complete([ChatMessage("user", f"{given} * 2")])).raw)

    report = await evaluate(doubles(4), ask, exact_match)
    assert [result.passed for result in report.results] == [False, False, True, False]
    assert len(adapter.calls) == 4


async def test_an_empty_dataset_is_refused_and_nothing_is_stored(store: RunStore) -> None:
    said = "dataset 'numbers' of suite 's' has no samples, so nothing was run\ncheck the dataset file"
    for call in (
        lambda: EvalSuite("s", Dataset([], name="numbers"), double, exact_match).run(store=store),
        lambda: anext(EvalSuite("s", Dataset([], name="numbers"), double, exact_match).stream(store=store)),
    ):
        with pytest.raises(ConfigurationError, match=said):
            await call()
    with pytest.raises(ConfigurationError, match="has no samples, so nothing was run"):
        await evaluate(Dataset([]), double, exact_match)
    assert store.runs() == []


def test_evaluate_sync_blocks_and_uses_one_event_loop_twice() -> None:
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


def test_only_these_records_can_be_changed() -> None:
    assert changeable("runs") == {
        "Description",
        "Interrupt",
        "Limits",
        "OpenRun",
        "RepeatedErrors",
        "RunLease",
        "Stop",
        "_Contents",
        "_Runs",
    }
