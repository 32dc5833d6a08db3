"""Groups of rollouts: the repeats of a sample, with rewards and advantages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import comb
from typing import Any, Literal

from fairtrial.base.frozen import first_is
from fairtrial.data.sample import Sample
from fairtrial.data.session.snapshot import restore_session
from fairtrial.data.session.tokens import POLICY, TokenCall, TokensMissing, token_calls
from fairtrial.data.session.trajectory import ChatMessage, Trajectory
from fairtrial.data.session.views import RecordedView
from fairtrial.errors import ConfigurationError, FairtrialError
from fairtrial.models.agent import AgentEnded
from fairtrial.reports.figures.metrics import REWARD, Range, widen
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.rl.advantages import AdvantageKind, Convention, check_kind, group_advantages
from fairtrial.rl.tokens import TokenRow, stitch
from fairtrial.rl.values import declared_range
from fairtrial.scoring.evaluator import Case
from fairtrial.stats.intervals import MeanEstimate, mean_interval
from fairtrial.store.protocol import RunRecord, RunStore, ScoreRow
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import AttemptFailed

type RolloutStatus = Literal["terminated", "truncated", "failed"]
"""The agent finished; it was ended by a limit of turns, tokens or time; its task raised an error."""
type Signal = Literal["mixed", "all_equal", "unscored"]
"""Whether rewards differ within a group, are all equal (nothing can be learned), or are unknown."""

_FAILED = ("task_error", "dead_letter")


class RolloutSource:
    """Loads the result of one trial from its store."""

    __slots__ = ("ordinal", "run", "store")

    def __init__(self, store: RunStore, run: RunRecord, ordinal: int) -> None:
        self.store = store
        self.run = run
        self.ordinal = ordinal

    def load(self) -> EvalResult:
        """Return the result with its session."""
        return next(iter(self.store.results(self.run.run_id, after=self.ordinal - 1, limit=1)))


@dataclass(frozen=True)
class Rollout:
    """One trial as training data: a conversation with a reward and an advantage.

    `reward` and `advantage` are None if the trial was not scored: an error is not a reward of 0. Messages, status,
    output and error are loaded from the store when they are first read.

    Attributes:
        key: Run, experiment, sample and repeat.
        reward: The reward of the score.
        advantage: The reward relative to its group.
        metrics: All metrics of the score by name, with and without a weight.
        outcome: The outcome of the trial, such as "scored" or "timeout"; "unscored" without an evaluator.
    """

    key: TrialKey
    reward: float | None
    advantage: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    outcome: str = "scored"
    source: RolloutSource | None = field(default=None, repr=False, compare=False)

    @property
    def sample_id(self) -> str:
        """The id of the sample."""
        return self.key.sample_id

    @property
    def repeat(self) -> int:
        """The position in the group, from 0."""
        return self.key.repeat

    @cached_property
    def result(self) -> EvalResult:
        """The result of the trial."""
        if self.source is None:
            raise FairtrialError(f"rollout {self.key} has no store from which it can be loaded")
        return self.source.load()

    @cached_property
    def sample(self) -> Sample[Any, Any]:
        """The sample, as plain JSON values."""
        return self.result.sample

    @cached_property
    def session(self) -> RecordedView:
        """The events of the attempt that counts: the last one."""
        snapshot = self.result.snapshot
        recorded = self.result.session if snapshot is None else restore_session(snapshot)
        if not isinstance(recorded, RecordedView):
            raise FairtrialError(f"the session of rollout {self.key} must be a recorded one (got {recorded!r})")
        return recorded.view(attempt=len(recorded[AttemptFailed].all()) + 1)

    @cached_property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The recorded messages or, if there are none, the input and the output as a conversation."""
        return Case(self.sample, self.result.output, self.session).trajectory.messages

    @property
    def trajectory(self) -> Trajectory:
        """The messages as a trajectory, as evaluators receive it."""
        return Trajectory(self.messages)

    @property
    def last_reply(self) -> str:
        """The text of the assistant's last reply; empty if there is none."""
        return self.trajectory.last_reply or ""

    @cached_property
    def calls(self) -> tuple[TokenCall, ...]:
        """The tokens of the policy's model calls; empty unless the adapter recorded them.

        Calls of other actors, such as a simulated user, are not the policy's even if they share its engine.
        """
        return tuple(call for call in token_calls(self.session) if call.actor == POLICY)

    @property
    def policy(self) -> str:
        """The name of the weights, from the run's tag `policy`; empty if it has none."""
        return "" if self.source is None else self.source.run.tags.get("policy", "")

    @cached_property
    def missing_tokens(self) -> tuple[str, ...]:
        """Why tokens of model calls were requested and are missing; empty if all calls have them."""
        return tuple(event.reason for event in self.session[TokensMissing].all())

    def rows(self) -> list[TokenRow]:
        """Return the tokens of the conversation as training rows; see `stitch`."""
        return stitch(self.calls)

    @property
    def error(self) -> str | None:
        """The error of the trial, if any."""
        return self.result.error

    @cached_property
    def status(self) -> RolloutStatus:
        """How the rollout ended; an unscored rollout has a status too."""
        if self.outcome == "timeout":
            return "truncated"
        if self.outcome in _FAILED:
            return "failed"
        ended = self.session[AgentEnded].latest()
        if ended is not None:
            return "failed" if ended.reason == "error" else ended.reason
        return "truncated" if self.result.cut_off_calls else "terminated"


@first_is(str)
@dataclass(frozen=True)
class Group:
    """The rollouts of one sample in one experiment, in the order of their repeats.

    Attributes:
        sample_id: The sample.
        experiment: The experiment.
        rollouts: The rollouts; trials that have no result yet are missing.
        planned: The number of rollouts that the run plans for the group.
        bounds: The range of the rewards, if it is declared.
    """

    sample_id: str
    experiment: str
    rollouts: tuple[Rollout, ...]
    planned: int
    bounds: Range | None = None

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The rewards, None where a rollout was not scored."""
        return tuple(rollout.reward for rollout in self.rollouts)

    @property
    def advantages(self) -> tuple[float | None, ...]:
        """The advantages, None where a rollout was not scored."""
        return tuple(rollout.advantage for rollout in self.rollouts)

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts with a reward."""
        return tuple(rollout for rollout in self.rollouts if rollout.reward is not None)

    @property
    def signal(self) -> Signal:
        """Whether the group can teach anything: only differing rewards can."""
        rewards = {reward for reward in self.rewards if reward is not None}
        return "unscored" if not rewards else "all_equal" if len(rewards) == 1 else "mixed"

    @cached_property
    def sample(self) -> Sample[Any, Any]:
        """The sample, as plain JSON values."""
        return self.rollouts[0].sample


def groups(
    report: EvalReport | ExperimentReport,
    *,
    advantage: AdvantageKind = "grpo",
    convention: Convention = "trl",
) -> Iterator[Group]:
    """Yield the groups of a run, in the order of its samples, one experiment after the other.

    A group is all repeats of a sample (`EvalConfig(repeats=8)`). They are read lazily, from any store; a run that is
    still executed or was resumed, and a run of a fleet, give the same groups as any other.

    Args:
        report: The report of a run, or of one experiment of it.
        advantage: The formula of the advantages; see `advantages`.
        convention: The trainer whose numbers are reproduced.
    """
    check_kind(advantage, convention)
    if not isinstance(report, EvalReport | ExperimentReport):
        raise ConfigurationError(
            f"groups() takes a report or one of its experiments (got {type(report).__name__})\n"
            'as in groups(EvalReport.load("runs.db", "support@1")["baseline"])'
        )
    names = report.experiments if isinstance(report, EvalReport) else (report.name,)
    return (
        group for name in names for group in _experiment_groups(report.store, report.run, name, advantage, convention)
    )


def _experiment_groups(
    store: RunStore, run: RunRecord, experiment: str, advantage: str, convention: str
) -> Iterator[Group]:
    facts = iter(store.sample_facts(run.run_id))
    place, sample_id = -1, ""
    members: list[ScoreRow] = []

    def finished() -> Iterator[Group]:
        if members:
            yield _group(store, run, experiment, sample_id, members, advantage, convention)

    for row in store.scores(run.run_id, experiment=experiment):
        if row.outcome == "not_run":
            continue
        wanted = run.split(row.ordinal)[0]
        if wanted != place:
            yield from finished()
            members = []
            while place < wanted:
                place, sample_id, _ = next(facts)
        members.append(row)
    yield from finished()


def _group(
    store: RunStore,
    run: RunRecord,
    experiment: str,
    sample_id: str,
    rows: Sequence[ScoreRow],
    advantage: str,
    convention: str,
) -> Group:
    scored = [row.reward for row in rows if row.reward is not None]
    found = iter(group_advantages(scored, advantage, convention) if scored else ())
    repeats = run.repeats
    rollouts = tuple(
        Rollout(
            TrialKey(run.run_id, experiment, sample_id, row.ordinal % repeats),
            row.reward,
            None if row.reward is None else next(found),
            row.metrics,
            row.outcome,
            RolloutSource(store, run, row.ordinal),
        )
        for row in rows
    )
    ranges: dict[str, Range | None] = {}
    for row in rows:
        if row.reward is not None:
            widen(ranges, REWARD, declared_range(row, REWARD))
    return Group(sample_id, experiment, rollouts, repeats, ranges.get(REWARD))


def load_group(group: Group) -> Group:
    """Read the results, sessions and the sample of a group at once, which is quicker than one after the other."""
    source = group.rollouts[0].source
    if source is None:
        return group
    page = source.store.results(
        source.run.run_id, experiment=group.experiment, after=source.ordinal - 1, limit=group.planned, snapshots=True
    )
    results = {result.ordinal: result for result in page}
    sample = source.store.sample(source.run.run_id, source.run.split(source.ordinal)[0])
    for one in group.rollouts:
        if one.source is not None and one.source.ordinal in results:
            vars(one).update(result=results[one.source.ordinal], sample=sample)  # What `cached_property` would do.
    return group


def unscored(group: Group) -> Group:
    """Return a group without rewards, advantages and metrics."""
    rollouts = tuple(
        replace(
            rollout,
            reward=None,
            advantage=None,
            metrics={},
            outcome="unscored" if rollout.outcome == "scored" else rollout.outcome,
        )
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def best_at_k(groups: Iterable[Group], k: int, *, level: float = 0.95) -> MeanEstimate:
    """Estimate the mean of the best reward among k rollouts of a sample, with its interval.

    Each group contributes the expected maximum of k of its scored rollouts, drawn without replacement. Groups with
    fewer than k scored rollouts are counted in `unscored`.

    Args:
        groups: The groups.
        k: The number of rollouts.
        level: The level of the interval.
    """
    if k < 1:
        raise ConfigurationError(f"k must be at least 1 (got {k})")
    found = list(groups)
    rows = [_expected_best([rollout.reward or 0.0 for rollout in group.scored], k) for group in found]
    return mean_interval(rows, bounds=reward_bounds(found), level=level)


def reward_bounds(groups: Iterable[Group]) -> Range | None:
    """Return the range that holds the rewards of all these groups, if each of them declares one."""
    ranges: dict[str, Range | None] = {}
    for group in groups:
        if group.scored:
            widen(ranges, REWARD, group.bounds)
    return ranges.get(REWARD)


def _expected_best(rewards: Sequence[float], k: int) -> list[float]:
    count = len(rewards)
    if count < k:
        return []
    # The i-th largest is the best of a draw if the other k - 1 are among those below it.
    ranked = sorted(rewards, reverse=True)
    total = comb(count, k)
    best = sum(reward * (comb(count - at - 1, k - 1) / total) for at, reward in enumerate(ranked[: count - k + 1]))
    return [min(max(best, ranked[-1]), ranked[0])]
