"""What a worker has done so far, for metrics and for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class LoopCounters:
    """Counts since the loop was made; they only ever grow, but for `in_flight`.

    Attributes:
        received: Messages received.
        finished: Messages acknowledged or set aside.
        outcomes: Results by outcome.
        in_flight: Messages held just now.
        handed_back: Messages given back untouched or unfinished: drained, or nobody's fault.
        retried: Messages given back to be tried again.
        dead_lettered: Messages set aside here; bodies that cannot be read are set aside by the mailbox.
        lease_losses: Messages that went to someone else while they were worked on.
        delivery_retries: Deliveries of results that had to be repeated.
        receive_errors: Receives that failed.
        refused: Messages refused because their suite's fingerprint is another.
        suspects: Suspected poison messages, which are executed in child processes.
        crashes: Messages that ended a child process in which nothing else was executed.
        hung: Messages given up on because their code goes on although it was cancelled.
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
    receive_errors: int = 0
    refused: int = 0
    suspects: int = 0
    crashes: int = 0
    hung: int = 0
