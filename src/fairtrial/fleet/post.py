"""Where the mailboxes of a suite are: requests for its workers, and the results of each of its runs."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any, Protocol
from urllib.parse import urlsplit

from fairtrial.errors import ConfigurationError, MissingExtraError, ReplyNotAvailableError
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.mailbox.claim_check import ClaimCheck
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.mailbox.protocol import Mailbox

_KEPT_SECONDS = 3600
_UNCLAIMED_SECONDS = 30 * 24 * 3600
_MAX_PART = 80


def requests_name(suite: str) -> str:
    """The mailbox a suite's workers take their work from."""
    return f"{_part(suite)}.requests"


def results_name(suite: str, run_id: str) -> str:
    """The mailbox the results of one run go to. It outlives its collector."""
    return f"{_part(suite)}.results.{_part(run_id)}"


def _part(text: str) -> str:
    """The text if it can be part of a mailbox's name; else something readable that no other text gives."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", text) and len(text) <= _MAX_PART:
        return text
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")[: _MAX_PART - 20]
    return f"{plain or 'suite'}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


class PostOffice(Protocol):
    """Gives out the mailboxes of suites and runs. Client and workers of a fleet use the same one."""

    async def requests(self, suite: str) -> Mailbox[EvalRequest]:
        """The mailbox a suite's workers take their work from."""
        ...

    async def results(self, suite: str, run_id: str) -> Mailbox[EvalReply]:
        """The mailbox the results of one run go to; it exists when this returns."""
        ...

    async def leave(self, mailbox: Mailbox[Any]) -> None:
        """Stop using a mailbox; what is in it stays."""
        ...

    async def retire(self, mailbox: Mailbox[Any]) -> None:
        """Stop using a mailbox nobody needs any more; it vanishes with what is in it."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class RedisPostOffice:
    """Mailboxes on one Redis. Belongs to the event loop it is first used in.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, `unix://` for a socket.
        claim_check: Where bodies over 64 KB are kept: a folder that client and workers share.
        options: Further options of redis-py's connections, such as `ssl_ca_certs`.
    """

    def __init__(self, url: str, *, claim_check: ClaimCheck | None = None, **options: Any) -> None:
        try:
            from fairtrial.mailbox.redis import RedisConnection
        except ImportError:
            raise MissingExtraError("a mailbox on Redis", "redis") from None
        self.connection = RedisConnection(url, **options)
        self._claim_check = claim_check
        self._open: list[Mailbox[Any]] = []

    def __repr__(self) -> str:
        return f"RedisPostOffice({self.connection!r})"

    def _mailbox(self, name: str, kind: type[Any]) -> Any:
        from fairtrial.mailbox.redis import RedisMailbox

        mailbox = RedisMailbox(name, kind, self.connection, claim_check=self._claim_check)
        self._open.append(mailbox)
        return mailbox

    async def requests(self, suite: str) -> Mailbox[EvalRequest]:
        """The mailbox a suite's workers take their work from."""
        mailbox: Mailbox[EvalRequest] = self._mailbox(requests_name(suite), EvalRequest)
        return mailbox

    async def results(self, suite: str, run_id: str) -> Mailbox[EvalReply]:
        """The mailbox the results of one run go to; it vanishes a month after its run was last taken up."""
        mailbox = self._mailbox(results_name(suite, run_id), EvalReply)
        await mailbox.open()
        # A client that was killed and a run that was stopped leave theirs behind. Whoever comes later than this finds
        # none and has what is missing sent again.
        await self._expire(mailbox, _UNCLAIMED_SECONDS)
        opened: Mailbox[EvalReply] = mailbox
        return opened

    async def leave(self, mailbox: Mailbox[Any]) -> None:
        """Stop using a mailbox; what is in it stays."""
        if mailbox in self._open:
            self._open.remove(mailbox)
        await mailbox.close()

    async def retire(self, mailbox: Mailbox[Any]) -> None:
        """Empty a mailbox and have it vanish in an hour: until then a late duplicate of a result still finds it."""
        await mailbox.purge()
        await self._expire(mailbox, _KEPT_SECONDS)
        await self.leave(mailbox)

    async def close(self) -> None:
        """Close the mailboxes and the connection."""
        for mailbox in list(self._open):
            await self.leave(mailbox)
        await self.connection.close()

    async def _expire(self, mailbox: Any, seconds: int) -> None:
        from redis.exceptions import RedisError

        from fairtrial.mailbox.redis.errors import translated

        try:
            for key in (mailbox.keys.stream, mailbox.keys.delayed, mailbox.keys.dead):
                await self.connection.command("EXPIRE", key, seconds)
        except (RedisError, OSError) as error:
            raise translated(error, f"keeping {mailbox.name}") from None


class MemoryPostOffice:
    """Mailboxes in this process, for tests and for fleets of one: give the same one to client and workers."""

    def __init__(self) -> None:
        self._mailboxes: dict[str, InMemoryMailbox[Any]] = {}

    def _mailbox(self, name: str, kind: type[Any]) -> Any:
        if name not in self._mailboxes:
            self._mailboxes[name] = InMemoryMailbox(name, kind, resolver=self)
        return self._mailboxes[name]

    def resolve(self, name: str) -> Mailbox[Any]:
        """The mailbox of that name; raises `ReplyNotAvailableError` if there is none."""
        try:
            return self._mailboxes[name]
        except KeyError:
            raise ReplyNotAvailableError(f"nobody knows a mailbox called {name!r}") from None

    async def requests(self, suite: str) -> Mailbox[EvalRequest]:
        """The mailbox a suite's workers take their work from."""
        mailbox: Mailbox[EvalRequest] = self._mailbox(requests_name(suite), EvalRequest)
        return mailbox

    async def results(self, suite: str, run_id: str) -> Mailbox[EvalReply]:
        """The mailbox the results of one run go to."""
        mailbox: Mailbox[EvalReply] = self._mailbox(results_name(suite, run_id), EvalReply)
        return mailbox

    async def leave(self, mailbox: Mailbox[Any]) -> None:
        """Nothing to let go of: others in this process go on using it."""

    async def retire(self, mailbox: Mailbox[Any]) -> None:
        """Forget a mailbox."""
        self._mailboxes.pop(mailbox.name, None)

    async def close(self) -> None:
        """Close the mailboxes; what is in them goes with them."""
        for mailbox in self._mailboxes.values():
            await mailbox.close()
        self._mailboxes.clear()


def open_post_office(url: str, *, claim_check: ClaimCheck | None = None) -> PostOffice:
    """The post office at an address.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, `unix://` for a socket.
        claim_check: Where bodies over 64 KB are kept; the folder FAIRTRIAL_CLAIM_CHECK names unless given, and
            bodies over 1 MB are refused if neither is.

    Raises:
        ConfigurationError: that is not an address we know.
    """
    if urlsplit(url).scheme in ("redis", "rediss", "unix"):
        folder = os.environ.get("FAIRTRIAL_CLAIM_CHECK")
        return RedisPostOffice(url, claim_check=ClaimCheck(folder) if claim_check is None and folder else claim_check)
    # The address itself is not repeated: it may hold a password.
    raise ConfigurationError("not the address of a mailbox server: use redis://host:port, rediss:// or unix://")
