"""Settles deliveries from PostgreSQL, and renews their leases from a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from fairtrial.errors import LeaseLostError
from fairtrial.mailbox.postgres.connection import PostgresConnection, RenewalConnection, Rows
from fairtrial.mailbox.postgres.statements import ACKNOWLEDGE, DEAD_LETTER, EXTEND, NACK, RENEW
from fairtrial.mailbox.protocol import Renewer

CHUNK = 1000
_MAX_REASON = 2000


class PostgresQueue(Protocol):
    """The interface of a mailbox for its receipts."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def connection(self) -> PostgresConnection:
        """The connection to PostgreSQL."""
        ...

    @property
    def renewer(self) -> Renewer:
        """Renews the leases of this mailbox."""
        ...

    @property
    def settlement(self) -> Settlement:
        """Settles deliveries in batches."""
        ...

    def check_open(self) -> None:
        """Raise `MailboxClosedError` after `close`."""
        ...

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send a reply to the reply address of a message."""
        ...


class PostgresReceipt:
    """The handle of one delivery: its row and the token of its lease."""

    __slots__ = ("lease", "mailbox", "row")

    def __init__(self, mailbox: PostgresQueue, row: int, lease: int) -> None:
        self.mailbox = mailbox
        self.row = row
        self.lease = lease

    @property
    def renewer(self) -> Renewer:
        """The renewer for this lease and others of the same mailbox."""
        return self.mailbox.renewer

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        await self._settle(self.mailbox.settlement.acknowledge, ())

    async def nack(self, delay: float, *, counted: bool) -> None:
        """See `Receipt.nack`."""
        await self._settle(self.mailbox.settlement.nack, (float(delay), int(counted)))

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        await self._settle(self.mailbox.settlement.extend, (float(seconds),))

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        await self._settle(self.mailbox.settlement.dead_letter, (_storable(reason), _storable(error)))

    async def reply(self, address: str | None, body: Any) -> str:
        """See `Message.reply`."""
        return await self.mailbox.send_reply(str(self.row), address, body)

    async def _settle(self, operation: Any, args: tuple[Any, ...]) -> None:
        mailbox = self.mailbox
        mailbox.check_open()
        item = (self.row, self.lease, *args)
        if not await mailbox.connection.batcher.submit(operation, mailbox.name, item):
            raise LeaseLostError(
                f"the lease of message {self.row} of {mailbox.name} was lost: it expired, or the message was settled "
                "before"
            )


class Settlement:
    """Settles many deliveries with one statement; each operation tells for each item whether its lease was valid.

    Its methods are the operations of a `StatementBatcher`, so each exists once.
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        names = ("ids", "leases")
        self.acknowledge = partial(self._run, "acknowledging", ACKNOWLEDGE, names)
        self.nack = partial(self._nack, (*names, "delays", "counted"))
        self.extend = partial(self._run, "extending", EXTEND, (*names, "seconds"))
        self.dead_letter = partial(self._run, "setting aside", DEAD_LETTER, (*names, "reasons", "errors"))

    async def _nack(self, names: Sequence[str], mailbox: str, items: Sequence[tuple[Any, ...]]) -> Sequence[bool]:
        doing = f"giving back messages of {mailbox}"
        rows = await self._connection.run(doing, NACK, _columns(names, items))
        return _kept([(id,) for ids, _ in rows for id in ids], [item[0] for item in items])

    async def _run(
        self, doing: str, statement: str, names: Sequence[str], mailbox: str, items: Sequence[tuple[Any, ...]]
    ) -> Sequence[bool]:
        rows = await self._connection.run(f"{doing} messages of {mailbox}", statement, _columns(names, items))
        return _kept(rows, [item[0] for item in items])


def settle_within(
    execute: Callable[[str, Any], Iterable[Any]],
    receipts: Sequence[PostgresReceipt],
    deaths: Sequence[tuple[str, str]] | None = None,
) -> int:
    """Settle deliveries in a transaction of the caller; returns the number of those whose lease was valid.

    Args:
        execute: Executes a statement of psycopg in the transaction, in a thread or not, and returns its rows.
        receipts: The deliveries.
        deaths: The reason and the error of each, if they become dead letters; otherwise they are acknowledged.
    """
    leases = [(receipt.row, receipt.lease) for receipt in receipts]
    if deaths is None:
        return len(list(execute(ACKNOWLEDGE, _columns(("ids", "leases"), leases))))
    items = [(*lease, _storable(why), _storable(error)) for lease, (why, error) in zip(leases, deaths, strict=True)]
    return len(list(execute(DEAD_LETTER, _columns(("ids", "leases", "reasons", "errors"), items))))


class PostgresRenewer:
    """Renews the leases of a mailbox from any thread."""

    def __init__(self, connection: RenewalConnection) -> None:
        self._connection = connection

    def renew(self, receipts: Sequence[PostgresReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; False for those that are lost."""
        kept: list[bool] = []
        for start in range(0, len(receipts), CHUNK):
            chunk = receipts[start : start + CHUNK]
            columns = _columns(("ids", "leases"), [(receipt.row, receipt.lease) for receipt in chunk])
            rows = self._connection.run("renewing leases", RENEW, {**columns, "seconds": float(seconds)})
            kept += _kept(list(rows), [receipt.row for receipt in chunk])
        return kept


def _columns(names: Sequence[str], items: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the items as one array for each parameter."""
    return dict(zip(names, map(list, zip(*items, strict=True)), strict=True))


def _kept(rows: Rows, ids: Sequence[int]) -> list[bool]:
    """Return for each id whether its row was changed; a second settlement of the same delivery was not."""
    changed = {row[0] for row in rows}
    answers = []
    for id in ids:
        answers.append(id in changed)
        changed.discard(id)
    return answers


def _storable(text: str) -> str:
    return text[:_MAX_REASON].replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
