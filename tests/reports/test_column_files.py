"""Column files give the same figures as the store itself, and are never trusted more than it."""

from __future__ import annotations

import errno
import json
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fairtrial import Dataset, EvalReport, EvalSuite, Metric, Sample, Score, TokenUsage, compare, exact_match, gate
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures import column_file, column_reader
from fairtrial.reports.figures.column_file import ColumnFile, open_columns, write_columns
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import ExperimentSource, run_totals
from fairtrial.store import RunRecord, RunStore, open_store
from fairtrial.store.column_cache import cached_columns, column_path
from fairtrial.trials import EvalResult, TrialKey

SIDES = ("plain", "terse")
BLOCK = 8  # Small, so that a few trials fill several blocks.


@contextmanager
def from_files() -> Iterator[None]:
    """Read runs of any size from column files."""
    with mock.patch.object(column_reader, "SMALLEST_FILE", 0), mock.patch.object(column_file, "BLOCK", BLOCK):
        yield


@contextmanager
def without_files() -> Iterator[None]:
    with mock.patch.object(column_reader, "open_columns", return_value=None):
        yield


def metric() -> st.SearchStrategy[Metric]:
    values = st.sampled_from([0.0, 0.1, 1 / 3, 1.0, 7.5, -2.0])
    return st.builds(
        Metric,
        st.sampled_from(["a", "b", "value", "passed", "caf\u00e9", "\0"]),
        values,
        passed=st.sampled_from([None, True, False]),
        higher_is_better=st.sampled_from([None, True, False]),
        weight=st.sampled_from([1.0, 1.0, 0.5]),
    )


SCORES = st.builds(
    lambda value, passed, metrics: Score(value, passed, metrics=metrics),
    st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 1.0]),
    st.booleans(),
    st.lists(metric(), max_size=3, unique_by=lambda one: one.name),
)
ERRORS = st.sampled_from(["task_error", "timeout", "scorer_error", "dead_letter"])
VALUES = st.sampled_from(
    [None, "x", "[1]", [1], {"k": 1}, 1, 1.0, True, 0.0, -0.0, "\ud800", "\0", float("nan"), 10**30]
)
METADATA: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}), st.dictionaries(st.sampled_from(["cluster", "topic", "\u00e9"]), VALUES, max_size=3)
)
type Trial = tuple[Score | str | None, int, int, float | None, dict[str, Any]]
TRIAL: st.SearchStrategy[Trial] = st.tuples(
    st.one_of(st.none(), SCORES, SCORES, ERRORS),
    st.integers(0, 3),
    st.integers(0, 50),
    st.sampled_from([None, 0.0, 0.125, 1e-7]),
    st.sampled_from([{}, {}, {"warmup": True}]),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Sample[Any, Any]], int, list[list[Trial]]]:
    size, repeats = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    names = st.text(st.characters(codec=None, categories=("L", "N", "Cs", "Cc")), min_size=1, max_size=4)
    ids = draw(st.lists(names, min_size=size, max_size=size, unique=True))
    samples = [
        Sample(name, draw(st.sampled_from([f"input {place}", "the same", ""])), "e", draw(METADATA))
        for place, name in enumerate(ids)
    ]
    return samples, repeats, [[draw(TRIAL) for _ in range(repeats)] for _ in range(size * len(SIDES))]


def result_of(run: RunRecord, sample: Sample[Any, Any], ordinal: int, trial: Trial) -> EvalResult | None:
    score, attempt, latency, cost, metadata = trial
    if score is None:
        return None
    _, experiment, repeat = run.split(ordinal)
    key = TrialKey(run.run_id, run.experiments[experiment], sample.id, repeat)
    usage = TokenUsage(latency, attempt, cost_usd=cost)
    given: dict[str, Any] = {"attempt": attempt, "latency_ms": latency, "usage": usage, "metadata": metadata}
    if isinstance(score, Score):
        return EvalResult(
            key=key, ordinal=ordinal, outcome="scored", score=score, output="out", execution=ordinal, **given
        )
    return EvalResult(key=key, ordinal=ordinal, outcome=score, error="no", stage="task", execution=ordinal, **given)  # type: ignore[arg-type]


def store_run(
    store: RunStore,
    samples: list[Sample[Any, Any]],
    repeats: int,
    cells: list[list[Trial]],
    *,
    run_id: str = "r1",
    after_each: Callable[[], Any] = lambda: None,
    order: list[int] | None = None,
) -> RunRecord:
    """Store a run sample by sample, in this order."""
    run = store.create_run(
        RunRecord(run_id, "suite", "data", "1", run_id * 3, len(samples), SIDES, repeats, created_at=500.0)
    )
    for place in order or range(len(samples)):
        results = []
        for side in range(len(SIDES)):
            for repeat in range(repeats):
                trial = cells[place * len(SIDES) + side][repeat]
                results.append(result_of(run, samples[place], run.ordinal(place, side, repeat), trial))
        stored = [result for result in results if result is not None]
        if stored:
            store.commit(run_id, stored, {place: samples[place]})
            after_each()
    store.update_run(run_id, status="finished", finished_at=1000.0)
    return store.get_run(run_id)


def assert_equal(one: Columns, other: Columns) -> None:
    """Compare columns bit for bit, with the order of everything."""
    assert list(one.ids) == list(other.ids)
    assert one.outcomes.tobytes() == other.outcomes.tobytes()
    assert list(one.values) == list(other.values)
    for name, array in one.values.items():
        assert array.dtype == other.values[name].dtype
        assert array.shape == other.values[name].shape
        np.testing.assert_array_equal(np.signbit(array), np.signbit(other.values[name]))
        np.testing.assert_array_equal(array, other.values[name])
    assert (one.clusters is None) == (other.clusters is None)
    if one.clusters is not None and other.clusters is not None:
        assert one.clusters.tolist() == other.clusters.tolist()
    assert list(one.groups) == list(other.groups)
    for key, labels in one.groups.items():
        assert list(map(repr, labels)) == list(map(repr, other.groups[key]))
    assert list(one.directions.items()) == list(other.directions.items())
    assert one.repeated_inputs == other.repeated_inputs
    assert (one.planned, one.adaptive, one.fingerprint) == (other.planned, other.adaptive, other.fingerprint)


def both(store: RunStore, run: RunRecord, **given: Any) -> tuple[Columns, Columns]:
    source = ExperimentSource(store, run, given.pop("side", "plain"))
    with without_files():
        direct = read_columns(source, **given)
    with from_files():
        return read_columns(source, **given), direct


relaxed = settings(
    phases=[Phase.generate], max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class TestFigures:
    @pytest.mark.proves("R118")
    @relaxed
    @given(made=runs())
    def test_columns_equal_those_read_from_the_store_bit_for_bit(self, made: Any, store: RunStore) -> None:
        run = store_run(store, *made, run_id=uuid4().hex)
        for side in SIDES:
            for given_ in (
                {"costs": True, "keys": ["topic", "\u00e9", "none"]},
                {"cluster": ""},
                {"metrics": ["passed", "reward", "passed:a", "b", "latency_ms"]},
            ):
                assert_equal(*both(store, run, side=side, **given_))

    @relaxed
    @given(made=runs(), data=st.data())
    def test_a_file_that_grew_with_its_run_equals_one_built_at_once(
        self, made: Any, data: st.DataObject, store: RunStore
    ) -> None:
        run_id = uuid4().hex
        order = data.draw(st.permutations(range(len(made[0]))))
        source: list[ExperimentSource] = []

        def look() -> None:
            source[:] = [ExperimentSource(store, store.get_run(run_id), "plain")]
            with from_files():
                grown = read_columns(source[0], costs=True, keys=["topic"])
            with without_files():
                assert_equal(grown, read_columns(source[0], costs=True, keys=["topic"]))

        run = store_run(store, *made, run_id=run_id, after_each=look, order=order)
        assert_equal(*both(store, run, costs=True, keys=["topic"]))

    def test_zero_and_minus_zero_stay_apart_in_a_file_that_grows(self, store: RunStore) -> None:
        samples = [Sample("a", "1", "e", {"topic": 0.0}), Sample("b", "2", "e", {"topic": -0.0})]
        cells: list[list[Trial]] = [[(Score(1.0), 0, 1, None, {})] for _ in range(2 * len(SIDES))]
        run = store_run(store, samples, 1, cells, run_id=uuid4().hex)
        with from_files():
            found = read_columns(ExperimentSource(store, run, "plain"), keys=["topic"])
        assert list(map(repr, found.groups["topic"])) == ["0.0", "-0.0"]

    @settings(relaxed, max_examples=5)
    @given(made=runs())
    def test_reports_comparisons_and_gates_say_the_same(self, made: Any, store: RunStore) -> None:
        run = store_run(store, *made, run_id=uuid4().hex)

        def said() -> list[Any]:
            report = EvalReport(store, run)
            found: list[Any] = [report.to_json(), str(report)]
            for slices in ((), ("topic",)):
                try:
                    found.append(compare(report["plain"], report["terse"], metrics=None, slice_by=slices).to_json())
                except ConfigurationError as error:
                    found.append(str(error))
            found.append(gate(report["terse"], {"min_pass_rate": 0.5}).to_json())
            return found

        with without_files():
            expected = said()
        with from_files():
            assert open_columns(store, run) is not None
            assert said() == expected

    def test_postgresql_gives_the_same(self, pg_url: str) -> None:
        store = open_store(pg_url)
        run = store_run(store, *sample_run())
        for side in SIDES:
            assert_equal(*both(store, run, side=side, costs=True, keys=["topic"]))
        assert [one.run_id for one in cached_columns(store.identity)] == ["r1"]  # type: ignore[attr-defined]
        store.delete_run("r1")
        assert not cached_columns(store.identity)  # type: ignore[attr-defined]
        store.close()

    def test_totals_come_from_the_file_and_equal_those_of_the_store(self, store: RunStore) -> None:
        run = store_run(store, *sample_run(missing=False))
        expected = store.totals("r1")
        assert write_columns(store, run)
        with mock.patch.object(type(store), "totals", side_effect=AssertionError("the store was asked")):
            assert run_totals(store, run) == expected


def sample_run(*, missing: bool = True) -> tuple[list[Sample[Any, Any]], int, list[list[Trial]]]:
    samples = [
        Sample(f"s{place}", f"question {place // 2}", "e", {"topic": f"t{place % 3}"} if place % 4 else {})
        for place in range(30)
    ]
    cells: list[list[Trial]] = []
    for place in range(60):
        score: Score | str | None = Score(
            place / 60, place % 3 > 0, metrics=[Metric("a", place / 7, passed=place % 2 > 0)]
        )
        if place % 11 == 0:
            score = None if missing else "timeout"
        cells.append([(score, 0, place, place / 1000, {}), ("task_error", 1, 5, None, {})])
    return samples, 2, cells


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    found = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    yield found
    found.close()


def path_of(store: RunStore) -> Path:
    return column_path(store.identity, "r1")  # type: ignore[attr-defined]


class TestFiles:
    def test_the_file_is_private_and_has_no_address_in_its_name(self, store: RunStore, tmp_path: Path) -> None:
        write_columns(store, store_run(store, *sample_run()))
        path = path_of(store)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert str(tmp_path).encode() not in path.read_bytes()
        assert sorted(path.parent.iterdir()) == [path]

    def test_a_current_file_is_used_without_reading_results(self, store: RunStore) -> None:
        run = store_run(store, *sample_run(missing=False))
        write_columns(store, run)
        before = path_of(store).stat().st_mtime_ns
        with mock.patch.object(type(store), "result_numbers", side_effect=AssertionError("results were read")):
            found = open_columns(store, run)
        assert found is not None
        assert found.header.rows == run.planned
        assert path_of(store).stat().st_mtime_ns == before

    def test_every_damage_to_a_file_is_noticed_and_repaired(self, store: RunStore) -> None:
        run = store_run(store, *sample_run(missing=False))
        with from_files():
            write_columns(store, run)
        path = path_of(store)
        good = path.read_bytes()
        _, expected = both(store, run, costs=True)
        damaged = [b"", good[:10], good[:-1], good[: len(good) // 2], good + b"x", b"\x80\x04K\x01."]
        damaged += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 211)]
        for data in damaged:
            path.write_bytes(data)
            column_file._open.clear()
            column_file._in_memory.clear()
            source = ExperimentSource(store, run, "plain")
            assert_equal(_from_files(source), expected)
            repaired = path.read_bytes()
            assert repaired == good or (repaired == data and _only_padding(data, good))

    @pytest.mark.parametrize("content", [b"of somebody else", None], ids=["to another file", "to nothing"])
    def test_a_link_in_place_of_a_file_is_replaced_and_not_written_through(
        self, store: RunStore, tmp_path: Path, content: bytes | None
    ) -> None:
        run = store_run(store, *sample_run(missing=False))
        with from_files():
            write_columns(store, run)
        path, elsewhere = path_of(store), tmp_path / "elsewhere"
        _, expected = both(store, run, costs=True)
        if content is not None:
            elsewhere.write_bytes(content)
        path.unlink()
        path.symlink_to(elsewhere)
        column_file._open.clear()
        column_file._in_memory.clear()
        assert_equal(_from_files(ExperimentSource(store, run, "plain")), expected)
        assert (elsewhere.read_bytes() if elsewhere.exists() else None) == content
        assert path.is_file()
        assert not path.is_symlink()

    def test_a_file_of_another_run_store_or_version_is_not_used(self, store: RunStore, tmp_path: Path) -> None:
        run = store_run(store, *sample_run(missing=False))
        write_columns(store, run)
        mine = path_of(store).read_bytes()
        other = open_store(f"sqlite:///{tmp_path / 'other.db'}")
        samples, repeats, cells = sample_run(missing=False)
        theirs = store_run(other, samples, repeats, cells[::-1])
        column_path(other.identity, "r1").parent.mkdir(parents=True)  # type: ignore[attr-defined]
        column_path(other.identity, "r1").write_bytes(mine)  # type: ignore[attr-defined]
        assert_equal(*both(other, theirs, costs=True))
        with mock.patch("fairtrial.store.column_cache.FORMAT", "another version"):
            column_file._open.clear()
            assert open_columns(store, run, build=False) is None
        other.close()

    def test_a_continued_run_gets_another_file(self, store: RunStore) -> None:
        samples, repeats, cells = sample_run(missing=False)
        run = store_run(store, samples, repeats, cells)
        write_columns(store, run)
        store.update_run("r1", status="running")
        better = EvalResult(
            key=TrialKey("r1", "plain", "s0", 1),
            ordinal=1,
            outcome="scored",
            score=Score(1.0, True),
            output="out",
            attempt=2,
            execution=99,
        )
        assert store.commit("r1", [better]).new == 1
        running, direct = both(store, store.get_run("r1"), costs=True)
        assert running.values["value"][0, 1] == 1.0
        assert_equal(running, direct)
        store.update_run("r1", status="finished", finished_at=2000.0)
        assert_equal(*both(store, run, costs=True))  # The caller's record is out of date.

    def test_only_changed_blocks_are_read_again(self, store: RunStore) -> None:
        samples, repeats, cells = sample_run(missing=False)
        scored: list[list[Trial]] = [[(Score(0.5, True), 0, 1, None, {})] * repeats for _ in cells]
        asked: list[tuple[int, int]] = []
        original = type(store).result_numbers  # type: ignore[attr-defined]

        def watch(self: Any, run_id: str, first: int, end: int) -> Any:
            asked.append((first, end))
            return original(self, run_id, first, end)

        def look() -> None:
            asked.clear()
            open_columns(store, store.get_run("r1"))

        with from_files(), mock.patch.object(type(store), "result_numbers", watch):
            store_run(store, samples, repeats, scored, after_each=look)
        assert asked
        assert all(end > (len(samples) - 1) * repeats * 2 - BLOCK for _, end in asked)

    def test_a_full_disk_only_costs_time(self, store: RunStore) -> None:
        run = store_run(store, *sample_run())
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(column_file._FileTarget, "write", side_effect=full):
            assert_equal(*both(store, run, costs=True))
        assert not list(path_of(store).parent.iterdir())

    def test_a_cache_that_cannot_be_written_only_costs_time(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("FAIRTRIAL_CACHE_DIR", str(tmp_path / "file"))
        run = store_run(store, *sample_run())
        assert_equal(*both(store, run, costs=True))
        assert cached_columns() == []

    def test_two_processes_that_build_at_once_leave_one_whole_file(self, store: RunStore, tmp_path: Path) -> None:
        run = store_run(store, *sample_run(missing=False))
        code = (
            "import sys; from fairtrial import open_store\n"
            "from fairtrial.reports.figures.column_file import write_columns\n"
            "store = open_store(sys.argv[1]); sys.stdin.readline()\n"
            "print(write_columns(store, store.get_run('r1')))"
        )
        command = [sys.executable, "-c", code, f"sqlite:///{tmp_path / 'runs.db'}"]
        builders = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
        ]
        answers = [builder.communicate("go\n", timeout=120)[0].strip() for builder in builders]
        assert answers == ["True"] * 3
        assert sorted(path_of(store).parent.iterdir()) == [path_of(store)]
        assert_equal(*both(store, run, costs=True))

    def test_a_store_in_memory_has_no_file(self) -> None:
        store = open_store("memory:")
        run = store_run(store, *sample_run())
        assert open_columns(store, run) is None
        assert not write_columns(store, run)

    def test_keys_with_too_many_values_are_read_from_the_store(
        self, store: RunStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fairtrial.reports.figures.column_samples.MOST_VALUES", 2)
        run = store_run(store, *sample_run())
        assert_equal(*both(store, run, keys=["topic"]))
        found = open_columns(store, run)
        assert found is not None
        assert found.header.uncoded == ["topic"]

    def test_keys_beyond_a_number_are_read_from_the_store(
        self, store: RunStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fairtrial.reports.figures.column_samples._MOST_KEYS", 1)
        samples, repeats, cells = sample_run()
        run = store_run(store, [replace(one, metadata={"topic": "t", "level": "l"}) for one in samples], repeats, cells)
        assert_equal(*both(store, run, keys=["topic", "level"]))
        found = open_columns(store, run)
        assert found is not None
        assert found.header.uncoded == ["level"]


def _from_files(source: ExperimentSource) -> Columns:
    with from_files():
        return read_columns(source, costs=True)


def _only_padding(data: bytes, good: bytes) -> bool:
    """True if only bytes between arrays differ, which no figure depends on."""
    return len(data) == len(good) and sum(one != other for one, other in zip(data, good, strict=True)) == 1


def test_a_large_run_has_its_file_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.store.column_cache.WRITTEN_AT_THE_END", 10)
    data = Dataset([Sample(f"s{place}", "x", "x") for place in range(20)])
    suite = EvalSuite("small", data, lambda text: text, exact_match)
    report = suite.run_sync(store=f"sqlite:///{tmp_path / 'runs.db'}")
    assert [one.run_id for one in cached_columns(report.store.identity)] == [report.run_id]  # type: ignore[attr-defined]
    found = open_columns(report.store, report.run, build=False)
    assert isinstance(found, ColumnFile)
    assert found.header.finished_at == report.run.finished_at
    assert json.loads(json.dumps(found.header.totals))[0]["passed"] == 20
