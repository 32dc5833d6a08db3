"""What a store of runs is: the durable truth about them.

Stores are synchronous and safe to call from several threads and processes: the scheduler commits from one writer
thread, reports read lazily from wherever they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from fairtrial.data.sample import Sample
from fairtrial.frozen import EMPTY
from fairtrial.session.views import SessionView
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult, Outcome
from fairtrial.types import JSON

type RunStatus = Literal["running", "finished", "interrupted", "incomplete", "unscored", "stopped"]
"""A run is `finished` when the store holds a result for every trial of its plan. `interrupted`, `incomplete` and
`unscored` can be resumed: the run was ended early, results could not be stored or got lost, or all trials were executed
and the scoring of some failed. `stopped` ended early because it had seen enough."""

RESUMABLE: tuple[RunStatus, ...] = ("interrupted", "incomplete", "unscored")
"""The statuses of a run that has ended and that the same command continues."""

IMPORTED = "imported"
"""The note of a run that another tool executed: where it came from. Such a run is never resumed."""

NO_SAMPLES: Mapping[int, Sample[Any, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What is known about a run before any result: its identity and its plan.

    A trial's ordinal is its place in the plan, sample-major:
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
    number: int = 0  # The how-manieth run of its suite, from 1; given by the store.
    status: RunStatus = "running"
    params: Mapping[str, JSON] = EMPTY  # Experiment name -> its parameters.
    config: Mapping[str, JSON] = EMPTY
    tags: Mapping[str, str] = EMPTY
    evaluator: str = ""
    code_hash: str = ""
    parent_run: str | None = None  # The run whose outputs this one scored again.
    created_at: float = 0.0
    finished_at: float | None = None
    notes: Mapping[str, JSON] = EMPTY  # What a reader must know: adaptive stopping, a resumed run with changed code.

    @property
    def imported(self) -> bool:
        """True if another tool executed the run."""
        return IMPORTED in self.notes

    identity: Mapping[str, JSON] | None = None  # What the run is made of; None if it was stored before version 2.

    @property
    def code_versions(self) -> int:
        """How many versions of the code executed trials of the run."""
        code = None if self.identity is None else self.identity.get("code")
        if isinstance(code, Sequence) and not isinstance(code, str):
            return len(code)
        return 2 if self.notes.get("code_changed") else 1

    @property
    def planned(self) -> int:
        """How many trials the plan has."""
        return self.dataset_size * len(self.experiments) * self.repeats

    def ordinal(self, sample_ordinal: int, experiment: int, repeat: int) -> int:
        """The place in the plan of one trial."""
        return (sample_ordinal * len(self.experiments) + experiment) * self.repeats + repeat

    def split(self, ordinal: int) -> tuple[int, int, int]:
        """(sample ordinal, experiment index, repeat) of a place in the plan."""
        rest, repeat = divmod(ordinal, self.repeats)
        sample, experiment = divmod(rest, len(self.experiments))
        return sample, experiment, repeat


class RunOwner(NamedTuple):
    """Which process executes a run, as the store knows it."""

    owner: str | None  # None: nobody.
    epoch: int  # The fencing token: how often the run changed hands.
    heartbeat_at: float | None
    age_seconds: float | None  # Of the heartbeat, by the database's own clock; None if it has none, as in SQLite.


class Committed(NamedTuple):
    """What became of a batch.

    Attributes:
        new: How many results changed the store.
        duplicate: How many it already had.
        refused: The trials of which nothing could be stored, and why: they are not in the run's plan, or the database
            takes no row for them.
        unstorable: The trials whose result could not be stored as it was, and why. Each is stored as a "task_error" at
            stage "store" without output and session, and is among `new` or `duplicate`.
    """

    new: int
    duplicate: int
    refused: tuple[tuple[TrialKey, str], ...] = ()
    unstorable: tuple[tuple[TrialKey, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the results of one experiment of a run, computed where the results are."""

    experiment: str
    outcomes: Mapping[Outcome, int]  # Stored results by outcome.
    passed: int = 0
    value_sum: float = 0.0
    value_min: float | None = None
    value_max: float | None = None
    value_squares: float = 0.0  # Sum of squared values.
    reward_sum: float = 0.0
    reward_min: float | None = None
    reward_max: float | None = None
    reward_squares: float = 0.0
    latency_sum: int = 0
    latency_max: int = 0
    slowest: str | None = None  # Sample id of the slowest trial.
    timed: int = 0  # Trials whose latency counts: all but not_run and those with metadata "warmup" or "untimed" True.
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None  # Of the task's calls, as far as it is known.
    judge_cost_usd: float | None = None
    cache_hits: int = 0  # Model calls that the response cache answered.
    unpriced_calls: int = 0  # Calls of the task whose cost is not known.
    unpriced_judge_calls: int = 0

    @property
    def total_cost_usd(self) -> float:
        """What the task's and the judges' calls are known to have cost."""
        return (self.cost_usd or 0.0) + (self.judge_cost_usd or 0.0)


class MetricTotals(NamedTuple):
    """A metric over the scored trials of an experiment that have it.

    `judged` counts those in which it had a verdict, `passed` those in which it passed.
    """

    trials: int
    mean: float
    judged: int
    passed: int


class ScoreRow(NamedTuple):
    """The numbers of one stored trial, without what was said in it."""

    ordinal: int
    outcome: Outcome
    passed: bool | None
    value: float | None
    latency_ms: int | None  # None for a warm-up trial.
    tokens: int
    cost_usd: float | None
    metrics: Mapping[str, float]
    reward: float | None
    verdicts: (
        str | None
    )  # One character for each metric, in order: 1 passed, 0 failed, - no verdict; None: none has one.


@dataclass(frozen=True, slots=True)
class Label:
    """What a person said about a trial. Labels are only ever added."""

    key: TrialKey
    name: str
    value: JSON
    annotator: str = ""
    at: float = 0.0


class RunStore(Protocol):
    """Runs, their samples, results, transcripts and labels."""

    def create_run(self, run: RunRecord, *, latest: int | None = None) -> RunRecord:
        """Keep a new run; gives it the next number of its suite, or the one it brings if that is higher.

        A run_id that exists already is an error.

        Args:
            run: The run.
            latest: The number of the suite's latest run, 0 if it must have none; not compared if None.

        Raises:
            RunBusyError: the suite's latest run has another number: somebody else has started one meanwhile.
        """
        ...

    def get_run(self, run_id: str) -> RunRecord:
        """One run. Raises `UnknownRunError`."""
        ...

    def runs(
        self, *, suite: str | None = None, status: RunStatus | None = None, limit: int | None = None
    ) -> list[RunRecord]:
        """Runs, newest first."""
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
        """Change what may change about a run: its end, notes (merged into those it has), and its code versions.

        A run that is "running" again has no end: its `finished_at` goes back to None. With `epoch`, it raises
        `RunBusyError` and changes nothing if the run has been taken over since.
        """
        ...

    def run_owner(self, run_id: str) -> RunOwner:
        """Return which process executes a run."""
        ...

    def acquire_run(self, run_id: str, owner: str, seen: RunOwner) -> int | None:
        """Make `owner` the owner of a run, if nothing has changed since `seen` was read (compare-and-swap).

        Returns the new epoch, which fences off all earlier owners, or None if somebody else came first.
        """
        ...

    def renew_run(self, run_id: str, epoch: int) -> None:
        """Record a heartbeat. Raises `RunBusyError` if the run has been taken over since `epoch`."""
        ...

    def release_run(self, run_id: str, epoch: int) -> None:
        """Give up ownership; does nothing if the run has been taken over since `epoch`."""
        ...

    def delete_run(self, run_id: str) -> None:
        """Forget a run with its results, transcripts and labels, and samples that no other run uses."""
        ...

    def commit(
        self,
        run_id: str,
        results: Sequence[EvalResult],
        samples: Mapping[int, Sample[Any, Any]] = NO_SAMPLES,
        *,
        epoch: int | None = None,
    ) -> Committed:
        """Keep results durably, all in one transaction, with the samples (by sample ordinal) they belong to.

        A result is taken if its trial has none yet, or if the stored one is not "scored" and this one is, or has a
        higher attempt. Anything else is counted as a duplicate and changes nothing. One bad row never sinks a batch:
        it is found by halving and stored as an error of its trial (see `Committed`), and the rest is kept. Only data
        errors count as bad rows; everything else that a database raises is an error of the store, and is raised.
        Committing the same batch again is always safe, so a caller may repeat a commit that raised
        `StoreUnavailableError`. With `epoch`, it raises `RunBusyError` and keeps nothing if the run has been taken over
        since; that is checked in the transaction.
        """
        ...

    def done(self, run_id: str) -> bytearray:
        """A bitmap of the ordinals that have a stored result other than not_run: bit i of byte i//8."""
        ...

    def ordinals(self, run_id: str, outcomes: Sequence[Outcome]) -> Iterator[int]:
        """The ordinals stored with one of these outcomes, ascending, streamed."""
        ...

    def results(
        self,
        run_id: str,
        *,
        experiment: str | None = None,
        outcomes: Sequence[Outcome] | None = None,
        passed: bool | None = None,
        sample_ids: Iterable[str] | None = None,
        after: int = -1,
        limit: int | None = None,
        outputs: bool = True,
        snapshots: bool = False,
    ) -> Iterator[EvalResult]:
        """Results in plan order, streamed; `after` is an ordinal, for paging.

        `outputs` False leaves outputs out. `snapshots` True brings each session's snapshot along, for those who need
        them all: scoring a run again, or copying it.
        """
        ...

    def scores(self, run_id: str, *, experiment: str) -> Iterator[ScoreRow]:
        """The numbers of an experiment's results in plan order, streamed: statistics need nothing else."""
        ...

    def totals(self, run_id: str) -> list[Totals]:
        """Sums per experiment, in the order of the run's experiments; one row for each, even if nothing is stored."""
        ...

    def metric_totals(self, run_id: str) -> Mapping[str, Mapping[str, MetricTotals]]:
        """Experiment -> metric -> its figures over scored trials, in the order in which metrics first occur."""
        ...

    def group_totals(self, run_id: str, key: str) -> list[tuple[JSON, Totals]]:
        """Totals per experiment and per value of a metadata key of the samples (None where a sample has no such key).

        In the order of the run's experiments, and within each of the values' JSON text; only groups that have results.
        """
        ...

    def sample(self, run_id: str, sample_ordinal: int) -> Sample[Any, Any]:
        """A stored sample, as plain JSON values."""
        ...

    def samples(self, run_id: str, *, after: int = -1) -> Iterator[tuple[int, Sample[Any, Any]]]:
        """The stored samples with their ordinals, ascending, streamed."""
        ...

    def sample_facts(self, run_id: str, keys: Sequence[str] = ()) -> Iterator[tuple[int, str, tuple[JSON, ...]]]:
        """(ordinal, id, values of these metadata keys) of the known samples, ascending, streamed.

        A value is None where a sample has no such key. Samples of which only the id is known are among them, and so
        may be samples of the same dataset that this run has not come to.
        """
        ...

    def session(self, run_id: str, ordinal: int) -> SessionView:
        """The session of a stored result (an empty one if none was kept)."""
        ...

    def snapshot(self, run_id: str, ordinal: int) -> bytes | None:
        """The session of a stored result as snapshot bytes."""
        ...

    def put_blob(self, data: bytes) -> str:
        """Keep bytes under their SHA-256 (hex), once. Raises `SecretInDataError` if they hold a known secret."""
        ...

    def get_blob(self, sha256: str) -> bytes:
        """Bytes by hash. Raises `StoreError` if absent."""
        ...

    def label(self, label: Label) -> None:
        """Add what a person said about a trial; a label without a time gets the present one."""
        ...

    def labels(self, run_id: str, *, name: str | None = None) -> Iterator[Label]:
        """Labels of a run, oldest first."""
        ...

    def close(self) -> None:
        """Let go of files and connections; a closed store raises `StoreError` when it is used."""
        ...
