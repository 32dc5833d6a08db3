"""A whole fleet, measured: how fast, how small, how elastic."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match
from fairtrial.fleet import EvalLoop
from fairtrial.suites.worker import run_worker
from tests.figures import Figure
from tests.fleet.processes import ROOT
from tests.redis_server import RedisServer

pytestmark = pytest.mark.measured


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmarks, as modules."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    import fleet_scale  # type: ignore[import-not-found]  # not a package
    import fleet_throughput  # type: ignore[import-not-found]  # not a package

    return fleet_scale, fleet_throughput


@pytest.mark.proves("R60", "R61")
def test_no_op_trials_go_through_a_fleet_at_a_third_of_the_speed_of_a_bare_loop(
    tmp_path: Path, benchmarks: Any, figure: Figure
) -> None:
    _, throughput = benchmarks
    ratios = []
    for turn in range(3):
        ours, bare = tmp_path / f"ours{turn}", tmp_path / f"bare{turn}"
        ours.mkdir()
        bare.mkdir()
        ratios.append(throughput.ours(ours, 10_000, 2).per_second / throughput.bare(bare, 10_000, 2))
    figure("fleet: no-op trials a second, x a bare loop", statistics.median(ratios), at_least=0.35)


@pytest.mark.long  # Memory, which a neighbour does not change.
@pytest.mark.proves("R60")
def test_fifty_thousand_trials_leave_queue_and_client_small(tmp_path: Path, benchmarks: Any, figure: Figure) -> None:
    scale, _ = benchmarks
    figures = scale.Soak(tmp_path, scale.Plan(50_000, 2)).run()
    figure("fleet of 50,000 trials: MB of Redis", figures["redis_peak_mb"], at_most=60)
    assert scale.problems(figures) == [], figures


async def nap(given: int) -> int:
    await asyncio.sleep(0.2)
    return given


async def seconds_with(url: str, store: Path, *, joining: int) -> float:
    """How long a run takes that begins with one worker; `joining` more come after a tenth of it.

    Workers are started within this process: how long Python takes to start on a busy machine is not the question.
    """
    data = Dataset([Sample(f"s{i}", i, i) for i in range(300)])
    suite = EvalSuite("naps", data, nap, exact_match, config=EvalConfig(max_concurrent=10), version="1")
    loops: list[EvalLoop] = []
    workers = [asyncio.create_task(run_worker(suite, url, started=loops.append))]
    done = 0
    began = time.monotonic()
    async with aclosing(suite.stream(store=str(store), mailbox=url)) as results:
        async for _ in results:
            done += 1
            if done == len(data) // 10:
                workers += [asyncio.create_task(run_worker(suite, url, started=loops.append)) for _ in range(joining)]
    seconds = time.monotonic() - began
    for loop in loops:
        loop.stop()
    await asyncio.gather(*workers)
    assert done == len(data)
    return seconds


@pytest.mark.proves("R60")
def test_three_workers_that_join_a_run_finish_it_more_than_twice_as_soon(tmp_path: Path, figure: Figure) -> None:
    with RedisServer(tmp_path / "redis") as server:
        alone = asyncio.run(seconds_with(server.url, tmp_path / "alone.db", joining=0))
        together = asyncio.run(seconds_with(server.url, tmp_path / "together.db", joining=3))
    figure("fleet of 4 workers: speed, x one worker", alone / together, at_least=2)
