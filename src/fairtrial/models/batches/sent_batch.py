"""One batch from the moment when it may be sent: submitted or found, watched, read to its end, deleted."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fairtrial.errors import ModelAuthError, ModelError, ModelUnavailableError
from fairtrial.models.batches.batch_queue import BatchQueue
from fairtrial.models.batches.calls import pause_after
from fairtrial.models.batches.recovery import MARGIN_SECONDS, Adopt, Candidate, Read, Wait, decide
from fairtrial.models.batches.results import BatchResults
from fairtrial.models.batches.wire import BatchStatus, is_gone
from fairtrial.store.batches import AGAIN, SENT, BatchIntent, BatchRequest

if TYPE_CHECKING:
    from fairtrial.models.batches.sender import RunBatches

log = logging.getLogger("fairtrial.models")

_LEAST_POLL_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 600.0
_GROWTH = 1.5


class SentBatch:
    """A batch of a run.

    Attributes:
        intent: The batch as it is stored.
        next_look: When the provider is asked for its state again.
    """

    def __init__(self, run: RunBatches, queue: BatchQueue, intent: BatchIntent, rows: Sequence[BatchRequest]) -> None:
        self._run, self._queue, self._book = run, queue, run.book
        self._calls, self._wire, self._settings = queue.calls, queue.calls.wire, queue.settings
        self.intent = intent
        self._rows = rows
        self.next_look = 0.0

    async def send(self, lines: list[str]) -> None:
        """Store, send and watch the batch."""
        try:
            await self._book.plan(self.intent, self._rows)
            await self._change(state="submitting")
            try:
                # It may be repeated: a file costs nothing, and all with this name are deleted in the end.
                file_id = await self._calls.repeated(lambda client: self._wire.upload(client, self.intent, lines))
                if file_id is not None:
                    await self._change(file_id=file_id)
                made = await self._create(lines)
            except ModelError as error:
                # Nothing was made: the requests end with this error, and the same command sends them again.
                await self._abandon(error)
                return
            lines.clear()
            if made is not None:
                self._book.taken.add(made.id)
                await self._change(state="submitted", batch_id=made.id)
            elif not await self._find():
                return
            await self._follow()
        except ModelAuthError as error:
            raise self._calls.with_batches_kept(error) from error
        finally:
            self._queue.make_room()

    async def resume(self) -> None:
        """Continue with the batch of an earlier process."""
        self._queue.under_way += 1
        try:
            self._rows = self._book.of(self.intent, SENT)
            if self.intent.state == "planned":
                await self._abandon()
                return
            if self.intent.state == "submitting" and not await self._find():
                return
            if self._rows or not await self._has_ended():
                await self._follow()
        except ModelAuthError as error:
            raise self._calls.with_batches_kept(error) from error
        finally:
            self._queue.make_room()

    async def _change(self, **values: Any) -> None:
        self.intent = await self._book.change(self.intent, **values)

    async def _abandon(self, error: ModelError | None = None) -> None:
        """Forget the batch, which the provider has not made."""
        if self.intent.file_id is not None or (error is None and self.intent.state == "submitting"):
            await self._delete(None)
        await self._book.abandon(self.intent, self._rows, error)

    async def _create(self, lines: list[str]) -> BatchStatus | None:
        """Make the batch; None if it is not known whether the provider has made it."""
        failures = 0
        while True:
            try:
                return await self._wire.create(await self._calls.client(), self.intent, lines)
            except Exception as error:
                found = self._calls.model_error(error)
                if not found.retryable:
                    raise found from error
                if isinstance(found, ModelUnavailableError) and not self._calls.never_sent(error):
                    log.warning("the answer to a batch was lost (%s): looking for it in the provider's list", found)
                    return None
                failures += 1
                await asyncio.sleep(pause_after(failures, found.retry_after))

    async def _find(self) -> bool:
        """Find the batch in the provider's list; if it was not made, abandon it and return False."""
        since = time.monotonic()
        first_ids: dict[str, str] = {}
        earliest = self.intent.created_at - MARGIN_SECONDS
        while True:
            listed: list[Candidate] = await self._calls.repeated(lambda client: self._wire.listed(client, earliest))
            decision = decide(
                self.intent.id,
                self.intent.requests,
                self.intent.created_at,
                [replace(one, first_id=first_ids.get(one.id)) for one in listed],
                waited_seconds=time.monotonic() - since,
                lag_seconds=self._settings.list_lag_seconds,
                labelled=self._calls.labelled,
                known=self._book.taken,
            )
            if isinstance(decision, Adopt):
                self._book.taken.add(decision.batch_id)
                await self._change(state="submitted", batch_id=decision.batch_id)
                return True
            if isinstance(decision, Read):
                for batch_id in decision.batch_ids:
                    first_ids[batch_id] = await self._first_id(batch_id)
            elif isinstance(decision, Wait):
                poll = max(self._settings.poll_seconds, _LEAST_POLL_SECONDS)
                await asyncio.sleep(poll if decision.seconds is None else min(decision.seconds, poll))
            else:
                await self._abandon()
                return False

    async def _first_id(self, batch_id: str) -> str:
        async def read(client: Any) -> str:
            try:
                async for line in self._wire.results(client, await self._wire.get(client, batch_id)):
                    return line.custom_id
            except Exception as error:
                if not is_gone(error):  # Another run of the account may have deleted its batch meanwhile.
                    raise
            return ""

        return await self._calls.repeated(read)

    async def _has_ended(self) -> bool:
        """End a batch whose replies an earlier process has stored; False if it is to be watched."""
        with self._run.finishing():
            try:
                status = await self._wire.get(await self._calls.client(), str(self.intent.batch_id))
            except Exception as error:
                if not is_gone(error):
                    return False  # It is looked at again later, as any other.
                await self._finish(None)
                return True
            if status.ended:
                await self._finish(status)
            return status.ended

    async def _follow(self) -> None:
        """Watch the batch until it has ended, and store its replies."""
        pause = self._settings.poll_seconds
        self._run.under_way[self.intent.id] = self
        try:
            while True:
                wait = pause * random.uniform(0.9, 1.1)  # noqa: S311 - no secret
                self.next_look = time.time() + wait
                self._run.say()
                await asyncio.sleep(wait)
                pause = min(pause * _GROWTH, _LONGEST_POLL_SECONDS)
                status = await self._status()
                if status is None and time.time() < self.intent.created_at + self._settings.list_lag_seconds:
                    continue  # It was made a moment ago: perhaps not every server of the provider has it.
                if status is None or status.ended:
                    break
                if (status.done, status.failed) != (self.intent.done, self.intent.failed):
                    await self._change(done=status.done, failed=status.failed)
        finally:
            del self._run.under_way[self.intent.id]
            self._run.say()
        with self._run.finishing():
            await self._finish(status)

    async def _status(self) -> BatchStatus | None:
        """Return the state of the batch; None if the provider does not have it any more."""
        batch_id = str(self.intent.batch_id)
        try:
            return await self._calls.repeated(lambda client: self._wire.get(client, batch_id))
        except ModelError as error:
            if is_gone(error.__cause__):
                return None
            raise

    async def _finish(self, status: BatchStatus | None) -> None:
        """Store the replies of the batch, which has ended, and delete it at the provider."""
        counts = {} if status is None else {"done": status.done, "failed": status.failed}
        results: BatchResults | None = None
        if status is not None and self._rows:
            results = BatchResults(self._book, self._queue, self.intent, status, self._rows)
            await results.read()
        elif self._rows:
            log.warning("the provider no longer has batch %s: its requests are sent again", self.intent.batch_id)
            again = [row._replace(state=AGAIN, tries=row.tries + 1) for row in self._rows]
            await self._book.wake(await self._book.settle(again))
        # Deleted first: if the process dies between the two, the next one finds nothing to delete.
        await self._delete(status)
        await self._change(state="collected", **counts)
        if results is not None:
            await results.release()

    async def _delete(self, status: BatchStatus | None) -> None:
        """Delete what the provider keeps of the batch; if that fails, it is only logged."""
        if self._settings.keep_files:
            return
        try:
            await self._wire.delete(await self._calls.client(), self.intent, status)
        except Exception as error:
            if not is_gone(error):
                found = self._calls.model_error(error)
                which = self.intent.batch_id or self.intent.id
                log.warning("the files of batch %s could not be deleted at the provider: %s", which, found)
