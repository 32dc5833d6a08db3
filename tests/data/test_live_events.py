"""Events that are dispatched while they happen, and slices of a session with state."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
from dataclasses import dataclass, replace

import pytest

from fairtrial import Dataset, EvalConfig, EvalResult, EvalSuite, Score, Session, SessionView, TokenUsage, ToolInvoked
from fairtrial.data.session import ControlDispatcher, PromptExecuted, ToolCall, restore_session
from fairtrial.errors import SessionError
from fairtrial.models import ScriptedAdapter, TaskLoop, Tool, agent_task
from fairtrial.runs import EvalRunCompleted, SampleEvaluated
from fairtrial.trials import TrialContext, current_trial


@dataclass(frozen=True, slots=True)
class PlanStep:
    name: str
    status: str


@dataclass(frozen=True, slots=True)
class StepDone:
    name: str


def _completed(plan: tuple[PlanStep, ...], event: StepDone) -> tuple[PlanStep, ...]:
    return tuple(replace(step, status="completed") if step.name == event.name else step for step in plan)


@pytest.mark.proves("R129")
def test_a_dispatcher_hears_what_a_session_records_at_once_and_by_type() -> None:
    bus, heard = ControlDispatcher(), list[object]()
    bus.subscribe(ToolInvoked, heard.append)
    session = Session(dispatcher=bus)
    session.record(ToolInvoked("search"))
    assert heard == [ToolInvoked("search")]
    session.record(PromptExecuted(usage=TokenUsage(1, 2)))
    session.next_attempt().record(ToolInvoked("again"))
    assert heard == [ToolInvoked("search"), ToolInvoked("again")]
    bus.unsubscribe(ToolInvoked, heard.append)
    bus.dispatch(ToolInvoked("unheard"))
    assert len(heard) == 2


@pytest.mark.proves("R129")
def test_a_handler_that_raises_is_logged_and_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: object) -> None:
        raise RuntimeError("no disk")

    bus, heard = ControlDispatcher(), list[object]()
    bus.subscribe(object, broken)
    bus.subscribe(object, heard.append)
    Session(dispatcher=bus).record(ToolInvoked("search"))
    assert heard == [ToolInvoked("search")]
    assert "a handler of ToolInvoked events raised" in caplog.text
    assert isinstance(pickle.loads(pickle.dumps(bus)), ControlDispatcher)


@pytest.mark.proves("R129")
def test_the_bus_of_a_run_hears_the_tools_and_prompts_of_its_trials_and_the_run() -> None:
    def add(left: int, right: int) -> int:
        """Add two numbers."""
        return left + right

    call = ToolCall("add", {"left": 1, "right": 2})
    task = agent_task(ScriptedAdapter([call, "3"]), tools=[Tool(add, inline=True)])
    bus, second, heard = ControlDispatcher(), ControlDispatcher(), list[tuple[str, str]]()
    bus.subscribe(ToolInvoked, lambda event: heard.append((event.name, current_trial().key.sample_id)))
    second.subscribe(PromptExecuted, lambda event: heard.append(("model", current_trial().key.sample_id)))
    bus.subscribe(EvalRunCompleted, lambda event: heard.append(("end", "")))
    suite = EvalSuite("live", Dataset.of({"1+2": "3"}), task, lambda output, expected: Score(float(output == expected)))
    report = suite.run_sync(store="memory:", bus=[bus, second])
    (sample,) = (result.sample_id for result in report.results)
    assert report.pass_rate == 1.0
    assert heard == [("model", sample), ("add", sample), ("model", sample), ("end", "")]


@pytest.mark.proves("R129")
def test_a_main_loop_passes_its_bus_on_to_its_sessions() -> None:
    bus, heard = ControlDispatcher(), list[object]()
    bus.subscribe(object, heard.append)

    def record(given: str, ctx: TrialContext) -> str:
        ctx.session.record(PlanStep(given, "pending"))
        return given

    loop: TaskLoop[str, str] = TaskLoop(record, bus=bus)
    asyncio.run(loop.execute("look"))
    assert heard == [PlanStep("look", "pending")]


@pytest.mark.proves("R130")
def test_a_slice_has_a_state_that_recorded_events_change() -> None:
    session = Session()
    session.mutate(PlanStep).seed([PlanStep("look", "pending"), PlanStep("write", "pending")])
    session.mutate(PlanStep).register(StepDone, _completed)
    session.record(StepDone("look"))
    plan = session.query(PlanStep)
    assert [step.status for step in plan.all()] == ["completed", "pending"]
    assert plan.latest() == PlanStep("write", "pending")
    assert plan.where(lambda step: step.status == "completed") == (PlanStep("look", "completed"),)
    session.record(PlanStep("aside", "failed"))
    assert len(session.query(PlanStep).all()) == 2  # The log is another thing than the state.
    assert session[PlanStep].all() == (PlanStep("aside", "failed"),)
    assert session.query(ToolInvoked).all() == ()


def test_a_dispatcher_keeps_nothing_of_sessions_that_are_gone() -> None:
    bus, reduced = ControlDispatcher(), list[object]()

    def reducer(plan: tuple[PlanStep, ...], event: StepDone) -> tuple[PlanStep, ...]:
        reduced.append(event)
        return plan

    kept = Session(dispatcher=bus)
    for session in (kept, *(Session(dispatcher=bus) for _ in range(5))):
        session.mutate(PlanStep).register(StepDone, reducer)
    del session
    gc.collect()
    bus.publish(StepDone("look"))
    assert reduced == [StepDone("look")]


@pytest.mark.proves("R130")
def test_evaluators_and_snapshots_have_the_state_as_it_was() -> None:
    session = Session()
    session.mutate(PlanStep).seed([PlanStep("look", "pending")])
    session.mutate(PlanStep).register(StepDone, _completed)
    before = session.view()
    session.record(StepDone("look"))
    assert before.query(PlanStep).all() == (PlanStep("look", "pending"),)
    restored = restore_session(session.snapshot())
    assert restored.query(PlanStep).all() == (PlanStep("look", "completed"),)
    assert len(json.loads(session.snapshot())["events"]) == len(json.loads(session.snapshot())["events"])

    def task(given: str, ctx: TrialContext) -> str:
        ctx.session.mutate(PlanStep).seed([PlanStep(given, "pending")])
        ctx.session.mutate(PlanStep).register(StepDone, _completed)
        ctx.session.record(StepDone(given))
        return given

    def done(output: str, expected: str, session: SessionView) -> bool:
        return all(step.status == "completed" for step in session.query(PlanStep).all())  # type: ignore[attr-defined]

    report = EvalSuite("plan", Dataset.of({"look": "look"}), task, done).run_sync(store="memory:")
    assert report.pass_rate == 1.0


@pytest.mark.proves("R130", "R89")
def test_block_64_results_accumulate_in_a_session_while_a_run_goes_on() -> None:
    bus = ControlDispatcher()
    session = Session(dispatcher=bus)
    session.mutate(EvalResult).seed(())
    session.mutate(EvalResult).register(SampleEvaluated, lambda state, event: (*state, event.result))
    seen: list[int] = []

    def task(given: str) -> str:
        seen.append(len(session.query(EvalResult).all()))
        return given

    suite = EvalSuite(
        "held", Dataset.of({"a": "a", "b": "b"}), task, lambda o, e: o == e, config=EvalConfig(max_concurrent=1)
    )
    suite.run_sync(store="memory:", bus=bus)
    assert [result.passed for result in session.query(EvalResult).all()] == [True, True]
    assert seen[0] == 0
    other = Session(dispatcher=bus)
    other.record(StepDone("x"))  # Sessions on one bus do not take each other's events for theirs.
    assert len(session.query(EvalResult).all()) == 2


def test_a_state_that_cannot_be_stored_is_refused_when_the_session_is_read() -> None:
    session = Session()
    session.mutate(PlanStep).seed([object()])  # type: ignore[list-item]
    with pytest.raises(SessionError, match="cannot be recorded"):
        session.snapshot()
