"""The cost of storing a trial, compared with the least work. CPU time, interleaved, the best of several."""

from __future__ import annotations

import random
import sqlite3
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fairtrial import ChatMessage, EvalResult, PromptExecuted, Sample, Score, Session, TokenUsage, TrialKey, open_store
from fairtrial.store import RunRecord, RunStore, Totals, export_results
from fairtrial.store.rows import RESULT_COLUMNS
from tests.figures import Figure

pytestmark = pytest.mark.measured

BATCH = 500
# What a result of the million has; the other columns have defaults.
COLUMNS = (
    "run, ordinal, experiment, sample, repeat, outcome, timed, passed, value, latency_ms, started_at, input_tokens, "
    "output_tokens, cached_tokens, cost_usd, attempt, stage, execution, metrics"
)
QUESTION, ANSWER = "What is the capital of France? Answer in one word.", "Paris"
HASH = 2**62 - 1  # As long as hashes of inputs are.


def transcript() -> bytes:
    session = Session(tags={"run": "r1", "sample": "s-000000001"})
    session.record(ChatMessage("user", QUESTION))
    session.record(ChatMessage("assistant", ANSWER))
    session.record(PromptExecuted("capital", "scripted", "model-1", TokenUsage(100, 20)))
    return session.snapshot()


def batch(run: RunRecord, start: int, snapshot: bytes) -> tuple[list[EvalResult], dict[int, Sample[Any, Any]]]:
    results, samples = [], {}
    for n in range(start, start + BATCH):
        sample = samples[n] = Sample(f"s-{n:09d}", QUESTION, ANSWER, {"topic": "geography", "level": 3})
        results.append(
            EvalResult(
                key=TrialKey(run.run_id, "baseline", sample.id, 0),
                ordinal=n,
                outcome="scored",
                score=Score(1.0, reason="exact match"),
                output=ANSWER,
                latency_ms=1234,
                usage=TokenUsage(100, 20, 0, 0.001),
                execution=random.getrandbits(62),
                started_at=1_767_225_600.1,
                output_json=f'"{ANSWER}"',
                snapshot=snapshot,
            )
        )
    return results, samples


def new_run(store: RunStore, size: int) -> RunRecord:
    return store.create_run(RunRecord("r1", "bench", "capitals", "1", "f" * 32, size, ("baseline",), 1))


def by_hand(connection: sqlite3.Connection, start: int, snapshot: bytes) -> float:
    """The same rows into the same tables, with compression, and nothing checked, encoded or redacted."""
    compress = zstandard.ZstdCompressor(level=1).compress
    numbers = range(start, start + BATCH)
    executions = [random.getrandbits(62) for _ in numbers]
    began = time.process_time()
    facts = '{"topic":"geography","level":3}'
    samples = [(1, n, f"s-{n:09d}", f'"{QUESTION}"', f'"{ANSWER}"', facts, HASH) for n in numbers]
    results = [
        (
            *(1, n, 0, n, 0, 1, 1, 1, 1.0, 1234, 1_767_225_600.1, 100, 20, 0, 0.001, None, 0, 0, 0, 0, 0, 0, 0, 1),
            *(None, execution, None, 0, None, None, 0, None),
        )
        for n, execution in zip(numbers, executions, strict=True)
    ]
    details = [
        (1, n, execution, None, "exact match", None, None, f'"{ANSWER}"', compress(snapshot))
        for n, execution in zip(numbers, executions, strict=True)
    ]
    connection.execute("BEGIN IMMEDIATE")
    for table, rows in (("samples", samples), (f"results ({','.join(RESULT_COLUMNS)})", results), ("details", details)):
        marks = ",".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    connection.execute("COMMIT")
    return time.process_time() - began


def best(seconds: list[float]) -> float:
    """The lower quartile: what it takes when nobody else is in the way."""
    return sorted(seconds)[len(seconds) // 4]


def test_a_committed_result_costs_little_more_than_raw_inserts(tmp_path: Path, figure: Figure) -> None:
    snapshot, batches = transcript(), 60
    store, raw = open_store(tmp_path / "ours.db"), open_store(tmp_path / "raw.db")
    run = new_run(store, batches * BATCH)
    new_run(raw, batches * BATCH)
    connection = sqlite3.connect(tmp_path / "raw.db", isolation_level=None)
    connection.execute("PRAGMA synchronous=NORMAL")
    ours, theirs = [], []
    for start in range(0, batches * BATCH, BATCH):
        results, samples = batch(run, start, snapshot)
        began = time.process_time()
        committed = store.commit("r1", results, samples)
        ours.append(time.process_time() - began)
        assert committed.new == BATCH
        theirs.append(by_hand(connection, start, snapshot))
    assert len(list(raw.results("r1", limit=3))) == 3  # It really wrote what a store reads.
    connection.close()
    store.close()
    raw.close()
    # Batch by batch: the speed of a shared machine changes between one second and the next.
    ratio = statistics.median(mine / bare for mine, bare in zip(ours, theirs, strict=True))
    print(f"{best(ours) / BATCH * 1e6:.1f} us per result, with {len(snapshot)} byte transcripts")
    figure("storing a result: CPU time, x raw sqlite3", ratio, at_most=2.2)


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a million results in four experiments, made inside the database for speed."""
    path = tmp_path_factory.mktemp("million") / "runs.db"
    store = open_store(path)
    store.create_run(RunRecord("r1", "bench", "capitals", "1", "f" * 32, 260_000, ("a", "b", "c", "d"), 1))
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(
            f"""
            WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 999999)
            INSERT INTO results ({COLUMNS})
            SELECT 1, i, i % 4, i / 4, 0, iif(i % 10, 1, 2), 1, iif(i % 10, i % 2, NULL),
                   iif(i % 10, (i % 7) / 7.0, NULL), 1000 + i % 977, 1767225600.1, 100, 20, 0, 0.001, 1,
                   NULL, i * 7919, NULL FROM n
            """
        )
        connection.execute(
            """
            WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 249999)
            INSERT INTO samples SELECT 1, i, 's' || i, '"q"', '"a"', json_object('topic', i % 5), NULL FROM n
            """
        )
    connection.close()
    return path


def test_totals_of_a_million_results_take_little_longer_than_a_bare_aggregate(million: Path, figure: Figure) -> None:
    connection = sqlite3.connect(million)
    query = "SELECT experiment, count(*), sum(value) FROM results WHERE run = 1 GROUP BY experiment"
    ours: list[float] = []
    bare: list[float] = []
    counted: list[tuple[int, int, float]] = []
    totals: list[Totals] = []
    for _ in range(5):
        began = time.process_time()
        counted = connection.execute(query).fetchall()
        bare.append(time.process_time() - began)
        store = open_store(million)  # One that has not computed them yet.
        began = time.process_time()
        totals = store.totals("r1")
        ours.append(time.process_time() - began)
        store.close()
    connection.close()
    assert [sum(found.outcomes.values()) for found in totals] == [count for _, count, _ in counted]
    # Round by round: what slows the machine down for a moment slows both.
    ratio = statistics.median(own / other for own, other in zip(ours, bare, strict=True))
    figure("totals of 1,000,000 results: CPU time, x the bare aggregate", ratio, at_most=3)


def test_what_is_done_of_a_million_results_is_known_quickly(million: Path) -> None:
    store = open_store(million)
    began = time.process_time()
    bits = store.done("r1")
    took = time.process_time() - began
    store.close()
    assert sum(byte.bit_count() for byte in bits) == 1_000_000
    assert took < 2


def test_a_result_costs_the_same_after_a_million_others(million: Path, tmp_path: Path, figure: Figure) -> None:
    snapshot = transcript()
    full, empty = open_store(million), open_store(tmp_path / "empty.db")
    runs = {}
    for name, store in (("full", full), ("empty", empty)):
        runs[name] = store.create_run(
            RunRecord(f"flat-{name}", "bench", "capitals", "1", "e" * 32, 20_000, ("baseline",), 1)
        )
    costs: dict[str, list[float]] = {"full": [], "empty": []}
    for start in range(0, 20_000, BATCH):
        for name, store in (("full", full), ("empty", empty)):
            results, samples = batch(runs[name], start, snapshot)
            began = time.process_time()
            assert store.commit(runs[name].run_id, results, samples).new == BATCH
            costs[name].append(time.process_time() - began)
    full.delete_run("flat-full")
    full.close()
    empty.close()
    grown = best(costs["full"]) / best(costs["empty"])
    figure("storing a result after 1,000,000 others: CPU time, x the first", grown, at_most=1.3)


def test_parquet_takes_a_fraction_of_the_time_in_which_the_results_are_read(tmp_path: Path, figure: Figure) -> None:
    store = open_store(tmp_path / "runs.db")
    run = new_run(store, 10 * BATCH)
    for start in range(0, run.planned, BATCH):
        store.commit(run.run_id, *batch(run, start, transcript()))
    export_results(store, run.run_id, tmp_path / "loaded.parquet")
    ratios = []
    for _round in range(5):
        began = time.process_time()
        export_results(store, run.run_id, tmp_path / "run.parquet")
        taken = time.process_time() - began
        began = time.process_time()
        assert sum(1 for _result in store.results(run.run_id)) == run.planned
        ratios.append(taken / (time.process_time() - began))
    store.close()
    figure("Parquet of a run: CPU time, x reading its results", statistics.median(ratios), at_most=1.0)
