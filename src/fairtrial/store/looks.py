"""The ledger of looks at test splits, in the table `meta`: a row for each pair that was compared on a split.

Nothing deletes these rows: the looks at a split stay when their runs are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from fairtrial.base.codec.escape import escape_text
from fairtrial.store.schema import meta


def new_looks(known: Sequence[str], pairs: Sequence[str]) -> list[str]:
    """Return the pairs that are not known yet, each once."""
    return [pair for pair in dict.fromkeys(pairs) if pair not in known]


def read_looks(connection: sa.Connection, split: str) -> list[str]:
    """Return the pairs that were compared on a split, in order."""
    prefix = _prefix(split)
    query = sa.select(meta.c.name, meta.c.value).where(meta.c.name.startswith(prefix, autoescape=True))
    rows = [(row.name[len(prefix) :], str(row.value)) for row in connection.execute(query)]
    return [pair for _number, pair in sorted((int(number), pair) for number, pair in rows if number.isdecimal())]


def add_looks(connection: sa.Connection, split: str, pairs: Sequence[str]) -> list[str]:
    """Add pairs in a writing transaction; returns all of the split. A crash adds all of them or none."""
    if connection.dialect.name == "postgresql":
        # Two processes must not give one number to two pairs; SQLite's writers are serialized anyway.
        connection.execute(sa.text("LOCK TABLE meta IN SHARE ROW EXCLUSIVE MODE"))
    known = read_looks(connection, split)
    for pair in new_looks(known, pairs):
        known.append(pair)
        connection.execute(sa.insert(meta).values(name=f"{_prefix(split)}{len(known)}", value=pair))
    return known


def _prefix(split: str) -> str:
    return f"look:{escape_text(split)}:"
