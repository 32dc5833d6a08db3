"""User code that blocks or does not end, run where it cannot stop everything else.

Blocking code runs in daemon threads, or in a child process (`base.isolation`). Daemon threads of our own, not a
pool of the event loop's: a thread that hangs must keep neither the run nor the interpreter from ending. Async code that
catches its own cancellation is orphaned: it continues to run, but nothing waits for it any more.
"""

from __future__ import annotations

import contextvars
import logging
import math
import queue
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from fairtrial.errors import ConfigurationError, FairtrialError

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger("fairtrial.runs")
_MAX_HUNG = 256
_IDLE_SECONDS = 10.0


def loop_caller() -> Callable[[Callable[[], Any]], Any]:
    """The function that runs something on the current event loop from another thread."""
    if on_trio():
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
    import asyncio

    return asyncio.get_running_loop().call_soon_threadsafe


def on_trio() -> bool:
    """True if this runs on trio; nobody can be on it who has not imported it."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


def in_event_loop() -> bool:
    """True inside a running event loop, of asyncio or of trio."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return on_trio()
    return True


def require_asyncio(what: str, remedy: str) -> None:
    """Raise a ConfigurationError if this runs on trio, where `what` does not work."""
    if on_trio():
        raise ConfigurationError(f"{what} needs asyncio: {remedy}")


async def in_thread[T](call: Callable[[], T]) -> T:
    """Return the result of a call that blocks for a bounded time, such as one to a store or a file."""
    return await anyio.to_thread.run_sync(call)


async def finish[T](work: Coroutine[Any, Any, T], *, cancel: bool = False) -> T:
    """Await `work` to its end even if this task is cancelled meanwhile; the cancellation is raised afterwards.

    For asyncio. `work` runs in a task of its own. An anyio scope around the caller repeats its cancellation on each
    turn of the event loop: that reaches neither `work` nor the wait for it.

    Args:
        work: What is awaited.
        cancel: Pass a cancellation on to `work`, once, before it is awaited to its end.
    """
    import asyncio

    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        if cancel:
            task.cancel()
        with anyio.CancelScope(shield=True):
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError:
                    pass  # Cancelled again, which changes nothing.
        if not task.cancelled():
            task.result()  # An error of the work takes the place of the cancellation.
        raise
    return task.result()


class TimeLimit:
    """The time limits of one piece of user code, one step after the other; `supervise` enforces them.

        with limit.begin(seconds):
            await user_code()
        if limit.expired: ...

    On asyncio a step costs nothing but two assignments until the code first waits. On trio it is a cancel scope.
    """

    __slots__ = (
        "_active",
        "_cancels",
        "_on_begin",
        "_on_end",
        "_scope",
        "_shielded",
        "abandoned",
        "deadline",
        "expired",
    )

    def __init__(self) -> None:
        self._active = False
        self._shielded = False
        self._cancels = 0
        self.deadline = math.inf  # On the clock `time.monotonic()`.
        self._scope: anyio.CancelScope | None = None
        self._on_begin: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self.expired = False
        self.abandoned = False  # Cancelled from outside, or orphaned: nothing further is to be started.

    def begin(self, seconds: float, *, shield: bool = False) -> Self:
        """Set the limit of the next step. A shielded step is ended by its own limit alone."""
        self.expired = False
        self._shielded = shield
        self.deadline = monotonic() + seconds
        if on_trio():
            self._scope = anyio.CancelScope(deadline=anyio.current_time() + seconds, shield=shield)
        return self

    def extend(self, seconds: float) -> None:
        """Give the step that is under way more time."""
        self.deadline += seconds
        if self._scope is not None:
            self._scope.deadline += seconds
        if self._on_begin is not None:
            self._on_begin()

    def __enter__(self) -> None:
        if self._scope is not None:
            self._scope.__enter__()
            return
        self._active = True
        if self._on_begin is not None:
            self._on_begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if self._scope is not None:
            caught = bool(self._scope.__exit__(kind, error, trace))
            self.expired, self._scope = self._scope.cancelled_caught, None
            return caught
        self._active = False
        if not self._cancels:
            return False
        import asyncio

        self.expired = not self.abandoned
        task = asyncio.current_task()
        while self._cancels and task is not None:
            self._cancels -= 1
            task.uncancel()
        # A further cancellation comes from elsewhere and is passed on.
        return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()

    def check(self) -> None:
        """Raise if nothing further is to be started."""
        if self.abandoned:
            raise anyio.get_cancelled_exc_class()


async def supervise(limit: TimeLimit, work: Coroutine[Any, Any, None], *, grace_seconds: float) -> bool:
    """Wait for `work`, which runs user code in steps of `limit`; False if it had to be orphaned.

    User code is cancelled when its time is up and again after half of `grace_seconds`. If it still goes on after the
    other half, it catches its cancellation and is left behind. On trio that is not possible: there, a task that
    catches every Cancelled stops the whole event loop.
    """
    if on_trio():
        await work
        return True
    import asyncio

    # Eager: a task that never waits costs no turn of the event loop.
    task = asyncio.Task(_announce_end(limit, work), loop=asyncio.get_running_loop(), eager_start=True)
    if task.done():
        task.result()
        return True
    return await _Supervisor(limit, task, grace_seconds).wait()


async def _announce_end(limit: TimeLimit, work: Coroutine[Any, Any, None]) -> None:
    """Await the work and wake its supervisor in the same turn of the event loop: a callback would take another one."""
    try:
        await work
    finally:
        if limit._on_end is not None:
            limit._on_end()


class _Deadlines:
    """The deadlines of one event loop: wakes the supervisors when they are due, with one timer for all of them.

    The limits of most trials are equal and never reached, so the timer is set once and not for every trial.
    """

    __slots__ = ("_due", "_loop", "_next", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[_Supervisor, float] = {}  # On the clock `time.monotonic()`.
        self._next = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Deadlines:
        """Return those of the event loop that runs in this thread."""
        deadlines: _Deadlines | None = getattr(_local, "deadlines", None)
        if deadlines is None or deadlines._loop is not loop:
            deadlines = _local.deadlines = cls(loop)
        return deadlines

    def wake_at(self, due: float, supervisor: _Supervisor) -> None:
        """Wake a supervisor once; a later call replaces an earlier one."""
        self._due[supervisor] = due
        if due < self._next:
            if self._timer is not None:
                self._timer.cancel()
            self._next = due
            self._timer = self._loop.call_later(min(max(due - monotonic(), 0.0), 86400.0), self._wake)

    def forget(self, supervisor: _Supervisor) -> None:
        """Do not wake it any more."""
        self._due.pop(supervisor, None)

    def _wake(self) -> None:
        now, self._next, self._timer = monotonic(), math.inf, None
        try:
            for supervisor in [supervisor for supervisor, due in self._due.items() if due <= now]:
                self.forget(supervisor)
                supervisor.look()  # May raise: what a task waits for may be the user's, and is cancelled there.
        finally:
            if self._due:
                supervisor, due = min(self._due.items(), key=itemgetter(1))
                self.wake_at(due, supervisor)


_local = threading.local()


class _Supervisor:
    """Enforces the limits of a task that waits for something."""

    __slots__ = ("_deadlines", "_ended", "_half", "_limit", "_task")

    def __init__(self, limit: TimeLimit, task: asyncio.Task[None], grace_seconds: float) -> None:
        self._limit = limit
        self._task = task
        self._half = grace_seconds / 2
        loop = task.get_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._deadlines = _Deadlines.of(loop)

    async def wait(self) -> bool:
        task, limit = self._task, self._limit
        limit._on_begin, limit._on_end = self.look, self._wake
        self.look()
        try:
            await self._ended
            if task.done():
                task.result()
            return task.done()
        except BaseException:  # We are cancelled: from here on, so is the work.
            if not task.done():
                with anyio.CancelScope(shield=True):
                    await self._abandon()
            raise
        finally:
            limit._on_begin = limit._on_end = None
            self._deadlines.forget(self)
            if not task.done():
                limit.abandoned = True
                _log.error(
                    "user code still runs %g s after it was cancelled: it is orphaned, and its result is discarded. "
                    "Code that catches every exception must let CancelledError through, or be run with isolate=True",
                    2 * self._half,
                )
                orphan(task)
            elif not task.cancelled():
                task.exception()  # Seen: it is not to be logged as one that nobody retrieved.

    def _wake(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def look(self) -> None:
        """Enforce the limit if it is reached, and look again when there will be something to do."""
        limit, now = self._limit, monotonic()
        if limit.deadline > now:
            self._deadlines.wake_at(limit.deadline, self)
        elif limit._cancels < 2:
            self._cancel()
            self._deadlines.wake_at(now + self._half, self)
        else:
            self._wake()

    def _cancel(self) -> None:
        if self._limit._active:
            self._limit._cancels += 1
            self._task.cancel()

    async def _abandon(self) -> None:
        """Cancel the work because its caller was cancelled; close its resources first."""
        import asyncio

        self._limit.abandoned = True
        for _ in range(2):
            if not self._limit._shielded:
                self._cancel()
            await asyncio.wait([self._task], timeout=2 * self._half)
            if self._task.done():
                return


def orphan(task: asyncio.Task[Any]) -> None:
    """Let the event loop end without a task that never ends, which `asyncio.run` would wait for."""
    import asyncio
    import ctypes

    if task.done():
        return
    # The documented way out of `all_tasks()`, which `asyncio.run` cancels and waits for ("Extending asyncio", Python's
    # documentation); there is none without the underscore.
    asyncio._unregister_task(task)
    # Never collected, not even as the interpreter ends: closing a coroutine runs it once more, perhaps forever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    task.add_done_callback(_end_orphan)


def _end_orphan(task: asyncio.Task[Any]) -> None:
    import ctypes

    ctypes.pythonapi.Py_DecRef(ctypes.py_object(task))
    if not task.cancelled():
        task.exception()


class _Job:
    __slots__ = ("abandoned", "call", "context", "done", "error", "result", "wake")

    def __init__(self, call: Callable[[], Any], wake: Callable[[Callable[[], Any]], Any]) -> None:
        self.call = call
        self.context = contextvars.copy_context()
        self.wake = wake
        self.done = anyio.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False


class DaemonThreads:
    """Threads that are made as they are needed, reused, and never waited for at the end.

    A thread that nobody has used for `idle_seconds` ends: agents and users of conversations own threads, and no one
    closes them.
    """

    def __init__(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._idle: deque[queue.SimpleQueue[_Job | None]] = deque()
        self._lock = threading.Lock()
        self.hung = 0

    async def run(self, call: Callable[[], Any]) -> Any:
        """The call's result. A cancelled wait leaves the thread behind: nothing can stop a running thread."""
        if self.hung >= _MAX_HUNG:
            raise FairtrialError(
                f"{self.hung} threads hang in user code that does not return; mark it isolate=True, "
                "which runs it in a child process that can be killed"
            )
        job = _Job(call, loop_caller())
        self._queue().put(job)
        try:
            await job.done.wait()
        except BaseException:
            with self._lock:
                if not job.done.is_set():
                    job.abandoned = True
                    self.hung += 1
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # The traceback holds this frame: break the circle.
        return job.result

    def _queue(self) -> queue.SimpleQueue[_Job | None]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(jobs,), name="fairtrial user code", daemon=True).start()
        return jobs

    def _serve(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := self._next(jobs)) is not None:
            try:
                job.result = job.context.run(job.call)
            except BaseException as error:
                job.error = error
            with self._lock:
                self._idle.append(jobs)
                if job.abandoned:
                    self.hung -= 1
                    continue
            try:
                job.wake(job.done.set)
            except RuntimeError:
                pass  # The event loop and the caller are gone. Others may use this thread.

    def _next(self, jobs: queue.SimpleQueue[_Job | None]) -> _Job | None:
        """Wait for the next job of a thread; None if it is to end."""
        while True:
            try:
                return jobs.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._lock:
                    if jobs in self._idle:  # Else a job is on its way.
                        self._idle.remove(jobs)
                        return None

    def __reduce__(self) -> Any:
        return (DaemonThreads, ())  # A child process has threads of its own.

    def close(self) -> None:
        """Let idle threads end; busy ones end with the process."""
        with self._lock:
            while self._idle:
                self._idle.pop().put(None)
