"""The batches of a store in SQLite or PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import batched

import sqlalchemy as sa

from fairtrial.store.batches import SENT, SUCCEEDED, BatchFigures, BatchIntent, BatchRequest
from fairtrial.store.bulk import BulkInsert
from fairtrial.store.compress import compress, decompress
from fairtrial.store.protocol import RunRecord
from fairtrial.store.records import check_epoch
from fairtrial.store.redact import current
from fairtrial.store.schema import batch_intents, batch_requests, results, runs

_PAGE = 500
_INTENT_COLUMNS = tuple(BatchIntent.__dataclass_fields__)
_REQUEST_COLUMNS = BatchRequest._fields
_SLIM = [batch_requests.c[name] for name in _REQUEST_COLUMNS[:-1]]


def _stored(number: int) -> sa.Exists:
    """Whether the result of a request's attempt is stored, or of a later one."""
    columns = batch_requests.c
    later = results.c.attempt >= columns.attempt
    return sa.exists().where(results.c.run == number, results.c.ordinal == columns.ordinal, later)


class SqlBatches:
    """The batches of a store in a database."""

    def __init__(
        self,
        read: Callable[[], AbstractContextManager[sa.Connection]],
        write: Callable[[], AbstractContextManager[sa.Connection]],
        plan_of: Callable[[str], tuple[int, RunRecord]],
        dialect: str,
    ) -> None:
        self._read = read
        self._write = write
        self._plan_of = plan_of
        changes = ", ".join(f"{name} = excluded.{name}" for name in _REQUEST_COLUMNS[1:])
        conflict = f"ON CONFLICT (run, key) DO UPDATE SET {changes}"
        self._upsert = BulkInsert(dialect, batch_requests, _REQUEST_COLUMNS, conflict, lead="run")

    def _number(self, run_id: str) -> int:
        return self._plan_of(run_id)[0]

    def _checked(self, connection: sa.Connection, run_id: str, epoch: int | None) -> int:
        """Return the number of a run, which nobody can take over until the transaction ends."""
        number = self._number(run_id)
        if epoch is not None:
            query = sa.select(runs.c.epoch).where(runs.c.id == number).with_for_update(read=True)
            check_epoch(run_id, connection.execute(query).scalar_one(), epoch)
        return number

    def begin(self, run_id: str, *, epoch: int | None) -> tuple[list[BatchIntent], list[BatchRequest]]:
        """Return the intents of a run, and the requests of attempts without a result."""
        with self._write() as connection:
            number = self._checked(connection, run_id, epoch)
            missing = sa.and_(batch_requests.c.run == number, ~_stored(number))
            connection.execute(sa.update(batch_requests).where(missing).values(used=0))
            rows = connection.execute(sa.select(*_SLIM).where(missing)).all()
        return self.intents(run_id), [BatchRequest._make((*row, None)) for row in rows]

    def plan(
        self, run_id: str, intent: BatchIntent, requests: Sequence[BatchRequest], *, epoch: int | None = None
    ) -> None:
        """Store an intent and its requests."""
        with self._write() as connection:
            number = self._checked(connection, run_id, epoch)
            connection.execute(sa.delete(batch_intents).where(batch_intents.c.id == intent.id))
            values = {name: getattr(intent, name) for name in _INTENT_COLUMNS}
            connection.execute(sa.insert(batch_intents).values(run=number, **values))
            self._upsert.run(connection, requests, number)

    def change(self, run_id: str, intent: BatchIntent, *, epoch: int | None = None) -> None:
        """Store the state of an intent."""
        with self._write() as connection:
            self._checked(connection, run_id, epoch)
            values = {name: getattr(intent, name) for name in ("state", "batch_id", "file_id", "done", "failed")}
            connection.execute(sa.update(batch_intents).where(batch_intents.c.id == intent.id).values(**values))

    def abandon(self, run_id: str, intent: BatchIntent, *, epoch: int | None = None) -> None:
        """Mark an intent as abandoned, and forget the requests that have no outcome."""
        with self._write() as connection:
            number = self._checked(connection, run_id, epoch)
            connection.execute(
                sa.update(batch_intents).where(batch_intents.c.id == intent.id).values(state="abandoned")
            )
            connection.execute(
                sa.delete(batch_requests).where(
                    batch_requests.c.run == number,
                    batch_requests.c.intent == intent.id,
                    batch_requests.c.state == SENT,
                )
            )

    def settle(self, run_id: str, requests: Sequence[BatchRequest], *, epoch: int | None = None) -> None:
        """Store the outcomes of requests, with the replies."""
        redact = current().data
        rows = [
            one if one.reply is None else one._replace(reply=compress(redact(one.reply))) for one in requests
        ]  # Before the transaction, which holds locks.
        with self._write() as connection:
            self._upsert.run(connection, rows, self._checked(connection, run_id, epoch))

    def use(self, run_id: str, keys: Iterable[str], *, epoch: int | None = None) -> None:
        """Record that the replies with these keys were asked for."""
        with self._write() as connection:
            number = self._checked(connection, run_id, epoch)
            for some in batched(keys, _PAGE):
                which = sa.and_(batch_requests.c.run == number, batch_requests.c.key.in_(some))
                connection.execute(sa.update(batch_requests).where(which).values(used=1))

    def replies(self, run_id: str, keys: Sequence[str]) -> dict[str, BatchRequest]:
        """Return stored requests with their replies."""
        query = sa.select(*_SLIM, batch_requests.c.reply).where(batch_requests.c.run == self._number(run_id))
        with self._read() as connection:
            found = [
                BatchRequest._make(row)
                for some in batched(keys, _PAGE)
                for row in connection.execute(query.where(batch_requests.c.key.in_(some)))
            ]
        return {one.key: one if one.reply is None else one._replace(reply=decompress(one.reply)) for one in found}

    def intents(self, run_id: str) -> list[BatchIntent]:
        """Return all intents of a run, the oldest first."""
        columns = [batch_intents.c[name] for name in _INTENT_COLUMNS]
        query = sa.select(*columns).where(batch_intents.c.run == self._number(run_id))
        with self._read() as connection:
            return [BatchIntent(*row) for row in connection.execute(query.order_by(batch_intents.c.created_at))]

    def figures(self, run_id: str) -> BatchFigures:
        """Return what the batches of a run came to."""
        columns = batch_requests.c
        answered = columns.state == SUCCEEDED
        unused = sa.and_(answered, columns.used == 0)
        query = sa.select(
            sa.func.count(),
            sa.func.count().filter(answered),
            sa.func.sum(columns.cost_usd),
            sa.func.count().filter(unused),
            sa.func.sum(columns.cost_usd).filter(unused),
        ).where(columns.run == self._number(run_id))
        with self._read() as connection:
            return BatchFigures(*connection.execute(query).one())

    def answered(self, run_id: str) -> dict[str, tuple[int, float | None]]:
        """Return the number of stored answers of each intent, and what they cost."""
        columns = batch_requests.c
        query = (
            sa.select(columns.intent, sa.func.count(), sa.func.sum(columns.cost_usd))
            .where(columns.run == self._number(run_id), columns.state == SUCCEEDED)
            .group_by(columns.intent)
        )
        with self._read() as connection:
            return {row[0]: (row[1], row[2]) for row in connection.execute(query)}

    def forget_replies(self, run_id: str, *, epoch: int | None = None) -> None:
        """Delete the replies of stored attempts, which have them in their transcripts."""
        with self._write() as connection:
            number = self._checked(connection, run_id, epoch)
            which = sa.and_(batch_requests.c.run == number, _stored(number))
            connection.execute(sa.update(batch_requests).where(which).values(reply=None))

    def delete(self, connection: sa.Connection, number: int) -> None:
        """Delete the batches of a run, in the transaction that deletes the run."""
        for table in (batch_intents, batch_requests):
            connection.execute(sa.delete(table).where(table.c.run == number))
