"""Async code called by blocking code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

import fairtrial.fleet.worker.worker
import fairtrial.runs.sync
from fairtrial import Sample, evaluate_sync, exact_match
from fairtrial.base.sync_bridge import blocking_portal, call_sync
from fairtrial.fleet import EvalLoop
from fairtrial.mailbox import InMemoryMailbox


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


class InterruptedAtTheStart:
    """The way into the event loop, in which Ctrl-C is pressed once or twice just when a task has been started."""

    def __init__(self, times: int) -> None:
        self.times = times

    def start_task_soon(self, call: Callable[..., Any]) -> Future[Any]:
        future = blocking_portal().start_task_soon(call)
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)
        return future


@pytest.mark.parametrize("times", [1, 2])
class TestInterruptedAtTheStart:
    def test_a_loop_ends_before_the_interrupt_is_raised(self, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fairtrial.fleet.worker.worker, "blocking_portal", partial(InterruptedAtTheStart, times))
        loop = EvalLoop(requests=InMemoryMailbox("q"), evaluator=exact_match, loop=str, results=InMemoryMailbox("r"))
        with pytest.raises(KeyboardInterrupt):
            loop.run_sync()
        assert not loop.running

    def test_a_run_ends_before_the_interrupt_is_raised(self, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fairtrial.runs.sync, "blocking_portal", partial(InterruptedAtTheStart, times))
        with pytest.raises(KeyboardInterrupt, match="the run was interrupted; it was kept in memory only"):
            evaluate_sync([Sample("a", 1, "1")], str, exact_match)
