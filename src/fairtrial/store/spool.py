"""The spool of a store: spans that were received and acknowledged, until a run has their trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from itertools import batched
from typing import NamedTuple

import sqlalchemy as sa

from fairtrial.store.compress import compress, decompress
from fairtrial.store.redact import current
from fairtrial.store.schema import received_spans

_PAGE = 500


class SpooledPart(NamedTuple):
    """What one request has of one trace; `factor` is that of all rates when the trace was first seen."""

    trace: str
    received_at: float
    factor: float
    data: bytes


class SpooledTrace(NamedTuple):
    """A trace in the spool."""

    trace: str
    first_at: float
    last_at: float
    factor: float
    size: int  # Of its rows, in bytes.


class SqlSpool:
    """The spool of a store in a database."""

    def __init__(
        self,
        read: Callable[[], AbstractContextManager[sa.Connection]],
        write: Callable[[], AbstractContextManager[sa.Connection]],
    ) -> None:
        self._read = read
        self._write = write

    def add(self, suite: str, parts: Sequence[SpooledPart]) -> list[int]:
        """Store parts durably, in one transaction and without secrets; returns their sizes."""
        redact = current().data
        rows = [
            {"suite": suite, **one._asdict(), "data": compress(redact(one.data))} for one in parts
        ]  # Before the transaction, which holds locks.
        with self._write() as connection:
            connection.execute(sa.insert(received_spans), rows)
        return [len(row["data"]) for row in rows]

    def traces(self, suite: str) -> list[SpooledTrace]:
        """Return the traces in the spool, the oldest first."""
        columns = received_spans.c
        first = sa.func.min(columns.received_at)
        query = (
            sa.select(
                columns.trace,
                first,
                sa.func.max(columns.received_at),
                sa.func.max(columns.factor),
                sa.func.sum(sa.func.length(columns.data)),
            )
            .where(columns.suite == suite)
            .group_by(columns.trace)
            .order_by(first)
        )
        with self._read() as connection:
            return [SpooledTrace._make(row) for row in connection.execute(query)]

    def read(self, suite: str, trace: str) -> list[bytes]:
        """Return the parts of a trace, in the order in which they arrived."""
        columns = received_spans.c
        query = sa.select(columns.data).where(columns.suite == suite, columns.trace == trace).order_by(columns.id)
        with self._read() as connection:
            return [decompress(data) for data in connection.execute(query).scalars()]

    def delete(self, suite: str, traces: Collection[str]) -> None:
        """Delete traces that are stored in a run, or left out."""
        columns = received_spans.c
        for some in batched(traces, _PAGE):
            with self._write() as connection:
                connection.execute(sa.delete(received_spans).where(columns.suite == suite, columns.trace.in_(some)))
