"""Stores, saved runs, messages and sessions of the first format stay readable."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairtrial import EvalReport, ToolInvoked
from fairtrial.data.session import restore_session
from fairtrial.errors import StoreVersionError
from fairtrial.fleet.messages import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult
from fairtrial.store import open_store, schema
from fairtrial.store.open import migrate_store

FILES = Path(__file__).parent / "format1"
EXPECTED = json.loads((FILES / "expected.json").read_text())


@pytest.fixture(params=["sqlite", "postgresql"])
def old_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a store with schema 1."""
    if request.param == "sqlite":
        return str(shutil.copy(FILES / "runs.db", tmp_path / "runs.db"))
    url = str(request.getfixturevalue("pg_url"))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute((FILES / "postgres.sql").read_bytes())
    return url


def facts(report: EvalReport) -> list[list[Any]]:
    return [
        [
            result.key.experiment, result.key.sample_id, result.key.repeat, result.outcome,
            result.score and result.score.value, result.score and result.score.passed,
            result.error, result.output, result.usage.input_tokens, result.usage.cost_usd,
            len(result.session[ToolInvoked].all()),
        ]
        for result in report.results
    ]  # fmt: skip


EXPECTED_FACTS = [[*row[:6], *row[7:]] for row in EXPECTED["results"]]  # Reasons have got names since.


def check_report(report: EvalReport) -> None:
    assert facts(report) == EXPECTED_FACTS
    for experiment, summary in EXPECTED["summary"].items():
        part = report[experiment]
        assert (part.pass_rate, part.pass_rate_all) == (summary["pass_rate"], summary["pass_rate_all"])
        assert part.mean_score == summary["mean"]


def old_run(url: str) -> str:
    with psycopg.connect(url) if "://" in url else open_sqlite(url) as connection:
        return str(connection.execute("SELECT run_id FROM runs WHERE suite = 'numbers'").fetchone()[0])  # type: ignore[index]


def open_sqlite(path: str) -> Any:
    return closing(sqlite3.connect(path))


def schema_version(url: str) -> str:
    with psycopg.connect(url) if "://" in url else open_sqlite(url) as connection:
        return str(connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()[0])  # type: ignore[index]


def test_a_saved_run_of_schema_1_is_reported_as_before() -> None:
    check_report(EvalReport.load(FILES / "saved-run.db"))


def test_a_store_of_schema_1_is_read_without_being_changed(old_store: str) -> None:
    store = open_store(old_store)
    check_report(EvalReport(store, store.get_run(old_run(old_store))))
    store.close()
    assert schema_version(old_store) == "1"


def test_a_store_of_schema_1_refuses_writes_and_names_the_remedy(old_store: str) -> None:
    store = open_store(old_store)
    with pytest.raises(StoreVersionError, match="fairtrial store migrate"):
        store.update_run(old_run(old_store), status="running")
    store.close()
    assert schema_version(old_store) == "1"


def test_a_migrated_store_reads_as_before_and_takes_writes(old_store: str) -> None:
    assert migrate_store(old_store) == (1, schema.VERSION)
    assert migrate_store(old_store) == (schema.VERSION, schema.VERSION)
    store = open_store(old_store)
    run_id = old_run(old_store)
    check_report(EvalReport(store, store.get_run(run_id)))
    store.update_run(run_id, notes={"seen": True})
    assert store.get_run(run_id).notes["seen"] is True
    store.close()


def test_a_migrated_store_has_the_columns_of_a_new_one(old_store: str) -> None:
    migrate_store(old_store)
    store = open_store(old_store)
    from sqlalchemy import inspect

    found = inspect(store._engine)  # type: ignore[attr-defined]
    for table in schema.metadata.tables.values():
        assert {column["name"] for column in found.get_columns(table.name)} == set(table.c.keys())
    store.close()


@pytest.mark.long
def test_looking_at_an_old_store_from_the_command_line_does_not_migrate_it(tmp_path: Path) -> None:
    path = shutil.copy(FILES / "runs.db", tmp_path / "runs.db")
    commands = (["runs"], ["show", "numbers"], ["failures", "numbers"], ["store", "stats"])
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "fairtrial.cli", *command, "--store", str(path)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert schema_version(str(path)) == "1"


MESSAGES: dict[str, list[str]] = json.loads((FILES / "messages.json").read_text())
TYPES = {kind.__name__: kind for kind in (EvalRequest, EvalReply, MainLoopRequest, MainLoopResult)}


@pytest.mark.parametrize("name", TYPES)
def test_messages_of_the_first_format_are_read(name: str) -> None:
    for text in MESSAGES[name]:
        message = TYPES[name].from_wire(text.encode())
        assert message.to_wire() == text.encode()  # Written as before: old readers understand it.


def test_what_the_messages_say_is_understood() -> None:
    request = EvalRequest.from_wire(MESSAGES["EvalRequest"][0].encode())
    assert (request.key.sample_id, request.ordinal, request.attempt) == ("s1", 7, 2)
    reply = EvalReply.from_wire(MESSAGES["EvalReply"][0].encode())
    assert reply.result.score is not None
    assert (reply.result.score.value, reply.result.score.passed) == (0.75, True)
    failed = EvalReply.from_wire(MESSAGES["EvalReply"][1].encode())
    assert (failed.result.outcome, failed.result.error) == ("task_error", "RuntimeError: no")


def test_a_session_of_the_first_format_is_restored() -> None:
    session = restore_session((FILES / "session.snapshot").read_bytes())
    assert session.tags["run_id"] == "run"
