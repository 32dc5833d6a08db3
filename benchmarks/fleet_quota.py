"""How well many processes share one provider's quota.

    python benchmarks/fleet_quota.py [--server redis|postgres|both] [--workers 10] [--quota 200] [--seconds 20]
                                     [--burst 20] [--adaptive] [--alone] [--light] [--snapshot]

Starts its own redis-server or PostgreSQL, or one after the other, and a model server that answers 429 beyond its quota,
and worker processes that each would use up the whole quota by themselves: `OpenAIAdapter` with a `FleetLimiter`, 30
calls at once.

--adaptive: the workers are not told the quota and have to find it together.
--alone: each has a limiter of its own instead, the adaptive one of a single process, for comparison.
--light: they call by aiohttp instead of the adapter, for machines where ten interpreters with an SDK in each are what
would be measured.

--server both: also compares the time that one reservation takes on each, in turns, alone and with ten at once.
--snapshot: a transaction that reads is open in PostgreSQL meanwhile, so that no old version of a row can be removed.

At the same time, as many processes send requests to a second server, each at a constant rate of its own and without a
limiter: what is missing there was taken by other work on the machine, not by the limiter.

Exits with 1 unless, with a quota that is known, at least 90% of it was used (of what the machine allowed), under 2% of
the requests were refused, and no worker had less than half of its share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ModelError
from fairtrial.fleet.limits.connections import limit_server
from fairtrial.fleet.limits.quota import FleetLimiter
from fairtrial.fleet.limits.servers import Quota
from fairtrial.integrations.model_server import RateLimited, spawn_model_server
from fairtrial.models.limiter import AdaptiveLimiter, Limiter, Permit, Verdict

LATENCY = 0.1
AT_ONCE = 30
HOW = {"known": "one quota", "adaptive": "one quota that they are not told", "alone": "each with a limiter of its own"}
FILL = 0.97
"""The share of the quota that `FleetLimiter` uses by default, and the reference too."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The share of the quota that was used and the one that the reference used, the share of refused requests, calls by
    worker, round trips to the server per call."""

    used: float
    reference: float
    refused: float
    calls: tuple[int, ...]
    blocks_per_call: float

    @property
    def used_of_possible(self) -> float:
        """The share of the quota that was used, of the time that the machine gave to the processes of the reference."""
        return self.used / min(1.0, self.reference / FILL)

    @property
    def smallest_share(self) -> float:
        """The calls of the worker with the fewest, against the mean."""
        return min(self.calls) * len(self.calls) / max(1, sum(self.calls))


@asynccontextmanager
async def by_adapter(base_url: str, limiter: Limiter) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Calls as a task makes them."""
    from fairtrial.models.openai import OpenAIAdapter

    messages = [ChatMessage("user", "hello")]
    async with OpenAIAdapter("test-model", base_url=base_url, api_key="test", limiter=limiter) as adapter:

        async def call() -> None:
            await adapter.complete(messages)

        yield call


@asynccontextmanager
async def by_aiohttp(base_url: str, limiter: Limiter) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The same requests with next to nothing around them; refused ones are tried again after half a second."""
    import aiohttp

    body = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}
    async with aiohttp.ClientSession() as session:

        async def call() -> None:
            while True:
                async with limiter.slot() as permit, session.post(f"{base_url}/chat/completions", json=body) as answer:
                    await answer.read()
                    if answer.status == 200:
                        return
                    limiter.report(permit, "rate_limited", retry_after=float(answer.headers["retry-after-ms"]) / 1000)
                await asyncio.sleep(0.5)

        yield call


class ConstantRate:
    """Admits calls at a constant rate in this process alone. Missed turns are not made up for, as in `FleetLimiter`."""

    def __init__(self, rate: float) -> None:
        self._gap = 1 / rate
        self._next = 0.0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Permit]:
        """Wait for the next turn."""
        turn = max(self._next, time.monotonic())
        self._next = turn + self._gap
        await asyncio.sleep(turn - time.monotonic())
        yield Permit(0)

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Nothing is learned from refusals."""


async def work(url: str, base_url: str, mode: str, light: bool, quota: float, seconds: float) -> None:
    """One worker process: ready, wait for the word, call as much as one may."""
    fleet = FleetLimiter(
        url, "benchmark", requests_per_second=None if mode == "adaptive" else quota, adaptive=mode == "adaptive"
    )
    limiter: Limiter = fleet
    if mode == "alone":
        limiter = AdaptiveLimiter()
    elif mode == "reference":
        limiter = ConstantRate(quota)
    done = 0
    caller = by_aiohttp if light else by_adapter
    async with fleet, caller(base_url, limiter) as ask:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        end = time.monotonic() + seconds

        async def call() -> None:
            nonlocal done
            while time.monotonic() < end:
                try:
                    async with asyncio.timeout(end - time.monotonic()):
                        await ask()
                    done += 1
                except (ModelError, TimeoutError):
                    pass

        await asyncio.gather(*(call() for _ in range(AT_ONCE)))
        blocks = fleet.counters["limiter_blocks"]
    print(json.dumps({"done": done, "blocks": blocks}), flush=True)


def run(
    url: str, *, workers: int, quota: float, seconds: float, burst: int, mode: str = "known", light: bool = False
) -> Outcome:
    """Start the workers, let them go together, and count at the server."""
    refusal = RateLimited(retry_after=0.5, form="milliseconds")
    kinds = {"reference": quota * FILL / workers, mode: quota}
    started: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                spawn_model_server("hi", latency=LATENCY, requests_per_second=quota, burst=burst, refusal=refusal)
            )
            for _ in kinds
        ]
        try:
            for server, (kind, rate) in zip(servers, kinds.items(), strict=True):
                command = [sys.executable, __file__, "--worker", url, server.base_url + "/v1", kind]
                command += ["adapter" if kind == mode and not light else "light", str(rate), str(seconds)]
                pipe = subprocess.PIPE
                started += [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(workers)]
            for process in started:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise RuntimeError("a worker did not start; see its message above")
            for server in servers:
                server.reset()
            for process in started:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            said = [json.loads(process.communicate(timeout=seconds + 60)[0]) for process in started][workers:]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        reference, stats = (server.stats() for server in servers)
    calls = tuple(int(one["done"]) for one in said)
    return Outcome(
        used=(stats.requests - stats.refused) / (quota * seconds),
        reference=(reference.requests - reference.refused) / (quota * seconds),
        refused=stats.refused / max(1, stats.requests),
        calls=calls,
        blocks_per_call=sum(one["blocks"] for one in said) / max(1, sum(calls)),
    )


async def reservation_seconds(url: str, *, at_once: int, times: int = 200) -> float:
    """The median time in which a start time is reserved, while `at_once` connections do so."""
    quota = Quota("cost", 1.0, 1e6, 0.0, 0.0, 0.0, 1e6)  # Nobody has to wait for a turn.
    took: list[float] = []

    async def reserve() -> None:
        server = limit_server(url)
        await server.reserve(quota, 1, 0.0, 0.0)
        for _ in range(times):
            began = time.perf_counter()
            await server.reserve(quota, 1, 0.0, 0.0)
            took.append(time.perf_counter() - began)
        await server.close()

    await asyncio.gather(*(reserve() for _ in range(at_once)))
    return statistics.median(took)


def compare_costs(urls: dict[str, str], *, rounds: int = 5) -> None:
    """Print how long a reservation takes on each server, measured in turns, and the ratio."""
    from benchmarks.figures import figure

    for at_once in (1, 10):
        found: dict[str, list[float]] = {name: [] for name in urls}
        for _ in range(rounds):
            for name, url in urls.items():
                found[name].append(asyncio.run(reservation_seconds(url, at_once=at_once)))
        each = {name: statistics.median(values) for name, values in found.items()}
        ratio = statistics.median(ours / theirs for ours, theirs in zip(found["postgres"], found["redis"], strict=True))
        shown = ", ".join(f"{name} {value * 1000:.2f} ms" for name, value in each.items())
        print(f"one reservation, {at_once} at once: {shown}")
        figure(f"a reservation of `FleetLimiter`, {at_once} at once, PostgreSQL against Redis", ratio, "x the time")


@contextmanager
def servers(which: str, *, snapshot: bool) -> Iterator[dict[str, str]]:
    """The addresses of the servers that limits are shared through."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import psycopg

    from benchmarks import bare_postgres
    from benchmarks.mailbox import server

    with ExitStack() as stack:
        urls: dict[str, str] = {}
        if which != "postgres":
            urls["redis"] = stack.enter_context(server())
        if which != "redis":
            urls["postgres"] = stack.enter_context(bare_postgres.server()).new_database()
            if snapshot:
                reader = stack.enter_context(psycopg.connect(urls["postgres"]))
                reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                reader.execute("SELECT 1")
        yield urls


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        _, _, url, base_url, mode, caller, quota, seconds = sys.argv
        asyncio.run(work(url, base_url, mode, caller == "light", float(quota), float(seconds)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=["redis", "postgres", "both"], default="redis")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--quota", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--burst", type=int, default=20)
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--snapshot", action="store_true")
    given = parser.parse_args()
    mode = "adaptive" if given.adaptive else "alone" if given.alone else "known"
    sizes = {name: getattr(given, name) for name in ("workers", "quota", "seconds", "burst", "light")}
    with servers(given.server, snapshot=given.snapshot) as urls:
        what = f"{given.workers} processes {'by aiohttp' if given.light else 'by `OpenAIAdapter`'}, {HOW[mode]}"
        good = [_print(name, mode, what, run(url, mode=mode, **sizes)) for name, url in urls.items()]
        if given.server == "both":
            compare_costs(urls)
    return 0 if all(good) or mode != "known" else 1


def _print(server: str, mode: str, what: str, found: Outcome) -> bool:
    """Print an outcome, and return whether it is good for a quota that is known."""
    from benchmarks.figures import ENGINES, figure

    print(f"{server}: {found.used:.1%} of the quota used, constant rates without a limiter {found.reference:.1%}")
    print(f"calls by worker {found.calls}, {found.blocks_per_call:.2f} blocks asked for per call")
    limits = [0.9, 2, 0.5] if mode == "known" else [None, None, None]
    what = f"{what}{f', in {ENGINES[server]}' if mode != 'alone' else ''}"
    kept = figure(f"{what}: used, of constant rates", found.used_of_possible, "x", at_least=limits[0])
    kept &= figure(f"{what}: refused", 100 * found.refused, "%", at_most=limits[1])
    return kept & figure(f"{what}: smallest share, of the mean", found.smallest_share, "x", at_least=limits[2])


if __name__ == "__main__":
    sys.exit(main())
