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


def hint(depth: MailboxDepth, suite: str) -> str | None:
    """Why no results come, as far as the mailbox shows it; None when workers are at work."""
    if depth.in_flight:
        return None
    if depth.waiting:
        return (
            f"{depth.waiting} requests of suite {suite!r} are waiting and no worker takes them: start one with "
            "`fairtrial worker SUITE --mailbox URL`"
        )
    if depth.delayed:
        return (
            f"workers hand back {depth.delayed} requests of suite {suite!r}: their code or settings differ from this "
            "client's, and their log says so"
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
