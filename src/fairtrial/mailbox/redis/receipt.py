"""Settles one delivery from Redis, and renews its lease from a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from fairtrial.errors import LeaseLostError
from fairtrial.mailbox.protocol import Renewer
from fairtrial.mailbox.redis.coalesce import Call
from fairtrial.mailbox.redis.errors import is_gone, translated
from fairtrial.mailbox.redis.queue import RedisQueue
from fairtrial.mailbox.redis.scripts import ACK, BURY, EXTEND, NACK, LuaScript
from fairtrial.mailbox.redis.thread_connection import ThreadConnection

CHUNK = 200
OURS = ord("1")
"""The answer of a settling script if the lease was still valid."""
_MAX_REASON = 2000


class RedisReceipt:
    """The handle of one delivery: its stream entry and its mailbox."""

    __slots__ = ("consumer", "entry", "mailbox", "message_id")

    def __init__(self, mailbox: RedisQueue[Any], entry: str, consumer: str, message_id: str) -> None:
        self.mailbox = mailbox
        self.entry = entry
        self.consumer = consumer
        self.message_id = message_id

    @property
    def renewer(self) -> Renewer:
        """The renewer for this lease and others of the same mailbox."""
        return self.mailbox.renewer

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        await self._run("acknowledging", ACK, (self.mailbox.keys.stream,), (self.entry,))

    async def nack(self, delay: float, *, counted: bool) -> None:
        """See `Receipt.nack`."""
        keys = (self.mailbox.keys.stream, self.mailbox.keys.delayed)
        # Rounded up: a message must not return before its delay has passed.
        await self._run("giving back", NACK, keys, (self.entry, int(delay * 1000 + 0.999999), int(counted)))

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        consumer, idle = self.mailbox.consumers.extended(seconds)
        head = (consumer, idle, self.consumer)
        await self._run("extending", EXTEND, (self.mailbox.keys.stream,), (self.entry,), head=head)
        self.consumer = consumer

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        keys = (self.mailbox.keys.stream, self.mailbox.keys.dead)
        args = (self.entry, _storable(reason), _storable(error))
        await self._run("setting aside", BURY, keys, args)

    async def reply(self, address: str | None, body: Any) -> str:
        """See `Message.reply`."""
        return await self.mailbox.send_reply(self.message_id, address, body)

    async def _run(
        self,
        doing: str,
        script: LuaScript,
        keys: tuple[str, ...],
        args: tuple[Any, ...],
        *,
        head: tuple[Any, ...] = (),
    ) -> None:
        mailbox = self.mailbox
        mailbox.check_open()
        try:
            ours = await mailbox.connection.submit(script, keys, (mailbox.consumers.token, *head), args)
        except (RedisError, OSError) as error:
            if is_gone(error):
                raise self.lost() from None
            raise translated(error, f"{doing} message {self.message_id} of {mailbox.name}") from None
        if ours != OURS:
            raise self.lost()

    def lost(self) -> LeaseLostError:
        """Return the error for a lease that was lost."""
        return LeaseLostError(
            f"the lease of message {self.message_id} of {self.mailbox.name} was lost: it expired, or the message was "
            "settled before"
        )


class RedisRenewer:
    """Renews the leases of a mailbox from any thread, in chunks that keep the server responsive."""

    def __init__(self, connection: ThreadConnection) -> None:
        self._connection = connection

    def renew(self, receipts: Sequence[RedisReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; False for those that are lost."""
        groups: dict[tuple[int, str], list[int]] = {}
        for at, receipt in enumerate(receipts):
            groups.setdefault((id(receipt.mailbox), receipt.consumer), []).append(at)
        calls: list[Call] = []
        places: list[list[int]] = []
        for group in groups.values():
            group.sort(key=lambda at: _order(receipts[at].entry))
            first = receipts[group[0]]
            consumer, idle = first.mailbox.consumers.extended(seconds)
            for start in range(0, len(group), CHUNK):
                chunk = group[start : start + CHUNK]
                head = [first.mailbox.consumers.token, consumer, idle, first.consumer]
                entries = [receipts[at].entry for at in chunk]
                calls.append(Call(EXTEND, (first.mailbox.keys.stream,), head + entries))
                places.append(chunk)
                for at in chunk:
                    receipts[at].consumer = consumer
        kept = [False] * len(receipts)
        for answer, chunk in zip(self._connection.run(calls), places, strict=True):
            if isinstance(answer, BaseException):
                if is_gone(answer):
                    continue
                raise translated(answer, "renewing leases")
            for at, held in zip(chunk, answer, strict=True):
                kept[at] = held == OURS
        return kept


def _order(entry: str) -> tuple[int, int]:
    time, _, sequence = entry.partition("-")
    return int(time), int(sequence)


def _storable(text: str) -> bytes:
    return text[:_MAX_REASON].encode("utf-8", "replace")
