"""Signal handling of worker processes: the first signal drains, the second hands back, the third kills."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handle_signals(
    is_running: Callable[[], bool], drain: Callable[[], None], hurry: Callable[[], None]
) -> Iterator[None]:
    """Handle SIGTERM and SIGINT while the block runs, if this is the main thread.

    While `is_running`, a signal calls `drain`. A later one calls `hurry` and makes the next one kill the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = set(_SIGNALS)

    def release(number: int, handler: object) -> None:
        loop.remove_signal_handler(number)
        signal.signal(number, handler)  # type: ignore[arg-type]  # what `getsignal` returned

    def on_signal(number: int) -> None:
        if is_running():
            _log.info("%s", signal.Signals(number).name)
            drain()
            return
        for other in handled:
            release(other, signal.SIG_DFL)
        hurry()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in handled:
            release(number, before[number])
