"""The results of a run as Parquet beside its transcripts: what other tools read is what Fairtrial says."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import sqlalchemy as sa

from fairtrial import Metric, Sample, Score, TokenUsage
from fairtrial.base.codec.escape import MARK
from fairtrial.cli.app import invoke
from fairtrial.data.sample import NOT_GIVEN
from fairtrial.errors import StoreError, StoreUnavailableError
from fairtrial.store import export, export_results, open_store, schema
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import SamplingNote, write_notes
from fairtrial.store.objects import FolderObjects
from fairtrial.store.sql import SqlStore
from fairtrial.trials.result import Outcome
from tests.doc_pages import ROOT
from tests.store.build import full_run, result, run_record, sample, samples
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


@pytest.mark.parametrize(("rows", "groups"), [(5, 1), (2, 3), (12, 1), (4, 4)])
def test_the_files_of_a_run_are_its_export_in_parts(
    store: SqlStore, place: Path, tmp_path: Path, rows: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_ROW_GROUP", rows)
    monkeypatch.setattr(export, "_FILE_GROUPS", groups)
    report = suite().run_sync(store=store)
    assert len(parquet_files(place)) == -(-12 // (rows * groups))
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
    monkeypatch.setattr(export, "_FILE_GROUPS", 1)
    for rows, again in ((5, "timeout"), (6, "scored")):
        monkeypatch.setattr(export, "_ROW_GROUP", rows)
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


@dataclass(frozen=True)
class Answer:
    text: str
    share: float


OUTPUTS: list[Any] = [
    "plain", "", "null", "ä 漢 😀", "a\0b", "half \ud83d", 'a "quote" and a \\ slash', "line\nline", MARK + "nan", None,
    True, 0, -7, 1e22, 0.1, math.nan, math.inf, b"bytes \0", [], [1, None, "x\0"], {}, {"a": {"b": [1.0, "\ud800"]}},
    Answer("said", 0.5),
]  # fmt: skip
CRITERIA = Score(
    0.5, False, "half\0 of it", [
        Metric("polite", 1.0, 2.0, passed=True, reason="it says please\0"), Metric("short", 0.0, 1.0, passed=False),
        Metric("words", 12.0, higher_is_better=True), Metric("a\ud800b", 0.25),
    ], name="checklist",
)  # fmt: skip


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
@pytest.mark.parametrize("weighted", [False, True])
def test_columns_from_a_database_are_those_of_single_results(
    engine: str, weighted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(export, "_ROW_GROUP", 7)
    url = str(tmp_path / "runs.db") if engine == "sqlite" else str(request.getfixturevalue("pg_url"))
    notes = write_notes(sampling=SamplingNote("2026-11-01", 0.1)) if weighted else {}
    facts: list[dict[str, Any]] = [{}, {"kind": "a", "sampling_weight": 4}, {"n": 1, "kind": None}]
    facts += [{"x\0": [1, "\ud800"], "n": 2.5}, {"kind": "null"}]
    size = len(OUTPUTS)
    given = {
        at: Sample(
            f"s{at} \ud83d" if at == 3 else f"s{at}", value, NOT_GIVEN if at % 3 == 1 else value, facts[at % len(facts)]
        )
        for at, value in enumerate(OUTPUTS)
    }
    plan = run_record(size=size, repeats=2, experiments=("one", "two\ud800"), notes=notes)
    read: list[pl.DataFrame] = []
    with closing(open_store(url)) as database, closing(MemoryStore()) as memory:
        for store in (database, memory):
            run = store.create_run(plan)
            trials = []
            for ordinal in range(run.planned - 3):
                output = OUTPUTS[ordinal % size]
                outcome: Outcome = ("scored", "scored", "scored", "task_error", "timeout", "not_run")[ordinal % 6]
                changes: dict[str, Any] = {"output": output, "usage": TokenUsage(2**31 - 1, 2**31 - 1, 0, 0.25)}
                if outcome == "scored":
                    changes["score"] = CRITERIA if ordinal % 2 else Score(1, True)
                else:
                    changes |= {"error": f"{output!s}: \0", "stage": "task"}
                changes["metadata"] = [{}, {"untimed": True}, {"warmup": True}][ordinal % 3]
                sample_id = given[run.split(ordinal)[0]].id
                made = result(run, ordinal, outcome, **changes)
                trials.append(replace(made, key=made.key._replace(sample_id=sample_id)))
            committed = store.commit(run.run_id, trials, {at: one for at, one in given.items() if at != 5})
            assert not committed.refused
            target = tmp_path / f"{type(store).__name__}.parquet"
            assert export_results(store, run.run_id, target) == len(trials)
            read.append(pl.read_parquet(target))
    assert read[0].columns == read[1].columns
    for name in read[1].columns:
        assert read[0][name].to_list() == read[1][name].to_list(), name
    assert {"metrics.polite", "reason.short", "metadata.kind"} < set(read[0].columns)
    assert ("weight" in read[0].columns) is weighted


@pytest.mark.parametrize("damaged", ['{"topic":', "[" * 100_000, '{"topic":NaN}'])
def test_damaged_metadata_are_a_damaged_store(store: SqlStore, tmp_path: Path, damaged: str) -> None:
    run = full_run(store)
    with store._write() as connection:
        connection.execute(sa.update(schema.samples).where(schema.samples.c.ordinal == 1).values(metadata=damaged))
    with pytest.raises(StoreError, match="the store is damaged"):
        export_results(store, run.run_id, tmp_path / "run.parquet")
    assert list(tmp_path.glob("*.parquet")) == []


@pytest.mark.sqs
def test_polars_reads_the_files_in_a_bucket(tmp_path: Path) -> None:
    with emulated_bucket() as proxy, closing(open_store(tmp_path / "runs.db", transcripts="s3://evals/x")) as store:
        report = suite().run_sync(store=store)
        options = {"aws_endpoint_url": proxy.endpoint, "aws_allow_http": "true", "aws_region": os.environ["AWS_REGION"]}
        read = pl.scan_parquet(f"s3://evals/x/{report.run_id}/columns-*.parquet", storage_options=options)
        assert read.select("output").collect()["output"].to_list() == [f"q{at}" for at in range(12)]
