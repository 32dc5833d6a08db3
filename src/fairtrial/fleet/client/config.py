"""Settings of a fleet client."""

from __future__ import annotations

from dataclasses import dataclass, field

from fairtrial.base.backoff import patience_seconds


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Settings of a client that submits a run to a fleet.

    Attributes:
        batch: Maximum number of requests to send, or results to commit, at once.
        receivers: Number of tasks that receive and commit batches of results concurrently.
        floor: Minimum number of requests to keep in the mailbox, however few workers there seem to be.
        lease_seconds: Lease of a batch of results, after which another collector may receive it.
        poll_seconds: Interval at which the depth of the request mailbox is read.
        recovery_seconds: Time without a result after which the client checks for lost requests.
        hint_seconds: Time without a result and without a worker after which the client logs a hint.
        worker_seconds: Time without a worker with this run's code after which the run ends as `incomplete`.
        ahead: With adaptive stopping, how far trials may be sent ahead of the first one without a result.
        max_rounds: How often lost requests are resent without a single result in between before they are given up.
        open_seconds: How long to wait at the start for the mailbox server.
        one_transaction: Whether workers store results themselves if the queue is in the store's own database.
    """

    batch: int = 500
    receivers: int = 2
    floor: int = 100
    lease_seconds: float = 15.0
    poll_seconds: float = 0.1
    recovery_seconds: float = 2.0
    hint_seconds: float = 10.0
    worker_seconds: float = field(default_factory=patience_seconds)
    ahead: int = 10_000
    max_rounds: int = 3
    open_seconds: float = 30.0
    one_transaction: bool = True
