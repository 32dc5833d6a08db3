"""Numbers about this process, for those who operate it. Kept without any library; `fleet.metrics` shows them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

type Labels = tuple[str, ...]


class Measure:
    """A counter or a gauge, by labels."""

    def __init__(self, name: str, kind: Literal["counter", "gauge"], help: str, *labels: str) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        self.labels = labels
        self._lock = threading.Lock()
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        """Add an amount."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def read(self) -> Mapping[Labels, float]:
        """The values by labels."""
        with self._lock:
            return dict(self._values)


class Histogram:
    """How often durations lie between the bounds of buckets, by labels."""

    def __init__(self, name: str, help: str, *labels: str, buckets: Sequence[float] = _BUCKETS) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self.buckets = tuple(buckets)
        self._lock = threading.Lock()
        self._series: dict[Labels, list[float]] = {}  # The count of each bucket, then the sum.

    def observe(self, seconds: float, *labels: str) -> None:
        """Count one duration."""
        with self._lock:
            series = self._series.get(labels)
            if series is None:
                series = self._series[labels] = [0.0] * (len(self.buckets) + 2)
            series[bisect_left(self.buckets, seconds)] += 1
            series[-1] += seconds

    def read(self) -> Mapping[Labels, tuple[Sequence[float], float]]:
        """The counts of each bucket, the last without a bound, and the sum, by labels."""
        with self._lock:
            return {labels: (tuple(counts), total) for labels, (*counts, total) in self._series.items()}


TRIAL_SECONDS = Histogram("fairtrial_trial_duration_seconds", "From the start of a trial to its score.", "outcome")
MODEL_CALL_SECONDS = Histogram(
    "fairtrial_model_call_duration_seconds", "One request to a provider.", "provider", "model", "outcome"
)
COMMIT_SECONDS = Histogram("fairtrial_commit_duration_seconds", "One commit of results, waiting included.")
QUEUE_DELAY_SECONDS = Histogram(
    "fairtrial_queue_delay_seconds", "How long a message waited until a worker received it.", "mailbox"
)
SLOW_COMMITS = Measure("fairtrial_slow_commits_total", "counter", "Commits that took more than 10 s or still do.")
FAILED_RENEWALS = Measure("fairtrial_failed_lease_renewals_total", "counter", "Leases that could not be renewed.")
WAITING = Measure("fairtrial_waiting_for", "gauge", "Calls that wait for a store or a queue just now.", "resource")

HISTOGRAMS = (TRIAL_SECONDS, MODEL_CALL_SECONDS, COMMIT_SECONDS, QUEUE_DELAY_SECONDS)
MEASURES = (SLOW_COMMITS, FAILED_RENEWALS, WAITING)


@dataclass(slots=True)
class RunProgress:
    """Where a run of this process stands.

    Attributes:
        run_id: The run.
        suite: Its suite.
        planned: Its trials.
        stored: Trials with a stored result.
        outstanding: Trials that were started, or sent to workers, and have no stored result yet.
        cost_usd: What it has cost, with what it cost before it was resumed.
        depths: How many messages are where, by mailbox; a run on a fleet has one.
    """

    run_id: str
    suite: str
    planned: int
    stored: int = 0
    outstanding: int = 0
    cost_usd: float = 0.0
    depths: dict[str, Any] = field(default_factory=dict)


_runs: dict[str, RunProgress] = {}


def running() -> Sequence[RunProgress]:
    """The runs this process is the client of."""
    return list(_runs.values())


def progress_of(run_id: str) -> RunProgress | None:
    """A run this process is the client of; None if it is not."""
    return _runs.get(run_id)


@contextmanager
def track_run(run_id: str, suite: str, planned: int) -> Iterator[RunProgress]:
    """Show a run among the metrics while the block runs."""
    progress = _runs[run_id] = RunProgress(run_id, suite, planned)
    try:
        yield progress
    finally:
        _runs.pop(run_id, None)
