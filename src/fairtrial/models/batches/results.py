"""The results of a batch that has ended: read in pieces, and stored as the outcomes of its requests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from fairtrial.base.formatting import count
from fairtrial.models.batches.batch_queue import BatchQueue
from fairtrial.models.batches.calls import LineError, pause_after
from fairtrial.models.batches.request_book import PIECE, RequestBook
from fairtrial.models.batches.requests import custom_id
from fairtrial.models.batches.wire import BatchStatus, Line, is_gone
from fairtrial.store.batches import AGAIN, INVALID, SUCCEEDED, BatchIntent, BatchRequest

log = logging.getLogger("fairtrial.models")

_REREADS = 3
_TOO_MANY_TOKENS = frozenset({"token_limit_exceeded", "enqueued_token_limit_exceeded"})
_UNCOUNTED = frozenset({"canceled", "cancelled", "batch_cancelled"})


class BatchResults:
    """The results of one batch.

    The trials of the last piece wait until `release`: otherwise a run could end before its last batch is deleted, and
    the next process has no reason to look at a batch if all trials have results.
    """

    def __init__(
        self,
        book: RequestBook,
        queue: BatchQueue,
        intent: BatchIntent,
        status: BatchStatus,
        rows: Sequence[BatchRequest],
    ) -> None:
        self._book, self._queue, self._intent, self._status, self._rows = book, queue, intent, status, rows
        self._open = {custom_id(intent.id, row.key): row for row in rows}
        self._strange = 0
        self._held: list[BatchRequest] = []

    async def read(self) -> None:
        """Store the outcomes of all requests."""
        if self._status.problems and not self._status.files:
            await self._refused()
            return
        for attempt in range(1, _REREADS + 1):
            if not self._open:
                break
            try:
                await self._read_once()
                pause = min(self._queue.settings.poll_seconds, pause_after(attempt, None))
            except Exception as error:
                if is_gone(error):
                    break
                found = self._queue.calls.model_error(error)
                if not found.retryable:
                    raise found from error
                log.warning("the results of batch %s could not be read to their end: %s", self._status.id, found)
                pause = pause_after(attempt, found.retry_after)
            if self._open:
                await asyncio.sleep(pause)
        if self._strange:
            log.warning("batch %s has %s that were not in it", self._status.id, count(self._strange, "result"))
        if self._open:
            log.warning(
                "batch %s has no result for %s, which %s sent again",
                self._status.id,
                count(len(self._open), "request"),
                "is" if len(self._open) == 1 else "are",
            )
            await self._settle([row._replace(state=AGAIN, tries=row.tries + 1) for row in self._open.values()])

    async def _read_once(self) -> None:
        calls = self._queue.calls
        piece: dict[str, BatchRequest] = {}
        self._strange = 0
        async for line in calls.wire.results(await calls.client(), self._status):
            row = self._open.get(line.custom_id)
            if row is None:
                self._strange += bool(line.custom_id) and not line.custom_id.startswith(self._intent.id)
                continue
            piece.setdefault(line.custom_id, self._outcome_of(row, line))
            if len(piece) == PIECE:
                await self._keep(piece)
        await self._keep(piece)

    async def _keep(self, piece: dict[str, BatchRequest]) -> None:
        await self._settle(list(piece.values()))
        for name in piece:  # Only what is stored is not read again.
            del self._open[name]
        piece.clear()

    async def _settle(self, rows: Sequence[BatchRequest]) -> None:
        if rows:
            settled = await self._book.settle(rows)
            self._queue.learn(rows)
            await self.release()
            self._held = settled

    async def release(self) -> None:
        """Wake the trials that still wait for stored outcomes."""
        held, self._held = self._held, []
        await self._book.wake(held)

    def _outcome_of(self, row: BatchRequest, line: Line) -> BatchRequest:
        if line.status is None:
            return row._replace(state=AGAIN, tries=row.tries + (line.body not in _UNCOUNTED))
        if line.status == 200:
            try:
                cost = self._queue.calls.cost(line.body)
            except (KeyError, TypeError, ValueError, AttributeError):
                cost = None  # The trial that reads the reply says what is wrong with it.
            return row._replace(state=SUCCEEDED, cost_usd=cost, reply=_json(line.body))
        error = self._queue.calls.error(LineError(line.status, line.body))
        if error.retryable:
            return row._replace(state=AGAIN, tries=row.tries + 1)
        return row._replace(state=INVALID, reply=_json({"status": line.status, "body": line.body}))

    async def _refused(self) -> None:
        """Settle the requests of a batch that the provider refused as a whole, before it answered any."""
        queue, rows, problems = self._queue, self._rows, self._status.problems
        if any(code in _TOO_MANY_TOKENS for _line, code, _message in problems):
            log.warning("the provider has no room for batch %s now: %s", self._status.id, problems[0][2])
            if alone := sum(one.under_way - one.blocked for one in queue.beside) == 1:
                queue.largest = max(len(rows) // 2, 1)
            else:
                queue.blocked += 1
                await queue.room.wait()
                queue.blocked -= 1
            if len(rows) > 1 or not alone:
                await self._settle([row._replace(state=AGAIN) for row in rows])
                return
        named = {line: message for line, _code, message in problems if line is not None}
        general = "; ".join(dict.fromkeys(message for line, _code, message in problems if line is None))
        settled: list[BatchRequest] = []
        for number, row in enumerate(sorted(rows, key=lambda row: row.key), 1):
            message = named.get(number) if named else (general or "the batch failed")
            if message is None:  # Another line is to blame.
                settled.append(row._replace(state=AGAIN))
            else:
                body = {"error": {"message": message, "type": "invalid_request_error"}}
                settled.append(row._replace(state=INVALID, reply=_json({"status": 400, "body": body})))
        await self._settle(settled)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
