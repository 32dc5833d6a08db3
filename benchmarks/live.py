"""How soon the viewer shows the trials of a running run, and what that costs the run.

    python benchmarks/live.py [--trials 100000] [--rounds 3] [--engine sqlite|postgres]

A process runs a suite of trivial trials as fast as it can and notes when each batch was committed. In every second
run `fairtrial view` is open and a page follows the progress. Prints the longest time from a commit to the event that
shows it, and the ratio of the time the run takes with the page open to the time without; exits with 1 if a target is
missed. The ratio of elapsed times means something only on a machine with a free core for the viewer.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import ENGINES, figure  # beside this file
from viewer import Pages

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match, open_store
from tests.servers import PostgresServer

LAG_SECONDS = 2.0
COST = 1.05


def run(url: str, trials: int) -> dict[str, Any]:
    """Run a suite of trivial trials; return when each batch was stored, and what the run took."""

    async def task(question: str) -> str:
        return question

    dataset = Dataset((Sample(f"s{at}", f"question {at}", f"question {at}") for at in range(trials)), name="live")
    suite = EvalSuite("live", dataset, task, exact_match, config=EvalConfig(max_concurrent=100), version="1")
    store = open_store(url)
    commits: list[tuple[float, int]] = []
    commit = store.commit

    def timed(run_id: str, results: Any, *given: Any, **named: Any) -> Any:
        done = commit(run_id, results, *given, **named)
        commits.append((time.time(), len(results)))
        return done

    vars(store)["commit"] = timed
    started, cpu = time.perf_counter(), time.process_time()
    asyncio.run(suite.run(store=store))
    return {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu, "commits": commits}


def follow(pages: Pages, name: str) -> list[tuple[float, int]]:
    """Return when which number of stored trials was shown, until the run ends."""
    connection = http.client.HTTPConnection("127.0.0.1", pages.connection.port, timeout=60)
    connection.request("GET", f"{pages.base}{name}/live", headers={"Cookie": pages.cookie})
    stream = connection.getresponse()
    assert stream.status == 200, stream.read()
    shown = []
    for line in stream:
        if line.startswith(b"event: ended"):
            break
        if line.startswith(b"data: "):
            shown.append((time.time(), json.loads(line[6:])["stored"]))
    connection.close()
    return shown


def longest_lag(commits: list[list[float]], shown: list[tuple[float, int]]) -> float:
    """Return the most seconds between a commit and the first event that includes it."""
    total, place, longest = 0, 0, 0.0
    for at, size in commits:
        total += int(size)
        while shown[place][1] < total:
            place += 1
        longest = max(longest, shown[place][0] - at)
    return longest


def measure(url: str, trials: int, rounds: int) -> tuple[list[float], list[dict[str, Any]], list[dict[str, Any]]]:
    """Run without and with a page that follows, in turn; return the lags and both lists of figures."""
    lags, alone, followed = [], [], []
    open_store(url).close()
    pages = Pages(url)
    for at in range(2 * rounds):
        command = [sys.executable, __file__, "--child", url, "--trials", str(trials)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if at % 2 == 0:
            alone.append(json.loads(process.communicate()[0]))
            continue
        store = open_store(url)
        while len(store.runs()) < at + 1:
            time.sleep(0.01)
        store.close()
        shown = follow(pages, f"live@{at + 1}")
        followed.append(json.loads(process.communicate()[0]))
        lags.append(longest_lag(followed[-1]["commits"], shown))
    pages.stop()
    return lags, alone, followed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(run(given.child, given.trials)))
        return 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["FAIRTRIAL_CACHE_DIR"] = f"{folder}/cache"
        url = f"sqlite:///{Path(folder) / 'runs.db'}"
        if given.engine == "postgres":
            url = stack.enter_context(PostgresServer()).new_database()
        lags, alone, followed = measure(url, given.trials, given.rounds)

    def middle(runs: list[dict[str, Any]], name: str) -> float:
        return statistics.median(one[name] for one in runs)

    what = f"a page that follows a run of {given.trials:,} trials on {ENGINES[given.engine]}"
    ratio = middle(followed, "seconds") / middle(alone, "seconds")
    each = {
        "cpu_us": middle(followed, "cpu") / given.trials * 1e6,
        "bare_cpu_us": middle(alone, "cpu") / given.trials * 1e6,
    }
    kept = figure(f"{what}: the run, against one that nobody follows", ratio, "x the time", at_most=COST, **each)
    kept &= figure(f"{what}: a commit is shown, at most", max(lags), "s", at_most=LAG_SECONDS)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
