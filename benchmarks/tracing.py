"""What exporting traces costs: a run without it, with a sample of 1%, and with everything.

    python benchmarks/tracing.py [--trials 10000] [--rounds 7]

Every contestant runs the same trivial task over the same samples and stores results and transcripts in SQLite; the
traces go over HTTP to a server in another process. CPU time of this process, rounds interleaved, medians: the machine
may be shared. "Off" is measured twice, which shows the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fairtrial import ChatMessage, Dataset, EvalConfig, EvalSuite, Sample, exact_match, open_store
from fairtrial.tracing import TraceExporter
from fairtrial.trials.context import TrialContext

CONCURRENCY = 100
LIMITS = {"1%": 1.05, "everything": 2.5}
SHARES = {"off": None, "off again": None, "1%": 0.01, "everything": 1.0}

SINK = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_port, flush=True)
server.serve_forever()
"""


async def task(question: str, ctx: TrialContext) -> str:
    ctx.session.record(ChatMessage("user", question))
    answer = "answer" + question[8:]
    ctx.session.record(ChatMessage("assistant", answer))
    return answer


@contextlib.contextmanager
def sink() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait()


def measure(url: str, share: float | None, trials: int) -> float:
    """CPU microseconds per trial, including what is sent after the run."""
    samples = [Sample(f"s{number}", f"question {number}", f"answer {number}") for number in range(trials)]
    config = EvalConfig(max_concurrent=CONCURRENCY)
    suite = EvalSuite("tracing", Dataset(samples, name="tracing"), task, exact_match, config=config)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder)}/runs.db")
        started = time.process_time()
        if share is None:
            report = asyncio.run(suite.run(store=store))
        else:
            exporter = TraceExporter(url, sample=share, max_queue=trials)
            report = asyncio.run(suite.run(store=store, bus=exporter))
            summary = exporter.close(timeout_seconds=120)
            assert summary.sent == summary.sampled, summary
            assert share < 1 or summary.sent == trials, summary
        taken = time.process_time() - started
        assert report.successful == trials
        store.close()
    return taken / trials * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    figures: dict[str, list[float]] = {name: [] for name in SHARES}
    with sink() as url:
        for share in SHARES.values():  # Imports and first-use costs are not per-trial costs.
            measure(url, share, 300)
        for _ in range(options.rounds):
            for name, share in SHARES.items():
                figures[name].append(measure(url, share, options.trials))
    print(f"{options.trials} trials, concurrency {CONCURRENCY}, CPU microseconds per trial, median of {options.rounds}")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, value in medians.items():
        print(f"  {name:<12} {value:8.1f}   (min {min(figures[name]):.1f}, max {max(figures[name]):.1f})")
    off = statistics.median(figures["off"] + figures["off again"])
    failed = False
    for name, limit in LIMITS.items():
        print(f"{name} / off: {medians[name] / off:.3f} x the CPU time (target: at most {limit:g})")
        failed |= medians[name] / off > limit
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
