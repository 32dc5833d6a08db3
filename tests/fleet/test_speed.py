"""The capacity and latency of one worker process."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import fleet_hold, fleet_latency

pytestmark = pytest.mark.measured


@pytest.mark.proves("R65")
def test_a_main_loop_answers_within_five_milliseconds(redis_url: str) -> None:
    figures = asyncio.run(fleet_latency.measure(redis_url, 300))
    assert figures["request_to_reply_p50_ms"] < 5, figures


@pytest.mark.proves("R51")
def test_one_process_holds_two_thousand_trials_with_all_leases_kept(redis_url: str) -> None:
    figures = fleet_hold.measure(redis_url, trials=2000, seconds=5.0, lease=3.0)
    assert figures["at_once"] == figures["received"] == figures["scored"] == 2000, figures
    assert figures["lease_losses"] == 0, figures
    assert figures["peak_mb"] < 300, figures
