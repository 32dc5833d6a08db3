"""Detects async tasks that block the event loop, which serializes the trials."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fairtrial.base.offload import loop_caller
from fairtrial.runs.events import log
from fairtrial.trials.task import ResolvedTask

_PAUSE_SECONDS = 0.1
_BLOCKED_SECONDS = 0.25  # An event loop that does not respond for this long is blocked.
_ENOUGH_SECONDS = 2.0  # Total blocked time for a warning, if it is at least half of the time.
_STALLS = 3  # One or two may be due to a cold start.
_OURS = (str(Path(__file__).parent.parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_LOOPS = (
    "_run_once",
    "unrolled_run",
)  # A turn of asyncio and of trio; below them is the program that started the loop.


@contextmanager
def watch_event_loop(tasks: Sequence[ResolvedTask]) -> Iterator[None]:
    """Warn once if async tasks block the event loop most of the time while the block runs."""
    names = dict.fromkeys(task.name for task in tasks if task.is_async)
    if not names:
        yield
        return
    over = threading.Event()
    call_soon, thread = loop_caller(), threading.get_ident()

    def watch() -> None:
        began, blocked, stalls = time.monotonic(), 0.0, 0
        while not over.wait(_PAUSE_SECONDS):
            answered, asked = threading.Event(), time.monotonic()
            try:
                call_soon(answered.set)
            except RuntimeError:  # The event loop has ended.
                return
            if answered.wait(_BLOCKED_SECONDS):
                continue
            place = _place_in(thread)
            while not answered.wait(_PAUSE_SECONDS) and not over.is_set():
                pass
            if place is None:
                continue
            now = time.monotonic()
            blocked += now - asked
            stalls += 1
            if stalls >= _STALLS and blocked >= _ENOUGH_SECONDS and blocked >= (now - began) / 2:
                log.warning(
                    "the event loop was blocked for %.1f of %.1f s (%s), so trials run one after another. Task %s is "
                    "async and calls code that blocks: use an async client and await it, or make the task a plain "
                    "`def`, which runs in a thread",
                    blocked,
                    now - began,
                    place,
                    ", ".join(names),
                )
                return

    threading.Thread(target=watch, name="fairtrial loop watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _place_in(thread: int) -> str | None:
    """Return the innermost location of a thread in user code; None during an import, or where there is none.

    Many concurrent trials keep the event loop busy with our own work, for which no task is to blame.
    """
    frame = sys._current_frames().get(thread)
    found: FrameType | None = None
    while frame is not None and frame.f_code.co_name not in _LOOPS:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return None  # Importing a library is slow, but happens once.
        if found is None and not file.startswith((*_OURS, "<")):
            found = frame
        frame = frame.f_back
    return (
        None if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"
    )
