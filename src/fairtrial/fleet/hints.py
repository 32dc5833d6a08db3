"""What a client says when its fleet does not answer: to the person who waits, and in a trial's result."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from fairtrial.data.sample import Sample
from fairtrial.fleet.wire import EvalReply
from fairtrial.mailbox.protocol import MailboxDepth
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult

_CODE_SHOWN = 8  # Characters of a fingerprint: enough to tell the versions of one suite apart.


def hint(
    depth: MailboxDepth,
    suite: str,
    *,
    handed_back: bool = False,
    announced: Sequence[str] | None = None,
    fingerprint: str = "",
) -> str | None:
    """Why no results come, as far as the mailbox shows it; None when workers are at work.

    `handed_back` says that requests were handed back at an earlier look: between two refusals all of them wait, as if
    there were no worker. `announced` are the fingerprints of the workers, `fingerprint` is the run's.
    """
    if announced and not has_worker(announced, fingerprint):
        return missing_worker(suite, announced, fingerprint)
    if depth.in_flight or announced:
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


def has_worker(announced: Sequence[str], fingerprint: str) -> bool:
    """Whether one of the announced workers accepts requests made from the code with this fingerprint."""
    return any(not code or not fingerprint or code == fingerprint for code in announced)


def missing_worker(suite: str, announced: Sequence[str], fingerprint: str) -> str:
    """That no worker can serve a run, which ones are there, and the remedy."""
    if not announced:
        return f"No worker of suite {suite!r} is connected: start one with `fairtrial worker SUITE --mailbox URL`"
    several = len(announced) > 1
    codes = ", ".join(sorted({code[:_CODE_SHOWN] for code in announced}))
    return (
        f"{len(announced)} worker{'s' if several else ''} of suite {suite!r} {'are' if several else 'is'} connected, "
        f"but with code {codes}; this run needs code {fingerprint[:_CODE_SHOWN]}: start workers with this client's "
        "code, or with --allow-drift"
    )


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
