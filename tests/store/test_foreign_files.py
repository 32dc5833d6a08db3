"""Saved runs from others: any content gives a report or a `StoreError` in a short time."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from fairtrial import Dataset, EvalReport, EvalSuite, PromptExecuted, TokenUsage, TrialContext, exact_match
from fairtrial.errors import StoreError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("saved")

    def double(number: int, context: TrialContext) -> int:
        context.session.record(PromptExecuted("p", "a", usage=TokenUsage(1, 1, 0, 0.1)))
        return 2 * number

    suite = EvalSuite("good", Dataset.of({number: 2 * number for number in range(5)}, name="n"), double, exact_match)
    suite.run_sync(store=f"sqlite:///{folder}/runs.db").save(folder / "run.db")
    return (folder / "run.db").read_bytes()


def changed(saved: bytes, tmp_path: Path, *statements: str | tuple[str, tuple[object, ...]]) -> Path:
    path = tmp_path / "run.db"
    path.write_bytes(saved)
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(*((statement,) if isinstance(statement, str) else statement))
    connection.commit()
    connection.close()
    return path


def look(path: Path) -> str:
    report = EvalReport.load(path)
    for result in report.results:
        assert result.output is None or result.output == result.output
        assert result.session.tags is not None
    return str(report)


def test_an_untouched_file_is_read(saved: bytes, tmp_path: Path) -> None:
    assert "100.0%" in look(changed(saved, tmp_path))


def frame_of_zeros(size: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=size)
    block = bytes(1 << 24)
    return b"".join(compressor.compress(block) for _ in range(size >> 24)) + compressor.flush()


@pytest.mark.parametrize(
    "frame",
    [
        frame_of_zeros(1 << 30),
        b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + (2**50).to_bytes(8, "little") + b"\x01\x00\x00",
        b"\x28\xb5\x2f\xfd" + b"nonsense",
    ],
    ids=["a gigabyte of zeros", "a header that claims 2^50 bytes", "no frame"],
)
def test_a_transcript_that_would_fill_the_memory_is_refused(saved: bytes, tmp_path: Path, frame: bytes) -> None:
    path = changed(saved, tmp_path, ("UPDATE details SET transcript = ?", (frame,)))
    with pytest.raises(StoreError, match="transcript"):
        look(path)


@pytest.mark.parametrize(
    "statements",
    [
        ("UPDATE runs SET dataset_size = 9000000000000000000",),
        ("UPDATE runs SET dataset_size = -5, repeats = -1",),
        ("UPDATE runs SET experiments = '{\"a\":1}'",),
        ("UPDATE results SET outcome = 99",),
        ("UPDATE results SET experiment = 99",),
        ("UPDATE results SET stage = 99",),
        ("UPDATE results SET value = 9e999",),
        ("UPDATE results SET metrics = '[1]'",),
        ("UPDATE details SET output = '{'",),
        (
            "ALTER TABLE results RENAME TO hidden",
            "CREATE VIEW results AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
            "SELECT h.* FROM hidden h, c",
        ),
        ("CREATE TABLE other (id INTEGER)",),
        ("CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM runs; END",),
    ],
    ids=lambda statements: statements[0][:45],
)
def test_a_file_with_impossible_content_is_refused(saved: bytes, tmp_path: Path, statements: tuple[str, ...]) -> None:
    with pytest.raises(StoreError):
        look(changed(saved, tmp_path, *statements))


@pytest.mark.parametrize(
    ("column", "value"),
    [("results.latency_ms", "'long'"), ("results.value", "'1'"), ("runs.suite", "x'00'"), ("details.output", "5")],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_column(
    saved: bytes, tmp_path: Path, column: str, value: str
) -> None:
    table, name = column.split(".")
    path = changed(saved, tmp_path, f"UPDATE {table} SET {name} = CAST({value} AS BLOB)")
    with pytest.raises(StoreError, match=f"a value of {column} has another type than it must have"):
        look(path)


def test_a_store_on_a_read_only_file_system_is_read(saved: bytes, tmp_path: Path) -> None:
    path = changed(saved, tmp_path)
    command = [sys.executable, "-m", "fairtrial.cli", "runs", "--store", str(path)]
    # A mount of our own, gone with the process; it makes the folder read-only for root, too.
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, str(tmp_path), *command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "good" in done.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20
