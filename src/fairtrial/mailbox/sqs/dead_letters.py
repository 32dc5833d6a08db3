"""The dead letters of a mailbox on SQS, in a separate queue.

SQS cannot list a queue. Dead letters are received and made visible again, which is fine for hundreds of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from fairtrial.errors import BodyError, ConfigurationError
from fairtrial.mailbox.dead_letters import DeadLetter
from fairtrial.mailbox.sealing import readable
from fairtrial.mailbox.sqs.batches import MAX_ENTRIES
from fairtrial.mailbox.sqs.connection import SqsConnection
from fairtrial.mailbox.sqs.errors import FAILURES, entry_error, translated
from fairtrial.mailbox.sqs.queues import MailboxQueues
from fairtrial.mailbox.sqs.wire_message import WireMessage

_LISTING_SECONDS: Final = 120
_EMPTY_POLLS: Final = 2  # A short poll of SQS may miss messages: the queue is empty when several found none.


class SqsLetterBox(Protocol):
    """The interface of a mailbox for its dead letters."""

    name: str
    connection: SqsConnection
    queues: MailboxQueues

    async def open(self) -> None:
        """Find or create the queues."""
        ...

    async def count(self, url: str) -> tuple[int, int, int]:
        """Return the number of messages in a queue: waiting, delayed and in flight."""
        ...

    async def send_wire(self, wire: WireMessage, url: str | None = None) -> None:
        """Send a message to one of the queues."""
        ...

    async def body_of(self, wire: WireMessage) -> bytes:
        """Return the body of a message, from the claim check if it is there."""
        ...


class SqsDeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, mailbox: SqsLetterBox) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        """Return the number of dead letters."""
        await self._mailbox.open()
        url = self._mailbox.queues.dead
        return 0 if url is None else sum(await self._mailbox.count(url))

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1 (got {limit})")
        held = await self._receive_all()
        await self._release([handle for handle, _ in held])
        wires = {wire.dead_id: wire for _, wire in held if after is None or wire.dead_id > after}
        return [await self._letter(wires[id]) for id in sorted(wires)[:limit]]

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        return await self._remove(ids, send=True)

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        return await self._remove(ids, send=False)

    async def _remove(self, ids: Collection[str], *, send: bool) -> int:
        wanted = set(ids)
        if not wanted:
            return 0
        held = await self._receive_all()
        found = {}
        try:
            for handle, wire in held:
                if wire.dead_id in wanted:
                    if send:
                        clean = replace(wire, deliveries=0, dead_id="", reason="", error="", died_at=0.0)
                        await self._mailbox.send_wire(clean)
                    await self._batch("delete_message_batch", [handle])
                    found[handle] = wire.dead_id
        finally:
            await self._release([handle for handle, _ in held if handle not in found])
        return len(set(found.values()))

    async def _receive_all(self) -> list[tuple[str, WireMessage]]:
        await self._mailbox.open()
        url = self._mailbox.queues.dead
        held: list[tuple[str, WireMessage]] = []
        empty = 0
        while url is not None and empty < _EMPTY_POLLS:
            try:
                messages = await self._mailbox.connection.receive(
                    QueueUrl=url, MaxNumberOfMessages=MAX_ENTRIES, VisibilityTimeout=_LISTING_SECONDS, WaitTimeSeconds=0
                )
            except FAILURES as error:
                raise translated(error, f"reading dead letters of {self._mailbox.name}") from None
            empty = 0 if messages else empty + 1
            for message in messages:
                try:
                    wire = WireMessage.loads(message["Body"])
                except BodyError:
                    continue  # Not ours; it becomes visible again by itself.
                if wire.dead_id:
                    held.append((message["ReceiptHandle"], wire))
        return held

    async def _release(self, handles: Sequence[str]) -> None:
        await self._batch("change_message_visibility_batch", handles, VisibilityTimeout=0)

    async def _batch(self, operation: str, handles: Sequence[str], **more: Any) -> None:
        url = self._mailbox.queues.dead
        doing = f"changing dead letters of {self._mailbox.name}"
        submit = self._mailbox.connection.batcher.submit
        for future in [submit(operation, url or "", {"ReceiptHandle": handle, **more}) for handle in handles]:
            try:
                failure = await future
            except FAILURES as error:
                raise translated(error, doing) from None
            if failure is not None:
                raise entry_error(failure, doing)

    async def _letter(self, wire: WireMessage) -> DeadLetter:
        try:
            text = readable(await self._mailbox.body_of(wire)).decode("utf-8", "replace")
        except (BodyError, OSError):
            text = f"sha256:{wire.payload}" if wire.form == "claim" else wire.payload
        return DeadLetter(
            wire.dead_id,
            wire.id,
            text,
            wire.deliveries,
            wire.reason,
            wire.error,
            wire.reply_to or None,
            died_at=wire.died_at,
        )
