"""Continue a finished trial from any of its turns, and estimate what each turn was worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import getrandbits
from typing import Any

from fairtrial.base.formatting import number
from fairtrial.base.frozen import first_is
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.data.session.views import RecordedView, kind_of, same_kind
from fairtrial.errors import ConfigurationError
from fairtrial.models.agent import FORK
from fairtrial.models.cache import without_cache
from fairtrial.reports.report import EvalReport
from fairtrial.rl.values import sample_values
from fairtrial.stats.intervals import MeanEstimate, mean_interval
from fairtrial.store.protocol import RunStore
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.context import TrialContext
from fairtrial.trials.environment import EnvironmentSaved
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import AttemptFailed
from fairtrial.trials.task import task


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
        said: The first words of what the agent did in this turn.
        value: The mean reward of the rollouts that continued from here, with its interval.
        credit: How much the turn changed the value: that of the next turn, or the reward of the trial, minus this one.
    """

    turn: int
    said: str
    value: MeanEstimate
    credit: float | None

    def __str__(self) -> str:
        span = self.value.interval
        interval = "" if span is None else f" [{number(span.low)}, {number(span.high)}]"
        credit = "" if self.credit is None else f"  credit {self.credit:+.3f}"
        return f"turn {self.turn}  value {number(self.value.mean)}{interval}{credit}  {self.said}"


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
    view = recorded.view(attempt=len(recorded[AttemptFailed].all()) + 1)
    messages, saved = list(view[ChatMessage].all()), list(view[EnvironmentSaved].all())
    found: list[Checkpoint] = []
    said = states = 0
    for envelope in view.envelopes:
        if same_kind(envelope.kind, kind_of(ChatMessage)):
            said += 1
        elif same_kind(envelope.kind, kind_of(EnvironmentSaved)):
            state = saved[states]
            states += 1
            if state.turn is not None and state.error is None:
                found.append(Checkpoint(state.turn, tuple(messages[:said]), state.state))
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
    estimates: list[MeanEstimate] = []
    for place in places:
        values = rewards.values[_child_id(result, place)]
        estimates.append(mean_interval([[value] for value in values], bounds=rewards.bounds, level=level))
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
        return await continuing.run(store=store, tags=tags, fresh=True)


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
