"""What a client says when its fleet does not answer: to the person who waits, and in a trial's result."""

from __future__ import annotations

import random
import time
from typing import Any

from fairtrial.data.sample import Sample
from fairtrial.fleet.wire import EvalReply
from fairtrial.mailbox.protocol import MailboxDepth
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult


def hint(depth: MailboxDepth, suite: str, *, handed_back: bool = False) -> str | None:
    """Why no results come, as far as the mailbox shows it; None when workers are at work.

    `handed_back` says that requests were handed back at an earlier look: between two refusals all of them wait, as if
    there were no worker.
    """
    if depth.in_flight:
        return None
    if handed_back or depth.delayed:
        return (
            f"workers hand back requests of suite {suite!r} ({depth.delayed} at present): their code or settings "
            "differ from this client's, and their log says so"
        )
    if depth.waiting:
        return (
            f"{depth.waiting} requests of suite {suite!r} are waiting and no worker takes them: start one with "
            "`fairtrial worker SUITE --mailbox URL`"
        )
    return None


def undelivered(
    run: RunRecord, key: TrialKey, ordinal: int, attempt: int, sample: Sample[Any, Any], reason: str
) -> EvalReply:
    """The result of a trial that no worker answered for."""
    result = EvalResult(
        key,
        ordinal,
        "dead_letter",
        error=reason,
        stage="delivery",
        attempt=attempt,
        execution=random.getrandbits(62),
        started_at=time.time(),
    )
    return EvalReply(result, run.split(ordinal)[0], sample)
