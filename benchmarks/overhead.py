"""What a trial costs beyond the task itself, against a bare loop and against peers.

    python benchmarks/overhead.py [--trials 10000] [--rounds 5] [--peers] [--inspect]

Every contestant runs the same trivial async task over the same samples at the same concurrency. Fairtrial and the
reference loop store every result and a compressed transcript in SQLite; the peers store what they store by default.
CPU time, rounds interleaved, medians: the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import queue
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import zstandard

from fairtrial import ChatMessage, Dataset, EvalConfig, EvalSuite, Sample, exact_match, open_store
from fairtrial.trials.context import TrialContext

CONCURRENCY = 100


def reply(question: str) -> str:
    return "answer" + question[8:]


async def task(question: str, ctx: TrialContext) -> str:
    ctx.session.record(ChatMessage("user", question))
    answer = reply(question)
    ctx.session.record(ChatMessage("assistant", answer))
    return answer


def fairtrial(cases: list[tuple[str, str, str]], folder: Path) -> None:
    dataset = Dataset([Sample(*case) for case in cases], name="overhead")
    suite = EvalSuite("overhead", dataset, task, exact_match, config=EvalConfig(max_concurrent=CONCURRENCY))
    store = open_store(f"sqlite:///{folder}/runs.db")
    report = asyncio.run(suite.run(store=store))
    assert (report.successful, report.pass_rate) == (len(cases), 1.0)
    store.close()


async def _reference(cases: list[tuple[str, str, str]], path: Path) -> None:
    """What an engineer would write to keep the same facts: no library of ours, no checks, no resume."""
    rows: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()

    def write() -> None:
        database = sqlite3.connect(path)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(
            "CREATE TABLE samples (dataset INT, ordinal INT, id TEXT, input TEXT, expected TEXT, metadata TEXT, "
            "input_hash INT, PRIMARY KEY (dataset, ordinal)) WITHOUT ROWID"
        )
        database.execute(
            "CREATE TABLE results (run INT, ordinal INT, experiment INT, sample INT, repeat INT, outcome INT, "
            "timed INT, passed INT, value REAL, latency_ms INT, started_at REAL, input_tokens INT, output_tokens INT, "
            "cached_tokens INT, cost_usd REAL, attempt INT, stage INT, execution INT, metrics TEXT, reward REAL, "
            "verdicts TEXT, judge_cost_usd REAL, cache_hits INT, unpriced_calls INT, unpriced_judge_calls INT, "
            "cut_off_calls INT, refused_calls INT, unknown_endings TEXT, reasoning_tokens INT, "
            "cache_write_tokens INT, redacted INT, code INT, PRIMARY KEY (run, ordinal)) WITHOUT ROWID"
        )
        database.execute(
            "CREATE TABLE details (run INT, ordinal INT, execution INT, error TEXT, reason TEXT, score TEXT, "
            "metadata TEXT, output TEXT, transcript BLOB, PRIMARY KEY (run, ordinal, execution)) WITHOUT ROWID"
        )
        compressor = zstandard.ZstdCompressor(level=1)
        ended = False
        while not ended:
            batch = []
            while len(batch) < 500:
                row = rows.get()
                if row is None:
                    ended = True
                    break
                batch.append(row)
            with database:
                database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?)", [row[0] for row in batch])
                database.executemany(f"INSERT INTO results VALUES ({', '.join('?' * 32)})", [row[1] for row in batch])
                database.executemany(
                    "INSERT INTO details VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [(*row[2], compressor.compress(row[3])) for row in batch],
                )
        database.close()

    thread = threading.Thread(target=write)
    thread.start()
    shared = iter(enumerate(cases))

    async def work() -> None:
        for ordinal, (sample_id, question, expected) in shared:
            started_at, started = time.time(), time.monotonic()
            with anyio.fail_after(300):
                await anyio.lowlevel.checkpoint()
                messages = [("user", time.time(), question)]
                answer = reply(question)
                messages.append(("assistant", time.time(), answer))
            latency = round((time.monotonic() - started) * 1000)
            passed = answer == expected
            execution = random.getrandbits(62)
            kind = "fairtrial.data.session.trajectory:ChatMessage"
            transcript = {
                "version": 1,
                "session_id": uuid4().hex,
                "tags": {"run_id": "reference", "sample_id": sample_id, "experiment": "baseline"},
                "events": [
                    [
                        seq,
                        at,
                        "task",
                        1,
                        None,
                        None,
                        kind,
                        {"role": role, "content": text, "tool_calls": [], "name": ""},
                    ]
                    for seq, (role, at, text) in enumerate(messages)
                ],
            }
            given = json.dumps(question)
            input_hash = int.from_bytes(hashlib.blake2b(given.encode(), digest_size=8).digest(), signed=True)
            rows.put(
                (
                    (1, ordinal, sample_id, given, json.dumps(expected), None, input_hash),
                    (
                        *(1, ordinal, 0, ordinal, 0, 0, 1, passed, float(passed), latency, started_at),
                        *(0, 0, 0, None, 1, None, execution, None, None, None, None),
                        *(0, 0, 0, 0, 0, None, 0, 0, 0, 0),
                    ),
                    (1, ordinal, execution, None, "", None, None, json.dumps(answer)),
                    json.dumps(transcript, separators=(",", ":"), ensure_ascii=False).encode(),
                )
            )

    async with anyio.create_task_group() as group:
        for _ in range(CONCURRENCY):
            group.start_soon(work)
    rows.put(None)
    thread.join()


def reference(cases: list[tuple[str, str, str]], folder: Path) -> None:
    asyncio.run(_reference(cases, folder / "reference.db"))
    with sqlite3.connect(folder / "reference.db") as database:
        assert database.execute("SELECT count(*), sum(passed) FROM results").fetchone() == (len(cases), len(cases))


def pydantic_evals(cases: list[tuple[str, str, str]], folder: Path) -> None:
    from pydantic_evals import Case
    from pydantic_evals import Dataset as PeerDataset
    from pydantic_evals.evaluators import EqualsExpected

    async def peer_task(question: str) -> str:
        return reply(question)

    dataset = PeerDataset(
        name="overhead",
        cases=[Case(name=name, inputs=question, expected_output=expected) for name, question, expected in cases],
        evaluators=[EqualsExpected()],
    )
    report = asyncio.run(dataset.evaluate(peer_task, max_concurrency=CONCURRENCY, progress=False))
    assert len(report.cases) == len(cases)


def inspect_ai(cases: list[tuple[str, str, str]], folder: Path) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import MemoryDataset
    from inspect_ai.dataset import Sample as PeerSample
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import exact
    from inspect_ai.solver import solver

    @solver
    def trivial() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            state.output = ModelOutput.from_content("none", reply(state.input_text))
            return state

        return solve

    samples = MemoryDataset(
        [PeerSample(id=name, input=question, target=expected) for name, question, expected in cases]
    )
    logs = eval(
        Task(dataset=samples, solver=trivial(), scorer=exact()),
        model="mockllm/model",
        max_samples=CONCURRENCY,
        log_dir=str(folder),
        display="none",
    )
    assert logs[0].status == "success"


def measure(contestant: Callable[[list[tuple[str, str, str]], Path], None], cases: list[tuple[str, str, str]]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        contestant(cases, Path(folder))
        return (time.process_time() - started) / len(cases) * 1e6


def main() -> None:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="also pydantic-evals (the bench dependency group)")
    parser.add_argument("--inspect", action="store_true", help="also Inspect, on a tenth of the trials (slow)")
    options = parser.parse_args()
    contestants = [fairtrial, reference] + ([pydantic_evals] if options.peers else [])
    cases = [(f"s{i}", f"question {i}", f"answer {i}") for i in range(options.trials)]
    figures: dict[str, list[float]] = {contestant.__name__: [] for contestant in contestants}
    for contestant in contestants:  # Imports and first-use costs are not per-trial costs.
        measure(contestant, cases[:200])
    for _ in range(options.rounds):
        for contestant in contestants:
            figures[contestant.__name__].append(measure(contestant, cases))
    if options.inspect:
        figures["inspect_ai"] = [measure(inspect_ai, cases[: max(options.trials // 10, 100)])]
    print(f"{options.trials} trials, concurrency {CONCURRENCY}, CPU microseconds per trial, median of {options.rounds}")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, value in medians.items():
        print(f"  {name:<16} {value:10.1f}   (min {min(figures[name]):.1f}, max {max(figures[name]):.1f})")
    ours = medians["fairtrial"]
    name, bare = "trivial trial against a loop that keeps the same facts", medians["reference"]
    kept = figure(name, ours / bare, "x the CPU time", at_most=1.5, cpu_us=ours, bare_cpu_us=bare)
    for peer, limit in (("pydantic_evals", 1.5), ("inspect_ai", 60)):
        if peer in medians:
            name = f"cases per CPU second against {peer.replace('_', '-')} {version(peer)}"
            kept &= figure(name, medians[peer] / ours, "x", at_least=limit, cpu_us=ours, bare_cpu_us=medians[peer])
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
