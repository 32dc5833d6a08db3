"""Counters of a worker, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fairtrial.base.frozen import first_is


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
