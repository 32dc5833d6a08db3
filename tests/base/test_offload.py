"""Work that is finished even if the caller is cancelled, and work with time limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest

from fairtrial.base.offload import DaemonThreads, TimeLimit, finish, require_asyncio, supervise
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


async def test_the_time_limits_of_many_tasks_are_enforced_in_their_order() -> None:
    ended: list[tuple[str, bool]] = []

    async def work(name: str, limit: TimeLimit, seconds: float) -> None:
        with limit.begin(seconds):
            await asyncio.sleep(0.3 if name == "in time" else 30)
        ended.append((name, limit.expired))

    async def run(name: str, seconds: float) -> None:
        limit = TimeLimit()
        assert await supervise(limit, work(name, limit, seconds), grace_seconds=30)

    with anyio.fail_after(20):
        await asyncio.gather(run("late", 0.2), run("early", 0.05), run("in time", 30), run("last", 0.5))
    assert ended == [("early", True), ("late", True), ("in time", False), ("last", True)]


async def test_a_task_that_cannot_be_cancelled_does_not_keep_the_limits_of_others_from_being_enforced() -> None:
    class Uncancellable(asyncio.Future[None]):
        def cancel(self, msg: object = None) -> bool:
            raise ValueError("not this one")

    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(str(context["exception"])))
    stuck = Uncancellable()

    async def limited(limit: TimeLimit, waits_for: asyncio.Future[None]) -> None:
        with limit.begin(0.05):
            await waits_for

    ended: list[asyncio.Task[bool]] = []
    limits = [TimeLimit() for _ in range(3)]
    for limit, future in zip(limits, (stuck, asyncio.Future[None](), asyncio.Future[None]()), strict=True):
        ended.append(asyncio.create_task(supervise(limit, limited(limit, future), grace_seconds=1)))
    done, _ = await asyncio.wait(ended[1:], timeout=5)
    stuck.set_result(None)
    for task in ended[1:]:
        task.cancel()
    await asyncio.wait(ended)
    assert done == set(ended[1:])
    assert [limit.expired for limit in limits[1:]] == [True, True]
    assert seen[0] == "not this one"


def test_what_needs_asyncio_is_refused_on_trio_with_the_remedy() -> None:
    async def use() -> None:
        require_asyncio("a fleet", "run it under asyncio")

    anyio.run(use)
    with pytest.raises(ConfigurationError, match="a fleet needs asyncio: run it under asyncio"):
        anyio.run(use, backend="trio")


async def test_threads_that_nobody_uses_any_more_end_and_those_in_use_are_kept() -> None:
    threads = DaemonThreads(idle_seconds=0.05)
    served = {await threads.run(threading.current_thread) for _ in range(5)}
    assert len(served) == 1
    release = threading.Event()

    def wait() -> threading.Thread:
        release.wait(20)
        return threading.current_thread()

    waiting = asyncio.ensure_future(threads.run(wait))
    await anyio.sleep(0.3)
    release.set()
    for thread in served | {await waiting}:
        await anyio.to_thread.run_sync(thread.join, 20)
        assert not thread.is_alive()
    assert await threads.run(lambda: 1) == 1
    threads.close()
