"""The queues of a mailbox: their names, creation, shards and deletion.

The name of a queue has a readable part and a hash of the name of the mailbox. Tags keep the whole name, the owner, the
number of shards, and when an abandoned queue may be deleted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

from fairtrial.errors import MailboxError, ReplyNotAvailableError
from fairtrial.mailbox.sqs.connection import SqsConnection
from fairtrial.mailbox.sqs.errors import FAILURES, code_of, is_gone, translated

_log = logging.getLogger(__name__)
MAILBOX_TAG: Final = "fairtrial:mailbox"
OWNER_TAG: Final = "fairtrial:owner"
SHARDS_TAG: Final = "fairtrial:shards"
EXPIRES_TAG: Final = "fairtrial:expires"
_RETENTION: Final = str(14 * 24 * 3600)  # The longest that SQS offers; its default of 4 days ends long weekends.
_REUSE_SECONDS: Final = 66.0  # SQS refuses the name of a deleted queue for 60 s.
_REUSE_STEP: Final = 3.0
_SHARDS_SECONDS: Final = 60.0  # How often receivers look for shards that others have added.
_PLAIN: Final = 30
_GRACE_SECONDS: Final = 60.0
_MAX_SWEPT: Final = 1000


def queue_name(prefix: str, mailbox: str, shard: int = 0) -> str:
    """Return the name of a queue of a mailbox."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", mailbox)[:_PLAIN]
    name = f"{prefix}-{plain}-{hashlib.sha256(mailbox.encode()).hexdigest()[:16]}"
    return f"{name}-s{shard}" if shard else name


def dead_name(prefix: str, mailbox: str) -> str:
    """Return the name of the queue with the dead letters of a mailbox."""
    return f"{queue_name(prefix, mailbox)}-dead"


class MailboxQueues:
    """The queues of one mailbox.

    Args:
        connection: The connection to SQS.
        mailbox: The name of the mailbox.
        shards: The number of queues to spread messages over.
        growing: Whether to use more queues if other processes have created more, and to record the number.
        ttl_seconds: Mark the queues as abandoned unless they are refreshed within this time.
    """

    def __init__(
        self,
        connection: SqsConnection,
        mailbox: str,
        shards: int = 1,
        *,
        growing: bool = False,
        ttl_seconds: float | None = None,
    ) -> None:
        self._connection = connection
        self._mailbox = mailbox
        self._prefix = connection.address.prefix
        self._wanted = shards
        self._growing = growing
        self._ttl = ttl_seconds
        self._next_look = 0.0
        self._lock = asyncio.Lock()
        self.urls: list[str] = []
        self.dead: str | None = None

    async def open(self, *, create: bool, again: bool = False) -> None:
        """Find the queues, and create those that are missing if `create`.

        Raises:
            ReplyNotAvailableError: there are none, and they must not be created.
        """
        async with self._lock:
            if self.urls and not again:
                return
            first = await self._find_or_create(queue_name(self._prefix, self._mailbox), create=create)
            if first is None:
                self.urls = []
                raise ReplyNotAvailableError(f"mailbox {self._mailbox} does not exist")
            await self._open_shards(first, create=create)
            if create and self._ttl is None:
                self.dead = await self._find_or_create(dead_name(self._prefix, self._mailbox), create=True)
            elif create:
                self.dead = await self._find(dead_name(self._prefix, self._mailbox))

    async def refresh_shards(self) -> None:
        """Look for shards that others have added, at most once a minute."""
        now = self._connection.clock.monotonic()
        if self._growing and self.urls and now >= self._next_look:
            self._next_look = now + _SHARDS_SECONDS
            async with self._lock:
                await self._open_shards(self.urls[0], create=True)

    async def open_dead(self) -> str:
        """Return the queue for dead letters, and create it if necessary."""
        if self.dead is None:
            self.dead = await self._find_or_create(dead_name(self._prefix, self._mailbox), create=True)
        assert self.dead is not None  # noqa: S101 - for type checkers
        return self.dead

    async def exists(self) -> bool:
        """Return whether the mailbox has a queue."""
        return await self._find(queue_name(self._prefix, self._mailbox)) is not None

    async def expire(self, seconds: float) -> None:
        """Let the sweeper delete the queues after this time, unless this is called again."""
        expires = {EXPIRES_TAG: str(int(self._connection.clock.time() + seconds))}
        for url in self._all():
            await self._call("tag_queue", QueueUrl=url, Tags=expires)

    async def delete(self) -> None:
        """Delete the queues with all messages."""
        for url in self._all():
            await self._call("delete_queue", QueueUrl=url)

    def _all(self) -> list[str]:
        return [*self.urls, *([self.dead] if self.dead else [])]

    async def _open_shards(self, first: str, *, create: bool) -> None:
        count = self._wanted
        if self._growing:
            tagged = (await self._call("list_queue_tags", QueueUrl=first)).get("Tags", {}).get(SHARDS_TAG, "1")
            known = int(tagged) if re.fullmatch(r"[0-9]{1,2}", tagged) else 1
            if create and known < count:
                await self._call("tag_queue", QueueUrl=first, Tags={SHARDS_TAG: str(count)})
            count = max(known, count)
        urls = [first]
        for shard in range(1, count):
            found = await self._find_or_create(queue_name(self._prefix, self._mailbox, shard), create=create)
            urls += [found] if found else []
        self.urls = urls
        self._next_look = self._connection.clock.monotonic() + _SHARDS_SECONDS

    async def _find(self, name: str) -> str | None:
        try:
            return str((await self._connection.call("get_queue_url", QueueName=name))["QueueUrl"])
        except FAILURES as error:
            if is_gone(error):
                return None
            raise translated(error, f"opening {self._mailbox}") from None

    async def _find_or_create(self, name: str, *, create: bool) -> str | None:
        found = await self._find(name)
        return await self._create(name) if found is None and create else found

    async def _create(self, name: str) -> str:
        owner = re.sub(r"[^A-Za-z0-9_.:/=+@ -]", "-", f"{socket.gethostname()}.{os.getpid()}")[:200]
        tags = {MAILBOX_TAG: self._mailbox, OWNER_TAG: owner}
        if self._ttl is not None:
            tags[EXPIRES_TAG] = str(int(self._connection.clock.time() + self._ttl))
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _REUSE_SECONDS
        while True:
            try:
                answer = await self._connection.call(
                    "create_queue", QueueName=name, Attributes={"MessageRetentionPeriod": _RETENTION}, tags=tags
                )
                return str(answer["QueueUrl"])
            except FAILURES as error:
                if code_of(error) != "QueueDeletedRecently" or loop.time() >= give_up:
                    raise translated(error, f"creating the queue of {self._mailbox}") from None
                _log.info("queue %s was deleted less than a minute ago; waiting until SQS accepts its name", name)
                await asyncio.sleep(_REUSE_STEP)

    async def _call(self, operation: str, **arguments: Any) -> Any:
        try:
            return await self._connection.call(operation, **arguments)
        except FAILURES as error:
            if is_gone(error) and operation in ("delete_queue", "tag_queue"):
                return {}
            raise translated(error, f"{operation.replace('_', ' ')} of {self._mailbox}") from None


async def list_queues(connection: SqsConnection) -> list[str]:
    """Return the URLs of the queues with the prefix of the address, at most a thousand."""
    try:
        answer = await connection.call(
            "list_queues", QueueNamePrefix=f"{connection.address.prefix}-", MaxResults=_MAX_SWEPT
        )
    except FAILURES as error:
        raise translated(error, "searching for queues") from None
    return list(answer.get("QueueUrls") or ())


async def tags_of(connection: SqsConnection, url: str) -> Mapping[str, str]:
    """Return the tags of a queue; empty if it was deleted meanwhile."""
    try:
        return dict((await connection.call("list_queue_tags", QueueUrl=url)).get("Tags") or {})
    except FAILURES as error:
        if is_gone(error):
            return {}
        raise translated(error, "reading the tags of queues") from None


async def delete_abandoned(connection: SqsConnection) -> int:
    """Delete the queues for replies and results whose owners have not refreshed them; returns their number.

    Killed clients and workers leave such queues behind, and SQS never deletes a queue by itself.
    """
    deleted = 0
    for url in await list_queues(connection):
        expires = (await tags_of(connection, url)).get(EXPIRES_TAG, "")
        if re.fullmatch(r"[0-9]{1,12}", expires) and int(expires) + _GRACE_SECONDS < connection.clock.time():
            try:
                await connection.call("delete_queue", QueueUrl=url)
            except FAILURES as error:
                if not is_gone(error):
                    raise translated(error, "deleting an abandoned queue") from None
            deleted += 1
    return deleted


async def delete_abandoned_quietly(connection: SqsConnection) -> None:
    """Do the same in the background; a failure is only logged."""
    try:
        deleted = await delete_abandoned(connection)
        if deleted:
            _log.info("deleted %d abandoned queues with the prefix %s", deleted, connection.address.prefix)
    except MailboxError as error:
        _log.warning("abandoned queues could not be deleted: %s", error)
