"""The batches of one run: what trials ask for is collected, sent and answered, while they wait in place.

Everything happens in the event loop of the run. What must survive a crash is in the store before the provider sees it:
the intent with its requests, then that it is being submitted, then the provider's id, then the replies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio

from fairtrial.base.formatting import count, money
from fairtrial.errors import ConfigurationError
from fairtrial.models.batches.batch_queue import BatchQueue, PendingRequest
from fairtrial.models.batches.batching import Batching, current_batches, shared_batching
from fairtrial.models.batches.calls import BatchCalls, LineError, UnansweredError
from fairtrial.models.batches.request_book import RequestBook, ask_table
from fairtrial.models.batches.requests import custom_id, request_key
from fairtrial.models.batches.sent_batch import SentBatch
from fairtrial.store.batches import INVALID, OPEN, SENT, SUCCEEDED, BatchRequest, batch_table
from fairtrial.store.notes import BatchesNote
from fairtrial.store.protocol import RunStore
from fairtrial.trials.context import TrialContext, TrialKey, slot_released

log = logging.getLogger("fairtrial.models")

_RESENDS = 2
_TICK_SECONDS = 0.1


class RunBatches:
    """The batches of a run. The store is first asked about them when a trial calls a model in batches.

    Args:
        store: Where they are stored.
        run_id: The run.
        epoch: The fencing token of the run's owner.
        tell: Called with a line of progress whenever it changes.

    Attributes:
        under_way: Batches that the provider has, by intent.
        budget_left: Returns what is left of the cost cap.
        stop: Ends the run for a reason.
    """

    def __init__(
        self, store: RunStore, run_id: str, epoch: int | None, tell: Callable[[str], object] = lambda _line: None
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._group: anyio.abc.TaskGroup
        self._opening = asyncio.Lock()
        self._book: RequestBook | None = None
        self._queues: dict[tuple[Any, ...], BatchQueue] = {}
        self._beside: dict[tuple[str, ...], list[BatchQueue]] = {}
        self._trials: dict[TrialKey, int] = {}  # The ordinals of the trials that are being executed.
        self._waiting: Counter[TrialKey] = Counter()
        self._finishing = 0  # Batches that have ended and are being read, deleted and marked.
        self._said = ""
        self.under_way: dict[str, SentBatch] = {}
        self.budget_left: Callable[[], float | None] = lambda: None
        self.stop: Callable[[str], object] = lambda _reason: None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RunBatches]:
        """Send and watch batches during the block. Batches that are under way at its end stay at the provider."""
        if shared_batching() is not None:
            batch_table(self._store)  # Without a place for batches, nothing is executed.
        token = current_batches.set(self)
        try:
            async with anyio.create_task_group() as self._group:
                yield self
                self._group.cancel_scope.cancel()
        finally:
            current_batches.reset(token)

    @property
    def book(self) -> RequestBook:
        """The requests of the run."""
        assert self._book is not None  # noqa: S101 - the first call of a trial has opened it
        return self._book

    async def _open(self) -> None:
        """Read what earlier processes have left, when the first trial asks."""
        async with self._opening:
            if self._book is None:
                book = RequestBook(batch_table(self._store), self._run_id, self._epoch, self._group.start_soon)
                await book.read()
                self._book = book

    async def close(self) -> BatchesNote | None:
        """Return what the batches came to, when all trials are stored; None if there were none."""
        table = getattr(self._store, "batches", None)
        intents = [] if table is None else await ask_table(lambda: table.intents(self._run_id), "reading the batches")
        if not intents:
            if shared_batching() is not None and self._book is None:
                log.warning(
                    "--batch had no effect on this run: no trial called a model through OpenAIAdapter or "
                    "AnthropicAdapter (other adapters, embeddings and clients of your own send at full price)"
                )
            return None

        while self._finishing:  # noqa: ASYNC110 - for a moment, at the end of a run
            await asyncio.sleep(_TICK_SECONDS / 10)

        def end() -> BatchesNote:
            found = batch_table(self._store)
            found.forget_replies(self._run_id, epoch=self._epoch)
            open_batches = sum(one.state in OPEN for one in found.intents(self._run_id))
            return BatchesNote(**found.figures(self._run_id)._asdict(), open_batches=open_batches)

        note = await ask_table(end, "reading the batches")
        if note.unused:
            log.warning(
                "%s of batches, %s, were paid and not used: their trials had given up waiting, or made other calls "
                "when they were executed again after an interruption. A task is answered from stored replies only if "
                "its calls do not depend on the time, on chance or on what else runs",
                count(note.unused, "reply", "replies"),
                money(note.unused_cost_usd),
            )
        if note.open_batches:
            log.warning(
                "%s still under way, for which no trial waits: see `fairtrial batches %s`",
                "1 batch is" if note.open_batches == 1 else f"{note.open_batches} batches are",
                self._run_id,
            )
        return note

    def begin_trial(self, key: TrialKey, ordinal: int) -> None:
        """Count a trial as one that is being executed, until `end_trial`."""
        self._trials[key] = ordinal

    def end_trial(self, key: TrialKey) -> None:
        """Count a trial no longer: its result says what it has cost."""
        ordinal = self._trials.pop(key)
        if self._book is not None:
            self._book.has_result(ordinal)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Let the end of the run wait for this block: the last trial ends before its batch is deleted and marked."""
        self._finishing += 1
        try:
            yield
        finally:
            self._finishing -= 1

    @property
    def window(self) -> int:
        """How many trials may wait at once, by the adapters that trials have used; 0 before the first call."""
        return max((one.settings.window for one in self._queues.values()), default=0)

    async def ask(
        self, calls: BatchCalls, settings: Batching, encode: Callable[[], str], actor: str, trial: TrialContext
    ) -> Any:
        """Return the provider's answer to a request, when its batch has ended.

        Args:
            calls: The adapter.
            settings: How its requests are sent.
            encode: Returns the body of the request as JSON; called again if it must be sent again.
            actor: The caller: "task" or "judge".
            trial: The trial.

        Raises:
            LineError: the provider refused it.
            UnansweredError: several batches came back without an outcome for it.
        """
        answer = self._ask(calls, settings, encode, actor, trial)
        return await (answer if self._is_here() else self._here(answer))

    async def count_cached(self, calls: BatchCalls, body: str, actor: str, trial: TrialContext) -> None:
        """Count a call that the response cache has answered: if a batch had the reply too, it was not in vain."""
        await self._here(self._count_cached(request_key(trial, actor, calls.address, body)))

    async def _count_cached(self, key: str) -> None:
        await self._open()
        row = self.book.get(key)
        if row is not None and row.state == SUCCEEDED:
            self.book.take(key)
            await self.book.use([key])

    def _is_here(self) -> bool:
        return asyncio.get_running_loop() is self._loop

    async def _here[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Do work in the event loop of the run, also for a task that is not async: its thread has another one."""
        if self._is_here():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _ask(
        self, calls: BatchCalls, settings: Batching, encode: Callable[[], str], actor: str, trial: TrialContext
    ) -> Any:
        ordinal = self._trials.get(trial.key)
        if ordinal is None:
            raise ConfigurationError("warm-up trials cannot wait for batches: set warmup=0")
        self._begin_wait(trial)  # No context manager: tens of thousands of trials wait here.
        try:
            if self._book is None:
                await self._open()
            queue = self._queue(calls, settings)
            key = request_key(trial, actor, calls.address, encode())
            async with slot_released():
                row = await self._outcome(queue, key, encode, ordinal, trial.attempt)
        finally:
            self._end_wait(trial)
        reply = json.loads(row.reply or b"null")
        if row.state == INVALID:
            raise LineError(reply["status"], reply["body"])
        return reply

    def _begin_wait(self, trial: TrialContext) -> None:
        self._waiting[trial.key] += 1
        trial.begin_wait()

    def _end_wait(self, trial: TrialContext) -> None:
        trial.end_wait()
        self._waiting[trial.key] -= 1
        if not self._waiting[trial.key]:
            del self._waiting[trial.key]

    async def _outcome(
        self, queue: BatchQueue, key: str, encode: Callable[[], str], ordinal: int, attempt: int
    ) -> BatchRequest:
        """Return a request with its reply, from the store or from the batch that it is sent in."""
        book = self.book
        while True:
            known = book.get(key)
            if known is not None and known.state in (SUCCEEDED, INVALID):
                row = await book.load(key)
            elif known is not None and known.state == SENT:
                if not book.has_estimate(key):  # It was sent by an earlier process.
                    book.expect(key, ordinal, queue.estimate(encode()))
                row = await book.wait(key)
            else:
                tries = 0 if known is None else known.tries
                if tries > _RESENDS:
                    raise UnansweredError(
                        f"{tries} batches came back without an outcome for this request",
                        live=queue.settings.fallback == "live",
                    )
                future: asyncio.Future[BatchRequest] = self._loop.create_future()
                queue.pending.append(PendingRequest(key, encode(), ordinal, attempt, tries, future, self._loop.time()))
                row = await future
            if row.state in (SUCCEEDED, INVALID):
                book.take(key)
                return row

    def _queue(self, calls: BatchCalls, settings: Batching) -> BatchQueue:
        own = (*calls.queue, *calls.terms, settings)
        queue = self._queues.get(own)
        if queue is None:
            queue = self._queues[own] = BatchQueue(calls, settings, self._beside.setdefault(calls.queue, []))
            self._group.start_soon(self._collect, queue)
            for intent in list(self.book.open_intents.values()):
                if (intent.account, intent.endpoint, intent.model) == calls.queue:
                    del self.book.open_intents[intent.id]
                    self._group.start_soon(SentBatch(self, queue, intent, ()).resume)
        return queue

    async def _collect(self, queue: BatchQueue) -> None:
        """Send the requests of a queue whenever there is a reason not to wait for more."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            largest = queue.largest
            queue.pending = [one for one in queue.pending if not one.future.done()]
            if not queue.pending:
                continue
            due = queue.due(len(self._trials), len(self._waiting))
            while queue.pending and (due or len(queue.pending) >= largest):
                chunk = self._affordable(queue, queue.fitting(largest))
                if not chunk:
                    break
                del queue.pending[: len(chunk)]
                batch, lines = self._booked(queue, chunk)
                self._group.start_soon(batch.send, lines)
                del chunk, lines, batch  # They would be kept until the next batch.

    def _booked(self, queue: BatchQueue, chunk: list[PendingRequest]) -> tuple[SentBatch, list[str]]:
        """Return one batch and its lines, and count it for the cost cap before another one is looked at."""
        chunk.sort(key=lambda one: one.key)  # `BatchResults` numbers the lines, perhaps in a later process.
        intent = queue.new_intent(len(chunk))
        rows = [BatchRequest(one.key, intent.id, one.ordinal, SENT, one.tries, attempt=one.attempt) for one in chunk]
        for one, row in zip(chunk, rows, strict=True):
            self.book.send(row, one.future, queue.estimate(one.text))
        lines = [queue.calls.line(custom_id(intent.id, one.key), one.text) for one in chunk]
        queue.sent = True
        queue.under_way += 1
        return SentBatch(self, queue, intent, rows), lines

    def _affordable(self, queue: BatchQueue, chunk: list[PendingRequest]) -> list[PendingRequest]:
        """Return the requests at the start of a chunk that the cost cap of the run has room for."""
        left = self.budget_left()
        if left is None:
            return chunk
        left -= self.book.owed_usd
        fits = 0
        for one in chunk:
            left -= queue.estimate(one.text)
            if left < 0:
                break
            fits += 1
        if not fits and not any(one.under_way for one in self._queues.values()):
            estimated = sum(queue.estimate(one.text) for one in chunk)
            self.stop(
                f"the next batch, of {count(len(chunk), 'request')}, is estimated at {money(estimated)}, more than the "
                "cost cap leaves. Raise max_cost_usd (--max-cost) to resume"
            )
        return chunk[:fits]

    def say(self) -> None:
        """Tell the line of progress, if it has changed."""
        line = self.progress()
        if line != self._said:
            self._said = line
            self._tell(line)

    def progress(self) -> str:
        """Return a line that says how far the batches are; "" if none is under way."""
        batches = list(self.under_way.values())
        if not batches:
            return ""
        total = sum(one.intent.requests for one in batches)
        reported = [one.intent.done for one in batches if one.intent.done is not None]
        done = f"{sum(reported):,} of {count(total, 'request')} done" if reported else count(total, "request")
        unsaid = "" if reported else " (no progress is reported before a batch ends)"
        now = time.time()
        age = max(now - min(one.intent.created_at for one in batches), 0.0)
        look = max(min(one.next_look for one in batches) - now, 0.0)
        which = f"{count(len(batches), 'batch', 'batches')}, {done}{unsaid}"
        return f"{which}, oldest {_duration(age)}, next look in {_duration(look)}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
