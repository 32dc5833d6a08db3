"""Whatever happens to a run, its report accounts for every trial of its plan."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete

from fairtrial import Dataset, EvalReport, EvalResult, EvalSuite, Experiment, PromptExecuted, Sample, Score, TokenUsage
from fairtrial.fleet import EvalReply, EvalRequest, MemoryBroker
from fairtrial.fleet.client import dispatch
from fairtrial.fleet.client.dispatch import DispatchConfig
from fairtrial.runs.runner import Interrupt
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import NO_SAMPLES, Committed, RunRecord, RunStore
from fairtrial.store.schema import results as results_table
from fairtrial.store.sql import SqlStore
from fairtrial.trials import EvalConfig, TrialContext
from tests.fleet.fake_worker import FakeWorker, answer

type Behaviour = Literal["scored", "task_error", "timeout", "scorer_error", "unstorable", "refused", "dead_letter"]
type Action = Literal["run", "fleet", "retry_errors", "rescore"]

_BEHAVIOURS: tuple[Behaviour, ...] = ("scored", "task_error", "scorer_error", "unstorable", "refused", "dead_letter")
_UNUSUAL = {"unstorable": TokenUsage(2**31 - 1), "scored": TokenUsage(3, 2)}


@dataclass(frozen=True)
class Step:
    """One command: what it is, after how many results it is interrupted, and at which commit the store forgets."""

    action: Action
    interrupt_after: int | None = None
    forget_at: int | None = None


@dataclass(frozen=True)
class Scenario:
    """A plan, what its trials do at each execution, and the commands that are given."""

    samples: int
    experiments: tuple[str, ...]
    repeats: int
    max_retries: int
    behaviours: tuple[tuple[Behaviour, ...], ...]
    steps: tuple[Step, ...]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    samples, repeats = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    experiments = draw(st.sampled_from([("a",), ("a", "b")]))
    planned = samples * repeats * len(experiments)
    one = st.sampled_from(_BEHAVIOURS)
    behaviours = draw(st.lists(st.lists(one, min_size=1, max_size=3).map(tuple), min_size=planned, max_size=planned))
    if draw(st.booleans()):
        behaviours[draw(st.integers(0, planned - 1))] = ("timeout",)
    steps = st.builds(
        Step,
        st.sampled_from(["run", "fleet", "retry_errors", "rescore"]),
        st.none() | st.integers(0, planned),
        st.none() | st.integers(1, 3),
    )
    return Scenario(
        samples,
        experiments,
        repeats,
        draw(st.integers(0, 1)),
        tuple(behaviours),
        tuple(draw(st.lists(steps, min_size=1, max_size=4))),
    )


class Quick(ValueError):
    """An error that is retried at once."""

    retry_after = 0.0


class Faults:
    """A store that takes nothing for some trials, and at some commit has lost what was committed before."""

    refused: frozenset[int] = frozenset()
    forget_at: int | None = None
    commits = 0

    def commit(
        self,
        run_id: str,
        results: Sequence[EvalResult],
        samples: Mapping[int, Sample[Any, Any]] = NO_SAMPLES,
        **rest: Any,
    ) -> Committed:
        self.commits += 1
        if self.commits == self.forget_at:
            self.forget(run_id)
        taken = [result for result in results if result.ordinal not in self.refused]
        kept: Committed = super().commit(run_id, taken, samples, **rest)  # type: ignore[misc]  # a store's
        bad = tuple((result.key, "no") for result in results if result.ordinal in self.refused)
        return kept._replace(refused=kept.refused + bad)

    def forget(self, run_id: str) -> None:
        raise NotImplementedError


class FaultyMemory(Faults, MemoryStore):
    def forget(self, run_id: str) -> None:
        self._runs[run_id].entries.clear()


class FaultyFile(Faults, SqlStore):
    def forget(self, run_id: str) -> None:
        with self._write() as connection:
            connection.execute(delete(results_table).where(results_table.c.run == self._plan(run_id)[0]))


@dataclass
class World:
    """A scenario as it is carried out."""

    scenario: Scenario
    store: Any
    executions: Counter[int] = field(default_factory=Counter)
    scorings: Counter[str] = field(default_factory=Counter)
    healed: bool = False

    def __post_init__(self) -> None:
        scenario = self.scenario
        data = Dataset([Sample(f"s{n}", n, n) for n in range(scenario.samples)], name="numbers")
        config = EvalConfig(
            max_concurrent=3,
            timeout_seconds=0.05,
            max_retries=scenario.max_retries,
            repeats=scenario.repeats,
            grace_seconds=0.1,
        )
        experiments = [Experiment(name) for name in scenario.experiments]
        self.suite = EvalSuite("s", data, self.task, self.judge, experiments=experiments, config=config, version="1")
        self.broker = MemoryBroker()
        self.reports: dict[str, EvalReport] = {}

    def ordinal(self, sample: int, experiment: str, repeat: int) -> int:
        place = sample * len(self.scenario.experiments) + self.scenario.experiments.index(experiment)
        return place * self.scenario.repeats + repeat

    def behaviour(self, ordinal: int) -> Behaviour:
        """What the trial does this time; the last behaviour of its list lasts."""
        if self.healed:
            return "scored"
        known = self.scenario.behaviours[ordinal]
        self.executions[ordinal] += 1
        return known[min(self.executions[ordinal], len(known)) - 1]

    async def task(self, number: int, ctx: TrialContext) -> str:
        ordinal = self.ordinal(number, ctx.key.experiment, ctx.key.repeat)
        behaviour = self.behaviour(ordinal)
        if behaviour in ("task_error", "dead_letter"):
            raise Quick("no")
        if behaviour == "timeout":
            await asyncio.sleep(10)
        if behaviour == "refused":
            self.store.refused |= {ordinal}
        for _ in range(2):
            ctx.session.record(PromptExecuted(usage=_UNUSUAL.get(behaviour)))
        return f"{ordinal} {behaviour} {self.executions[ordinal]}"

    def __fairtrial_identity__(self) -> str:
        return "world"  # Its state is what the scenario makes of it, not another evaluator.

    def judge(self, output: str, expected: int) -> Score:
        self.scorings[output] += 1
        if "scorer_error" in output and self.scorings[output] == 1:
            raise ValueError("the judge is out")
        return Score(len(output) % 2)

    def reply(self, request: EvalRequest) -> EvalReply:
        behaviour = self.behaviour(request.ordinal)
        if behaviour == "refused":
            self.store.refused |= {request.ordinal}
        output = f"{request.ordinal} {behaviour} {self.executions[request.ordinal]}"
        if behaviour in ("scored", "refused"):
            return answer(request, output=output)
        if behaviour == "unstorable":
            return answer(request, output=output, usage=TokenUsage(2**40))
        kept = output if behaviour == "scorer_error" else None
        return answer(request, outcome=behaviour, error="no", output=kept)

    async def run_step(self, step: Step) -> RunRecord:
        self.store.commits, self.store.forget_at = 0, step.forget_at
        if step.action == "rescore" and self.reports:
            return (await self.suite.rescore(next(reversed(self.reports)), store=self.store)).run
        interrupt, seen = Interrupt(), 0

        async def count(result: EvalResult) -> None:
            nonlocal seen
            seen += 1
            if step.interrupt_after is not None and seen > step.interrupt_after:
                interrupt()

        request = self.suite._request(self.store, {}, (), resume="errors" if step.action == "retry_errors" else "auto")
        if step.action != "fleet":
            return await self.suite._execute(request, None, interrupt=interrupt, on_result=count)
        async with FakeWorker(self.broker, "s", self.reply, concurrency=3).at_work():
            return await self.suite._execute(request, self.broker, interrupt=interrupt, on_result=count)

    def check(self, run: RunRecord) -> EvalReport:
        """Every trial of the plan is accounted for, and the status says what the store holds."""
        report = self.reports[run.run_id] = EvalReport(self.store, run)
        stored = [result.ordinal for result in report.results]
        planned = self.scenario.samples * self.scenario.repeats * len(self.scenario.experiments)
        assert report.planned == planned
        assert len(stored) == len(set(stored)) == report.total
        assert set(stored) <= set(range(planned))
        assert report.successful + sum(report.errors.values()) == report.total
        assert report.total + report.not_run == report.planned
        for name in self.scenario.experiments:
            part = report[name]
            assert part.successful + sum(part.errors.values()) + part.not_run == planned // len(
                self.scenario.experiments
            )
        missing = report.not_run
        if run.parent_run is not None:
            missing -= self.reports[run.parent_run].not_run
        assert run.status in ("finished", "interrupted", "incomplete", "unscored")
        if run.status in ("finished", "unscored"):
            assert missing == 0, f"{run.status} without {missing} results"
        if run.status == "incomplete":
            assert missing > 0
        assert (run.status == "unscored") == (missing == 0 and "scorer_error" in report.errors) or (
            run.status == "interrupted"
        )
        for result in report.results:
            if result.stage == "store":
                assert (result.outcome, result.output, result.score) == ("task_error", None, None)
        return report


async def run_scenario(scenario: Scenario, store: RunStore) -> None:
    world = World(scenario, store)
    for step in scenario.steps:
        world.check(await world.run_step(step))
    # Once nothing goes wrong any more, the same command ends every run, and retrying errors scores all of it.
    world.healed = True
    world.store.refused = frozenset()
    report = world.check(await world.run_step(Step("run")))
    for _ in range(2):
        if report.status != "finished":
            report = world.check(await world.run_step(Step("run")))
    assert report.status == "finished"
    report = world.check(await world.run_step(Step("retry_errors")))
    if report.status == "unscored":
        report = world.check(await world.run_step(Step("run")))
    assert (report.status, report.successful) == ("finished", report.planned)


_SOME = Scenario(2, ("a",), 1, 0, (("refused", "scored"), ("unstorable",)), (Step("run"), Step("run"), Step("rescore")))
_FLEET = Scenario(2, ("a",), 1, 0, (("dead_letter",), ("scorer_error",)), (Step("fleet", forget_at=1), Step("fleet")))


_quick = DispatchConfig(batch=4, floor=3, poll_seconds=0.01, recovery_seconds=0.1, hint_seconds=60)
_fixtures = [HealthCheck.function_scoped_fixture]


@pytest.fixture(autouse=True)
def quick_clients(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dispatch, "DispatchConfig", lambda: _quick)
    caplog.set_level(logging.CRITICAL)


@pytest.mark.long
@settings(max_examples=100, deadline=None, suppress_health_check=_fixtures)
@given(scenario=scenarios())
@example(scenario=_SOME)
@example(scenario=_FLEET)
def test_the_counts_of_a_report_add_up_to_its_plan_in_memory(scenario: Scenario) -> None:
    asyncio.run(run_scenario(scenario, FaultyMemory()))


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=_fixtures)
@given(scenario=scenarios())
@example(scenario=_SOME)
@example(scenario=_FLEET)
def test_the_counts_of_a_report_add_up_to_its_plan_in_sqlite(scenario: Scenario) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FaultyFile.sqlite(Path(folder) / "runs.db")
        try:
            asyncio.run(run_scenario(scenario, store))
        finally:
            store.close()
