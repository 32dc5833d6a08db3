"""A million traces a day into `fairtrial watch start`: python benchmarks/watch_load.py [--minutes 15]

Sends 11.6 traces a second, of which 1% are judged, kills the service with SIGKILL once in the middle and starts it
again, and ends it with SIGTERM. Prints the memory of the service over time, how many acknowledged traces of the sample
have no result, and how many have two. Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from fairtrial import open_store
from fairtrial.integrations.tracing.live_traces import position
from fairtrial.store.sql import SqlStore

RATE = 1_000_000 / 86_400
SAMPLE = 0.01
PATIENCE = 60.0
SUITE = """
import asyncio
from fairtrial import Dataset, EvalSuite, Score

def recorded(question: object) -> str:
    raise NotImplementedError

async def judge(output: str) -> Score:
    await asyncio.sleep(1)  # As a model takes.
    return Score(float("yes" in output))

suite = EvalSuite("live", Dataset([], name="traffic"), recorded, judge)
"""


def request_of(number: int) -> tuple[str, bytes]:
    """Return the id of a trace and a request with its spans, of about 6 kB."""
    trace = hashlib.sha256(str(number).encode()).hexdigest()[:32]
    moment = time.time_ns()

    def span(place: int, name: str, parent: str, **facts: str) -> dict[str, Any]:
        attributes = [{"key": key, "value": {"stringValue": value}} for key, value in facts.items()]
        return {"traceId": trace, "spanId": f"{place:016x}", "parentSpanId": parent, "name": name,
                "startTimeUnixNano": str(moment + place), "endTimeUnixNano": str(moment + 10**9),
                "attributes": attributes}  # fmt: skip

    text = f"question {number} " * 80
    spans = [span(1, "POST /ask", "", **{"input.value": text, "output.value": "yes"})]
    spans += [
        span(place, "chat model", f"{1:016x}", **{"gen_ai.operation.name": "chat", "gen_ai.prompt": text})
        for place in (2, 3, 4)
    ]
    return trace, json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


def send(url: str, body: bytes) -> bool:
    """Send a request; returns whether it was acknowledged."""
    request = urllib.request.Request(f"{url}/v1/traces", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def memory(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory of a process in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the service, and wait until it listens."""
    command = [sys.executable, "-m", "fairtrial.cli", "watch", "start", "live.py", "--sample", str(SAMPLE),
               "--receive", str(port), "--settle", "2", "--store", "runs.db"]  # fmt: skip
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.1)
    raise SystemExit("the service did not start")


def main() -> int:
    """Send traces, and say what was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, metavar="N")
    options = parser.parse_args()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = int(bound.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "live.py").write_text(SUITE, encoding="utf-8")
        service = start(folder, port)
        try:
            return measure(folder, service, port, options.minutes * 60)
        finally:
            service.kill()


def measure(folder: Path, service: subprocess.Popen[bytes], port: int, seconds: float) -> int:
    """Send for this time; returns the exit code."""
    url, refused, killed = f"http://127.0.0.1:{port}", 0, False
    acknowledged: list[str] = []
    began, number, shown = time.monotonic(), 0, 0.0
    print("minute  sent  acknowledged  MB")
    while (now := time.monotonic() - began) < seconds:
        if now >= shown:
            print(f"{now / 60:6.1f}  {number:,}  {len(acknowledged):,}  {memory(service):.1f}", flush=True)
            shown += max(seconds / 15, 10)
        if not killed and now > seconds / 2:
            service.kill()
            service.wait()
            service, killed = start(folder, port), True
            print(f"{(time.monotonic() - began) / 60:6.1f}  killed and started again", flush=True)
        if number > now * RATE:
            time.sleep(0.01)
            continue
        trace, body = request_of(number)
        number += 1
        if send(url, body):
            acknowledged.append(trace)
        else:
            refused += 1
    store = open_store(str(folder / "runs.db"))
    if not isinstance(store, SqlStore):
        raise TypeError(store)
    deadline = time.monotonic() + PATIENCE
    while store.spool.traces("live") and time.monotonic() < deadline:
        time.sleep(0.5)
    last = memory(service)
    service.send_signal(signal.SIGTERM)
    code = service.wait(PATIENCE)
    found = Counter(
        result.sample_id for run in store.runs() for result in store.results(run.run_id) if result.outcome == "scored"
    )
    wanted = {trace for trace in acknowledged if position(trace) < SAMPLE}
    lost, twice = len(wanted - found.keys()), sum(count > 1 for count in found.values())
    store.close()
    print(f"sent {number:,} in {seconds / 60:g} minutes, {len(acknowledged):,} acknowledged, {refused:,} not")
    print(f"sampled {len(wanted):,}, scored {len(found):,}, lost {lost:,}, scored twice {twice:,}")
    print(f"memory at the end {last:.1f} MB, exit code after SIGTERM {code}")
    return 1 if lost or twice or code else 0


if __name__ == "__main__":
    sys.exit(main())
