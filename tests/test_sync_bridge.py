"""Async code called from ordinary code."""

from __future__ import annotations

import threading

import pytest

from fairtrial.sync_bridge import blocking_portal, call_sync


async def where() -> int:
    return threading.get_ident()


def test_all_calls_share_one_event_loop() -> None:
    assert call_sync(where) == call_sync(where) != threading.get_ident()


def test_a_call_that_brings_the_event_loop_down_does_not_take_later_calls_with_it() -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    before = blocking_portal()
    with pytest.raises(KeyboardInterrupt):
        call_sync(interrupted)
    until_gone = [thread for thread in threading.enumerate() if thread.name == "fairtrial event loop"]
    for thread in until_gone:
        thread.join(10)
    assert call_sync(where) != threading.get_ident()
    assert blocking_portal() is not before
