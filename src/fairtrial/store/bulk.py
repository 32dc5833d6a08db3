"""Bulk inserts, with the fastest method of each database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Double, Integer, LargeBinary, SmallInteger, Table, Text

_POSTGRES: dict[type, str] = {
    SmallInteger: "int2",
    Integer: "int4",
    BigInteger: "int8",
    Double: "float8",
    Text: "text",
    LargeBinary: "bytea",
}


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
            arrays = ", ".join(f"%b::{_POSTGRES[type(table.c[name].type)]}[]" for name in columns)
            source = f"SELECT {first}* FROM unnest({arrays})"  # noqa: S608 - names of ours, no values
        else:
            source = f"VALUES ({first}{', '.join('?' * len(columns))})"
        self._statement = f"INSERT INTO {table.name} ({names}) {source} {on_conflict}"

    def run(self, connection: Connection, rows: Sequence[tuple[Any, ...]], lead: int | None = None) -> int:
        """Insert the rows; returns the number of rows inserted or changed."""
        statement = self._statement if lead is None else self._statement.replace("{lead}", str(int(lead)))
        if self._by_column:
            columns = tuple(list(column) for column in zip(*rows, strict=True))
            return connection.exec_driver_sql(statement, columns).rowcount
        return connection.exec_driver_sql(statement, list(rows)).rowcount
