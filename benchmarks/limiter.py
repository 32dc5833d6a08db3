"""How close the adaptive limiter comes to a limit it was not told.

    python benchmarks/limiter.py [--calls 3000] [--cap 40] [--latency 0.2]

The server answers 429 above `cap` requests in flight. The same calls are made with a fixed limit of exactly `cap`,
which nobody knows in practice, and with the adaptive limiter, which has to find it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ModelError
from fairtrial.integrations.model_server import ModelServerProcess, spawn_model_server
from fairtrial.models.limiter import AdaptiveLimiter, FixedLimiter, Limiter
from fairtrial.models.openai import OpenAIAdapter


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run of calls; `refused_late` counts refusals after the first tenth of the calls."""

    rate: float
    failed: int
    refused: int
    refused_late: float
    episodes: int


async def run(server: ModelServerProcess, limiter: Limiter, calls: int, workers: int) -> Outcome:
    """Make the calls and count."""
    messages = [ChatMessage("user", "hello")]
    left = iter(range(calls))
    failed = done = 0
    warm: tuple[int, int] | None = None
    server.reset()
    async with OpenAIAdapter(
        "test-model", base_url=server.base_url + "/v1", api_key="test", limiter=limiter
    ) as adapter:

        async def work() -> None:
            nonlocal failed, done, warm
            for _ in left:
                try:
                    await adapter.complete(messages)
                except ModelError:
                    failed += 1
                done += 1
                if warm is None and done >= calls // 10:
                    stats = await asyncio.to_thread(server.stats)
                    warm = warm or (stats.requests, stats.refused)

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(workers)))
        took = time.perf_counter() - started
    stats = server.stats()
    requests, refused = warm or (0, 0)
    late = (stats.refused - refused) / max(1, stats.requests - requests)
    return Outcome(calls / took, failed, stats.refused, late, getattr(limiter, "episodes", 0))


def compare(calls: int, cap: int, latency: float, workers: int = 200) -> tuple[Outcome, Outcome]:
    """The fixed limit's outcome and the adaptive limiter's."""
    with spawn_model_server("hi", latency=latency, max_concurrent=cap) as server:
        asyncio.run(run(server, FixedLimiter(cap), cap, cap))  # Imports and connections are not what is measured.
        fixed = asyncio.run(run(server, FixedLimiter(cap), calls, workers))
        adaptive = asyncio.run(run(server, AdaptiveLimiter(), calls, workers))
    return fixed, adaptive


def main() -> int:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--cap", type=int, default=40)
    parser.add_argument("--latency", type=float, default=0.2)
    given = parser.parse_args()
    fixed, adaptive = compare(given.calls, given.cap, given.latency)
    for name, outcome in (("fixed", fixed), ("adaptive", adaptive)):
        print(
            f"{name:8} {outcome.rate:6.0f} calls/s  failed {outcome.failed}  refused {outcome.refused} "
            f"({outcome.refused_late:.1%} after warm-up)  episodes {outcome.episodes}"
        )
    what = f"adaptive limiter, server refusing above {given.cap}"
    kept = figure(f"{what}, against that fixed limit", adaptive.rate / fixed.rate, "x the throughput", at_least=0.85)
    kept &= figure(f"{what}: refused after warm-up", 100 * adaptive.refused_late, "%", at_most=5)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
