"""Memory, cost per trial, summary, comparison and resume at a hundred thousand and at a million trials.

    python benchmarks/scale.py [--small 100000] [--large 1000000]

Each size runs in a process of its own, over a lazy dataset and a SQLite store. The summary is shown from the column
file that the run wrote when it ended, and without one. For the comparison, the trials become pairs of half as many
samples. Times are CPU seconds, without imports, because the machine may be shared. Prints ratios; exits with 1 if one
misses its target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from fairtrial import (
    ChatMessage,
    Dataset,
    EvalConfig,
    EvalReport,
    EvalSuite,
    TrialContext,
    exact_match,
    open_store,
)
from fairtrial.runs import RunEvent, TrialStarted, runner
from fairtrial.runs import opening as completion
from fairtrial.store import RunRecord, RunStore


async def task(question: str, ctx: TrialContext) -> str:
    ctx.session.record(ChatMessage("user", question))
    return "answer" + question[8:]


def suite(data: Path) -> EvalSuite:
    dataset = Dataset.load(data, lazy=True)
    return EvalSuite("scale", dataset, task, exact_match, config=EvalConfig(max_concurrent=100), version="1")


def peak_mb() -> float:
    """The most memory this process has held. Not ru_maxrss, which a child starts with its parent's value of."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def run(data: Path, database: Path) -> dict[str, Any]:
    """Run the suite whole; then print its summary and the bare aggregate; then resume with one trial missing."""
    made = suite(data)
    store = open_store(f"sqlite:///{database}")
    written: list[float] = []
    write = completion.write_column_file

    def timed_write(store: RunStore, run: RunRecord) -> None:
        started = time.process_time()
        write(store, run)
        written.append(time.process_time() - started)

    vars(runner)["write_column_file"] = timed_write
    cpu = time.process_time()
    report = asyncio.run(made.run(store=store))
    cpu = time.process_time() - cpu
    assert report.successful == len(made.dataset)
    peak = peak_mb()
    store.close()
    from fairtrial.reports.figures import column_file, column_reader

    summary, bare, text = [], [], ""
    for _ in range(4):  # The first one loads scipy.
        fresh = open_store(f"sqlite:///{database}")
        column_file.forget()
        started = time.process_time()
        text = str(EvalReport(fresh, fresh.get_run(report.run_id)))
        summary.append(time.process_time() - started)
        fresh.close()
        started = time.process_time()
        connection = sqlite3.connect(database)
        connection.execute(
            "SELECT experiment, outcome, count(*), sum(passed), sum(value), sum(latency_ms), sum(input_tokens) "
            "FROM results GROUP BY experiment, outcome"
        ).fetchall()
        connection.close()
        bare.append(time.process_time() - started)
    fresh = open_store(f"sqlite:///{database}")
    assert hasattr(column_reader, "open_columns")
    vars(column_reader)["open_columns"] = lambda *_given, **_named: None
    started = time.process_time()
    assert str(EvalReport(fresh, fresh.get_run(report.run_id))) == text
    without = time.process_time() - started
    return {
        "trials": len(made.dataset),
        "cpu": cpu,
        "columns": written[0],
        "peak_mb": peak,
        "first": summary[0],
        "summary": min(summary[1:]),
        "without": without,
        "bare": min(bare),
    }


def pair(data: Path, database: Path) -> dict[str, Any]:
    """Compare two experiments of half as many samples: for the first time in this process, and again."""
    from fairtrial import compare  # Loads numpy and scipy, which are no part of a run.
    from fairtrial.reports.figures import column_file

    store = open_store(f"sqlite:///{database}")
    report = EvalReport(store, store.runs()[0])
    column_file.write_columns(store, report.run)
    column_file.forget()
    few = EvalReport.of(list(islice(report.results, 4)))
    compare(few["plain"], few["other"])  # Loads scipy.
    seconds = []
    for _ in range(4):
        started = time.process_time()
        found = compare(report["plain"], report["other"])
        seconds.append(time.process_time() - started)
        assert found.candidates[0].matched == report.run.dataset_size
    return {"compare": seconds[0], "compare_again": min(seconds[1:])}


def make_pairs(database: Path) -> None:
    """Turn the trials of one experiment into those of two, with other verdicts."""
    with sqlite3.connect(database) as connection:
        connection.execute('UPDATE runs SET experiments = \'["plain","other"]\', dataset_size = dataset_size / 2')
        connection.execute("DELETE FROM samples WHERE ordinal >= (SELECT dataset_size FROM runs)")
        connection.execute(
            "UPDATE results SET experiment = ordinal % 2, sample = ordinal / 2, "
            "passed = (ordinal * 7919 % 100) < 70 + ordinal % 2, value = (ordinal * 7919 % 100) / 100.0"
        )


def resume(data: Path, database: Path) -> dict[str, Any]:
    """Measure how long it takes to resume a run with one missing trial, until that trial starts."""
    started = time.perf_counter()
    first: list[float] = []

    class Watch:
        def publish(self, event: RunEvent) -> None:
            if isinstance(event, TrialStarted):
                first.append(time.perf_counter() - started)

    report = asyncio.run(suite(data).run(store=f"sqlite:///{database}", bus=Watch()))
    assert len(first) == 1
    assert report.not_run == 0
    return {"resume": first[0]}


def forget_one_trial(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM results WHERE ordinal = (SELECT max(ordinal) * 2 / 3 FROM results)")
        connection.execute("UPDATE runs SET status = 'interrupted'")


def child(what: str, data: Path, database: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, str(data), str(database)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=1_000_000)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, data, database = options.child
        print(json.dumps({"run": run, "resume": resume, "pair": pair}[what](Path(data), Path(database))))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAIRTRIAL_CACHE_DIR"] = str(Path(folder) / "cache")
        figures = {}
        for size in (options.small, options.large):
            data, database = Path(folder) / f"{size}.jsonl", Path(folder) / f"{size}.db"
            with data.open("w") as file:
                for i in range(size):
                    file.write(json.dumps({"id": f"s{i}", "input": f"question {i}", "expected": f"answer {i}"}) + "\n")
            Dataset.load(data, lazy=True)  # The index is cached from here on, as it is on a second run.
            figures[size] = child("run", data, database)
            forget_one_trial(database)
            figures[size] |= child("resume", data, database)
            make_pairs(database)
            figures[size] |= child("pair", data, database)
    small, large = figures[options.small], figures[options.large]
    for size, found in figures.items():
        print(
            f"{size:>9,} trials: {found['cpu'] / size * 1e6:6.1f} us of CPU per trial "
            f"({found['columns'] / size * 1e6:.1f} for the column file), peak {found['peak_mb']:.1f} MB, "
            f"summary {found['summary']:.3f} s (bare aggregate {found['bare']:.3f} s, "
            f"without the column file {found['without']:.2f} s), "
            f"{size // 2:,} pairs compared in {found['compare']:.2f} s, again in {found['compare_again']:.2f} s, "
            f"resume reaches the missing trial in {found['resume']:.2f} s"
        )
    size, fewer = f"{options.large:,} trials", f"{options.small:,}"
    pairs = f"{options.large // 2:,} pairs"
    targets: list[tuple[str, float, str, float | None]] = [
        (f"{size} against {fewer}: peak memory", large["peak_mb"] / small["peak_mb"], "x", 1.15),
        (f"{size}: peak memory", large["peak_mb"], "MB", None),
        (f"{size}: first report", large["first"], "s of CPU", 1.5),
        (f"{size}: summary, at first", large["without"], "s of CPU", None),
        (f"{size}: summary from the column file", large["summary"], "s of CPU", None),
        (f"{size}: the same, against the bare SQL aggregate", large["summary"] / large["bare"], "x", 3.0),
        (f"{size}: column file, of the cost of the run", 100 * large["columns"] / large["cpu"], "%", 3.0),
        (f"{pairs} compared for the first time", large["compare"], "s of CPU", 3.0),
        (f"{pairs} compared again in the same process", large["compare_again"], "s of CPU", 0.3),
        (f"{size} with one missing: until it starts", large["resume"], "s", 5.0),
    ]
    each, before = large["cpu"] / options.large, small["cpu"] / options.small
    kept = figure(f"{size} against {fewer}: cost of a trial", each / before, "x", at_most=1.3, cpu_us=each * 1e6)
    for name, value, unit, limit in targets:
        kept &= figure(name, value, unit, at_most=limit)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
