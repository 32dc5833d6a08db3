"""Whether another client is at work on the same run.

Not a lock: two clients of one run do no harm, for every result counts once, and a lock that outlives its owner would.
But whoever starts the second one should hear of the first.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from fairtrial.types import JSON

NOTE = "fleet_client"
BEAT_SECONDS = 10.0
_STALE_SECONDS = 3 * BEAT_SECONDS


def present() -> dict[str, JSON]:
    """The note that says: I am here."""
    return {NOTE: {"host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}}


def gone() -> dict[str, JSON]:
    """The note that says: I am not here any more."""
    return {NOTE: None}


def another(notes: Mapping[str, Any]) -> str | None:
    """Who else seems to be at work on the run with these notes."""
    note = notes.get(NOTE)
    if not isinstance(note, Mapping):
        return None
    host, pid, at = note.get("host"), note.get("pid"), note.get("at")
    if not isinstance(pid, int) or not isinstance(at, int | float):
        return None
    seconds = time.time() - at
    if abs(seconds) > _STALE_SECONDS or (host == socket.gethostname() and not _alive(pid)):
        return None
    return f"process {pid} on {host}, seen {max(0, round(seconds))} s ago"


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # An earlier run of this very process, which has ended.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
