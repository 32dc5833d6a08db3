"""Supervision of one loop: restart after a crash, with exponential backoff."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fairtrial.base.backoff import backoff
from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError, LoopCrashedError, MailboxAccessError

_log = logging.getLogger(__name__)

type LoopState = Literal["new", "running", "crashed", "failed", "finished", "stopped"]


class Loop(Protocol):
    """The protocol of loops that a group can run, such as `MainLoop` and `EvalLoop`.

    A loop may also have `counters` and `gauges`: records, mappings from names to numbers, or functions that return
    these. They are included in the metrics. Counters only grow, except one called `in_flight`. An optional `ready`
    tells whether the loop takes work. A cancelled `run` hands back unfinished messages.
    """

    def run(self) -> Awaitable[object]:
        """Work until there is no more work, or until stopped."""
        ...

    def stop(self) -> object:
        """Take no more work, finish work in progress, and let `run` return. An awaitable result is awaited."""
        ...


type LoopFactory = Callable[[], Loop]


class Bound:
    """A loop with a custom `run`: `Bound(loop, lambda: loop.run(until_empty=True))`."""

    def __init__(self, loop: Loop, run: Callable[[], Awaitable[object]]) -> None:
        self._loop = loop
        self.run = run
        self.stop = loop.stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When and how crashed loops are restarted.

    Attributes:
        base_seconds: The pause after the first crash; doubled with each further crash in a row.
        max_seconds: The longest pause.
        settled_seconds: A loop that ran this long has recovered: the next crash counts as the first.
        alarm_after: After this many crashes in a row a loop counts as failing: the group is not ready, and the log and
            the metrics name the loop and the error. It is still restarted.
        give_up_after: After this many crashes in a row the group ends. None, the default, never ends it.
        draw: The source of jitter: returns a number from 0 to 1.
    """

    base_seconds: float = 0.5
    max_seconds: float = 60.0
    settled_seconds: float = 30.0
    alarm_after: int = 3
    give_up_after: int | None = None
    draw: Callable[[], float] = field(default=random.random, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.base_seconds <= self.max_seconds or self.settled_seconds <= 0:
            raise ConfigurationError("a RestartPolicy requires 0 < base_seconds <= max_seconds and settled_seconds > 0")
        if self.alarm_after < 1 or (self.give_up_after is not None and self.give_up_after < 1):
            raise ConfigurationError("alarm_after and give_up_after must be at least 1")

    def pause(self, crashes: int) -> float:
        """Return the seconds to wait after this many crashes in a row; half of it is random, to spread restarts."""
        return backoff(crashes, first=self.base_seconds, longest=self.max_seconds, draw=self.draw)


class Supervised:
    """A supervised loop and its state.

    Attributes:
        name: The name in logs and metrics.
        loop: The current or last loop.
        state: "crashed" waits for a restart; "failed" is not restarted.
        crashes: Number of crashes.
        in_a_row: Number of crashes since the loop last recovered.
        error: The error of the last crash.
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
        """Whether the loop crashes repeatedly, or will not be restarted."""
        if self.state == "running" and time.monotonic() - self._began >= self._policy.settled_seconds:
            return False
        return self.state == "failed" or self.in_a_row >= self._policy.alarm_after

    @property
    def ready(self) -> bool:
        """Whether the loop runs and takes work."""
        return self.state == "running" and bool(getattr(self.loop, "ready", True))

    def stop(self) -> None:
        """Let the loop finish its work and do not restart it. Must be called in the event loop's thread."""
        self._stopping.set()
        if self.state != "running" or self.loop is None:
            return
        try:
            outcome = self.loop.stop()
        except Exception:
            _log.exception(
                "stopping %s failed; it will be cancelled when the time limit of the drain is over", self.name
            )
            return
        if inspect.isawaitable(outcome):
            task: asyncio.Task[object] = asyncio.ensure_future(outcome)
            self._stops.add(task)
            task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[object]) -> None:
        self._stops.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("stopping %s failed", self.name, exc_info=task.exception())

    async def run(self) -> None:
        """Run the loop until it ends or is stopped; restart it after crashes.

        Raises:
            LoopCrashedError: the loop crashed too often in a row.
            ConfigurationError: the loop is misconfigured, so a restart would not help.
            MailboxAccessError: its server denies access, so a restart would not help.
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
                await self._crashed(error)  # Cancelled by its own code.
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
            _log.critical("%s crashes repeatedly (%d times in a row): %s", self.name, self.in_a_row, self.error)
        _log.error("%s crashed after %.1f s; restarting in %.1f s", self.name, ran, pause, exc_info=error)
        try:
            await asyncio.wait_for(self._stopping.wait(), pause)
        except TimeoutError:
            pass
