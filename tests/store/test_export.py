from __future__ import annotations

import csv
import io
import json
import stat
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fairtrial import Attachment, Metric, Sample, Score, TokenUsage
from fairtrial.base.codec import decode
from fairtrial.errors import ConfigurationError, MissingExtraError, StoreError, UnknownRunError
from fairtrial.store import Label, RunRecord, RunStore, export_results, load_run, open_store, save_run
from tests.store.build import result, rich_result, run_record, sample, samples, without_place

COLUMNS = [
    "run", "suite", "experiment", "sample_id", "repeat", "outcome", "passed", "value", "reward", "reason",
    "metrics.f1", "metrics.=cmd", "passed.=cmd", "reason.=cmd",
    "latency_ms", "tokens", "cost", "judge_cost", "cache_hits", "unpriced_calls", "error", "stage", "output",
    "expected", "input", "metadata.topic", "metadata.n",
]  # fmt: skip


PARTS = Score(
    0.25, False, "f1 is low", [Metric("f1", -0.5, weight=2.0), Metric("=cmd", 1.0, passed=True, reason="=ok")]
)


def filled(store: RunStore) -> RunRecord:
    run = store.create_run(run_record(size=3, repeats=1))
    batch = [
        result(run, 0, score=PARTS, output="=1+1"),
        result(run, 1, "timeout", error="@late", usage=TokenUsage()),
        result(run, 2, output={"text": "é \ud800\0"}),
        result(run, 5, score=Score(1.0), output="-5", usage=TokenUsage(1, 1)),
    ]
    given: dict[int, Sample[Any, Any]] = {
        0: Sample("s0", "+plus", "\ttab", {"topic": "\rreturn"}),
        1: Sample("s1", ["list"], None, {"n": -7}),
    }
    store.commit("r1", batch, given)
    return run


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.proves("R100")
class TestExport:
    @pytest.mark.proves("R134")
    def test_csv_has_a_row_for_each_trial(self, store: RunStore, tmp_path: Path) -> None:
        filled(store)
        assert export_results(store, "r1", tmp_path / "out.csv") == 4
        first, late, second, last = rows((tmp_path / "out.csv").read_text("utf-8"))
        assert [name.lstrip("'") for name in first] == COLUMNS
        assert (first["run"], first["suite"], first["experiment"], first["sample_id"]) == (
            "r1", "support", "baseline", "s0",
        )  # fmt: skip
        assert (first["passed"], first["value"], first["metrics.f1"]) == ("False", "0.25", "-0.5")
        assert (first["reward"], first["reason"]) == ("-0.5", "f1 is low")
        assert (first["passed.=cmd"], first["reason.=cmd"], second["reward"]) == ("True", "'=ok", "0.75")
        assert (late["reward"], late["reason"], late["passed.=cmd"]) == ("", "", "")
        assert first["cost"] == "0.25"
        assert (first["tokens"], first["latency_ms"], first["repeat"]) == ("15", "100", "0")
        assert (late["outcome"], late["passed"], late["value"], late["cost"]) == ("timeout", "", "", "")
        assert (late["stage"], late["output"], late["expected"]) == ("task", "", "'\ttab")
        assert second["output"] == '{"text":"é \ufdd0d800\ufdd00000"}'
        assert (second["input"], second["expected"], second["metadata.topic"]) == ('["list"]', "", "")
        assert second["metadata.n"] == "-7"
        assert (last["sample_id"], last["input"]) == ("s2", "")  # Its sample was never stored.

    def test_csv_cells_never_start_a_formula(self, store: RunStore, tmp_path: Path) -> None:
        filled(store)
        export_results(store, "r1", tmp_path / "out.csv")
        text = (tmp_path / "out.csv").read_bytes().decode("utf-8")
        first, late, _second, last = rows(text)
        assert first["output"] == "'=1+1"
        assert first["input"] == "'+plus"
        assert first["expected"] == "'\ttab"
        assert first["metadata.topic"] == "'\rreturn"
        assert late["error"] == "'@late"
        assert last["output"] == "'-5"
        assert "metrics.=cmd" in first  # A name of ours comes first, so it is no formula.
        for row in csv.reader(io.StringIO(text, newline="")):
            for cell in row:
                assert not cell.startswith(("=", "+", "@", "\t", "\r"))
                assert not cell.startswith("-") or float(cell) < 0

    def test_jsonl_keeps_values_as_they_are(self, store: RunStore) -> None:
        filled(store)
        out = io.StringIO()
        assert export_results(store, "r1", out, "jsonl") == 4
        lines = [decode(dict[str, Any], line) for line in out.getvalue().splitlines()]
        assert list(lines[0]) == COLUMNS
        assert lines[0]["output"] == "=1+1"
        assert lines[0]["passed"] is False
        assert (lines[0]["reward"], lines[0]["reason"], lines[0]["passed.=cmd"]) == (-0.5, "f1 is low", True)
        assert lines[1]["value"] is None
        assert lines[2]["output"] == {"text": "é \ud800\0"}
        assert lines[2]["input"] == ["list"]
        assert lines[3]["input"] is None

    def test_parquet_has_typed_columns(self, store: RunStore, tmp_path: Path) -> None:
        filled(store)
        assert export_results(store, "r1", str(tmp_path / "out.parquet")) == 4
        table = pq.read_table(tmp_path / "out.parquet")
        assert table.column_names == COLUMNS
        found = table.to_pylist()
        assert found[0]["metrics.f1"] == -0.5
        assert found[0]["passed"] is False
        assert (found[0]["reward"], found[0]["reason"]) == (-0.5, "f1 is low")
        assert (found[0]["passed.=cmd"], found[1]["passed.=cmd"]) == (True, None)
        assert found[1]["value"] is None
        assert found[0]["output"] == "=1+1"
        assert json.loads(found[2]["input"]) == ["list"]
        assert found[2]["metadata.n"] == "-7"
        assert [row["tokens"] for row in found] == [15, 0, 15, 2]

    @pytest.mark.parametrize("format", ["csv", "parquet"])
    def test_text_no_file_takes_is_replaced(self, tmp_path: Path, format: Any) -> None:
        store = open_store("memory:")
        run = store.create_run(run_record())
        given: dict[int, Sample[Any, Any]] = {0: Sample("s0", "plain\0", None, {"k\ud800": "v"})}
        store.commit("r1", [result(run, 0, output="a \ud800 \0 é 😀")], given)
        path = tmp_path / f"out.{format}"
        export_results(store, "r1", path, format)
        found = rows(path.read_text("utf-8"))[0] if format == "csv" else pq.read_table(path).to_pylist()[0]
        assert found["output"] == "a \ufffd \ufffd é 😀"
        assert found["input"] == "plain\ufffd"
        assert found["metadata.k\ufffd"] == "v"

    def test_a_run_without_results_is_a_header(self, store: RunStore, tmp_path: Path) -> None:
        store.create_run(run_record())
        for format in ("csv", "jsonl", "parquet"):
            assert export_results(store, "r1", tmp_path / f"out.{format}") == 0
        assert (tmp_path / "out.csv").read_text().startswith("run,suite,")
        assert (tmp_path / "out.jsonl").read_text() == ""
        assert pq.read_table(tmp_path / "out.parquet").num_rows == 0

    def test_an_unknown_format_is_refused(self, tmp_path: Path) -> None:
        store = open_store("memory:")
        for target, format in ((tmp_path / "out.xlsx", None), (io.StringIO(), None), (tmp_path / "o.csv", "xml")):
            with pytest.raises(ConfigurationError, match="csv, jsonl or parquet"):
                export_results(store, "r1", target, format)  # type: ignore[arg-type]  # that is the point

    def test_a_failed_export_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        store = open_store("memory:")
        run = filled(store)
        path = tmp_path / "out.csv"
        path.write_text("old")

        def broken(*_args: Any, **_kwargs: Any) -> Iterator[Any]:
            yield result(run, 0)
            raise StoreError("gone")

        store.results = broken  # type: ignore[method-assign]  # a store that fails half-way
        with pytest.raises(StoreError, match="gone"):
            export_results(store, "r1", path)
        assert [found.name for found in tmp_path.iterdir()] == ["out.csv"]
        assert path.read_text() == "old"

    def test_parquet_without_its_library_names_the_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = open_store("memory:")
        filled(store)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(MissingExtraError, match=r"fairtrial\[data\]"):
            export_results(store, "r1", tmp_path / "out.parquet")

    def test_parquet_is_written_in_groups_of_5000_rows(self, tmp_path: Path) -> None:
        store = open_store("memory:")
        run = filled(store)
        store.results = lambda *_a, **_k: iter([result(run, 0)] * 5_001)  # type: ignore[method-assign]  # a long run
        assert export_results(store, "r1", tmp_path / "out.parquet") == 5_001
        groups = pq.ParquetFile(tmp_path / "out.parquet").metadata
        assert [groups.row_group(place).num_rows for place in range(groups.num_row_groups)] == [5_000, 1]

    def test_chosen_trials_are_read_200_at_once(self) -> None:
        store = open_store("memory:")
        filled(store)
        read, asked = store.results, []

        def asked_for(run_id: str, **choice: Any) -> Iterator[Any]:
            asked.append(choice["ordinals"])
            return read(run_id, **choice)

        store.results = asked_for  # type: ignore[method-assign]  # a store that remembers what it is asked for
        assert export_results(store, "r1", io.StringIO(), "csv", ordinals=range(1, 202)) == 3
        assert asked == [tuple(range(1, 201)), (201,)]

    @pytest.mark.long
    @pytest.mark.measured
    def test_an_export_needs_no_more_memory_for_more_results(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "runs.db")
        peaks = []
        for size in (1_000, 8_000):
            run = store.create_run(run_record(f"r{size}", size=size, experiments=("baseline",), repeats=1))
            for start in range(0, size, 500):
                places = range(start, start + 500)
                store.commit(run.run_id, [result(run, n, output="x" * 500) for n in places], samples(places))
            export_results(store, run.run_id, tmp_path / "out", "csv")  # Once before, to fill caches.
            tracemalloc.start()
            export_results(store, run.run_id, tmp_path / "out", "csv")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        store.close()
        assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.proves("R100")
class TestPortable:
    def test_a_saved_run_comes_back_whole(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.create_run(run_record("other"))
        run = store.create_run(run_record(tags={"a": "b"}, notes={"n": 1}, status="finished", finished_at=5.0))
        store.commit("r1", [rich_result(run, n) for n in range(0, 40, 3)], samples(range(10)))
        store.commit("r1", [result(run, 1, "task_error")])
        store.label(Label(result(run, 0).key, "good", True, "ann", 5.0))
        path = tmp_path / "saved.fairtrial"
        save_run(store, "r1", path)
        assert [found.name for found in tmp_path.iterdir() if found.name.startswith(".")] == []
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o400)
        loaded, run_id = load_run(path)
        try:
            assert run_id == "r1"
            assert loaded.get_run("r1") == without_place(store.get_run("r1"))
            assert loaded.get_run("r1").number == 2
            assert list(loaded.results("r1")) == list(store.results("r1"))
            assert list(loaded.samples("r1")) == list(store.samples("r1"))
            assert list(loaded.labels("r1")) == list(store.labels("r1"))
            assert loaded.totals("r1") == store.totals("r1")
            assert [found.snapshot for found in loaded.results("r1", snapshots=True)] == [
                found.snapshot for found in store.results("r1", snapshots=True)
            ]
            with pytest.raises(StoreError):
                loaded.update_run("r1", status="running")
        finally:
            loaded.close()
        assert sorted(found.name for found in tmp_path.glob("saved*")) == ["saved.fairtrial"]

    def test_attachments_are_exported_with_the_run(self, store: RunStore, tmp_path: Path, run: RunRecord) -> None:
        picture, trace, elsewhere = b"picture " * 99, b"tokens", b"elsewhere"
        store.put_blob(picture)
        store.put_blob(trace)
        store.put_blob(b"of another run")
        given: dict[int, Sample[Any, Any]] = {0: Sample("s0", {"image": Attachment.of(picture)})}
        store.commit("r1", [result(run, 0, output=[Attachment.of(trace), Attachment.of(elsewhere)])], given)
        save_run(store, "r1", tmp_path / "saved.db")
        loaded, _run_id = load_run(tmp_path / "saved.db")
        try:
            assert loaded.get_blob(Attachment.of(picture).sha256) == picture
            assert loaded.get_blob(Attachment.of(trace).sha256) == trace
            for absent in (elsewhere, b"of another run"):
                with pytest.raises(StoreError):
                    loaded.get_blob(Attachment.of(absent).sha256)
        finally:
            loaded.close()

    def test_saving_an_unknown_run_writes_nothing(self, store: RunStore, tmp_path: Path) -> None:
        with pytest.raises(UnknownRunError):
            save_run(store, "nope", tmp_path / "saved.db")
        assert not (tmp_path / "saved.db").exists()

    def test_a_trial_that_cannot_be_copied_fails_the_save(self, tmp_path: Path) -> None:
        store = open_store("memory:")
        run = store.create_run(run_record())
        broken = replace(result(run, 0), latency_ms=-1)
        store.results = lambda *_a, **_k: iter([broken])  # type: ignore[method-assign]  # a store that lies
        with pytest.raises(StoreError, match="cannot be copied"):
            save_run(store, "r1", tmp_path / "saved.db")
        assert list(tmp_path.iterdir()) == []

    def test_a_store_of_several_runs_is_not_a_saved_run(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "runs.db")
        for name in ("r1", "r2"):
            store.create_run(run_record(name))
        store.close()
        with pytest.raises(StoreError, match="does not contain exactly one run"):
            load_run(tmp_path / "runs.db")

    def test_a_saved_run_can_be_opened_as_a_store(self, tmp_path: Path, opened: Callable[[str], RunStore]) -> None:
        store = open_store("memory:")
        run = store.create_run(run_record())
        store.commit("r1", [result(run, 0)], {0: sample(0)})
        save_run(store, "r1", tmp_path / "saved.db")
        again = opened(str(tmp_path / "saved.db"))
        assert again.commit("r1", [result(run, 0), result(run, 1)]) == (1, 1, (), ())
