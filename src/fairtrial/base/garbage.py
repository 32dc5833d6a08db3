"""Let Python look for cyclic garbage less often while many trials are in flight, and never while modules are loaded."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 10_000
"""How many more objects than now may exist before Python looks for garbage: its default is 700, or 2,000 from 3.13 on.

A hundred trials in flight start and end in turns, so their objects exceed the default several times in each turn, and
none of them is garbage: reference counts free them. With HTTP calls, a seventh of the CPU time of a run went into that.
"""


class _Threshold:
    """The threshold of this process, which several runs may share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            young, *older = gc.get_threshold()
            if self._users == 1:
                self._before = young
                if 0 < young < _YOUNG:  # 0 turns the collector off.
                    gc.set_threshold(_YOUNG, *older)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            young, *older = gc.get_threshold()
            if self._users == 0 and young == _YOUNG:  # Else someone has set another one meanwhile.
                gc.set_threshold(self._before, *older)


_threshold = _Threshold()


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect garbage less often during the block, unless the program has chosen that itself."""
    _threshold.enter()
    try:
        yield
    finally:
        _threshold.leave()


@contextmanager
def loading() -> Iterator[None]:
    """Do not look for garbage during the block, nor later in what it made: for modules, which stay until the end.

    Looking takes a tenth of the CPU time of loading them. For programs of our own: garbage that exists at the end of
    the block is never collected.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()
