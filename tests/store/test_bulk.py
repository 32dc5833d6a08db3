"""Columns in the binary format of PostgreSQL: each value arrives as it was, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, Double, Integer, LargeBinary, SmallInteger, Text

from fairtrial.store.bulk import _POSTGRES, binary_array, register_arrays


def whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


VALUES: dict[type, st.SearchStrategy[Any]] = {
    SmallInteger: whole(16),
    Integer: whole(32),
    BigInteger: whole(64),
    Double: st.floats(allow_nan=False),
    Text: st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    LargeBinary: st.binary(),
}


@pytest.fixture
def connection(pg_url: str) -> Any:
    register_arrays(psycopg.adapters)
    with psycopg.connect(pg_url, autocommit=True) as connected:
        yield connected


def sent(connection: Any, kind: type, values: Sequence[Any]) -> list[Any]:
    name, oid, layout = _POSTGRES[kind]
    array = binary_array(values, oid, layout)
    rows = connection.execute(f"SELECT * FROM unnest(%b::{name}[])", [array]).fetchall()
    return [value for (value,) in rows]


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_column_arrives_as_it_was_sent(connection: Any, kind: type) -> None:
    @given(st.lists(st.none() | VALUES[kind], max_size=20))
    def check(values: list[Any]) -> None:
        assert sent(connection, kind, values) == values

    check()


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (SmallInteger, 2**15, OverflowError),
        (Integer, -(2**31) - 1, OverflowError),
        (BigInteger, 2**63, OverflowError),
        (Integer, 1.5, OverflowError),
        (Double, "1.5", OverflowError),
        (Text, 5, TypeError),
        (Text, "\ud800", UnicodeError),
        (Text, "a\0b", psycopg.DataError),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_its_column_is_refused(
    connection: Any, kind: type, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        sent(connection, kind, [None, value])
