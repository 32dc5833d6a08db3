"""One loop, kept running: what crashes is started again, after a pause that grows."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fairtrial.backoff import backoff
from fairtrial.errors import ConfigurationError, LoopCrashedError, MailboxAccessError

_log = logging.getLogger(__name__)

type LoopState = Literal["new", "running", "crashed", "failed", "finished", "stopped"]


class Loop(Protocol):
    """What a group can run. `MainLoop` and `EvalLoop` are such loops.

    Beside the two methods a loop may have `counters` and `gauges`: records, mappings from names to numbers, functions
    that return such. They appear among the metrics. Counters only grow, but for one called `in_flight`. One that has
    `ready` says with it whether it takes work by now. A cancelled `run` hands back what it has not finished.
    """

    def run(self) -> Awaitable[object]:
        """Work until there is no more, or until told to stop."""
        ...

    def stop(self) -> object:
        """Take no more work, finish what is under way, and let `run` return. An awaitable result is awaited."""
        ...


type LoopFactory = Callable[[], Loop]


@dataclass(frozen=True, slots=True)
class Bound:
    """A loop that is run in a certain way: `Bound(loop, lambda: loop.run(until_empty=True))`."""

    loop: Any
    start: Callable[[], Awaitable[object]]

    @property
    def counters(self) -> Any:
        """The loop's own."""
        return getattr(self.loop, "counters", None)

    @property
    def gauges(self) -> Any:
        """The loop's own."""
        return getattr(self.loop, "gauges", None)

    @property
    def ready(self) -> bool:
        """The loop's own."""
        return bool(getattr(self.loop, "ready", True))

    def run(self) -> Awaitable[object]:
        """Run it that way."""
        return self.start()

    def stop(self) -> object:
        """Stop it."""
        return self.loop.stop()


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How crashed loops come back.

    Attributes:
        base_seconds: The pause after the first crash; doubles with each one that follows soon.
        max_seconds: The longest pause.
        settled_seconds: A loop that ran this long has recovered: the next crash counts as the first.
        alarm_after: This many crashes in a row make a loop one that is failing: the group is not ready then, and the
            log and the metrics say which loop it is and why. It is still tried again.
        give_up_after: This many crashes in a row end the group. None, the default, never does.
        draw: Where the jitter comes from: a number from 0 to 1.
    """

    base_seconds: float = 0.5
    max_seconds: float = 60.0
    settled_seconds: float = 30.0
    alarm_after: int = 3
    give_up_after: int | None = None
    draw: Callable[[], float] = field(default=random.random, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.base_seconds <= self.max_seconds or self.settled_seconds <= 0:
            raise ConfigurationError("a restart policy needs 0 < base_seconds <= max_seconds and settled_seconds > 0")
        if self.alarm_after < 1 or (self.give_up_after is not None and self.give_up_after < 1):
            raise ConfigurationError("alarm_after and give_up_after are at least 1")

    def pause(self, crashes: int) -> float:
        """Seconds to wait after so many crashes in a row; half of it is drawn, so that a fleet does not march."""
        return backoff(crashes, first=self.base_seconds, longest=self.max_seconds, draw=self.draw)


class Supervised:
    """A loop and what became of it.

    Attributes:
        name: What it is called in logs and metrics.
        loop: The loop that runs, or ran last.
        state: "crashed" waits to be started again; "failed" will not be.
        crashes: How often it has crashed.
        in_a_row: How often since it last ran for a while.
        error: What the last crash said.
    """

    def __init__(self, name: str, loop: Loop | LoopFactory, policy: RestartPolicy) -> None:
        self.name = name
        self._make: LoopFactory | None = None if hasattr(loop, "run") else loop
        self.loop: Loop | None = None if self._make is not None else loop  # type: ignore[assignment]  # told apart above
        self._policy = policy
        self._stopping = asyncio.Event()
        self._stops: set[asyncio.Task[object]] = set()
        self.state: LoopState = "new"
        self.crashes = 0
        self.in_a_row = 0
        self.error = ""
        self._began = 0.0

    @property
    def failing(self) -> bool:
        """Whether it crashes again and again and has not run for a while since, or will not come back."""
        if self.state == "running" and time.monotonic() - self._began >= self._policy.settled_seconds:
            return False
        return self.state == "failed" or self.in_a_row >= self._policy.alarm_after

    @property
    def ready(self) -> bool:
        """Whether it runs and takes work, as far as it says."""
        return self.state == "running" and bool(getattr(self.loop, "ready", True))

    def stop(self) -> None:
        """Let it finish what it has, and not start again. From the event loop's own thread."""
        self._stopping.set()
        if self.state != "running" or self.loop is None:
            return
        try:
            outcome = self.loop.stop()
        except Exception:
            _log.exception(
                "%s could not be told to stop; it will be cancelled when the drain's time is over", self.name
            )
            return
        if inspect.isawaitable(outcome):
            task: asyncio.Task[object] = asyncio.ensure_future(outcome)
            self._stops.add(task)
            task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[object]) -> None:
        self._stops.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s could not be told to stop", self.name, exc_info=task.exception())

    async def run(self) -> None:
        """Run it until it ends by itself or is stopped.

        Raises:
            LoopCrashedError: it crashed too often in a row.
            ConfigurationError: it cannot work as it is set up; starting it again would not help.
            MailboxAccessError: its server refuses it, for the same reason.
        """
        while not self._stopping.is_set():
            self._began = time.monotonic()
            try:
                if self._make is not None:
                    self.loop = self._make()
                assert self.loop is not None  # noqa: S101 - made above, or given
                self.state = "running"
                await self.loop.run()
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling() > 0:
                    self.state = "stopped"
                    raise
                await self._crashed(error)  # It cancelled itself: nobody asked for that.
            except (ConfigurationError, MailboxAccessError) as error:
                self.state, self.error = "failed", f"{type(error).__name__}: {error}"
                raise
            except Exception as error:
                await self._crashed(error)
            else:
                break
        self.state = "stopped" if self._stopping.is_set() else "finished"

    async def _crashed(self, error: BaseException) -> None:
        ran = time.monotonic() - self._began
        self.state = "crashed"
        self.crashes += 1
        self.in_a_row = 1 if ran >= self._policy.settled_seconds else self.in_a_row + 1
        self.error = f"{type(error).__name__}: {error}"
        if self._stopping.is_set():
            _log.error("%s crashed while it was being stopped", self.name, exc_info=error)
            return
        if self._policy.give_up_after is not None and self.in_a_row >= self._policy.give_up_after:
            self.state = "failed"
            raise LoopCrashedError(f"{self.name} crashed {self.in_a_row} times in a row; last: {self.error}") from error
        pause = self._policy.pause(self.in_a_row)
        if self.in_a_row == self._policy.alarm_after:
            _log.critical("%s crashes again and again (%d times in a row): %s", self.name, self.in_a_row, self.error)
        _log.error("%s crashed after %.1f s; it starts again in %.1f s", self.name, ran, pause, exc_info=error)
        try:
            await asyncio.wait_for(self._stopping.wait(), pause)
        except TimeoutError:
            pass
