"""Results on their way into the store: one thread, batches, and a wait for those who run ahead of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import anyio

from fairtrial.data.sample import Sample
from fairtrial.errors import StoreUnavailableError
from fairtrial.offload import loop_caller
from fairtrial.runs.events import log
from fairtrial.store.protocol import Committed, RunStore
from fairtrial.trials.result import EvalResult

_BATCH = 500
_WAIT_SECONDS = 0.2
_RETRY_SECONDS = 120.0


type _Item = tuple[EvalResult, int, Sample[Any, Any]]


class Writer:
    """Commits results from a thread of its own.

    A result is safe when its batch is committed, at most a fraction of a second after it was handed over. When the
    database cannot be reached, the thread tries again for two minutes; the trials wait for it meanwhile.
    """

    def __init__(
        self,
        store: RunStore,
        run_id: str,
        *,
        epoch: int | None = None,
        batch: int = _BATCH,
        wait_seconds: float = _WAIT_SECONDS,
    ) -> None:
        """Begin to write. With `epoch`, nothing is stored once another process has taken the run over."""
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._batch = batch
        self._wait = wait_seconds
        self._wake = loop_caller()
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._waiting: list[_Item] = []
        self._pending = 0
        self._closing = False
        self._room: anyio.Event | None = None
        self._error: BaseException | None = None
        self.new = 0
        self.duplicate = 0
        self.refused_ordinals: set[int] = set()  # Trials of which the store takes nothing.
        self._thread = threading.Thread(target=self._run, name="fairtrial writer", daemon=True)
        self._thread.start()

    async def put(self, result: EvalResult, sample_ordinal: int, sample: Sample[Any, Any]) -> None:
        """Hand over a result; waits while too many are on their way."""
        with self._lock:
            # Under the lock: a thread that fails after this test still sees, and wakes, whoever waits for room.
            if self._error is not None:
                raise self._error
            self._waiting.append((result, sample_ordinal, sample))
            self._pending += 1
            full = len(self._waiting) >= self._batch
            crowded = self._pending > 2 * self._batch
            if crowded and self._room is None:
                self._room = anyio.Event()
            room = self._room if crowded else None
        if full:  # The thread looks by itself now and then; waking it for every result would cost more than storing it.
            self._filled.set()
        if room is not None:
            await room.wait()
            if self._error is not None:
                raise self._error

    async def close(self) -> None:
        """Commit everything that was handed over, and end. Raises what kept the store from taking it."""
        self._closing = True
        self._filled.set()
        with anyio.CancelScope(shield=True):
            finished = anyio.Event()
            threading.Thread(target=self._join, args=(finished,), daemon=True).start()
            await finished.wait()
        if self._error is not None:
            raise self._error

    def _join(self, finished: anyio.Event) -> None:
        self._thread.join()
        self._wake(finished.set)

    def _run(self) -> None:
        try:
            while True:
                self._filled.wait(self._wait)
                closing = self._closing  # Read before the list: what is put before closing is in the list.
                with self._lock:
                    self._filled.clear()
                    batch, self._waiting = self._waiting, []
                for start in range(0, len(batch), self._batch):
                    self._commit(batch[start : start + self._batch])
                self._make_room(len(batch))
                if closing:
                    return
        except BaseException as error:
            with self._lock:
                self._error = error
            self._make_room(0)

    def _commit(self, batch: list[_Item]) -> None:
        results = [result for result, _, _ in batch]
        samples = {ordinal: sample for _, ordinal, sample in batch}
        committed = patiently(lambda: self._store.commit(self._run_id, results, samples, epoch=self._epoch))
        self.new += committed.new
        self.duplicate += committed.duplicate
        if committed.refused:
            refused = {key for key, _problem in committed.refused}
            self.refused_ordinals.update(result.ordinal for result in results if result.key in refused)
        log_problems(committed)

    def _make_room(self, count: int) -> None:
        with self._lock:
            self._pending -= count
            room, self._room = self._room, None
        if room is not None:
            self._wake(room.set)


def log_problems(committed: Committed) -> None:
    """Log the results of a batch that could not be stored as they were."""
    for key, problem in committed.refused:
        log.error("trial %s could not be stored: %s", key, problem)
    for key, problem in committed.unstorable:
        log.error("the result of trial %s is stored as an error: %s", key, problem)


def patiently[T](call: Callable[[], T]) -> T:
    """The result of a call to a store; while the database cannot be reached, it is made again for two minutes."""
    until = time.monotonic() + _RETRY_SECONDS
    delay = 0.1
    while True:
        try:
            return call()
        except StoreUnavailableError as error:
            if time.monotonic() > until:
                raise
            log.warning("%s; trying again in %.1f s", error, delay)
        time.sleep(delay)
        delay = min(delay * 2, 5.0)
