"""A mailbox beside a bare redis-py loop, in one run."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.mailbox import measure

pytestmark = [pytest.mark.measured, pytest.mark.proves("R69")]


def test_a_mailbox_keeps_up_with_a_bare_loop_and_replies_at_once(redis_url: str) -> None:
    figures = asyncio.run(measure(redis_url, 5_000, 3))
    # Neither fences nor single jobs nor types: the most a client could do.
    assert figures["work_ratio_to_bare_together"] >= 0.35, figures
    assert figures["work_ratio"] >= 0.6, figures
    assert figures["send_ratio"] >= 0.35, figures
    assert figures["reply_p50_ms"] < 5, figures
