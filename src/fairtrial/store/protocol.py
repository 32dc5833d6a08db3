"""What a store is: runs, results, totals, previews."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from fairtrial.base.frozen import EMPTY, JSON, FrozenDict, first_is
from fairtrial.data.sample import Sample
from fairtrial.data.session.views import SessionView
from fairtrial.errors import ConfigurationError
from fairtrial.store.notes import RunNotes
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, Outcome


class TrialPreview(NamedTuple):
    """One stored trial, with texts that are cut.

    `input`, `expected` and `output` are text, or JSON where the value is something else. `note` is the error of a
    failed trial and the reason of a scored one. `metadata` is None where it is too long to be shown.
    """

    ordinal: int
    sample_id: str
    outcome: Outcome
    passed: bool | None
    value: float | None
    latency_ms: int
    tokens: int
    cost_usd: float | None
    attempt: int
    input: str
    expected: str
    output: str
    note: str
    metadata: dict[str, Any] | None


type RunStatus = Literal["running", "finished", "interrupted", "incomplete", "unscored", "stopped"]
"""A run is `finished` when the store has a result for every trial of its plan. `interrupted`, `incomplete` and
`unscored` can be resumed: the run was ended early, results could not be stored or were lost, or all trials were
executed and the scoring of some failed. `stopped` ended early by adaptive stopping."""

RESUMABLE: tuple[RunStatus, ...] = ("interrupted", "incomplete", "unscored")
"""The statuses of ended runs that can be resumed."""

NO_SAMPLES: Mapping[int, Sample[Any, Any]] = MappingProxyType({})


@first_is(str)
@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of a run: its identity and its plan.

    A trial's ordinal is its position in the plan, sample-major:
    `(sample_ordinal * len(experiments) + experiment_index) * repeats + repeat`.
    """

    run_id: str
    suite: str
    dataset_name: str
    dataset_version: str
    dataset_fingerprint: str
    dataset_size: int
    experiments: tuple[str, ...]
    repeats: int
    _: KW_ONLY
    number: int = 0  # 1-based sequence number within the suite, assigned by the store.
    status: RunStatus = "running"
    params: Mapping[str, JSON] = EMPTY  # Experiment name -> its parameters.
    config: Mapping[str, JSON] = EMPTY
    tags: Mapping[str, str] = EMPTY
    evaluator: str = ""
    code_hash: str = ""
    parent_run: str | None = None  # The run whose outputs this one rescored.
    created_at: float = 0.0
    finished_at: float | None = None
    notes: Mapping[str, JSON] = EMPTY  # Additional facts, such as adaptive stopping; see `RunNotes`.

    def __repr__(self) -> str:
        return f"<RunRecord {self.name} {self.run_id}: {self.status}, {self.planned:,} trials planned>"

    @property
    def name(self) -> str:
        """The name that people type for the run: `suite@3`."""
        return f"{self.suite}@{self.number}"

    @property
    def noted(self) -> RunNotes:
        """The notes as records."""
        return RunNotes(self.notes)

    @property
    def imported(self) -> bool:
        """True if another tool executed the run. Such a run is never resumed."""
        return self.noted.is_imported

    identity: Mapping[str, JSON] | None = None  # See `RunIdentity`; None if stored before schema version 2.
    # What caches of the run's figures compare: a random number that is new when a stored result was replaced, when
    # anything was stored after the end, and when the run is continued. A running run only gets more results meanwhile.
    # Random, so that a copy, an import or a restored backup is never taken for what another one had.
    revision: int = field(default=0, compare=False)

    @property
    def took_seconds(self) -> float | None:
        """How long the run was executed, without the time between its end and a retry; None before its end."""
        if self.finished_at is None:
            return None
        executed = self.noted.executed_seconds
        return self.finished_at - self.created_at if executed is None else executed

    @property
    def planned(self) -> int:
        """The number of trials in the plan."""
        return self.dataset_size * len(self.experiments) * self.repeats

    def ordinal(self, sample_ordinal: int, experiment: int, repeat: int) -> int:
        """Return the ordinal of a trial."""
        return (sample_ordinal * len(self.experiments) + experiment) * self.repeats + repeat

    def split(self, ordinal: int) -> tuple[int, int, int]:
        """Return (sample ordinal, experiment index, repeat) of an ordinal."""
        rest, repeat = divmod(ordinal, self.repeats)
        sample, experiment = divmod(rest, len(self.experiments))
        return sample, experiment, repeat


class RunOwner(NamedTuple):
    """The process that executes a run, according to the store."""

    owner: str | None  # None: no process.
    epoch: int  # The fencing token: the number of changes of owner.
    heartbeat_at: float | None
    age_seconds: float | None  # Of the heartbeat, by the database's own clock; None if it has none, as in SQLite.


class Committed(NamedTuple):
    """The outcome of a commit.

    Attributes:
        new: Number of results that changed the store.
        duplicate: Number of results that it already had.
        refused: The trials of which nothing could be stored, and why: they are not in the run's plan, or the database
            refuses any row for them.
        unstorable: The trials whose result could not be stored as it was, and why. Each is stored as a "task_error" at
            stage "store" without output and session, and is counted in `new` or `duplicate`.
    """

    new: int
    duplicate: int
    refused: tuple[tuple[TrialKey, str], ...] = ()
    unstorable: tuple[tuple[TrialKey, str], ...] = ()


class SampleMeans(NamedTuple):
    """Means over samples, each counting once, whatever the number of its trials; None where no sample has a value.

    A sample counts with the mean of its scored trials; in `pass_rate_all` and `mean_score_all` with that of its
    finished ones, in which an error is a failure. Of live traces, which stand for different numbers of others, also the
    variance of the rewards and the mean latency; None for other runs, whose sums tell.
    """

    pass_rate: float | None
    mean_score: float | None
    mean_reward: float | None
    pass_rate_all: float | None
    mean_score_all: float | None
    reward_variance: float | None = None
    mean_latency_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the results of one experiment, computed by the store."""

    experiment: str
    outcomes: Mapping[Outcome, int]  # Stored results by outcome.
    passed: int
    value_sum: float
    value_min: float | None
    value_max: float | None
    value_squares: float  # Sum of squared values.
    reward_sum: float
    reward_min: float | None
    reward_max: float | None
    reward_squares: float
    latency_sum: int
    latency_max: int
    slowest: str | None  # Sample id of the slowest trial.
    timed: int  # Trials whose latency counts: all but not_run and those with metadata "warmup" or "untimed" True.
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cost_usd: float | None  # Known costs of the task's calls.
    judge_cost_usd: float | None
    cache_hits: int  # Model calls answered by the response cache.
    unpriced_calls: int  # Calls of the task with unknown cost.
    unpriced_judge_calls: int
    cut_off_calls: int  # Model answers truncated at a token limit.
    refused_calls: int  # Calls that the model or a filter declined.
    unknown_endings: Mapping[str, int]  # Answers by the unknown reason with which they ended.
    reasoning_tokens: int  # Of the output.
    cache_write_tokens: int  # Of the input.
    sample_means: SampleMeans | None  # None: all samples have as many scored trials, so that the sums tell.

    @property
    def total_cost_usd(self) -> float:
        """The known costs of the task's and the judges' calls."""
        return (self.cost_usd or 0.0) + (self.judge_cost_usd or 0.0)


METRIC_CODES: Mapping[str, tuple[bool | None, bool | None]] = {
    "-": (None, None), "0": (False, None), "1": (True, None),
    "+": (None, True), "f": (False, True), "p": (True, True),
    "~": (None, False), "F": (False, False), "P": (True, False),
}  # fmt: skip
"""The verdict of a metric and its `higher_is_better`, by the character that encodes both."""


REWARD_PLACE = -1
"""The place of the reward among the bounds of a score's metrics."""


@functools.lru_cache(maxsize=1024)
def split_facts(text: str) -> tuple[str, Mapping[int, tuple[float, float] | None]]:
    """Return what a score's metrics declare: their codes (`METRIC_CODES`) and, by place, their bounds.

    As in "p+ 0:0.0:1.0". The bounds of the reward are those of a score, unless they are given: None if it has none.
    """
    codes, *ranges = text.split(" ")
    found: dict[int, tuple[float, float] | None] = {}
    for one in ranges:
        place, *ends = one.split(":")
        low, high = map(float, ends) if ends else (0.0, 0.0)
        found[int(place)] = (low, high) if ends else None
    return codes, FrozenDict(found)


class MetricTotals(NamedTuple):
    """A metric over the scored trials of an experiment that have it.

    `judged` counts the trials in which it had a verdict, `passed` those in which it passed.
    """

    trials: int
    mean: float
    judged: int
    passed: int


class ScoreRow(NamedTuple):
    """The numbers of one stored trial, without texts."""

    ordinal: int
    outcome: Outcome
    passed: bool | None
    value: float | None
    latency_ms: int | None  # None for a warm-up trial.
    tokens: int
    cost_usd: float | None
    metrics: Mapping[str, float]
    reward: float | None
    verdicts: str | None  # What its metrics declare (`split_facts`); None: nothing.


@first_is(TrialKey)
@dataclass(frozen=True, slots=True)
class Label:
    """A human label of a trial. Labels are only ever added: a value of None withdraws an annotator's last one.

    A name that begins with "~" marks what is no verdict on a sampled trial (a comment, a skip, a label of a trial that
    was picked): calibration, comparisons and gates leave it out unless they are asked for that name.

    `weight` is the number of judged trials that the label represents, 1/(sampling probability), if trials were not
    sampled uniformly; only the ratios of weights matter.
    """

    key: TrialKey
    name: str
    value: JSON
    annotator: str = ""
    at: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigurationError(f"the weight of a label must be a number above 0 (got {self.weight!r})")


class RunStore(Protocol):
    """A store of runs with their samples, results, transcripts and labels."""

    def create_run(self, run: RunRecord, *, latest: int | None = None) -> RunRecord:
        """Store a new run; assigns the next number of its suite, or keeps its own number if that is higher.

        A run_id that exists already is an error.

        Args:
            run: The run.
            latest: The number of the suite's latest run, 0 if it must have none; not compared if None.

        Raises:
            RunBusyError: the suite's latest run has another number, because another process has started one meanwhile.
        """
        ...

    def get_run(self, run_id: str) -> RunRecord:
        """Return a run. Raises `UnknownRunError`."""
        ...

    def runs(
        self, *, suite: str | None = None, status: RunStatus | None = None, limit: int | None = None
    ) -> list[RunRecord]:
        """Return the runs, newest first."""
        ...

    def update_run(
        self,
        run_id: str,
        *,
        status: RunStatus | None = None,
        finished_at: float | None = None,
        notes: Mapping[str, JSON] | None = None,
        identity: Mapping[str, JSON] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Update the status, end time, notes (merged) and code versions of a run.

        The status "running" resets `finished_at` to None. With `epoch`, it raises `RunBusyError` and changes nothing
        if the run has been taken over since.
        """
        ...

    def run_owner(self, run_id: str) -> RunOwner:
        """Return the process that executes a run."""
        ...

    def acquire_run(self, run_id: str, owner: str, seen: RunOwner) -> int | None:
        """Make `owner` the owner of a run, if nothing has changed since `seen` was read (compare-and-swap).

        Returns the new epoch, which fences off all earlier owners, or None if another process was first.
        """
        ...

    def renew_run(self, run_id: str, epoch: int) -> None:
        """Record a heartbeat. Raises `RunBusyError` if the run has been taken over since `epoch`."""
        ...

    def release_run(self, run_id: str, epoch: int) -> None:
        """Release ownership; does nothing if the run has been taken over since `epoch`."""
        ...

    def delete_run(self, run_id: str) -> None:
        """Delete a run with its results, transcripts and labels, and samples that no other run uses."""
        ...

    def commit(
        self,
        run_id: str,
        results: Sequence[EvalResult],
        samples: Mapping[int, Sample[Any, Any]] = NO_SAMPLES,
        *,
        epoch: int | None = None,
    ) -> Committed:
        """Store results durably in one transaction, with their samples (by sample ordinal).

        A result is stored if its trial has none yet, or if the stored one is not "scored" and this one is, or has a
        higher attempt. Other results are duplicates and change nothing. An invalid row does not fail the batch: it is
        found by bisection and stored as an error of its trial (see `Committed`). Only data errors count as invalid
        rows; other errors of the database are raised.
        Committing the same batch again is always safe, so a caller may repeat a commit that raised
        `StoreUnavailableError`. With `epoch`, it raises `RunBusyError` and keeps nothing if the run has been taken over
        since; that is checked in the transaction.
        """
        ...

    def done(self, run_id: str) -> bytearray:
        """Return the bitmap of ordinals with a stored result other than not_run: bit i of byte i//8."""
        ...

    def codes(self, run_id: str) -> Sequence[int]:
        """Return the indexes of the code versions that the stored results come from, ascending."""
        ...

    def ordinals(self, run_id: str, outcomes: Sequence[Outcome]) -> Iterator[int]:
        """Yield the ordinals stored with one of these outcomes, ascending."""
        ...

    def results(
        self,
        run_id: str,
        *,
        experiment: str | None = None,
        outcomes: Sequence[Outcome] | None = None,
        passed: bool | None = None,
        sample_ids: Iterable[str] | None = None,
        ordinals: Sequence[int] | None = None,
        after: int = -1,
        limit: int | None = None,
        outputs: bool = True,
        snapshots: bool = False,
    ) -> Iterator[EvalResult]:
        """Yield results in plan order; `after` is an ordinal, for paging. `ordinals` selects a few trials.

        `outputs=False` leaves outputs out. `snapshots=True` includes the session snapshots, for rescoring or copying a
        run.
        """
        ...

    def previews(self, run_id: str, ordinals: Sequence[int], *, size: int = 300) -> list[TrialPreview]:
        """Return previews of the stored trials with these ordinals, in this order.

        Texts have at most `size` characters. Whole outputs, which may have megabytes, are never read.
        """
        ...

    def scores(self, run_id: str, *, experiment: str) -> Iterator[ScoreRow]:
        """Yield the numbers of an experiment's results in plan order, for statistics."""
        ...

    def totals(self, run_id: str) -> list[Totals]:
        """Return the sums per experiment, in the order of the run's experiments; one for each, even without results."""
        ...

    def metric_totals(self, run_id: str) -> Mapping[str, Mapping[str, MetricTotals]]:
        """Return experiment -> metric -> its totals over scored trials, in the order of first occurrence."""
        ...

    def group_totals(self, run_id: str, key: str) -> list[tuple[JSON, Totals]]:
        """Return totals per experiment and per value of a metadata key of the samples (None if a sample lacks the key).

        In the order of the run's experiments, and within each of the values' JSON text; only groups that have results.
        """
        ...

    def sample(self, run_id: str, sample_ordinal: int) -> Sample[Any, Any]:
        """Return a stored sample, as plain JSON values."""
        ...

    def samples(self, run_id: str, *, after: int = -1) -> Iterator[tuple[int, Sample[Any, Any]]]:
        """Yield the stored samples with their ordinals, ascending."""
        ...

    def sample_facts(self, run_id: str, keys: Sequence[str] = ()) -> Iterator[tuple[int, str, tuple[JSON, ...]]]:
        """Yield (ordinal, id, values of these metadata keys) of the known samples, ascending.

        A value is None if a sample lacks the key. This includes samples of which only the id is known, and may include
        samples of the same dataset that this run has not reached.
        """
        ...

    def repeated_inputs(self, run_id: str) -> Sequence[tuple[int, int]]:
        """Yield (ordinal, hash of the input) of the known samples whose input is not unique, ascending.

        Empty inputs are left out, and so are samples that were stored before inputs were hashed.
        """
        ...

    def sample_hashes(self, run_id: str) -> Iterator[tuple[int, int, int]]:
        """Yield (ordinal, hash of the input, hash of the expected value) of the known samples, ascending.

        Equal contents have equal hashes in all stores; `sample_hashes.UNKNOWN` stands for what is not stored.
        """
        ...

    def session(self, run_id: str, ordinal: int) -> SessionView:
        """Return the session of a stored result (empty if none was stored)."""
        ...

    def snapshot(self, run_id: str, ordinal: int) -> bytes | None:
        """Return the session of a stored result as snapshot bytes."""
        ...

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their SHA-256 (hex), once. Raises `SecretInDataError` if they contain a known secret."""
        ...

    def get_blob(self, sha256: str) -> bytes:
        """Return bytes by hash. Raises `StoreError` if absent."""
        ...

    def label(self, label: Label) -> None:
        """Add a label of a trial; without a time, it gets the current one."""
        ...

    def labels(self, run_id: str, *, name: str | None = None) -> Iterator[Label]:
        """Return the labels of a run, oldest first."""
        ...

    def looks(self, split: str) -> Sequence[str]:
        """Return the pairs that were compared on the test split with this fingerprint; the first look comes first."""
        ...

    def record_looks(self, split: str, pairs: Sequence[str]) -> Sequence[str]:
        """Record that pairs are compared on a test split, in one transaction; returns all pairs as `looks` does.

        A pair that is known keeps its place, so that repeating the call changes nothing.
        """
        ...

    def close(self) -> None:
        """Close files and connections; a closed store raises `StoreError` when it is used."""
        ...
