"""What databases of users contain: tables and codes that do not change without a new version of the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Dialect
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from fairtrial.store import schema
from fairtrial.store.protocol import METRIC_CODES
from fairtrial.store.rows import OUTCOMES, REDACTED_PARTS, STAGES

FILES = Path(__file__).parent / "schema"


def statements(dialect: Dialect) -> str:
    made = []
    for table in schema.metadata.sorted_tables:
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        parts: list[ExecutableDDLElement] = [CreateTable(table), *map(CreateIndex, indexes)]
        for part in parts:
            text = str(part.compile(dialect=dialect)).strip()
            made.append("\n".join(line.replace("\t", "  ").rstrip() for line in text.splitlines()) + ";\n")
    return "\n".join(made)


DIALECTS: list[Dialect] = [SQLiteDialect(), PGDialect()]  # type: ignore[no-untyped-call]  # SQLAlchemy's


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: str(dialect.name))
def test_the_tables_are_those_of_this_version(dialect: Dialect) -> None:
    """Who changes a table raises `schema.VERSION`, lists what was added, and changes the file."""
    assert schema.VERSION == 6
    assert statements(dialect) == (FILES / f"{dialect.name}.sql").read_text("utf-8")


def test_the_codes_in_the_tables_mean_what_they_always_meant() -> None:
    outcomes = ["scored", "task_error", "scorer_error", "timeout", "dead_letter", "not_run", "user_error"]
    assert {name: code for code, name in enumerate(outcomes, 1)} == OUTCOMES
    stages = ["setup", "task", "output", "score", "delivery", "store"]
    assert {None: None} | {stage: code for code, stage in enumerate(stages, 1)} == STAGES
    assert REDACTED_PARTS == ("output", "transcript", "error", "reason", "score", "metadata")
    assert METRIC_CODES == {
        "-": (None, None), "0": (False, None), "1": (True, None),
        "+": (None, True), "f": (False, True), "p": (True, True),
        "~": (None, False), "F": (False, False), "P": (True, False),
    }  # fmt: skip
