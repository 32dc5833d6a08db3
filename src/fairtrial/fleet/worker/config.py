"""Settings and counters of a worker."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields

from fairtrial.base.backoff import patience_seconds
from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError
from fairtrial.mailbox.protocol import DLQPolicy


@first_is(int)
@dataclass(slots=True)
class LoopCounters:
    """Counts since the loop was created; they only grow, except `in_flight`.

    Attributes:
        received: Messages received.
        finished: Messages acknowledged or dead-lettered.
        outcomes: Results by outcome.
        in_flight: Messages being processed.
        handed_back: Messages handed back without counting the delivery, such as when draining.
        retried: Messages returned for a retry.
        dead_lettered: Messages dead-lettered here; the mailbox itself dead-letters bodies that cannot be read.
        lease_losses: Messages whose lease expired while they were being processed.
        delivery_retries: Retried deliveries of results.
        committed: Results stored in the transaction that settled their request (see `EvalRequest.commit`).
        commits_refused: Results that could not be stored in this way: their run had ended, was deleted or had another
            owner, or the store did not take them.
        receive_errors: Receives that failed.
        refused: Messages refused because of a different fingerprint.
        suspects: Suspected poison messages, which are executed in child processes.
        crashes: Messages that crashed a child process in which nothing else was executed.
        hung: Messages abandoned because their code ignored its cancellation.
    """

    received: int = 0
    finished: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    handed_back: int = 0
    retried: int = 0
    dead_lettered: int = 0
    lease_losses: int = 0
    delivery_retries: int = 0
    committed: int = 0
    commits_refused: int = 0
    receive_errors: int = 0
    refused: int = 0
    suspects: int = 0
    crashes: int = 0
    hung: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Settings of a loop that takes work from a mailbox.

    Attributes:
        concurrency: Number of messages executed at once.
        lease_seconds: The lease of a message, renewed while it is being processed (`LeaseExtender`). A process whose
            interpreter stalls for as long is killed.
        wait_seconds: How long one receive waits for work.
        empty_seconds: How long the mailbox must have been empty before `run(until_empty=True)` ends.
        visibility_seconds: Maximum time for which a message may be leased, including renewals. Computed by default; if
            given, it must cover the longest processing time plus `buffer_seconds`.
        buffer_seconds: Time reserved beside timeouts, for settling messages and for a busy machine.
        delivery_seconds: How long to retry a result that its receiver rejects, before its message becomes a dead
            letter. While a queue or a store is unavailable, results are kept as long as the process lives.
        drain_seconds: How long work in flight may continue after `stop` before it is handed back.
        stall_seconds: If given, leases are not renewed while the event loop has not responded for this long.
        isolated_processes: Number of child processes that execute suspected poison messages. They share `concurrency`;
            each opens the suite's lifespan for itself.
        dlq: When to retry, when to isolate, and when to give up.
    """

    concurrency: int = 10
    lease_seconds: float = 60.0
    wait_seconds: float = 20.0
    empty_seconds: float = 0.0
    visibility_seconds: float | None = None
    buffer_seconds: float = 30.0
    delivery_seconds: float = field(default_factory=patience_seconds)
    drain_seconds: float = 30.0
    stall_seconds: float | None = None
    isolated_processes: int = 4
    dlq: DLQPolicy = field(default_factory=DLQPolicy)

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise ConfigurationError(f"concurrency must be a whole number of at least 1 (got {self.concurrency!r})")
        if type(self.isolated_processes) is not int or self.isolated_processes < 1:
            raise ConfigurationError(
                f"isolated_processes must be a whole number of at least 1 (got {self.isolated_processes!r})"
            )
        for setting in fields(self):
            if not setting.name.endswith(("_seconds", "_timeout")):
                continue
            value = getattr(self, setting.name)
            if value is None and setting.name in ("visibility_seconds", "stall_seconds"):
                continue
            least = (
                0
                if setting.name
                in ("wait_seconds", "empty_seconds", "drain_seconds", "buffer_seconds", "delivery_seconds")
                else 1e-9
            )
            if not isinstance(value, int | float) or not math.isfinite(value) or value < least:
                raise ConfigurationError(f"{type(self).__name__}.{setting.name} cannot be {value!r}")

    def hold_seconds(self, needed: float, what: str) -> float:
        """Return how long a message may be leased if handling it may take `needed` seconds.

        Raises:
            ConfigurationError: `visibility_seconds` is too short: the lease would expire before the work completes.
        """
        wanted = needed + self.buffer_seconds
        if self.visibility_seconds is None:
            return wanted
        if self.visibility_seconds < wanted:
            raise ConfigurationError(
                f"visibility_seconds must be at least {wanted:g} (got {self.visibility_seconds:g}): {what} may take "
                f"{needed:g} s, and buffer_seconds={self.buffer_seconds:g}; increase it or leave it out"
            )
        return self.visibility_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLoopConfig(LoopConfig):
    """The settings of an `EvalLoop`.

    Attributes:
        mainloop_timeout: How long to wait for a remote MainLoop.
        timeout_seconds: Time limit of a task, and separately of its scoring; overridden by a suite's rules.
        max_retries: How often a failed task is retried at once; overridden by a suite's rules.
        seed: The run's seed; overridden by a suite's rules.
        fingerprint: The fingerprint of this worker's code; requests made from other code are refused.
        allow_drift: Execute requests made from other code.
        refuse_seconds: The delay with which a refused request is handed back.
    """

    mainloop_timeout: float = 300.0
    timeout_seconds: float = 300.0
    max_retries: int = 0
    seed: int = 0
    fingerprint: str = ""
    allow_drift: bool = False
    refuse_seconds: float = 5.0

    def __post_init__(self) -> None:
        # Not super(): slots=True recreates the class, and super() refers to the old one.
        LoopConfig.__post_init__(self)
        if self.max_retries < 0 or self.seed < 0:
            given = f"{self.max_retries} and {self.seed}"
            raise ConfigurationError(f"max_retries and seed must be at least 0 (got {given})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MainLoopConfig(LoopConfig):
    """The settings of a `MainLoop` that serves a mailbox.

    Attributes:
        timeout_seconds: Time limit for one input; a request may ask for less.
    """

    timeout_seconds: float = 300.0
