"""The capacity and latency of one worker process."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import fleet_hold, fleet_latency
from tests.figures import Figure

pytestmark = pytest.mark.measured


@pytest.mark.proves("R65")
def test_a_main_loop_answers_within_five_milliseconds(redis_url: str, figure: Figure) -> None:
    figures = asyncio.run(fleet_latency.measure(redis_url, 300))
    figure("main loop: request to reply, median ms", figures["request_to_reply_p50_ms"], at_most=5)


@pytest.mark.proves("R70")
def test_a_main_loop_on_postgresql_answers_within_ten_milliseconds(pg_url: str, figure: Figure) -> None:
    figures = asyncio.run(fleet_latency.measure(pg_url, 300))
    figure("main loop on PostgreSQL: request to reply, median ms", figures["request_to_reply_p50_ms"], at_most=10)


@pytest.mark.proves("R51")
def test_one_process_holds_two_thousand_trials_with_all_leases_kept(redis_url: str, figure: Figure) -> None:
    figures = fleet_hold.measure(redis_url, trials=2000, seconds=5.0, lease=3.0)
    assert figures["at_once"] == figures["received"] == figures["scored"] == 2000, figures
    assert figures["lease_losses"] == 0, figures
    figure("worker with 2,000 trials at once: MB of memory", figures["peak_mb"], at_most=300)
