"""Queues of SQS: names, attributes, messages as SQS holds them, bodies in S3."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from fairtrial.errors import BodyError, ConfigurationError, MailboxError, MessageTooLargeError, ReplyNotAvailableError
from fairtrial.mailbox.body import MAX_BYTES
from fairtrial.mailbox.sqs.connection import FAILURES, SqsConnection, code_of, is_gone, translated

_ID: Final = re.compile(r"[0-9a-f]{32}")
_DEAD_ID: Final = re.compile(r"[0-9]{13,15}-[0-9a-f]{8}")
_REFUSED: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAX_COUNT: Final = 1_000_000_000
_MAX_REASON: Final = 2000
HEADER_BYTES: Final = 16 * 1024
"""Room for the header within the size limit of a message."""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One message.

    Attributes:
        payload: The body: text, base64, or the hash of a claim check, depending on `form`.
        form: `text`, `base64` or `claim`; `foreign` if it was not sent by a mailbox.
        id: The id of the message, the same in every copy.
        reply_to: The reply address; empty if there is none.
        deliveries: The deliveries of earlier copies.
        expiries: The expired leases of earlier copies.
        not_before: Do not deliver it before this time, in seconds since the epoch.
        dead_id: The id of the dead letter; empty for other messages.
        reason: Why it is a dead letter.
        error: The type of the error that made it one.
        died_at: When it became one, in seconds since the epoch.
    """

    payload: str
    form: str = "text"
    id: str = ""
    reply_to: str = ""
    deliveries: int = 0
    expiries: int = 0
    not_before: float = 0.0
    dead_id: str = ""
    reason: str = ""
    error: str = ""
    died_at: float = 0.0

    @classmethod
    def of(cls, body: bytes, reply_to: str) -> Self:
        """Return a new message. Bodies with characters that SQS refuses are sent as base64."""
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if text is None or _REFUSED.search(text):
            return cls(base64.b64encode(body).decode(), "base64", secrets.token_hex(16), reply_to)
        return cls(text, "text", secrets.token_hex(16), reply_to)

    @classmethod
    def of_claim(cls, sha256: str, reply_to: str) -> Self:
        """Return a new message whose body is in a claim check."""
        return cls(sha256, "claim", secrets.token_hex(16), reply_to)

    def dumps(self) -> str:
        """Return the text to send."""
        header = {name: value for name, value in asdict(self).items() if name != "payload" and value != _DEFAULTS[name]}
        return json.dumps(header, separators=(",", ":"), ensure_ascii=False) + "\n" + self.payload

    @classmethod
    def loads(cls, text: str) -> Self:
        """Return the message of a text that was received.

        Raises:
            BodyError: it was not sent by a mailbox.
        """
        header, mark, payload = text.partition("\n")
        try:
            values = json.loads(header) if mark and len(header) <= HEADER_BYTES else None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not _is_valid(values):
            raise BodyError("it was not sent by a mailbox: its first line is not a valid header")
        return cls(payload, **values)

    def body(self) -> bytes:
        """Return the body of a message that is not in a claim check.

        Raises:
            BodyError: it is damaged, or was not sent by a mailbox.
        """
        if self.form == "foreign":
            raise BodyError("it was not sent by a mailbox")
        if self.form == "text":
            return self.payload.encode("utf-8", "surrogatepass")
        try:
            return base64.b64decode(self.payload, validate=True)
        except (binascii.Error, ValueError):
            raise BodyError("its base64 is damaged") from None


_DEFAULTS: Final = {field.name: field.default for field in fields(WireMessage)}


def as_storable(text: str, longest: int = _MAX_REASON) -> str:
    """Return a reason or error as a header can store it: not too long, without characters that SQS refuses."""
    return _REFUSED.sub("\ufffd", text[:longest])


def _is_valid(values: dict[str, Any]) -> bool:
    """Check a header: anyone who can write to the queue can make one, and its values are displayed and logged."""
    for name, value in values.items():
        default = _DEFAULTS.get(name)
        if name == "payload" or name not in _DEFAULTS:
            return False
        if isinstance(default, str) and not isinstance(value, str):
            return False
        if isinstance(default, int | float) and (type(value) not in (int, type(default)) or not 0 <= value < 1e12):
            return False
        if isinstance(default, int) and value > _MAX_COUNT:
            return False
    dead_id = values.get("dead_id", "")
    return (
        _ID.fullmatch(values.get("id", "")) is not None
        and values.get("form", "text") in ("text", "base64", "claim")
        and (not dead_id or _DEAD_ID.fullmatch(dead_id) is not None)
    )


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


THRESHOLD: Final = 256 * 1024
_HASH: Final = re.compile(r"[0-9a-f]{64}")


class S3ClaimCheck:
    """Stores large bodies in the bucket of an SQS address, under `<prefix>/<SHA-256>`.

    Objects are not deleted when a message is settled, because several messages may have the same body: give the bucket
    a lifecycle rule that deletes them after 15 days, which is longer than SQS keeps a message.

    Args:
        connection: The connection, whose address names the bucket.
        threshold: Larger bodies, in bytes, are stored here. A smaller one costs less in the message.
        max_bytes: Larger bodies are refused.
    """

    def __init__(self, connection: SqsConnection, *, threshold: int = THRESHOLD, max_bytes: int = MAX_BYTES) -> None:
        if connection.address.bucket is None:
            raise ConfigurationError("the SQS address must name a bucket: sqs://region/prefix?bucket=NAME")
        if not 0 < threshold <= max_bytes:
            raise ConfigurationError(f"threshold must be between 1 and max_bytes (got {threshold})")
        self.bucket = connection.address.bucket
        self.threshold = threshold
        self.max_bytes = max_bytes
        self._connection = connection

    async def keep(self, body: bytes) -> str:
        """Store a body; returns its hash."""
        if len(body) > self.max_bytes:
            raise MessageTooLargeError(f"the body must have at most {self.max_bytes} bytes (got {len(body)})")
        sha256 = hashlib.sha256(body).hexdigest()
        try:
            # Even if it is there: that renews the age by which the bucket deletes objects.
            await self._connection.call_s3("put_object", Bucket=self.bucket, Key=self._key(sha256), Body=body)
        except FAILURES as error:
            raise translated(error, f"storing a large body in bucket {self.bucket}") from None
        return sha256

    async def fetch(self, sha256: str) -> bytes:
        """Return the body with this hash.

        Raises:
            BodyError: the hash is invalid or not found, or the body is damaged or too large.
            OSError: the bucket cannot be read at present.
        """
        if not _HASH.fullmatch(sha256):
            raise BodyError("it names no valid claim check")
        try:
            answer = await self._connection.call_s3("get_object", Bucket=self.bucket, Key=self._key(sha256))
            async with answer["Body"] as stream:
                size = int(answer["ContentLength"])
                if size > self.max_bytes:  # Checked before it is read, because the bucket is shared.
                    raise BodyError(f"the body must have at most {self.max_bytes} bytes (got {size})")
                body: bytes = await stream.read()
        except FAILURES as error:
            if code_of(error) in ("NoSuchKey", "404"):
                raise BodyError(f"its body {sha256[:12]} is not in bucket {self.bucket}") from None
            raise OSError(str(translated(error, f"reading a large body from bucket {self.bucket}"))) from None
        if hashlib.sha256(body).hexdigest() != sha256:
            raise BodyError(f"its body {sha256[:12]} in bucket {self.bucket} is damaged")
        return body

    def _key(self, sha256: str) -> str:
        return f"{self._connection.address.prefix}/{sha256}"
