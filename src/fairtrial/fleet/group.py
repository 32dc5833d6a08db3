"""Several loops in one process: supervised, drained, and watched."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from typing import Any, Final, Literal, Protocol

from fairtrial.errors import ConfigurationError
from fairtrial.fleet.metrics import Family, Reading, depth_families, exposition
from fairtrial.fleet.probe import HEALTH_HOST, STALL_SECONDS, Probe
from fairtrial.fleet.supervise import Loop, LoopFactory, RestartPolicy, Supervised
from fairtrial.fleet.watchdog import Watchdog
from fairtrial.frozen import EMPTY
from fairtrial.mailbox.protocol import MailboxDepth

_log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 600.0
HURRY_SECONDS: Final = 15.0
_DEPTH_SECONDS = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

type GroupState = Literal["new", "running", "draining", "hurrying", "over"]


class Watched(Protocol):
    """A mailbox whose depth is shown among the metrics."""

    async def depth(self) -> MailboxDepth:
        """How many messages are where."""
        ...


class LoopGroup:
    """Runs several loops until they end or are told to.

    - A loop that crashes is started again after a pause that grows; the others do not notice. One that crashes again
      and again makes the group not ready and is named in the log and the metrics.
    - SIGTERM and SIGINT drain: no loop takes more work, and each finishes what it has. After `drain_seconds`, or at a
      second signal, what is left is cancelled, and loops hand back their messages. A third signal kills.
    - With a `health_port`: `/live` (the event loop moves), `/ready` (all loops run and take work), `/health` (both),
      `/metrics`.
    - A watchdog notices an event loop that is stuck, says where, and may end the process.

    Args:
        loops: The loops, by name if a mapping. A function makes a fresh loop for every start.
        restart: How crashed loops come back.
        health_port: Where to answer probes; None for nowhere, 0 for a free port.
        health_host: The interface to answer on. "0.0.0.0" where probes come from outside, as in Kubernetes.
        stall_seconds: An event loop silent for this long is stuck; None to watch nothing.
        exit_on_stall: End the process when it is stuck.
        drain_seconds: How long a drain may take before it is hurried.
        watch: Mailboxes by name whose depth is shown among the metrics.
    """

    def __init__(
        self,
        loops: Sequence[Loop | LoopFactory] | Mapping[str, Loop | LoopFactory],
        *,
        restart: RestartPolicy | None = None,
        health_port: int | None = None,
        health_host: str = HEALTH_HOST,
        stall_seconds: float | None = STALL_SECONDS,
        exit_on_stall: bool = False,
        drain_seconds: float = DRAIN_SECONDS,
        watch: Mapping[str, Watched] = EMPTY,
    ) -> None:
        if not loops:
            raise ConfigurationError("a group needs at least one loop")
        if drain_seconds < 0:
            raise ConfigurationError(f"drain_seconds is 0 or more, not {drain_seconds}")
        policy = RestartPolicy() if restart is None else restart
        self.loops = [Supervised(name, loop, policy) for name, loop in _named(loops)]
        self.state: GroupState = "new"
        self.hurried = False  # Whether what was under way had to be cancelled.
        self._watchdog = None if stall_seconds is None else Watchdog(stall_seconds, exit_on_stall=exit_on_stall)
        if exit_on_stall and stall_seconds is None:
            raise ConfigurationError("exit_on_stall needs stall_seconds")
        self._health: Probe | None = None
        if health_port is not None:
            self._health = Probe(
                health_host, health_port, watchdog=self._watchdog, not_ready=self._not_ready, render=self._render
            )
        self._drain_seconds = drain_seconds
        self._watch = dict(watch)
        self._depths: dict[str, MailboxDepth] = {}
        self._oldest: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._abandoned = asyncio.Event()
        self._last_metrics = ""

    @property
    def health_address(self) -> tuple[str, int] | None:
        """Where probes are answered, while the group runs."""
        return None if self._health is None else self._health.address

    def run_sync(self) -> None:
        """Run the group to its end in this thread, which must have no event loop yet."""
        asyncio.run(self.run())

    async def run(self) -> None:
        """Run every loop until all have ended.

        Signals are heeded if this is the main thread.

        Raises:
            LoopCrashedError: a loop crashed too often; the others were drained.
            ConfigurationError: a loop, or the group, cannot work as it is set up; the other loops were drained.
            MailboxAccessError: a loop's server refuses it; the other loops were drained.
        """
        if self.state != "new":
            raise ConfigurationError("a group runs once; make another")
        self._loop = asyncio.get_running_loop()
        if self._health is not None:
            self._health.start()
        restore = self._heed_signals()
        depths: asyncio.Task[None] | None = None
        try:
            if self._watchdog is not None:
                self._watchdog.start()
            self.state = "running"
            if self._watch:
                depths = asyncio.create_task(self._look_at_mailboxes(), name="fairtrial depths")
            self._tasks = {asyncio.create_task(one.run(), name=f"fairtrial {one.name}") for one in self.loops}
            if self._stop_asked:
                self._drain()
            await self._until_over()
        finally:
            self.state = "over"
            restore()
            if depths is not None:
                depths.cancel()
            if self._timer is not None:
                self._timer.cancel()
            if self._watchdog is not None:
                self._watchdog.stop()
            if self._health is not None:
                self._health.close()

    def stop(self) -> None:
        """Drain: as the first signal does. From any thread."""
        self._stop_asked = True
        self._call(self._drain)

    def hurry(self) -> None:
        """Cancel what is left: as the second signal does. From any thread."""
        self._stop_asked = True
        self._call(self._hurry)

    def _call(self, step: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(step)

    async def _until_over(self) -> None:
        failures: list[BaseException] = []
        gone = asyncio.ensure_future(self._abandoned.wait())
        try:
            while self._tasks and not gone.done():
                try:
                    done, _ = await asyncio.wait({*self._tasks, gone}, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    self._hurry()
                    failures.append(asyncio.CancelledError())
                    continue
                for task in done - {gone}:
                    self._tasks.discard(task)
                    if not task.cancelled() and (error := task.exception()) is not None:
                        failures.append(error)
                        _log.critical("%s cannot go on; the group drains", task.get_name(), exc_info=error)
                        self._drain()
        finally:
            gone.cancel()
        if self._tasks:
            names = ", ".join(sorted(task.get_name() for task in self._tasks))
            _log.critical("left behind, although cancelled: %s", names)
        if failures:
            raise failures[0]

    def _drain(self) -> None:
        if self.state != "running":
            return
        self.state = "draining"
        _log.info("draining: no more work is taken")
        for one in self.loops:
            one.stop()
        self._timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._hurry)

    def _hurry(self) -> None:
        self._drain()
        if self.state != "draining":
            return
        self.state = "hurrying"
        self.hurried = True
        _log.warning("what is still under way is cancelled and handed back")
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(HURRY_SECONDS, self._abandoned.set)

    def _heed_signals(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        heeded = set(_SIGNALS)

        def restore() -> None:
            for number in list(heeded):
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])
            heeded.clear()

        def heard(number: int) -> None:
            if self.state == "running":
                _log.info("%s", signal.Signals(number).name)
                self._drain()
            else:
                for again in list(heeded):  # A third one kills.
                    loop.remove_signal_handler(again)
                    signal.signal(again, signal.SIG_DFL)
                self._hurry()

        for number in _SIGNALS:
            loop.add_signal_handler(number, heard, number)
        return restore

    # What the pages say. They are asked for in the health server's thread.

    def _not_ready(self) -> str:
        if self.state != "running":
            return f"the group is {self.state}"
        if self._watchdog is not None and self._watchdog.stalled:
            return "the event loop is stuck"
        # Errors may quote what a model or a sample said: they are in the log, not on the port.
        ill = [f"{one.name} has crashed {one.in_a_row} times in a row" for one in self.loops if one.failing]
        if ill:
            return "; ".join(ill)
        waiting = [one.name for one in self.loops if one.state != "finished" and not one.ready]
        return f"{', '.join(waiting)} {'does' if len(waiting) == 1 else 'do'} not take work yet" if waiting else ""

    async def _render(self) -> str:
        asked: Future[str] = Future()

        def render() -> None:
            if asked.set_running_or_notify_cancel():
                try:
                    asked.set_result(exposition(self._families()))
                except Exception as error:
                    asked.set_exception(error)

        # The loops' own numbers are read where the loops run. One that is stuck is shown as it was, and as stuck.
        self._call(render)
        try:
            self._last_metrics = await asyncio.wait_for(asyncio.wrap_future(asked), 1.0)
        except TimeoutError:
            pass
        state = [
            Family(
                "fairtrial_group_ready",
                "gauge",
                "1 when all loops run and take work.",
                (Reading(float(not self._not_ready())),),
            ),
            Family(
                "fairtrial_group_draining",
                "gauge",
                "1 from the first request to end.",
                (Reading(float(self.state in ("draining", "hurrying"))),),
            ),
        ]
        return self._last_metrics + exposition(state)

    def _families(self) -> list[Family]:
        def each(number: Callable[[Supervised], float]) -> tuple[Reading, ...]:
            return tuple(Reading(number(one), {"loop": one.name}) for one in self.loops)

        found = [
            Family("fairtrial_loop_up", "gauge", "1 while the loop runs.", each(lambda one: one.state == "running")),
            Family(
                "fairtrial_loop_failing", "gauge", "1 if it crashes again and again.", each(lambda one: one.failing)
            ),
            Family("fairtrial_loop_crashes_total", "counter", "Crashes so far.", each(lambda one: one.crashes)),
        ]
        own: dict[tuple[str, bool], list[Reading]] = {}
        for one in self.loops:
            for attribute in ("counters", "gauges"):
                for name, labels, value in _numbers(one.loop, attribute):
                    # How many are in flight goes up and down, although loops count it beside what only grows.
                    grows = attribute == "counters" and name != "in_flight"
                    own.setdefault((name, grows), []).append(Reading(value, {"loop": one.name, **labels}))
        for (name, grows), readings in sorted(own.items(), key=lambda item: item[0]):
            full = f"fairtrial_{name}{'_total' if grows and not name.endswith('_total') else ''}"
            words = name.replace("_", " ")
            found.append(Family(full, "counter" if grows else "gauge", f"The loop's {words}.", tuple(readings)))
        oldest = tuple(Reading(seconds, {"mailbox": name}) for name, seconds in self._oldest.items())
        return [
            *found,
            *depth_families(self._depths),
            Family("fairtrial_oldest_message_seconds", "gauge", "Age of the message that waits longest.", oldest),
        ]

    async def _look_at_mailboxes(self) -> None:
        while True:
            for name, mailbox in self._watch.items():
                try:
                    self._depths[name] = await mailbox.depth()
                    if (ask_oldest := getattr(mailbox, "oldest_waiting_seconds", None)) is not None:
                        self._oldest[name] = await ask_oldest() or 0.0
                except Exception as error:
                    # An old number would look like a fact.
                    self._depths.pop(name, None)
                    self._oldest.pop(name, None)
                    _log.debug("the depth of %s is not known: %s", name, error)
            await asyncio.sleep(_DEPTH_SECONDS)


def _named(
    loops: Sequence[Loop | LoopFactory] | Mapping[str, Loop | LoopFactory],
) -> list[tuple[str, Loop | LoopFactory]]:
    if isinstance(loops, Mapping):
        return list(loops.items())
    named: list[tuple[str, Loop | LoopFactory]] = []
    for number, loop in enumerate(loops, 1):
        own = getattr(loop, "name", None)
        name = own if isinstance(own, str) and own else f"{type(loop).__name__}-{number}"
        taken = {other for other, _ in named}
        named.append((f"{name}#{number}" if name in taken else name, loop))
    return named


def _numbers(loop: Any, attribute: str) -> list[tuple[str, dict[str, str], float]]:
    """What a loop says about itself, as far as it is numbers: name, labels, value. A mapping inside has a label."""
    said = getattr(loop, attribute, None)
    try:
        tree = said() if callable(said) else said
        if is_dataclass(tree):
            tree = {field.name: getattr(tree, field.name) for field in fields(tree)}
        if not isinstance(tree, Mapping):
            return []
        found: list[tuple[str, dict[str, str], float]] = []
        for name, value in tree.items():
            parts = value.items() if isinstance(value, Mapping) else ((None, value),)
            for part, number in parts:
                if isinstance(number, int | float):
                    labels = {} if part is None else {str(name).removesuffix("s"): str(part)}
                    found.append((str(name), labels, float(number)))
        return found
    except Exception:
        _log.exception("a loop's %s could not be read", attribute)
        return []
