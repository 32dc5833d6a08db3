"""The results of a run as Parquet beside its transcripts: what other tools read is what Fairtrial says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest

from fairtrial import Score
from fairtrial.cli.app import invoke
from fairtrial.errors import StoreUnavailableError
from fairtrial.store import export, export_results, open_store
from fairtrial.store.notes import SamplingNote, write_notes
from fairtrial.store.objects import FolderObjects
from fairtrial.store.sql import SqlStore
from fairtrial.trials.result import Outcome
from tests.doc_pages import ROOT
from tests.store.build import result, run_record, sample, samples
from tests.store.test_segments import suite
from tests.store.transcript_histories import emulated_bucket


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "transcripts"


@pytest.fixture
def store(tmp_path: Path, place: Path) -> Iterator[SqlStore]:
    with closing(open_store(tmp_path / "runs.db", transcripts=place)) as opened:
        assert isinstance(opened, SqlStore)
        yield opened


def parquet_files(place: Path) -> list[str]:
    return [path.name for path in sorted(place.glob("*/columns-*.parquet"))]


def duckdb(query: str, folder: Path) -> pl.DataFrame:
    """Return the answer to a query, asked in a process of its own: DuckDB complains at the end of one with tests."""
    target = folder / "answer.parquet"
    code = "import sys, duckdb; duckdb.execute(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"COPY ({query}) TO '{target}'"], check=True)
    return pl.read_parquet(target)


@pytest.mark.parametrize("rows", [5, 12, 100])
def test_the_files_of_a_run_are_its_export_in_parts(
    store: SqlStore, place: Path, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_FILE", rows)
    report = suite().run_sync(store=store)
    assert len(parquet_files(place)) == -(-12 // rows)
    export_results(store, report.run_id, tmp_path / "whole.parquet")
    whole = pl.read_parquet(tmp_path / "whole.parquet")
    assert pl.read_parquet(place / report.run_id / "columns-*.parquet").equals(whole)
    assert duckdb(f"FROM '{place}/*/columns-*.parquet'", tmp_path).equals(whole)
    assert [row["output"] for row in whole.to_dicts()] == [f"q{at}" for at in range(12)]


def test_a_run_that_is_resumed_replaces_its_files(
    store: SqlStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.create_run(run_record(size=12, repeats=1, experiments=("baseline",)))
    outcomes: list[Outcome] = ["timeout"]
    outcomes += ["scored"] * 11
    store.commit(run.run_id, [result(run, at, outcome) for at, outcome in enumerate(outcomes)], samples(range(12)))
    again: Outcome
    for rows, again in ((5, "timeout"), (6, "scored")):
        monkeypatch.setattr(export, "_FILE", rows)
        store.commit(run.run_id, [result(run, 0, again, attempt=2)])
        export.export_beside_segments(store, store.get_run(run.run_id))
        read = pl.read_parquet(place / run.run_id / "columns-*.parquet")
        assert read["outcome"].to_list() == [again, *outcomes[1:]]
    assert parquet_files(place) == ["columns-00000.parquet", "columns-00001.parquet"]


def test_files_move_and_are_deleted_with_the_transcripts(tmp_path: Path, place: Path) -> None:
    with closing(open_store(tmp_path / "runs.db")) as store:
        assert isinstance(store, SqlStore)
        report = suite().run_sync(store=store)
        assert parquet_files(place) == []
        store.move_transcripts(report.run_id, str(place))
        assert parquet_files(place) == ["columns-00000.parquet"]
        for path in place.glob("*/*"):
            os.utime(path, (1.0, 1.0))
        assert store.delete_unnamed_segments() == (0, 0)
        assert parquet_files(place) == ["columns-00000.parquet"]
        store.move_transcripts(report.run_id, None)
        assert not (place / report.run_id).exists()
        store.move_transcripts(report.run_id, str(place))
        store.delete_run(report.run_id)
        assert not (place / report.run_id).exists()


def test_a_backup_writes_no_files_beside_the_transcripts_of_its_original(
    store: SqlStore, tmp_path: Path, place: Path
) -> None:
    report = suite().run_sync(store=store)
    store.backup(tmp_path / "copy.db")
    for path in place.glob("*/columns-*"):
        path.unlink()
    with closing(open_store(tmp_path / "copy.db")) as copied:
        export.export_beside_segments(copied, copied.get_run(report.run_id))
    assert parquet_files(place) == []


def test_an_imported_run_has_its_files(store: SqlStore, place: Path, tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "other.db")) as other:
        report = suite().run_sync(store=other)
        assert isinstance(other, SqlStore)
        name = other.get_run(report.run_id).name
    bundle = tmp_path / "run.bundle.zip"
    assert invoke(["export", name, "-o", str(bundle), "--format", "bundle", "--store", str(tmp_path / "other.db")]) == 0
    addresses = ["--store", str(tmp_path / "runs.db")]
    os.environ["FAIRTRIAL_TRANSCRIPTS"] = str(place)
    try:
        assert invoke(["import", str(bundle), *addresses]) == 0
    finally:
        del os.environ["FAIRTRIAL_TRANSCRIPTS"]
    assert parquet_files(place) == ["columns-00000.parquet"]


@pytest.mark.parametrize("problem", ["bucket", "library"])
def test_a_run_is_complete_without_its_files(
    store: SqlStore, place: Path, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = FolderObjects.put

    def refuse(self: FolderObjects, name: str, data: bytes) -> None:
        if name.endswith(".parquet"):
            raise StoreUnavailableError("the bucket is away")
        put(self, name, data)

    if problem == "bucket":
        monkeypatch.setattr(FolderObjects, "put", refuse)
    else:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    report = suite().run_sync(store=store)
    assert store.get_run(report.run_id).status == "finished"
    assert parquet_files(place) == []
    said = "are not written beside its transcripts: the bucket is away"
    assert (said in caplog.text) is (problem == "bucket")
    monkeypatch.undo()
    store.move_transcripts(report.run_id, str(place))  # As the page says.
    assert parquet_files(place) == ["columns-00000.parquet"]


def test_a_sampled_trial_has_its_weight(store: SqlStore, place: Path, tmp_path: Path) -> None:
    notes = write_notes(sampling=SamplingNote("2026-11-01", 0.1))
    run = store.create_run(run_record(size=3, repeats=1, experiments=("baseline",), notes=notes))
    places = {0: sample(0, sampling_weight=10.0), 1: sample(1, sampling_weight=2), 2: sample(2)}
    trials = [result(run, at, score=Score(1.0, at != 1)) for at in range(3)]
    store.commit(run.run_id, trials, places)
    export.export_beside_segments(store, store.get_run(run.run_id))
    read = pl.read_parquet(place / "r1" / "columns-*.parquet")
    assert read["weight"].to_list() == [10.0, 2.0, 1.0]
    rate = "sum(weight * passed::INT) / sum(weight) FILTER (passed IS NOT NULL)"
    assert rate in (ROOT / "docs" / "how-to" / "query-results.md").read_text()
    assert duckdb(f"SELECT {rate} FROM '{place}/*/*.parquet'", tmp_path).item() == pytest.approx(11 / 13)
    assert read.columns.index("weight") == read.columns.index("reason") + 1
    export_results(store, run.run_id, tmp_path / "x.csv")
    assert ",weight," in (tmp_path / "x.csv").read_text()


@pytest.mark.sqs
def test_polars_reads_the_files_in_a_bucket(tmp_path: Path) -> None:
    with emulated_bucket() as proxy, closing(open_store(tmp_path / "runs.db", transcripts="s3://evals/x")) as store:
        report = suite().run_sync(store=store)
        options = {"aws_endpoint_url": proxy.endpoint, "aws_allow_http": "true", "aws_region": os.environ["AWS_REGION"]}
        read = pl.scan_parquet(f"s3://evals/x/{report.run_id}/columns-*.parquet", storage_options=options)
        assert read.select("output").collect()["output"].to_list() == [f"q{at}" for at in range(12)]
