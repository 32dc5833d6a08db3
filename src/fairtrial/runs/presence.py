"""Whether another process is at work on the same run.

Not a lock: one that outlives its owner would keep a run from being resumed. Whoever works on a run leaves a note with
it and renews it; a note that is old, or whose process is gone, means nothing. Two clients of a fleet do no harm, for
every trial is executed by whoever receives it, so the second one is told. Two local runs would pay for every trial
twice, so the second one is refused.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from fairtrial.errors import RunBusyError
from fairtrial.runs.events import log
from fairtrial.store.protocol import RunStore
from fairtrial.types import JSON

NOTE = "at_work"
BEAT_SECONDS = 10.0
_STALE_SECONDS = 3 * BEAT_SECONDS
_WATCH_SECONDS = 0.5


def present(*, client: bool = False) -> dict[str, JSON]:
    """The note that says: I am here; as the `client` of a fleet, which executes nothing itself."""
    note: dict[str, JSON] = {"host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}
    return {NOTE: {**note, "client": True} if client else note}


def is_client(notes: Mapping[str, Any]) -> bool:
    """Whether whoever left a note there is the client of a fleet."""
    note = notes.get(NOTE)
    return isinstance(note, Mapping) and note.get("client") is True


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


async def take_up(store: RunStore, run_id: str) -> None:
    """Say that this process works on the run.

    A note may be that of a process that has just died, on another machine or with a number that is in use again: it
    is watched until it is renewed, or too old to be.

    Raises:
        RunBusyError: another process works on it.
    """

    def note() -> Any:
        return store.get_run(run_id).notes.get(NOTE)

    said = False
    first = found = await anyio.to_thread.run_sync(note)
    while (who := another({NOTE: found})) is not None:
        if found != first:
            raise RunBusyError(
                f"run {run_id} is being worked on by {who}, and a second one would execute its trials twice: wait for "
                "it, or start a new run with fresh=True (--fresh)"
            )
        if not said:
            said = True
            log.warning("run %s was being worked on by %s: waiting to see whether it still is", run_id, who)
        await anyio.sleep(_WATCH_SECONDS)
        found = await anyio.to_thread.run_sync(note)
    await anyio.to_thread.run_sync(lambda: store.update_run(run_id, notes=present()))


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
