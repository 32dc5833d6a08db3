"""Rollouts that fork: environments saved and restored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from random import getrandbits
from typing import Any

import anyio

from fairtrial.base.formatting import number
from fairtrial.base.frozen import first_is
from fairtrial.base.offload import DaemonThreads
from fairtrial.base.sync_bridge import blocking_portal
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.data.session.views import RecordedView, kind_of, same_kind
from fairtrial.errors import ConfigurationError
from fairtrial.models.agent import AGENT, FORK, AgentParts, open_environment
from fairtrial.models.cache import without_cache
from fairtrial.models.tools import Tool, ToolCaller, as_tools
from fairtrial.reports.report import EvalReport
from fairtrial.rl.advantages import sample_values
from fairtrial.stats.intervals import MeanEstimate, mean_interval
from fairtrial.store.protocol import RunStore
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.config import Experiment
from fairtrial.trials.context import TrialContext
from fairtrial.trials.environment import EnvironmentSaved, tools_of
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import last_attempt
from fairtrial.trials.task import task

WORLD = "_fairtrial_world"
"""The attribute of a trainer's environment with its `World`."""

_log = logging.getLogger("fairtrial.rl")


def agent_parts(suite: EvalSuite) -> AgentParts | None:
    """Return the tools and the environment of the agent of a suite; None if its task is no `agent_task`."""
    found: AgentParts | None = getattr(suite.prepared().rules.tasks[0].fn, AGENT, None)
    return found


def required_parts(suite: EvalSuite, what: str) -> AgentParts:
    """Return the tools and the environment of the agent of a suite; raises if its task is no `agent_task`."""
    found = agent_parts(suite)
    if found is None:
        raise ConfigurationError(f"{what} needs a suite whose task is an agent_task(...) (got that of {suite.name!r})")
    return found


class World:
    """The open environment of one rollout; opened when it is made.

    The environment is opened and closed in one task of the event loop of `fairtrial.base.sync_bridge`, because context
    managers may not be left in another task than they were entered in.

    Attributes:
        environment: The environment; None if the agent has none.
        tools: Its tools and those of the agent, by name.
        invoked: The calls so far.
        problem: Why the environment could not be opened.
    """

    def __init__(self, parts: AgentParts, sample: Sample[Any, Any], *, close_seconds: float = 10.0) -> None:
        self.sample = sample
        self.environment: Any = None
        self.tools: Mapping[str, Tool] = parts.tools
        self.invoked: list[ToolInvoked] = []
        self.problem: str | None = None
        self._parts = parts
        self._close_seconds = close_seconds
        self._portal = blocking_portal()
        self._ready: Future[None] = Future()
        self._leaving: anyio.Event | None = None
        self._holder: Future[None] | None = self._portal.start_task_soon(self._hold)
        self._ready.result()

    async def _hold(self) -> None:
        self._leaving = anyio.Event()
        try:
            async with AsyncExitStack() as stack:
                offered = [*self._parts.tools.values()]
                if self._parts.environment_factory is not None:
                    opening = open_environment(self._parts.environment_factory, self.sample, self._parts.environments)
                    self.environment = await stack.enter_async_context(opening)
                    offered += as_tools(tools_of(self.environment)).values()
                for source in self._parts.sources:
                    offered += await stack.enter_async_context(source.open())
                self.tools = as_tools(offered)
                self._caller = ToolCaller(self.tools, DaemonThreads(), self._parts.tool_timeout_seconds)
                self._ready.set_result(None)
                await self._leaving.wait()
        except Exception as error:
            if self._ready.done():
                _log.warning("closing the environment of %s failed: %s", self.sample.id, _one_line(error))
            else:
                self.problem = f"its environment could not be opened: {_one_line(error)}"
                self._ready.set_result(None)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolInvoked:
        """Call a tool and record it; a failed call is marked as such."""
        if self.problem is not None or self._holder is None:
            return ToolInvoked(name, arguments, None, False, self.problem or "the environment is closed")
        invoked, _ = self._portal.call(self._caller.call, ToolCall(name, arguments))
        self.invoked.append(invoked)
        return invoked

    def close(self) -> None:
        """Close the environment; a second call does nothing."""
        holder, self._holder = self._holder, None
        if holder is None or holder.done():
            return
        if self._leaving is not None:
            self._portal.start_task_soon(self._leaving.set)
        try:
            holder.result(self._close_seconds)
        except TimeoutError:
            _log.warning("the environment of %s did not close within %g s", self.sample.id, self._close_seconds)
            holder.cancel()


def worlds_of(environments: Sequence[Any] | None) -> list[World | None] | None:
    """Return the worlds of the environments that a trainer passes to reward functions; None if it has none."""
    return None if environments is None else [getattr(one, WORLD, None) for one in environments]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@first_is(int)
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place from which a trial can be continued: the messages and the state of the environment before a turn."""

    turn: int
    messages: tuple[ChatMessage, ...]
    state: Mapping[str, Any]


@first_is(int)
@dataclass(frozen=True, slots=True)
class TurnValue:
    """The value of a trial before one of its turns.

    Attributes:
        turn: The turn, from 0.
        summary: The first words of what the agent did in this turn.
        value: The mean reward of the rollouts that continued from here, with its interval.
        credit: How much the turn changed the value: that of the next turn, or the reward of the trial, minus this one.
    """

    turn: int
    summary: str
    value: MeanEstimate
    credit: float | None

    def __str__(self) -> str:
        span = self.value.interval
        interval = "" if span is None else f" [{number(span.low)}, {number(span.high)}]"
        credit = "" if self.credit is None else f"  credit {self.credit:+.3f}"
        return f"turn {self.turn}  value {number(self.value.mean)}{interval}{credit}  {self.summary}"


def checkpoints(result: EvalResult) -> list[Checkpoint]:
    """Return the checkpoints of a trial, of its last attempt.

    Raises:
        ConfigurationError: the trial has none, or its record was redacted.
    """
    if "transcript" in result.redacted_parts:
        raise ConfigurationError(
            f"trial {result.key} cannot be continued: secrets were replaced in its record, so it differs from what "
            "happened"
        )
    recorded = result.session
    if not isinstance(recorded, RecordedView):
        raise ConfigurationError(f"trial {result.key} must have a recorded session (got {recorded!r})")
    view = last_attempt(recorded)
    messages, saved = list(view[ChatMessage].all()), list(view[EnvironmentSaved].all())
    found: list[Checkpoint] = []
    message_count = states = 0
    for envelope in view.envelopes:
        if same_kind(envelope.kind, kind_of(ChatMessage)):
            message_count += 1
        elif same_kind(envelope.kind, kind_of(EnvironmentSaved)):
            state = saved[states]
            states += 1
            if state.turn is not None and state.error is None:
                found.append(Checkpoint(state.turn, tuple(messages[:message_count]), state.state))
    if not found:
        raise ConfigurationError(
            f"trial {result.key} has no checkpoints\nrun it with agent_task(..., checkpoints=True)"
        )
    return found


async def fork(
    result: EvalResult,
    suite: EvalSuite,
    *,
    turn: int | Sequence[int],
    n: int = 8,
    store: RunStore | str = "memory:",
    seed: int | None = None,
) -> EvalReport:
    """Continue a trial n times from one of its turns, as a run of its own; `groups` of its report are the children.

    The children start with the messages and a restored environment of that turn, with what is left of `max_turns`. The
    trial itself is not changed. The run has the tags `fork_run`, `fork_sample` and `fork_repeat`; the sample of a
    child is named after the turn: `s1@2`. The response cache is not used.

    Args:
        result: A result of a run of the suite, whose task is an `agent_task` with `checkpoints=True`.
        suite: The suite: its agent continues, its evaluator scores.
        turn: The turn before which the children start, from 0; or several turns.
        n: The number of children of each turn.
        store: The store of the run; by default in memory.
        seed: The seed from which seeds of trials are derived; by default a random one.
    """
    if n < 1:
        raise ConfigurationError(f"n must be at least 1 (got {n})")
    wanted = [turn] if isinstance(turn, int) else list(turn)
    known = {found.turn: found for found in checkpoints(result)}
    missing = [one for one in wanted if one not in known]
    if missing or not wanted:
        raise ConfigurationError(
            f"turn must be one of {', '.join(map(str, known))} of trial {result.key} (got {missing or wanted})"
        )
    return await _continue(result, suite, [known[one] for one in wanted], n, store, seed)


async def turn_values(
    result: EvalResult,
    suite: EvalSuite,
    *,
    n: int = 16,
    level: float = 0.95,
    store: RunStore | str = "memory:",
    seed: int | None = None,
) -> list[TurnValue]:
    """Estimate the value of a trial before each of its turns, by continuing it n times from each.

    The turn with the lowest credit is the one that lost the game.

    Args:
        result: A result of a run of the suite, whose task is an `agent_task` with `checkpoints=True`.
        suite: The suite: its agent continues, its evaluator scores.
        n: The number of rollouts from each turn.
        level: The level of the intervals.
        store: The store of the run that continues the trial; by default in memory.
        seed: The seed from which seeds of trials are derived; by default a random one.
    """
    places = checkpoints(result)
    report = await _continue(result, suite, places, n, store, seed)
    rewards = sample_values(report, "reward")
    found = [rewards.values[_child_id(result, place)] for place in places]
    estimates = [mean_interval([[one] for one in values], bounds=rewards.bounds, level=level) for values in found]
    ends = [*(estimate.mean for estimate in estimates[1:]), None if result.score is None else result.score.reward]
    messages = result.trajectory.messages
    return [
        TurnValue(
            place.turn,
            _action(messages, len(place.messages)),
            estimate,
            None if estimate.mean is None or following is None else following - estimate.mean,
        )
        for place, estimate, following in zip(places, estimates, ends, strict=True)
    ]


async def _continue(
    result: EvalResult,
    suite: EvalSuite,
    places: Sequence[Checkpoint],
    n: int,
    store: RunStore | str,
    seed: int | None,
) -> EvalReport:
    agent, experiment = _agent(result, suite)
    make: Callable[..., Any] | None = getattr(agent, FORK, None)
    if make is None:
        raise ConfigurationError(
            f"the task of suite {suite.name!r} must be an agent_task(..., checkpoints=True) to continue a trial"
        )
    agents = {_child_id(result, place): make(place.messages, place.state, place.turn) for place in places}

    async def continued(input: Any, ctx: TrialContext) -> Any:
        return await agents[ctx.sample.id](input, ctx)

    continued.__annotations__["return"] = agent.__annotations__["return"]
    parent = next((sample for sample in suite.dataset if sample.id == result.sample_id), None) or result.sample
    children: list[Sample[Any, Any]] = [replace(parent, id=name) for name in agents]
    config = replace(
        suite.config,
        repeats=n,
        seed=getrandbits(31) if seed is None else seed,
        max_samples=None,
        warmup=0,
        stop_when=None,
        experiment_name="",
    )
    continuing = EvalSuite(
        f"{suite.name}-fork",
        Dataset(children, name=f"{suite.dataset.name}-fork"),
        task(name="continued")(continued),
        suite.evaluator,
        experiments=[Experiment(experiment.name, experiment.params)],
        config=config,
        adapter=suite.adapter,
        lifespan=suite.lifespan,
        version=suite.version,
    )
    tags = {"fork_run": result.key.run_id, "fork_sample": result.sample_id, "fork_repeat": str(result.repeat)}
    with without_cache():
        return await continuing.run(store=store, tags=tags, resume="never")


def _agent(result: EvalResult, suite: EvalSuite) -> tuple[Any, Experiment]:
    rules = suite.prepared().rules
    for found, resolved in zip(rules.experiments, rules.tasks, strict=True):
        if found.name == result.experiment:
            return resolved.fn, found
    names = ", ".join(found.name for found in rules.experiments)
    raise ConfigurationError(f"suite {suite.name!r} has no experiment {result.experiment!r}; it has {names}")


def _child_id(result: EvalResult, place: Checkpoint) -> str:
    return f"{result.sample_id}@{place.turn}"


def _action(messages: Sequence[ChatMessage], place: int) -> str:
    if place >= len(messages):
        return ""
    message = messages[place]
    calls = ", ".join(
        f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in message.tool_calls
    )
    text = calls or " ".join(message.text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
