"""What only PostgreSQL has: options of addresses, many rows at once."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Double, Integer, LargeBinary, SmallInteger, Table, Text

ISOLATION = r"-c default_transaction_isolation=read\ committed"
"""What our statements are made for, whatever the database has as its default: others fail where these wait or skip."""
POSTGRES_SETTINGS: dict[str, Any] = {
    "application_name": "fairtrial",
    "connect_timeout": 10,
    # A server that does not respond for 30 s is given up, for reads and for unacknowledged writes.
    # The limits of the kernel are two hours and about 15 minutes.
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

log = logging.getLogger("fairtrial.store")
_warned: set[str] = set()


def warn_about_plain_text(host: str, sslmode: object, owner: str) -> None:
    """Warn, once per host, if the connection may be unencrypted or the server is not authenticated.

    Args:
        host: The host name, or the folder of a socket.
        sslmode: The value in the URL; None if there is none.
        owner: What the address belongs to, for the message.
    """
    local = host in ("", "localhost", "::1") or host.startswith(("/", "127."))
    if local or sslmode is not None or "PGSSLMODE" in os.environ or host in _warned:
        return
    _warned.add(host)
    log.warning(
        "the connection to PostgreSQL on %s may be unencrypted, and the server's identity is not checked: add "
        "?sslmode=verify-full to the %s's address (sslmode=disable accepts that, as inside a private network)",
        host,
        owner,
    )


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
