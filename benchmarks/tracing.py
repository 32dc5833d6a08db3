"""What exporting traces costs, and how many spans per second can be received.

    python benchmarks/tracing.py [--only export|receive] [--trials 10000] [--spans 40000] [--rounds 7]

Export: a run without it, with a sample of 1%, and with everything. Every contestant runs the same trivial task over the
same samples and stores results and transcripts in SQLite; the traces go over HTTP to a server in another process. CPU
time of this process. "Off" is measured twice, which shows the noise.

Receive: `TraceReceiver` in a process of its own gets the spans of agents over HTTP, 8 requests at once, and keeps them
by trial. Beside it, a bare aiohttp server that only reads the bodies. CPU time of the server's process: the spans per
CPU second are what one core can take.

Rounds are interleaved and figures are medians: the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import batched
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from fairtrial import ChatMessage, Dataset, EvalConfig, EvalSuite, Sample, TrialKey, exact_match, open_store
from fairtrial.integrations.tracing import TraceExporter, TraceReceiver
from fairtrial.integrations.tracing.received import AttributeValue, key_values
from fairtrial.integrations.tracing.spans import otlp_json, traces_request
from fairtrial.trials.context import TrialContext, event_span_id, trace_id_of, trial_span_id

CONCURRENCY = 100
LIMITS = {"1%": 1.05, "everything": 2.5}
SPANS_PER_SECOND = 10_000
SPANS_OF_A_TRIAL = 8
SPANS_OF_A_REQUEST = 512  # As the batch processors of OpenTelemetry send them.
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


def trial_key(number: int) -> TrialKey:
    return TrialKey("benchmark", "baseline", f"s{number}")


def spans_of_trial(number: int) -> list[Any]:
    """The spans of an agent: a request, four model calls with their messages, three tool calls."""
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    trace_id = trace_id_of(trial_key(number), 1)
    root = event_span_id(trace_id, 0)
    found = []
    attributes: list[tuple[str, AttributeValue]]
    for place in range(SPANS_OF_A_TRIAL):
        if place == 0:
            name, attributes = "POST /ask", [("http.request.method", "POST"), ("http.response.status_code", 200)]
        elif place % 2:
            name = "chat gpt-5"
            text = hashlib.shake_128(f"{number} {place}".encode()).hexdigest(150)  # As hard to compress as text.
            messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}])
            attributes = [
                ("gen_ai.operation.name", "chat"), ("gen_ai.provider.name", "openai"),
                ("gen_ai.request.model", "gpt-5"), ("gen_ai.response.model", "gpt-5-2026"),
                ("gen_ai.usage.input_tokens", 412 + number % 50), ("gen_ai.usage.output_tokens", 31),
                ("gen_ai.response.finish_reasons", ("stop",)), ("gen_ai.input.messages", messages),
            ]  # fmt: skip
        else:
            name = "execute_tool weather"
            attributes = [
                ("gen_ai.operation.name", "execute_tool"), ("gen_ai.tool.name", "weather"),
                ("gen_ai.tool.call.id", f"call_{number}_{place}"), ("gen_ai.tool.call.arguments", '{"city":"Oslo"}'),
                ("gen_ai.tool.call.result", "snow"),
            ]  # fmt: skip
        start = 1_800_000_000_000_000_000 + number * 1_000_000_000 + place * 1_000_000
        found.append(
            Span(trace_id=trace_id, span_id=event_span_id(trace_id, place),
                 parent_span_id=root if place else trial_span_id(trace_id), name=name,
                 start_time_unix_nano=start, end_time_unix_nano=start + 900_000, attributes=key_values(attributes))
        )  # fmt: skip
    return found


def request_bodies(spans: int, is_json: bool) -> list[tuple[bytes, dict[str, str]]]:
    every = (span for number in range(spans // SPANS_OF_A_TRIAL) for span in spans_of_trial(number))
    found = []
    for part in batched(every, SPANS_OF_A_REQUEST):
        request = traces_request(part, "benchmark")
        body = json.dumps(otlp_json(request)).encode() if is_json else request.SerializeToString()
        headers = {"Content-Type": "application/json" if is_json else "application/x-protobuf"}
        found.append((gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"}))
    return found


def serve(kind: str, spans: int) -> None:
    """Serve in this process; prints the port, then CPU seconds and the number of spans for each line of input."""
    if kind == "bare":
        asyncio.run(serve_bare())
        return
    with TraceReceiver() as receiver:
        for number in range(spans // SPANS_OF_A_TRIAL):
            receiver.expect(trial_key(number), 1)
        print(receiver.endpoint.rpartition(":")[2], flush=True)
        for _ in sys.stdin:
            counts = receiver.counts
            kept = counts.spans - counts.duplicates - counts.late - counts.unknown - counts.surplus
            print(time.process_time(), kept, flush=True)


async def serve_bare() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.Response(body=b"")

    runner = web.ServerRunner(web.Server(handle, auto_decompress=False, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), 0, flush=True)


async def post_all(url: str, bodies: list[tuple[bytes, dict[str, str]]]) -> None:
    waiting = iter(bodies)

    async def work(session: aiohttp.ClientSession) -> None:
        for body, headers in waiting:
            async with session.post(url, data=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(work(session))


def measure_server(kind: str, bodies: list[tuple[bytes, dict[str, str]]], spans: int) -> tuple[float, float]:
    """CPU seconds of the server's process and wall seconds for all requests."""
    words = [sys.executable, __file__, "--serve", kind, "--spans", str(spans)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def used() -> tuple[float, int]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            seconds, kept = process.stdout.readline().split()
            return float(seconds), int(kept)

        url = f"http://127.0.0.1:{process.stdout.readline().strip()}/v1/traces"
        before = used()[0]
        started = time.monotonic()
        asyncio.run(post_all(url, bodies))
        wall = time.monotonic() - started
        after, kept = used()
        assert kind == "bare" or kept == spans, f"{kept} of {spans} spans were kept"
        process.stdin.close()
    return after - before, wall


def compare_servers(spans: int, rounds: int) -> bool:
    """Print how many spans per second the receiver takes; returns whether that is too few."""
    from figures import figure  # beside this file

    spans -= spans % SPANS_OF_A_TRIAL
    failed = False
    for name, is_json in (("protobuf", False), ("JSON", True)):
        bodies = request_bodies(spans, is_json)
        figures: dict[str, list[tuple[float, float]]] = {"receiver": [], "bare": []}
        for _ in range(rounds):
            for kind, measured in figures.items():
                measured.append(measure_server(kind, bodies, spans))
        cpu = {kind: statistics.median(seconds for seconds, _ in each) for kind, each in figures.items()}
        wall = statistics.median(seconds for _, seconds in figures["receiver"])
        rate = spans / cpu["receiver"]
        size = sum(len(body) for body, _ in bodies) / spans
        print(f"{name}, gzip: {spans} spans of {size:.0f} bytes in requests of {SPANS_OF_A_REQUEST}, {rounds} rounds")
        print(
            f"  receiver     {rate:10,.0f} spans per CPU second, {1e6 / rate:.1f} us each; {spans / wall:,.0f} a second"
        )
        print(f"  bare server  {spans / cpu['bare']:10,.0f} spans per CPU second, which it only reads as bytes")
        what = f"spans received over HTTP in requests of {SPANS_OF_A_REQUEST}, gzip, {name}"
        each = {"cpu_us": 1e6 / rate, "bare_cpu_us": cpu["bare"] / spans * 1e6}
        failed |= not figure(what, rate, "per CPU second", at_least=SPANS_PER_SECOND, **each)
    return failed


def compare_exports(trials: int, rounds: int) -> bool:
    """Print what exporting costs; returns whether that is too much."""
    from figures import figure  # beside this file

    figures: dict[str, list[float]] = {name: [] for name in SHARES}
    with sink() as url:
        for share in SHARES.values():  # Imports and first-use costs are not per-trial costs.
            measure(url, share, 300)
        for _ in range(rounds):
            for name, share in SHARES.items():
                figures[name].append(measure(url, share, trials))
    print(f"{trials} trials, concurrency {CONCURRENCY}, CPU microseconds per trial, median of {rounds}")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, value in medians.items():
        print(f"  {name:<12} {value:8.1f}   (min {min(figures[name]):.1f}, max {max(figures[name]):.1f})")
    off = statistics.median(figures["off"] + figures["off again"])
    kept = True
    for name, limit in LIMITS.items():
        what, cpu = f"trivial trial with traces, {name} sent", {"cpu_us": medians[name], "bare_cpu_us": off}
        kept &= figure(what, medians[name] / off, "x the CPU time without", at_most=limit, **cpu)
    return not kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["export", "receive"])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--spans", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", choices=["receiver", "bare"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.spans)
        return
    failed = options.only != "receive" and compare_exports(options.trials, options.rounds)
    failed |= options.only != "export" and compare_servers(options.spans, options.rounds)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
