"""Work that is finished even if the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from fairtrial.base.offload import finish, require_asyncio
from fairtrial.errors import ConfigurationError


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Work:
    """Ends when it is told to, and counts how often it is cancelled before."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.cancelled = 0
        self.ended = False
        self._error = error

    async def run(self) -> str:
        self.begun.set()
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
        self.ended = True
        if self._error is not None:
            raise self._error
        return "done"


async def cancel_natively(waiting: Callable[[], Awaitable[str]], work: Work) -> list[str]:
    """Cancel a task three times while it awaits; returns what it got."""
    got: list[str] = []

    async def run() -> None:
        got.append(await waiting())

    task = asyncio.create_task(run())
    await work.begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    left_early = task.done()
    work.may_end.set()  # Also after a failure: nothing may be left that catches every cancellation.
    assert not left_early
    with pytest.raises(asyncio.CancelledError):
        await task
    return got


async def cancel_by_scope(waiting: Callable[[], Awaitable[str]], work: Work) -> list[str]:
    """Cancel an anyio scope, which repeats it at each turn of the event loop; returns what was got inside."""
    got: list[str] = []
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            await work.begun.wait()
            scope.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            work.may_end.set()

        cancelling = asyncio.create_task(cancel())
        got.append(await waiting())
    await cancelling
    assert scope.cancelled_caught
    return got


ways = pytest.mark.parametrize("cancel_caller", [cancel_natively, cancel_by_scope], ids=["task", "scope"])
type CancelCaller = Callable[[Callable[[], Awaitable[str]], Work], Awaitable[list[str]]]


async def test_finish_returns_the_result() -> None:
    work = Work()
    work.may_end.set()
    assert await finish(work.run()) == "done"


async def test_finish_raises_the_error_of_the_work() -> None:
    work = Work(ValueError("broken"))
    work.may_end.set()
    with pytest.raises(ValueError, match="broken"):
        await finish(work.run())


@ways
async def test_finish_awaits_work_to_its_end_when_the_caller_is_cancelled(cancel_caller: CancelCaller) -> None:
    work = Work()
    assert await cancel_caller(lambda: finish(work.run()), work) == []
    assert (work.ended, work.cancelled) == (True, 0)


@ways
async def test_finish_passes_a_cancellation_on_once_when_it_is_asked_to(cancel_caller: CancelCaller) -> None:
    work = Work()
    assert await cancel_caller(lambda: finish(work.run(), cancel=True), work) == []
    assert (work.ended, work.cancelled) == (True, 1)


async def test_finish_raises_the_error_of_work_that_fails_after_a_cancellation() -> None:
    work = Work(ValueError("broken"))
    task = asyncio.create_task(finish(work.run()))
    await work.begun.wait()
    task.cancel()
    work.may_end.set()
    with pytest.raises(ValueError, match="broken"):
        await task


def test_what_needs_asyncio_is_refused_on_trio_with_the_remedy() -> None:
    async def use() -> None:
        require_asyncio("a fleet", "run it under asyncio")

    anyio.run(use)
    with pytest.raises(ConfigurationError, match="a fleet needs asyncio: run it under asyncio"):
        anyio.run(use, backend="trio")
