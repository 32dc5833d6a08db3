"""What the store reads of column files without numpy: headers, sums, and the list of files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fairtrial import Dataset, EvalReport, EvalSuite, Sample, exact_match
from fairtrial.store import column_cache
from fairtrial.store.column_cache import (
    FIRST_ARRAY,
    HEAD,
    ColumnHeader,
    cached_columns,
    cached_totals,
    clear_columns,
    column_path,
    delete_columns,
    header_bytes,
    read_header,
)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EvalReport]:
    monkeypatch.setattr(column_cache, "WRITTEN_AT_THE_END", 1)
    clear_columns()
    data = Dataset([Sample(f"s{place}", "x", "xy"[place % 2]) for place in range(6)], name="letters")
    suite = EvalSuite("small", data, lambda text: text, exact_match)
    made = suite.run_sync(store=f"sqlite:///{tmp_path / 'runs.db'}")
    yield made
    made.store.close()
    clear_columns()


def file_of(report: EvalReport) -> Path:
    return column_path(report.store.identity, report.run_id)  # type: ignore[attr-defined]


def header_of(path: Path) -> ColumnHeader | None:
    with path.open("rb") as file:
        return read_header(file)


def test_a_finished_run_has_its_sums_in_its_file(report: EvalReport) -> None:
    header = header_of(file_of(report))
    assert header is not None
    assert (header.run_id, header.rows, header.planned, header.extent) == (report.run_id, 6, 6, 6)
    (sums,) = cached_totals(report.store.identity, report.run) or []  # type: ignore[attr-defined]
    assert [sums] == list(report.store.totals(report.run_id))
    assert (sums.passed, sums.outcomes["scored"]) == (3, 6)


@pytest.mark.parametrize(
    "change",
    [
        {"created_at": 1.0},
        {"revision": 99},
        {"dataset_fingerprint": "other"},
        {"dataset_size": 7},
        {"experiments": ("baseline", "other")},
        {"finished_at": 1.0},
        {"repeats": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_sums_are_of_exactly_this_state_of_the_run(report: EvalReport, change: dict[str, object]) -> None:
    identity = report.store.identity  # type: ignore[attr-defined]
    assert cached_totals(identity, report.run) is not None
    assert cached_totals(identity, replace(report.run, **change)) is None  # type: ignore[arg-type]
    assert cached_totals(f"{identity}.other", report.run) is None


def _rewritten(data: bytes, change: Callable[[ColumnHeader], ColumnHeader], path: Path) -> bytes:
    """Replace the header by a changed one whose length and checksum are right."""
    header = header_of(path)
    assert header is not None
    magic, offset, _length, _crc = HEAD.unpack(data[: HEAD.size])
    text = header_bytes(change(header))
    return HEAD.pack(magic, offset, len(text), zlib.crc32(text)) + data[HEAD.size : offset] + text


def _moved(offset: int, count: int = 1) -> Callable[[ColumnHeader], ColumnHeader]:
    def change(header: ColumnHeader) -> ColumnHeader:
        name, place = next(iter(header.arrays.items()))
        return replace(header, arrays={**header.arrays, name: replace(place, offset=offset, count=count)})

    return change


DAMAGE: dict[str, Callable[[bytes, Path], bytes]] = {
    "empty": lambda data, path: b"",
    "shorter": lambda data, path: data[:-1],
    "longer": lambda data, path: data + b" ",
    "other magic": lambda data, path: b"X" + data[1:],
    "flipped in the header": lambda data, path: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
    "other format": lambda data, path: _rewritten(data, lambda header: replace(header, format="0"), path),
    "array before the first": lambda data, path: _rewritten(data, _moved(FIRST_ARRAY - 8), path),
    "array of negative length": lambda data, path: _rewritten(data, _moved(FIRST_ARRAY, -1), path),
    "array beyond the header": lambda data, path: _rewritten(data, _moved(len(data) + 64), path),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_has_no_header_and_is_listed_without_its_run(report: EvalReport, how: str) -> None:
    path = file_of(report)
    good = path.read_bytes()
    path.write_bytes(_rewritten(good, _moved(FIRST_ARRAY), path))
    assert header_of(path) is not None  # The control: the same rewriting without damage.
    path.write_bytes(good)
    path.write_bytes(DAMAGE[how](good, path))
    assert header_of(path) is None
    assert cached_totals(report.store.identity, report.run) is None  # type: ignore[attr-defined]
    assert [one.run_id for one in cached_columns()] == [None]
    assert cached_columns(report.store.identity) == []  # type: ignore[attr-defined]


def test_files_are_listed_and_deleted_by_store(report: EvalReport) -> None:
    identity, path = report.store.identity, file_of(report)  # type: ignore[attr-defined]
    (one,) = cached_columns(identity)
    assert (one.path, one.run_id, one.size) == (path, report.run_id, path.stat().st_size)
    assert cached_columns("sqlite:///elsewhere.db") == []
    assert clear_columns("sqlite:///elsewhere.db") == (0, 0)
    delete_columns(identity, "another run")
    assert path.exists()
    assert clear_columns(identity) == (1, one.size)
    assert not path.exists()
    assert cached_totals(identity, report.run) is None
    delete_columns(identity, report.run_id)  # Nothing is left to delete.


def test_a_deleted_run_takes_its_file_along(report: EvalReport) -> None:
    path = file_of(report)
    assert path.exists()
    report.store.delete_run(report.run_id)
    assert not path.exists()
