"""The dead letters of a mailbox on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fairtrial.errors import BodyError, ConfigurationError
from fairtrial.mailbox.claim_check import ClaimCheck
from fairtrial.mailbox.dead_letters import DeadLetter
from fairtrial.mailbox.postgres.receipt import PostgresQueue
from fairtrial.mailbox.postgres.statements import DEAD_COUNT, DEAD_PAGE, DROP, RETRY
from fairtrial.mailbox.sealing import readable

_MAX_ID = 2**63 - 1


class MailboxWithClaims(PostgresQueue, Protocol):
    """The interface of a mailbox for its dead letters."""

    @property
    def claim_check(self) -> ClaimCheck | None:
        """The store for large bodies."""
        ...


class PostgresDeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, mailbox: MailboxWithClaims) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        """Return the number of dead letters."""
        return int((await self._run(DEAD_COUNT))[0][0])

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1 (got {limit})")
        first = 0 if after is None else next(iter(_numbers([after])), _MAX_ID)
        return [await self._letter(row) for row in await self._run(DEAD_PAGE, after=first, limit=limit)]

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        rows = await self._run(RETRY, ids=_numbers(ids))
        return sum(number for number, _ in rows)

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        self._mailbox.check_open()
        parameters = {"name": self._mailbox.name, "ids": _numbers(ids)}
        return await self._mailbox.connection.change(f"dropping dead letters of {self._mailbox.name}", DROP, parameters)

    async def _run(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        self._mailbox.check_open()
        doing = f"reading dead letters of {self._mailbox.name}"
        return await self._mailbox.connection.run(doing, statement, {"name": self._mailbox.name, **parameters})

    async def _letter(self, row: tuple[Any, ...]) -> DeadLetter:
        death, id, data, kept, deliveries, reason, error, reply_to, died_at = row
        body = await self._kept(bytes(data)) if kept else readable(bytes(data)).decode("utf-8", "replace")
        return DeadLetter(str(death), str(id), body, deliveries, reason, error, reply_to, died_at=died_at)

    async def _kept(self, claim: bytes) -> str:
        """Return the body from the claim check, or a placeholder if it cannot be read."""
        sha256 = claim.decode("utf-8", "replace")
        if self._mailbox.claim_check is not None:
            try:
                return readable(await self._mailbox.claim_check.fetch(sha256)).decode("utf-8", "replace")
            except (BodyError, OSError):
                pass
        return f"sha256:{sha256}"


def _numbers(ids: Sequence[str]) -> list[int]:
    """Return the ids that can be those of dead letters."""
    return [int(id) for id in dict.fromkeys(ids) if id.isascii() and id.isdecimal() and int(id) <= _MAX_ID]
