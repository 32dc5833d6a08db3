"""The dead letters of a mailbox on Redis, in a separate stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from fairtrial.errors import BodyError, ConfigurationError
from fairtrial.mailbox.dead_letters import DeadLetter
from fairtrial.mailbox.redis.errors import translated
from fairtrial.mailbox.redis.queue import RedisQueue
from fairtrial.mailbox.redis.receive import message_id, milliseconds, number
from fairtrial.mailbox.redis.scripts import REVIVE
from fairtrial.mailbox.sealing import readable


class RedisDeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, mailbox: RedisQueue[Any]) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        """Return the number of dead letters."""
        return int(await self._command("XLEN", self._mailbox.keys.dead))

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1 (got {limit})")
        start = "-" if after is None else f"({after}"
        entries = await self._command("XRANGE", self._mailbox.keys.dead, start, "+", "COUNT", limit)
        return [await self._letter(entry.decode(), fields) for entry, fields in entries]

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        keys = (self._mailbox.keys.stream, self._mailbox.keys.dead)
        return int(await self._mailbox.run("retrying dead letters of", REVIVE, keys, ids)) if ids else 0

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        return int(await self._command("XDEL", self._mailbox.keys.dead, *ids)) if ids else 0

    async def _command(self, *args: Any) -> Any:
        self._mailbox.check_open()
        try:
            return await self._mailbox.connection.command(*args)
        except (RedisError, OSError) as error:
            raise translated(error, f"reading dead letters of {self._mailbox.name}") from None

    async def _letter(self, id: str, fields: dict[bytes, bytes]) -> DeadLetter:
        def text(name: bytes) -> str:
            return fields.get(name, b"").decode("utf-8", "replace")

        body = readable(fields.get(b"b", b"")).decode("utf-8", "replace")
        if b"s" in fields:
            body = await self._kept(text(b"s"))
        return DeadLetter(
            id,
            message_id(fields.get(b"i")) or id,
            body,
            number(fields.get(b"n")),
            text(b"reason"),
            text(b"error"),
            text(b"r") or None,
            died_at=milliseconds(fields.get(b"at")) / 1000,
        )

    async def _kept(self, sha256: str) -> str:
        """Return the body from the claim check, or a placeholder if it cannot be read."""
        if self._mailbox.claim_check is not None:
            try:
                return readable(await self._mailbox.claim_check.fetch(sha256)).decode("utf-8", "replace")
            except (BodyError, OSError):
                pass
        return f"sha256:{sha256}"
