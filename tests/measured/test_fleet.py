"""A whole fleet, measured: how fast, how small, how elastic."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.processes import ROOT, Processes, said, wait_for_lines
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
    tmp_path: Path, benchmarks: Any
) -> None:
    _, throughput = benchmarks
    ratios = []
    for turn in range(3):
        ours, bare = tmp_path / f"ours{turn}", tmp_path / f"bare{turn}"
        ours.mkdir()
        bare.mkdir()
        ratios.append(throughput.ours(ours, 10_000, 2) / throughput.bare(bare, 10_000, 2))
    assert statistics.median(ratios) >= 0.35, ratios


@pytest.mark.proves("R60")
def test_fifty_thousand_trials_leave_queue_and_client_small(tmp_path: Path, benchmarks: Any) -> None:
    scale, _ = benchmarks
    figures = scale.measure(tmp_path, 50_000, 2)
    assert scale.problems(figures) == [], figures


def seconds_with(folder: Path, *, joining: int) -> float:
    """How long a run takes that begins with one worker; `joining` more come after a tenth of it."""
    folder.mkdir()
    executed = folder / "executed"
    trials = 700
    with (
        RedisServer(folder / "redis") as redis,
        Processes(folder, redis.url, samples=trials, concurrency=10, sleep="0.3,0.3", log=executed) as fleet,
    ):
        fleet.worker()
        client = fleet.client(f"{folder}/runs.db")
        wait_for_lines(executed, 1)
        began = time.monotonic()
        wait_for_lines(executed, trials // 10)
        for _ in range(joining):
            fleet.worker()
        assert said(client)["successful"] == trials
        return time.monotonic() - began


@pytest.mark.proves("R60")
def test_three_workers_that_join_a_run_finish_it_more_than_twice_as_soon(tmp_path: Path) -> None:
    alone = seconds_with(tmp_path / "alone", joining=0)
    together = seconds_with(tmp_path / "together", joining=3)
    assert alone / together >= 2, (alone, together)
