"""Bulk inserts, with the fastest method of each database."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Double, Integer, LargeBinary, SmallInteger, Table, Text

_POSTGRES: dict[type, tuple[str, int, str]] = {  # Name, object id, and how `struct` writes a value after its length.
    SmallInteger: ("int2", 21, "!ih"),
    Integer: ("int4", 23, "!ii"),
    BigInteger: ("int8", 20, "!iq"),
    Double: ("float8", 701, "!id"),
    Text: ("text", 25, ""),
    LargeBinary: ("bytea", 17, ""),
}
_NULL = (-1).to_bytes(4, signed=True)


class BinaryArray(bytes):
    """An array in the binary format of PostgreSQL, whose type is that of the cast in the statement."""


def register_arrays(adapters: Any) -> None:
    """Let psycopg send a `BinaryArray` as it is.

    Its own dumper encodes lists value by value in Python, which takes a quarter of the CPU time of a commit.
    """
    from psycopg.adapt import Dumper
    from psycopg.pq import Format

    class BinaryArrayDumper(Dumper):
        format = Format.BINARY
        oid = 0

        def dump(self, obj: Any) -> bytes:
            return bytes(obj)

    adapters.register_dumper(BinaryArray, BinaryArrayDumper)


def binary_array(values: Sequence[Any], oid: int, layout: str) -> BinaryArray:
    """Encode a column. Values that do not fit raise `OverflowError` or `TypeError`."""
    if layout:
        pack, width = struct.Struct(layout).pack, struct.calcsize(layout) - 4
        try:
            parts = [_NULL if value is None else pack(width, value) for value in values]
        except struct.error as error:
            raise OverflowError(str(error)) from None
    else:
        encoded = [value.encode() if isinstance(value, str) else value for value in values]
        parts = [_NULL if value is None else len(value).to_bytes(4) + value for value in encoded]
    header = struct.pack("!iiiii", 1, 1, oid, len(values), 1)  # One dimension, NULLs allowed, numbered from 1.
    return BinaryArray(b"".join([header, *parts]))


class BulkInsert:
    """An insert of plain tuples. Building statements or dicts per row would cost more than the insert itself.

    SQLite runs a prepared statement for each row; PostgreSQL is handed whole columns, which saves it a message per row.
    """

    def __init__(self, dialect: str, table: Table, columns: Sequence[str], on_conflict: str, *, lead: str = "") -> None:
        """Prepare the statement; `lead` names a leading column with one value for all rows, given to `run`."""
        self._by_column = dialect == "postgresql"
        names = ", ".join(([lead] if lead else []) + list(columns))
        first = "{lead}, " if lead else ""
        if self._by_column:
            # Sent as binary: text would double the size of every transcript.
            self._types = [_POSTGRES[type(table.c[name].type)] for name in columns]
            arrays = ", ".join(f"%b::{name}[]" for name, _oid, _layout in self._types)
            source = f"SELECT {first}* FROM unnest({arrays})"  # noqa: S608 - names of ours, no values
        else:
            source = f"VALUES ({first}{', '.join('?' * len(columns))})"
        self._statement = f"INSERT INTO {table.name} ({names}) {source} {on_conflict}"

    def run(self, connection: Connection, rows: Sequence[tuple[Any, ...]], lead: int | None = None) -> int:
        """Insert the rows; returns the number of rows inserted or changed."""
        statement = self._statement if lead is None else self._statement.replace("{lead}", str(int(lead)))
        if self._by_column:
            columns = tuple(
                binary_array(column, oid, layout)
                for column, (_name, oid, layout) in zip(zip(*rows, strict=True), self._types, strict=True)
            )
            return connection.exec_driver_sql(statement, columns).rowcount
        return connection.exec_driver_sql(statement, list(rows)).rowcount
