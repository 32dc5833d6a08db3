"""Environments in runs: reached by evaluators, saved, restored."""

from __future__ import annotations

from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalConfig, EvalContext, EvalSuite, Sample, Score, ToolCall
from fairtrial.models import ScriptedAdapter, agent_task
from fairtrial.trials import EnvironmentRegistry, EnvironmentSaved


class Drawer:
    ENV_KIND = "drawer"
    VERSION = "1.0"

    def __init__(self, held: list[str] | None = None) -> None:
        self.held = list(held or ())
        self.closed = False

    async def put(self, thing: str) -> str:
        """Put something in."""
        self.held.append(thing)
        return "done"

    def tools(self) -> list[Any]:
        return [self.put]

    def close(self) -> None:
        self.closed = True

    async def serialize(self) -> dict[str, Any]:
        return {"env_kind": self.ENV_KIND, "version": self.VERSION, "held": self.held}

    @staticmethod
    async def deserialize(data: dict[str, Any]) -> Drawer:
        return Drawer(data["held"])


class Stuck(Drawer):
    async def serialize(self) -> dict[str, Any]:
        raise RuntimeError("the disk is full")


def _put(thing: str) -> ToolCall:
    return ToolCall("put", {"thing": thing})


def holds_a_pen(output: str, expected: str, environment: Drawer) -> Score:
    assert not environment.closed
    return Score(float("pen" in environment.held))


def _suite(task: Any, evaluator: Any = holds_a_pen, **config: Any) -> EvalSuite:
    return EvalSuite("drawers", Dataset([Sample("a", "Put a pen in.")]), task, evaluator, config=EvalConfig(**config))


@pytest.mark.proves("R135")
def test_evaluators_reach_the_environment_of_a_trial_while_it_is_open() -> None:
    made: list[Drawer] = []

    def factory(sample: Sample[Any, Any]) -> Drawer:
        made.append(Drawer())
        return made[-1]

    def in_context(sample: Sample[Any, Any], output: str, *, context: EvalContext) -> tuple[Score, ...]:
        return (Score(float("pen" in context.environment.held), name="pen"),)

    for evaluator in (holds_a_pen, in_context):
        task = agent_task(ScriptedAdapter([_put("pen"), "ok"]), environment_factory=factory)
        assert _suite(task, evaluator).run_sync(store="memory:").pass_rate == 1.0
    assert [drawer.closed for drawer in made] == [True, True]


@pytest.mark.proves("R135")
def test_the_state_at_the_end_is_recorded_and_another_trial_starts_from_it() -> None:
    registry = EnvironmentRegistry(Drawer)
    task = agent_task(
        ScriptedAdapter([_put("pen"), "ok"]), environment_factory=lambda sample: Drawer(["ink"]), environments=registry
    )
    report = _suite(task).run_sync(store="memory:")
    saved = report.results[0].session[EnvironmentSaved].latest()
    assert saved is not None
    assert saved.state == {"env_kind": "drawer", "version": "1.0", "held": ["ink", "pen"]}
    again = agent_task(ScriptedAdapter(["ok"]), environment_factory=lambda sample: saved.state, environments=registry)
    assert _suite(again).run_sync(store="memory:").pass_rate == 1.0
    refused = agent_task(ScriptedAdapter(["ok"]), environment_factory=lambda sample: saved.state)
    assert "give agent_task environments=" in str(_suite(refused).run_sync(store="memory:").results[0].error)


@pytest.mark.proves("R135")
@pytest.mark.parametrize(("kept", "held"), [(True, ["pen", "nib"]), (False, ["nib"])])
def test_a_retry_starts_from_the_last_state_if_asked(kept: bool, held: list[str]) -> None:
    task = agent_task(
        ScriptedAdapter([_put("pen"), RuntimeError("the model is away"), _put("nib"), "ok"]),
        environment_factory=lambda sample: Drawer(),
        environments=EnvironmentRegistry(Drawer),
        continue_on_retry=kept,
    )
    report = _suite(task, max_retries=1).run_sync(store="memory:")
    saved = report.results[0].session[EnvironmentSaved].all()
    assert [state.state["held"] for state in saved] == [["pen"], held]


@pytest.mark.proves("R135")
def test_state_that_cannot_be_saved_is_recorded_as_such_and_costs_no_result() -> None:
    task = agent_task(
        ScriptedAdapter([_put("pen"), "ok"]),
        environment_factory=lambda sample: Stuck(),
        environments=EnvironmentRegistry(Stuck),
    )
    report = _suite(task).run_sync(store="memory:")
    assert report.pass_rate == 1.0
    saved = report.results[0].session[EnvironmentSaved].latest()
    assert saved is not None
    assert saved.error == "RuntimeError: the disk is full"
    with pytest.raises(ConfigurationError, match="continue_on_retry needs environments"):
        agent_task(ScriptedAdapter([]), continue_on_retry=True)
