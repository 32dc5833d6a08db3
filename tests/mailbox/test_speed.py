"""A mailbox beside a bare redis-py loop, in one run."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.mailbox import measure
from tests.figures import Figure

pytestmark = [pytest.mark.measured, pytest.mark.proves("R69")]


def test_a_mailbox_keeps_up_with_a_bare_loop_and_replies_at_once(redis_url: str, figure: Figure) -> None:
    figures = asyncio.run(measure(redis_url, 5_000, 3))
    # Neither fences nor single jobs nor types: the most a client could do.
    figure("mailbox: messages a second, x a bare loop", figures["work_ratio_to_bare_together"], at_least=0.35)
    figure("mailbox: messages a second, x a bare loop with fences", figures["work_ratio"], at_least=0.6)
    figure("mailbox: sends a second, x a bare loop", figures["send_ratio"], at_least=0.35)
    figure("mailbox: request to reply, median ms", figures["reply_p50_ms"], at_most=5)
