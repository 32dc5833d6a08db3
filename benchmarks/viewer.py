"""Pages of `fairtrial view` over a run of a hundred thousand trials, or of another size.

    python benchmarks/viewer.py [--trials 100000] [--store URL | --postgres] [--rounds 30] [--tiles 10]

Makes a run in a store of its own (SQLite, the PostgreSQL database at URL, or a server that it starts), starts the
viewer as a user does, and asks for pages over one connection. Prints the times, the memory of the server, and the
ratio of the first page to the bare SQL query for its rows. Then the columns of the run are repeated, ten times by
default, and filtered, sorted and counted as the viewer does it, beside the bare numpy operations of one filter. Exits
with 1 if a target is missed. Times are of a whole request; on a busy machine they say little, the ratios more.
"""

from __future__ import annotations

import argparse
import compileall
import http.client
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import fairtrial
from benchmarks.figures import figure
from fairtrial import ChatMessage, Metric, Sample, Score, Session, TokenUsage, open_store
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.store import RunRecord, RunStore
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.viewer.question import read_question
from fairtrial.viewer.trial_table import count_and_find
from tests.servers import PostgresServer

KINDS = ("refund", "delivery", "address", "account", "other")
TILED_MS = 500
TARGETS = {  # p95 in milliseconds
    "first page": 50, "next page": 50, "filter, sort, facets": 200, "rare filter": 200, "one trial": 50,
    "search, common": 2000, "report, again": 100, "comparison, again": 100,
}  # fmt: skip
MEMORY_MB = 150
START_CPU_SECONDS = 1.5


def make_run(store: RunStore, trials: int) -> RunRecord:
    """Store a run of two experiments with short transcripts, 2% of errors and four metadata keys."""
    draw = random.Random(7)
    size = trials // 2
    run = store.create_run(
        RunRecord(
            "bench-run", "bench", "questions", "1", f"{trials:032x}", size, ("baseline", "careful"), 1,
            evaluator="judge", created_at=time.time(),
        )
    )  # fmt: skip
    session = Session(tags={})
    for number in range(8):
        session.record(ChatMessage("assistant" if number % 2 else "user", "some words about an order " * 8))
    snapshot = session.snapshot()
    for places in batched(range(size), 2_000):
        samples = {
            at: Sample(f"q{at:07}", f"Where is order {at}? " * 6, "Friday", {
                "kind": KINDS[at % 5], "language": draw.choice(("en", "de", "fr")), "level": at % 7,
                "rare": at % 997 == 0,
            })
            for at in places
        }  # fmt: skip
        results = []
        for at in places:
            for place, name in enumerate(run.experiments):
                ordinal = run.ordinal(at, place, 0)
                key = TrialKey(run.run_id, name, f"q{at:07}", 0)
                if draw.random() < 0.02:
                    results.append(
                        EvalResult(
                            key=key,
                            ordinal=ordinal,
                            outcome="task_error",
                            error="ValueError: no",
                            execution=ordinal + 1,
                        )
                    )
                    continue
                value = draw.random()
                score = Score(value, value > 0.3 - 0.05 * place, "a reason of some length", [Metric("brief", value)])
                results.append(
                    EvalResult(
                        key=key,
                        ordinal=ordinal,
                        outcome="scored",
                        score=score,
                        output=f"Order {at} arrives on Friday. " * 10,
                        execution=ordinal + 1,
                        latency_ms=draw.randrange(50, 5000),
                        usage=TokenUsage(100, 50, cost_usd=0.001),
                        snapshot=snapshot,
                    )
                )
        store.commit(run.run_id, results, samples)
    store.update_run(run.run_id, status="finished", finished_at=time.time())
    return store.get_run(run.run_id)


class Pages:
    """A server in a process of its own, asked over one connection."""

    def __init__(self, url: str) -> None:
        began = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "fairtrial.cli",
            "view",
            "--no-browser",
            "--port",
            "0",
            "--json",
            "--store",
            url,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += self.process.stdout.readline()
        facts = json.loads(text)
        self.connection = http.client.HTTPConnection("127.0.0.1", facts["port"], timeout=600)
        place, self.base = urlsplit(facts["address"]).netloc, urlsplit(facts["address"]).path
        headers = {"Origin": f"http://{place}", "Content-Type": "application/x-www-form-urlencoded"}
        self.connection.request("POST", f"{self.base}login", urlencode({"token": facts["token"]}), headers)
        answer = self.connection.getresponse()
        answer.read()
        self.cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
        self.get("")
        self.started_seconds, self.started_cpu_seconds = time.perf_counter() - began, self.cpu_seconds()

    def get(self, path: str) -> tuple[float, str]:
        """Return the milliseconds of a request, and the page."""
        began = time.perf_counter()
        self.connection.request("GET", self.base + path, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text[:500]
        return 1000 * (time.perf_counter() - began), text

    def cpu_ms(self) -> float:
        """Return the CPU time of the server's process so far."""
        return 1000 * _cpu_seconds(self.process.pid)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server and of its child processes so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        return sum(map(_cpu_seconds, [self.process.pid, *children]))

    def memory_mb(self) -> float:
        """Return the memory of the server's process, without its children."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024

    def stop(self) -> None:
        """End the server."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare_page(database: Path, rounds: int) -> float:
    """Return the median milliseconds of the bare SQL for the rows of a first page."""
    connection = sqlite3.connect(database)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        connection.execute(
            "select r.ordinal, r.outcome, r.value, s.id, substr(s.input, 1, 160), substr(d.output, 1, 160) "
            "from results r join samples s on s.dataset = 1 and s.ordinal = r.sample "
            "left join details d on d.run = r.run and d.ordinal = r.ordinal "
            "where r.run = 1 order by r.ordinal limit 100"
        ).fetchall()
        times.append(1000 * (time.perf_counter() - began))
    connection.close()
    return statistics.median(times)


class Tiled:
    """A column file whose arrays are repeated on disk: the columns of a run that is `times` times as large."""

    def __init__(self, file: Any, times: int, folder: Path) -> None:
        self._file, self._times, self._folder = file, times, folder
        self.header = replace(file.header, extent=file.header.extent * times, rows=file.header.rows * times)
        self.sample_ordinals = np.arange(file.sample_ordinals.size * times)
        self._arrays: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def array(self, name: str) -> Any:
        if name not in self._arrays:
            path = self._folder / f"{len(self._arrays)}.npy"
            np.save(path, np.tile(self._file.array(name), self._times))
            self._arrays[name] = np.load(path, mmap_mode="r")
        return self._arrays[name]


def tiled(url: str, times: int, rounds: int) -> int:
    """Filter a run that is `times` times as large by its columns alone; return whether the target was missed."""
    store = open_store(url)
    run = store.runs()[0]
    with tempfile.TemporaryDirectory() as folder:
        file: Any = Tiled(TrialColumns.open(store, run)._file, times, Path(folder))
        columns = TrialColumns(store, replace(run, dataset_size=run.dataset_size * times), file)
        found: dict[str, list[float]] = {"filter, sort, facets": [], "rare filter": [], "bare numpy": []}
        for at in range(rounds + 1):
            kind = KINDS[at % len(KINDS)]
            questions = {
                "filter, sort, facets": [("outcome", "failed"), ("m.kind", kind), ("sort", "-latency_ms")],
                "rare filter": [
                    ("m.rare", "true"),
                    ("m.language", "de"),
                    ("m.level", str(at % 7)),
                    ("outcome", "failed"),
                ],
            }
            for name, pairs in questions.items():
                question, _ = read_question(pairs)
                began = time.process_time()
                count_and_find(columns, question)
                found[name].append(1000 * (time.process_time() - began))
            began = time.process_time()
            chosen = (file.array("passed") == 0) & np.repeat(file.array("meta:kind") == 1 + at % len(KINDS), 2)
            np.argsort(file.array("latency_ms")[chosen])[-100:]
            found["bare numpy"].append(1000 * (time.process_time() - began))
    store.close()
    print(f"{columns.extent:,} trials by their columns:")
    bare = statistics.median(found["bare numpy"][1:])
    late = False
    for name in list(found)[:-1]:
        middle = statistics.median(found[name][1:])  # The first round wrote the repeated columns.
        cpu = {"cpu_us": middle * 1000, "bare_cpu_us": bare * 1000}
        what = f"{columns.extent:,} trials by their columns: {name}"
        late |= not figure(what, middle, "ms of CPU", at_most=TILED_MS, **cpu)
    return int(late)


def measure(pages: Pages, trials: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the milliseconds of every kind of request, and the server's CPU milliseconds for one."""
    draw = random.Random(11)
    table = "bench@1/trials"
    first = {name: pages.get(path)[0] for name, path in {
        "columns opened or built": table, "report, first": "bench@1",
        "comparison, first": "compare?a=bench@1:baseline&b=bench@1:careful",
    }.items()}  # fmt: skip
    while "are being computed" in pages.get("bench@1")[1]:
        time.sleep(0.5)

    def trial() -> str:
        at = draw.randrange(trials // 2)
        return f"bench@1/t/baseline/q{at:07}?o={2 * at}"

    asked = {
        "first page": lambda: table,
        "next page": lambda: f"{table}?after=:{draw.randrange(trials - 200)}",
        "filter, sort, facets": lambda: f"{table}?outcome=failed&m.kind={draw.choice(KINDS)}&sort=-latency_ms",
        "rare filter": lambda: f"{table}?m.rare=true&m.language=de&m.level={draw.randrange(7)}&outcome=failed",
        "one trial": trial,
        "search, common": lambda: f"{table}?q=about+an+order&from={draw.randrange(trials // 2)}",
        "report, again": lambda: "bench@1",
        "comparison, again": lambda: "compare?a=bench@1:baseline&b=bench@1:careful",
    }
    times: dict[str, list[float]] = {name: [ms] for name, ms in first.items()}
    cpu: dict[str, float] = {}
    for name, path in asked.items():
        found = []
        before = pages.cpu_ms()
        for _ in range(rounds if name != "search, common" else 5):
            found.append(pages.get(path())[0])
        times[name] = found
        cpu[name] = (pages.cpu_ms() - before) / len(found)
    return times, cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--store", default="")
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiles", type=int, default=10)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["FAIRTRIAL_CACHE_DIR"] = f"{folder}/cache"
        database = Path(folder) / "runs.db"
        if given.postgres:
            given.store = stack.enter_context(PostgresServer()).new_database()
        url = given.store or str(database)
        store = open_store(url)
        began = time.process_time()
        make_run(store, given.trials)
        store.close()
        print(f"{given.trials:,} trials made in {time.process_time() - began:.0f} s of CPU")
        # As an installation is: else this environment may compile the package in every process.
        compileall.compile_dir(Path(fairtrial.__file__).parent, quiet=1)
        pages = Pages(url)
        print(f"start to first page {pages.started_seconds:.1f} s, memory then {pages.memory_mb():.0f} MB")
        times, cpu = measure(pages, given.trials, given.rounds)
        memory = pages.memory_mb()
        pages.stop()
        where = f"{given.trials:,} trials on {'PostgreSQL' if given.store else 'SQLite'}"
        missed = show(where, times, cpu, memory, None if given.store else bare_page(database, given.rounds))
        start = f"{where}: viewer, start to the first page"
        kept = figure(start, pages.started_cpu_seconds, "s of CPU", at_most=START_CPU_SECONDS)
        return tiled(url, given.tiles, 10) | missed | (not kept)


def show(where: str, times: dict[str, list[float]], cpu: dict[str, float], memory: float, bare: float | None) -> int:
    """Print the figures; return 1 if a target was missed."""
    kept = True
    for name, found in times.items():
        p95 = sorted(found)[min(len(found) - 1, int(0.95 * len(found)))]
        spent = cpu[name] * 1000 if name in cpu else None
        kept &= figure(f"{where}: {name}, p95", p95, "ms", at_most=TARGETS.get(name), cpu_us=spent)
    if bare is not None:
        ratio = statistics.median(times["first page"]) / bare
        figure(f"{where}: first page, p50, against the bare SQL for its rows", ratio, "x the time")
    kept &= figure(f"{where}: memory of the viewer", memory, "MB", at_most=MEMORY_MB)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
