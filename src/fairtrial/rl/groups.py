"""Groups of rollouts, their tokens, and how they are sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import comb
from random import getrandbits
from typing import Any, Literal

from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import POLICY, TokenCall, TokensMissing, restore_session, token_calls
from fairtrial.data.session.trajectory import ChatMessage, Trajectory
from fairtrial.data.session.views import RecordedView
from fairtrial.errors import ConfigurationError, FairtrialError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.agent import AgentEnded, EnvironmentFactory, PrepareMessages, agent_task
from fairtrial.models.cache import without_cache
from fairtrial.reports.figures.metrics import REWARD, Range, widen
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.rl.advantages import AdvantageKind, Convention, check_kind, declared_range, group_advantages
from fairtrial.scoring.evaluator import Case, Evaluator, Scorer, evaluator
from fairtrial.scoring.score import Score
from fairtrial.stats.intervals import MeanEstimate, mean_interval
from fairtrial.store.protocol import RunRecord, RunStore, ScoreRow
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import last_attempt


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training sample of tokens.

    Attributes:
        prompt_ids: The tokens before the first sampled one.
        completion_ids: All tokens after them: those sampled by the policy, and those of tools and users in between.
        mask: 1 for each token of the completion that the policy sampled, 0 for the others.
        logprobs: The log-probability of each sampled token, 0 for the others.
        actor: Who made the calls: "task", because only the policy is trained.
        model: The model that sampled the tokens.
        sampling: The sampling parameters of the calls.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    actor: str = POLICY
    model: str = ""
    sampling: Mapping[str, Any] = EMPTY


def stitch(calls: Iterable[TokenCall]) -> list[TokenRow]:
    """Join the calls of a conversation into as few rows as possible.

    A call extends the row if its prompt begins with all tokens of it and it was sampled in the same way; otherwise, if
    the engine tokenized the conversation differently or it was shortened, it starts a new row. No sampled token is
    changed or lost.
    """
    open_rows: list[_OpenRow] = []
    for call in calls:
        if not open_rows or not open_rows[-1].continues(call):
            open_rows.append(_OpenRow(call))
        open_rows[-1].add(call)
    return [row.close() for row in open_rows]


class _OpenRow:
    """A row that may still grow."""

    def __init__(self, call: TokenCall) -> None:
        self._origin = _origin(call)
        self._prompt = len(call.prompt_ids)
        self._tokens = list(call.prompt_ids)
        self._mask: list[int] = []
        self._logprobs: list[float] = []

    def continues(self, call: TokenCall) -> bool:
        """Return whether a call was sampled as this row was, and its prompt begins with all tokens of it."""
        return _origin(call) == self._origin and list(call.prompt_ids[: len(self._tokens)]) == self._tokens

    def add(self, call: TokenCall) -> None:
        between = call.prompt_ids[len(self._tokens) :]
        self._tokens += (*between, *call.completion_ids)
        self._mask += (*(0,) * len(between), *(1,) * len(call.completion_ids))
        self._logprobs += (*(0.0,) * len(between), *call.logprobs)

    def close(self) -> TokenRow:
        tokens = self._tokens
        prompt, completion = tuple(tokens[: self._prompt]), tuple(tokens[self._prompt :])
        return TokenRow(prompt, completion, tuple(self._mask), tuple(self._logprobs), *self._origin)


def _origin(call: TokenCall) -> tuple[str, str, Mapping[str, Any]]:
    return call.actor, call.model, call.sampling


type RolloutStatus = Literal["terminated", "truncated", "failed"]
"""The agent finished; it was ended by a limit of turns, tokens or time; its task raised an error."""
type Signal = Literal["mixed", "all_equal", "unscored"]
"""Whether rewards differ within a group, are all equal (nothing can be learned), or are unknown."""

_FAILED = ("task_error", "dead_letter", "user_error")


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """Loads the result of one trial from its store."""

    store: RunStore
    run: RunRecord
    ordinal: int

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
        return last_attempt(recorded)

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
    rows = (row for row in store.scores(run.run_id, experiment=experiment) if row.outcome != "not_run")
    for wanted, members in groupby(rows, lambda row: run.split(row.ordinal)[0]):
        while place < wanted:
            place, sample_id, _ = next(facts)
        yield _group(store, run, experiment, sample_id, list(members), advantage, convention)


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


async def rollout(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any,
    evaluator: Evaluator | Scorer,
    *,
    group_size: int = 8,
    policy: str = "",
    advantage: AdvantageKind = "grpo",
    convention: Convention = "trl",
    seed: int | None = None,
    config: EvalConfig | None = None,
) -> list[Group]:
    """Execute each sample `group_size` times, score the trials, and return the groups with their advantages.

    Nothing is stored on disk. The response cache is not used for the task: after a training step, the same model name
    stands for other weights. Seeds of trials are new in every call, because equal seeds give equal rollouts.

    Args:
        samples: The samples.
        task: The task, as in a suite.
        evaluator: The evaluator, as in a suite.
        group_size: The number of rollouts of each sample.
        policy: The name of the weights, such as "step-120"; a tag of the run.
        advantage: The formula of the advantages; see `advantages`.
        convention: The trainer whose numbers are reproduced.
        seed: The seed from which seeds of trials are derived; by default a random one.
        config: Other settings of the run; `repeats` and `seed` are set here.
    """
    if group_size < 1:
        raise ConfigurationError(f"group_size must be at least 1 (got {group_size})")
    dataset = samples if isinstance(samples, Dataset) else Dataset(samples)
    settings = replace(
        config or EvalConfig(), repeats=group_size, seed=getrandbits(31) if seed is None else seed, stop_when=None
    )
    # With a version, because the hash of a project's files takes longer than a rollout, and nothing resumes this run.
    suite = EvalSuite("rollouts", dataset, task, evaluator, config=settings, version="rollouts")
    with without_cache():
        report = await suite.run(store="memory:", tags={"policy": policy} if policy else EMPTY)
    return list(groups(report, advantage=advantage, convention=convention))


async def generate_rollouts(
    samples: Dataset[Any, Any] | Iterable[Sample[Any, Any]],
    task: Any = None,
    *,
    endpoint: ProviderAdapter | None = None,
    environment_factory: EnvironmentFactory | None = None,
    prepare_messages: PrepareMessages | None = None,
    seed: int | None = None,
    config: EvalConfig | None = None,
) -> list[Rollout]:
    """Execute each sample once, without scoring, and return one rollout for each, in the order of the samples.

    A rollout that failed is in its place, with what it recorded, its `status` and its `error`. Environments are closed.

    Args:
        samples: The samples.
        task: The task; or leave it out and give `endpoint`.
        endpoint: The model of an agent that is made with `agent_task`.
        environment_factory: The environment of that agent, from the sample.
        prepare_messages: The first messages of that agent, from the sample.
        seed: The seed from which seeds of trials are derived; by default a random one.
        config: Settings of the run, such as `max_concurrent`.
    """
    if (task is None) == (endpoint is None):
        raise ConfigurationError("generate_rollouts() needs either a task or an endpoint, the adapter of a model")
    if task is not None and (environment_factory or prepare_messages):
        raise ConfigurationError("environment_factory and prepare_messages belong to endpoint; the task has its own")
    if endpoint is not None:
        task = agent_task(endpoint, environment_factory=environment_factory, prepare_messages=prepare_messages)
    found = await rollout(samples, task, _no_score, group_size=1, seed=seed, config=config)
    return [unscored(group).rollouts[0] for group in found]


@evaluator(form="plain", inline=True, name="unscored")
def _no_score(output: Any, expected: Any) -> Score:
    return Score(0.0)
