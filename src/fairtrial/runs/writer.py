"""Writes results to the store: one thread, batches, and backpressure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import anyio

from fairtrial.base import metrics
from fairtrial.base.backoff import retry_while_unavailable, retry_while_unavailable_sync
from fairtrial.base.offload import in_thread, loop_caller
from fairtrial.data.sample import Sample
from fairtrial.runs.events import log, trial_fields
from fairtrial.store.protocol import Committed, RunStore
from fairtrial.trials.result import EvalResult

BATCH_COUNT = 500
BATCH_BYTES = 16 * 1024 * 1024
SLOW_COMMIT_SECONDS = 10.0
_SCALARS = frozenset({int, float, bool, type(None)})
_WAIT_SECONDS = 0.2


type Item = tuple[EvalResult, int, Sample[Any, Any] | None]
"""A result to commit, the ordinal of its sample and, unless it is already stored, the sample."""


class Writer:
    """Commits results from a separate thread.

    A result is durable when its batch is committed, within a fraction of a second after `put`. While the database is
    unavailable, the thread retries (`backoff.patience_seconds`), and the trials wait.
    """

    def __init__(
        self,
        store: RunStore,
        run_id: str,
        *,
        epoch: int | None = None,
        batch: int = BATCH_COUNT,
        wait_seconds: float = _WAIT_SECONDS,
    ) -> None:
        """Start the thread. With `epoch`, nothing is stored once another process has taken the run over."""
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._batch = batch
        self._wait = wait_seconds
        self._wake = loop_caller()
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._waiting: list[tuple[Item, int]] = []  # With their sizes.
        self._waiting_bytes = 0
        self._pending = 0
        self._pending_bytes = 0
        self._closing = False
        self._room: anyio.Event | None = None
        self._error: BaseException | None = None
        self.new = 0
        self.duplicate = 0
        self.refused_ordinals: set[int] = set()  # Trials whose results the store refuses.
        within = copy_context().run  # So that log records of the thread name the run.
        self._thread = threading.Thread(target=within, args=(self._run,), name="fairtrial writer", daemon=True)
        self._thread.start()

    async def put(self, result: EvalResult, sample_ordinal: int, sample: Sample[Any, Any]) -> None:
        """Queue a result; waits while too many are queued."""
        item: Item = (result, sample_ordinal, sample)
        size = size_of(item)
        with self._lock:
            # Under the lock: if the thread fails after this check, it still sees and wakes waiting callers.
            if self._error is not None:
                raise self._error
            self._waiting.append((item, size))
            self._waiting_bytes += size
            self._pending += 1
            self._pending_bytes += size
            full = len(self._waiting) >= self._batch or self._waiting_bytes >= BATCH_BYTES
            crowded = self._pending > 2 * self._batch or self._pending_bytes > 2 * BATCH_BYTES
            if crowded and self._room is None:
                self._room = anyio.Event()
            room = self._room if crowded else None
        if full:  # The thread polls; waking it for every result would cost more than storing it.
            self._filled.set()
        if room is not None:
            await room.wait()
            if self._error is not None:
                raise self._error

    async def close(self) -> None:
        """Commit all queued results and end the thread. Raises the error that prevented a commit."""
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
                closing = self._closing  # Read before the list, which then contains everything put before closing.
                with self._lock:
                    self._filled.clear()
                    waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
                for batch in split_batches(waiting, itemgetter(1), self._batch):
                    self._commit([item for item, _size in batch])
                    self._make_room(len(batch), sum(size for _item, size in batch))
                if closing:
                    return
        except BaseException as error:
            with self._lock:
                self._error = error
            self._make_room(0, 0)

    def _commit(self, batch: Sequence[Item]) -> None:
        committed = _commit_batch(self._store, self._run_id, batch, epoch=self._epoch)
        self.new += committed.new
        self.duplicate += committed.duplicate
        if (progress := metrics.progress_of(self._run_id)) is not None:
            progress.stored += committed.new
        if committed.refused:
            refused = {key for key, _problem in committed.refused}
            self.refused_ordinals.update(result.ordinal for result, _, _ in batch if result.key in refused)

    def _make_room(self, count: int, size: int) -> None:
        with self._lock:
            self._pending -= count
            self._pending_bytes -= size
            room, self._room = self._room, None
        if room is not None:
            self._wake(room.set)


def call_store[T](call: Callable[[], T], doing: str, on_failure: Callable[[], None] = lambda: None) -> T:
    """Call a store, with retries while its database is unavailable (`patience_seconds`), and return the result."""
    return retry_while_unavailable_sync(call, doing, log, on_failure=on_failure)


async def ask_store[T](call: Callable[[], T], doing: str) -> T:
    """`call_store` in a thread, for calls before and after the trials; cancelling ends the wait for the database."""
    return await retry_while_unavailable(lambda: in_thread(call), doing, log)


def commit_items(
    store: RunStore, run_id: str, items: Sequence[Item], on_failure: Callable[[], None] = lambda: None
) -> Committed:
    """Commit results in batches of bounded count and size, with retries while the database is unavailable."""
    parts = [_commit_batch(store, run_id, batch, on_failure) for batch in split_batches(items, size_of)]
    return Committed(
        sum(part.new for part in parts),
        sum(part.duplicate for part in parts),
        tuple(chain.from_iterable(part.refused for part in parts)),
        tuple(chain.from_iterable(part.unstorable for part in parts)),
    )


def _commit_batch(
    store: RunStore,
    run_id: str,
    batch: Sequence[Item],
    on_failure: Callable[[], None] = lambda: None,
    *,
    epoch: int | None = None,
) -> Committed:
    results = [result for result, _, _ in batch]
    samples = {ordinal: sample for _, ordinal, sample in batch if sample is not None}
    message = "committing %d results of run %s has taken more than %g s"

    def report_slow() -> None:
        metrics.SLOW_COMMITS.add(1)
        log.warning(message, len(batch), run_id, SLOW_COMMIT_SECONDS, extra={"run": run_id})

    slow = threading.Timer(SLOW_COMMIT_SECONDS, report_slow)
    slow.daemon = True
    slow.start()
    began = time.monotonic()
    try:
        doing = f"committing results of run {run_id}"
        committed = call_store(partial(store.commit, run_id, results, samples, epoch=epoch), doing, on_failure)
    finally:
        slow.cancel()
        metrics.COMMIT_SECONDS.observe(time.monotonic() - began)
    if committed.new and (progress := metrics.progress_of(run_id)) is not None:
        progress.cost_usd += sum(result.total_cost_usd for result in results)
    for key, problem in committed.refused:
        log.error("trial %s could not be stored: %s", key, problem, extra=trial_fields(key))
    for key, problem in committed.unstorable:
        log.error("the result of trial %s is stored as an error: %s", key, problem, extra=trial_fields(key))
    return committed


def split_batches[T](items: Sequence[T], size: Callable[[T], int], count: int = BATCH_COUNT) -> Iterator[list[T]]:
    """Split items into batches of at most `count` items and `BATCH_BYTES`; a larger item is a separate batch."""
    batch: list[T] = []
    total = 0
    for item in items:
        weight = size(item)
        if batch and (len(batch) >= count or total + weight > BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += weight
    if batch:
        yield batch


def size_of(item: Item) -> int:
    """Estimate the size of a result and its sample in the database, in bytes."""
    result, _ordinal, sample = item
    size = len(result.snapshot or b"") + len(result.output_json or "")
    if sample is None:
        return size
    given, expected = sample.input, sample.expected
    # Most inputs are plain text: avoid a call.
    size += len(given) if type(given) is str else _text_size(given)
    return size + (len(expected) if type(expected) is str else _text_size(expected))


def _text_size(value: Any, depth: int = 4) -> int:
    if type(value) in _SCALARS:
        return 16
    if isinstance(value, str | bytes):
        return len(value)
    if depth and isinstance(value, Mapping):
        return sum(_text_size(part, depth - 1) for part in value.values())
    if depth and isinstance(value, list | tuple):
        return sum(_text_size(part, depth - 1) for part in value)
    return 16
