"""Brokers, which open the mailboxes of a suite: one for requests, and one for the results of each run."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from fairtrial.base.plugins import find_plugin
from fairtrial.errors import ConfigurationError, MissingExtraError, ReplyNotAvailableError
from fairtrial.fleet.messages import EvalReply, EvalRequest
from fairtrial.mailbox.body import ClaimCheck
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.mailbox.protocol import Mailbox

_KEPT_SECONDS = 3600
_UNCLAIMED_SECONDS = 30 * 24 * 3600
_MAX_PART = 80
_MAX_SUITES = 1000
_REQUESTS = ".requests"
_MAX_SCANS = 1000  # Steps of the search for queues: a server may have millions of other keys.


def requests_name(suite: str) -> str:
    """Return the name of the mailbox with the requests for a suite's workers."""
    return f"{_part(suite)}{_REQUESTS}"


def requests_suite(key: str) -> str | None:
    """Return the suite, as mailbox names spell it, whose requests a key of Redis belongs to; None if none."""
    found = re.fullmatch(r"\{fairtrial:(.+)\.requests\}:\w+", key)
    return None if found is None else found[1]


def results_name(suite: str, run_id: str) -> str:
    """Return the name of the mailbox for the results of one run. It outlives its collector."""
    return f"{_part(suite)}.results.{_part(run_id)}"


def committed_channel(run_id: str) -> str:
    """Return the channel on which PostgreSQL notifies the clients of a run that a worker has stored results."""
    return f"fairtrial_run_{hashlib.sha256(run_id.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"


def _part(text: str) -> str:
    """Return the text if it may be part of a mailbox name, else a readable substitute with a hash of the text."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", text) and len(text) <= _MAX_PART:
        return text
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")[: _MAX_PART - 20]
    return f"{plain or 'suite'}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


class Broker(Protocol):
    """Opens the mailboxes of suites and runs. Client and workers must use the same broker."""

    async def requests(self, suite: str) -> Mailbox[EvalRequest]:
        """The mailbox a suite's workers take their work from."""
        ...

    async def results(self, suite: str, run_id: str) -> Mailbox[EvalReply]:
        """Open the mailbox for the results of one run, and create it if necessary."""
        ...

    async def leave(self, mailbox: Mailbox[Any]) -> None:
        """Stop using a mailbox; what is in it stays."""
        ...

    async def retire(self, mailbox: Mailbox[Any]) -> None:
        """Close a mailbox that is no longer needed; it is deleted with its messages."""
        ...

    async def close(self) -> None:
        """Close all mailboxes and connections."""
        ...


class _ServerBroker:
    """What brokers on servers have in common: one connection, and the mailboxes that they have opened on it."""

    def __init__(self, connection: Any, mailbox_type: Any, claim_check: ClaimCheck | None) -> None:
        self.connection = connection
        self._mailbox_type = mailbox_type
        self._claim_check = claim_check
        self._open: list[Mailbox[Any]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.connection!r})"

    def _mailbox(self, name: str, body_type: type[Any], **options: Any) -> Any:
        mailbox = self._mailbox_type(name, body_type, self.connection, claim_check=self._claim_check, **options)
        self._open.append(mailbox)
        return mailbox

    async def _expire(self, mailbox: Any, seconds: int) -> None:
        """Let the server delete a mailbox unless it is opened again within this time."""
        await mailbox.expire(seconds)

    async def requests(self, suite: str) -> Mailbox[EvalRequest]:
        """The mailbox a suite's workers take their work from."""
        mailbox: Mailbox[EvalRequest] = self._mailbox(requests_name(suite), EvalRequest)
        return mailbox

    async def results(self, suite: str, run_id: str) -> Mailbox[EvalReply]:
        """Open the mailbox for the results of one run; it expires a month after it was last opened."""
        mailbox: Mailbox[EvalReply] = self._mailbox(results_name(suite, run_id), EvalReply)
        await cast(Any, mailbox).open()
        # Killed clients and stopped runs leave their mailbox behind. A client that resumes the run after it has expired
        # sends the missing trials again.
        await self._expire(mailbox, _UNCLAIMED_SECONDS)
        return mailbox

    async def retire(self, mailbox: Mailbox[Any]) -> None:
        """Empty a mailbox and let it expire in an hour: until then, late duplicates can still be delivered."""
        await mailbox.purge()
        await self._expire(mailbox, _KEPT_SECONDS)
        await self.leave(mailbox)

    async def has_mailbox(self, name: str) -> bool:
        """Return whether a mailbox with this name exists on this server."""
        mailbox = self._mailbox(name, object)
        try:
            return bool(await mailbox.exists())
        finally:
            await self.leave(mailbox)

    async def leave(self, mailbox: Mailbox[Any]) -> None:
        """Stop using a mailbox; what is in it stays."""
        if mailbox in self._open:
            self._open.remove(mailbox)
        await mailbox.close()

    async def close(self) -> None:
        """Close the mailboxes and the connection."""
        for mailbox in list(self._open):
            await self.leave(mailbox)
        await self.connection.close()


class RedisBroker(_ServerBroker):
    """A broker on one Redis. It belongs to the event loop in which it is first used.

    Args:
        url: The address, as `RedisConnection` takes it.
        claim_check: The store for bodies over 64 KB: a folder that client and workers share.
        options: Further connection options of redis-py, such as `ssl_ca_certs`.
    """

    def __init__(self, url: str, *, claim_check: ClaimCheck | None = None, **options: Any) -> None:
        try:
            from fairtrial.mailbox.redis import RedisConnection, RedisMailbox
        except ImportError:
            raise MissingExtraError("a mailbox on Redis", "redis") from None
        super().__init__(RedisConnection(url, **options), RedisMailbox, claim_check)

    async def suites(self) -> list[str]:
        """Return the suites that have a queue on this server, as mailbox names spell them."""
        from redis.exceptions import RedisError

        from fairtrial.mailbox.redis.topology import translated

        try:
            keys = await self.connection.scan("{fairtrial:*.requests}:*", _MAX_SCANS)
        except (RedisError, OSError) as error:
            raise translated(error, "searching for queues") from None
        return sorted({suite for key in keys if (suite := requests_suite(key))})

    async def _expire(self, mailbox: Any, seconds: int) -> None:
        from redis.exceptions import RedisError

        from fairtrial.mailbox.redis.topology import translated

        try:
            for key in (mailbox.keys.stream, mailbox.keys.delayed, mailbox.keys.dead):
                await self.connection.command("EXPIRE", key, seconds)
        except (RedisError, OSError) as error:
            raise translated(error, f"keeping {mailbox.name}") from None


class PostgresBroker(_ServerBroker):
    """A broker in one PostgreSQL database, which may be the store's. It belongs to the event loop of its first use.

    Args:
        url: `postgresql://[user[:password]@]host[:port]/database`, with any parameter of libpq; `?pgbouncer=true` for a
            PgBouncer in transaction mode.
        claim_check: The store for bodies over 64 KB: a folder that client and workers share.
        options: Further options of `PostgresConnection`.
    """

    def __init__(self, url: str, *, claim_check: ClaimCheck | None = None, **options: Any) -> None:
        from fairtrial.mailbox.postgres import PostgresConnection, PostgresMailbox

        super().__init__(PostgresConnection(url, **options), PostgresMailbox, claim_check)

    async def suites(self) -> list[str]:
        """Return the suites that have a queue in this database, as mailbox names spell them."""
        from fairtrial.mailbox.postgres.statements import NAMES

        rows = await self.connection.run("searching for queues", NAMES, {"suffix": _REQUESTS, "most": _MAX_SUITES})
        return [name.removesuffix(_REQUESTS) for (name,) in rows]


class SqsBroker(_ServerBroker):
    """A broker on Amazon SQS. It belongs to the event loop in which it is first used.

    Args:
        url: `sqs://region/prefix?endpoint=...&bucket=...&shards=...`; credentials come from the AWS credential chain.
        claim_check: The store for large bodies; by default the bucket in the URL.
    """

    def __init__(self, url: str, *, claim_check: ClaimCheck | None = None) -> None:
        try:
            from fairtrial.mailbox.sqs import SqsConnection, SqsMailbox
        except ImportError:
            raise MissingExtraError("a mailbox on SQS", "sqs") from None
        super().__init__(SqsConnection(url), SqsMailbox, claim_check)
        self._sweeping: asyncio.Task[None] | None = None

    def _mailbox(self, name: str, body_type: type[Any], **options: Any) -> Any:
        if body_type is EvalReply:
            options["shards"] = 1
        return super()._mailbox(name, body_type, **options)

    async def _expire(self, mailbox: Any, seconds: int) -> None:
        await mailbox.queues.expire(seconds)

    async def results(self, suite: str, run_id: str) -> Mailbox[EvalReply]:
        """Open the mailbox for the results of one run, and delete those that others abandoned.

        SQS never deletes a queue: a sweeper does a month after it was last opened. SQS keeps messages for 14 days.
        """
        from fairtrial.mailbox.sqs.queues import delete_abandoned_quietly

        mailbox = await super().results(suite, run_id)
        if self._sweeping is None:
            self._sweeping = asyncio.ensure_future(delete_abandoned_quietly(self.connection))
        return mailbox

    async def suites(self) -> list[str]:
        """Return the suites that have a queue at this address, as mailbox names spell them."""
        from fairtrial.mailbox.sqs.queues import MAILBOX_TAG, list_queues, tags_of

        names = {
            (await tags_of(self.connection, url)).get(MAILBOX_TAG, "") for url in await list_queues(self.connection)
        }
        return sorted(name.removesuffix(_REQUESTS) for name in names if name.endswith(_REQUESTS))

    async def retire(self, mailbox: Mailbox[Any]) -> None:
        """Let the sweeper delete a mailbox in an hour: until then, late duplicates can still be delivered."""
        await self._expire(mailbox, _KEPT_SECONDS)
        await self.leave(mailbox)

    async def close(self) -> None:
        """Close the mailboxes and the connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await super().close()


class MemoryBroker:
    """A broker in this process, for tests and single-process fleets. Client and workers must share one object."""

    def __init__(self) -> None:
        self._mailboxes: dict[str, InMemoryMailbox[Any]] = {}

    def __repr__(self) -> str:
        return f"<MemoryBroker: {len(self._mailboxes)} mailboxes>"

    def _mailbox(self, name: str, body_type: type[Any]) -> Any:
        if name not in self._mailboxes:
            self._mailboxes[name] = InMemoryMailbox(name, body_type, reply_resolver=self)
        return self._mailboxes[name]

    def resolve(self, name: str) -> Mailbox[Any]:
        """Return the mailbox with this name; raises `ReplyNotAvailableError` if there is none."""
        try:
            return self._mailboxes[name]
        except KeyError:
            raise ReplyNotAvailableError(f"there is no mailbox named {name!r}") from None

    async def requests(self, suite: str) -> Mailbox[EvalRequest]:
        """The mailbox a suite's workers take their work from."""
        mailbox: Mailbox[EvalRequest] = self._mailbox(requests_name(suite), EvalRequest)
        return mailbox

    async def results(self, suite: str, run_id: str) -> Mailbox[EvalReply]:
        """Open the mailbox for the results of one run."""
        mailbox: Mailbox[EvalReply] = self._mailbox(results_name(suite, run_id), EvalReply)
        return mailbox

    async def leave(self, mailbox: Mailbox[Any]) -> None:
        """Do nothing: the mailbox is shared within this process."""

    async def retire(self, mailbox: Mailbox[Any]) -> None:
        """Delete a mailbox."""
        self._mailboxes.pop(mailbox.name, None)

    async def close(self) -> None:
        """Close the mailboxes and discard their messages."""
        for mailbox in self._mailboxes.values():
            await mailbox.close()
        self._mailboxes.clear()


def connect_broker(url: str, *, claim_check: ClaimCheck | None = None) -> Broker:
    """Connect to the broker at a URL.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, `unix://` for a socket, or
            `redis+sentinel://` and `redis+cluster://` as `RedisConnection` takes them;
            `postgresql://[user[:password]@]host[:port]/database`; `sqs://region/prefix` for Amazon SQS; or
            a scheme that is an entry point of `fairtrial.mailboxes`, which is called with the URL and `claim_check`.
        claim_check: The store for bodies over 64 KB; by default the folder in FAIRTRIAL_CLAIM_CHECK. Without either,
            bodies over 1 MB are refused.

    Raises:
        ConfigurationError: the scheme of the URL is not supported.
    """
    scheme = urlsplit(url).scheme.partition("+")[0]
    folder = os.environ.get("FAIRTRIAL_CLAIM_CHECK")
    claim_check = ClaimCheck(folder) if claim_check is None and folder else claim_check
    if scheme in ("redis", "rediss", "unix"):
        return RedisBroker(url, claim_check=claim_check)
    if scheme in ("postgresql", "postgres"):
        return PostgresBroker(url, claim_check=claim_check)
    if scheme == "sqs":
        return SqsBroker(url, claim_check=claim_check)
    opener = find_plugin("mailboxes", scheme)
    if opener is not None:
        broker: Broker = opener(url, claim_check=claim_check)
        return broker
    # The URL is not repeated: it may contain a password.
    raise ConfigurationError("the mailbox URL must start with redis://, rediss://, unix://, postgresql:// or sqs://")
