"""Several worker processes of one machine: started, watched, stopped, shown."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Final, Literal

from fairtrial.base.frozen import EMPTY
from fairtrial.base.system import handle_signal, release_signal
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.ops.health import HEALTH_HOST, STALL_SECONDS, Family, Probe, Reading, depth_families, exposition
from fairtrial.fleet.ops.supervise import Loop, LoopFactory, RestartPolicy, Supervised
from fairtrial.fleet.ops.watchdog import Watchdog
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handle_signals(
    is_running: Callable[[], bool], drain: Callable[[], None], hurry: Callable[[], None]
) -> Iterator[None]:
    """Handle SIGTERM and SIGINT while the block runs, if this is the main thread.

    While `is_running`, a signal calls `drain`. A later one calls `hurry` and makes the next one kill the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = set(_SIGNALS)

    def release(number: int, handler: object) -> None:
        release_signal(loop, number, handler)

    def on_signal(number: int) -> None:
        if is_running():
            _log.info("%s", signal.Signals(number).name)
            drain()
            return
        for other in handled:
            release(other, signal.SIG_DFL)
        hurry()

    for number in _SIGNALS:
        handle_signal(loop, number, partial(on_signal, number))
    try:
        yield
    finally:
        for number in handled:
            release(number, before[number])


_DEPTH_SECONDS = 5.0
_RENDER_SECONDS = 1.0


class MailboxDepths:
    """The depths of mailboxes, asked for every few seconds.

    Attributes:
        depths: The last depth of each mailbox that answered.
        oldest: The age in seconds of the message that waits longest, of each mailbox that knows it.
    """

    def __init__(self, mailboxes: Mapping[str, Mailbox[Any]]) -> None:
        self._mailboxes = dict(mailboxes)
        self.depths: dict[str, MailboxDepth] = {}
        self.oldest: dict[str, float] = {}

    async def watch(self) -> None:
        """Ask until cancelled."""
        while self._mailboxes:
            for name, mailbox in self._mailboxes.items():
                await self._ask(name, mailbox)
            await asyncio.sleep(_DEPTH_SECONDS)

    async def _ask(self, name: str, mailbox: Mailbox[Any]) -> None:
        try:
            self.depths[name] = await mailbox.depth()
            if (ask_oldest := getattr(mailbox, "oldest_waiting_seconds", None)) is not None:
                self.oldest[name] = await ask_oldest() or 0.0
        except Exception as error:
            # An outdated number would be misleading.
            self.depths.pop(name, None)
            self.oldest.pop(name, None)
            _log.debug("the depth of %s is not known: %s", name, error)

    def families(self) -> list[Family]:
        """The depths for Prometheus."""
        oldest = tuple(Reading(seconds, {"mailbox": name}) for name, seconds in self.oldest.items())
        return [
            *depth_families(self.depths),
            Family("fairtrial_oldest_message_seconds", "gauge", "Age of the message that waits longest.", oldest),
        ]


class GroupPages:
    """Says whether a group is ready, and its metrics. Called in the health server's thread.

    Args:
        lifecycle: The group's loops and its state.
        watchdog: Says whether its event loop is stuck; None if it is not watched.
        depths: The depths of mailboxes.
    """

    def __init__(self, lifecycle: GroupLifecycle, watchdog: Watchdog | None, depths: MailboxDepths) -> None:
        self._lifecycle = lifecycle
        self._loops = lifecycle.loops
        self._watchdog = watchdog
        self._depths = depths
        self._last_metrics = ""

    def not_ready(self) -> str:
        """Why the group is not ready; nothing if it is."""
        if (state := self._lifecycle.state) != "running":
            return f"the group is {state}"
        if self._watchdog is not None and self._watchdog.stalled:
            return "the event loop is stuck"
        # Errors may quote models or samples, so they are only written to the log.
        failing = [f"{one.name} has crashed {one.in_a_row} times in a row" for one in self._loops if one.failing]
        if failing:
            return "; ".join(failing)
        waiting = [one.name for one in self._loops if one.state != "finished" and not one.ready]
        return f"{', '.join(waiting)} {'does' if len(waiting) == 1 else 'do'} not take work yet" if waiting else ""

    async def render(self) -> str:
        """The metrics of the group, as text."""
        rendered: Future[str] = Future()

        def render() -> None:
            if rendered.set_running_or_notify_cancel():
                try:
                    rendered.set_result(exposition(self.families()))
                except Exception as error:
                    rendered.set_exception(error)

        # The numbers of loops are read in their event loop. For a blocked one, the last known numbers are shown.
        self._lifecycle.call(render)
        try:
            self._last_metrics = await asyncio.wait_for(asyncio.wrap_future(rendered), _RENDER_SECONDS)
        except TimeoutError:
            pass
        ready = not self.not_ready()
        draining = self._lifecycle.state in ("draining", "hurrying")
        state = [
            Family("fairtrial_group_ready", "gauge", "1 when all loops run and take work.", (Reading(float(ready)),)),
            Family(
                "fairtrial_group_draining", "gauge", "1 from the first request to end.", (Reading(float(draining)),)
            ),
        ]
        return self._last_metrics + exposition(state)

    def families(self) -> list[Family]:
        """The numbers of the loops and the mailboxes. Called in the group's event loop."""

        def each(number: Callable[[Supervised], float]) -> tuple[Reading, ...]:
            return tuple(Reading(number(one), {"loop": one.name}) for one in self._loops)

        return [
            Family("fairtrial_loop_up", "gauge", "1 while the loop runs.", each(lambda one: one.state == "running")),
            Family(
                "fairtrial_loop_failing", "gauge", "1 if it crashes again and again.", each(lambda one: one.failing)
            ),
            Family("fairtrial_loop_crashes_total", "counter", "Crashes so far.", each(lambda one: one.crashes)),
            *_own_families(self._loops),
            *self._depths.families(),
        ]


def _own_families(loops: Sequence[Supervised]) -> list[Family]:
    """The counters and gauges that loops have of their own."""
    own: dict[tuple[str, bool], list[Reading]] = {}
    for one in loops:
        for attribute in ("counters", "gauges"):
            for name, labels, value in _numbers(one.loop, attribute):
                # The number in flight is a gauge, although loops keep it with their counters.
                grows = attribute == "counters" and name != "in_flight"
                own.setdefault((name, grows), []).append(Reading(value, {"loop": one.name, **labels}))
    families = []
    for (name, grows), readings in sorted(own.items(), key=lambda item: item[0]):
        full = f"fairtrial_{name}{'_total' if grows and not name.endswith('_total') else ''}"
        words = name.replace("_", " ")
        families.append(Family(full, "counter" if grows else "gauge", f"The loop's {words}.", tuple(readings)))
    return families


def _numbers(loop: Any, attribute: str) -> list[tuple[str, dict[str, str], float]]:
    """What a loop says about itself, as far as it is numbers: name, labels, value. A mapping inside has a label."""
    value = getattr(loop, attribute, None)
    try:
        tree = value() if callable(value) else value
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


DRAIN_SECONDS: Final = 600.0
HURRY_SECONDS: Final = 15.0

type GroupState = Literal["new", "running", "draining", "hurrying", "over"]


class GroupLifecycle:
    """The state machine of a group and the tasks of its loops: new -> running -> draining -> hurrying -> over.

    `start`, `drain`, `hurry` and `end` are the transitions; each is called in the group's event loop and does nothing
    if the group is already in a later state. A drain that exceeds `drain_seconds` becomes `hurry`, which cancels the
    remaining work. Tasks that do not end within `HURRY_SECONDS` of their cancellation are abandoned.

    Attributes:
        loops: The loops.
        state: The current state.
        hurried: Whether work in progress was cancelled.
    """

    def __init__(self, loops: Sequence[Supervised], drain_seconds: float) -> None:
        self.state: GroupState = "new"
        self.hurried = False
        self.loops = loops
        self._drain_seconds = drain_seconds
        self._stop_requested = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._abandoned = asyncio.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def request(self, transition: Callable[[], None]) -> None:
        """Request `drain` or `hurry` from any thread; before the start, both become a drain."""
        self._stop_requested = True
        self.call(transition)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the group's event loop, if there is one."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function)

    def attach(self) -> None:
        """Bind the group to the running event loop."""
        if self.state != "new":
            raise ConfigurationError("a LoopGroup can run only once: create a new one")
        self._event_loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Run every loop."""
        self.state = "running"
        self._tasks = {asyncio.create_task(one.run(), name=f"fairtrial {one.name}") for one in self.loops}
        if self._stop_requested:
            self.drain()

    def drain(self) -> None:
        """Let loops finish their work in progress."""
        if self.state != "running":
            return
        self.state = "draining"
        _log.info("draining: taking no more work")
        for one in self.loops:
            one.stop()
        self._timer = asyncio.get_running_loop().call_later(self._drain_seconds, self.hurry)

    def hurry(self) -> None:
        """Cancel the remaining work; loops hand back their messages."""
        self.drain()
        if self.state != "draining":
            return
        self.state = "hurrying"
        self.hurried = True
        _log.warning("cancelling work in progress and handing its messages back")
        for task in self._tasks:
            task.cancel()
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(HURRY_SECONDS, self._abandoned.set)

    def end(self) -> None:
        """Mark the group as over: all tasks have ended or were abandoned."""
        self.state = "over"
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self) -> None:
        """Wait until every loop has ended or was abandoned; raises the first error that ended one."""
        failures: list[BaseException] = []
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        try:
            while self._tasks and not abandoned.done():
                try:
                    done, _ = await asyncio.wait({*self._tasks, abandoned}, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    self.hurry()
                    failures.append(asyncio.CancelledError())
                    continue
                for task in done - {abandoned}:
                    self._tasks.discard(task)
                    if not task.cancelled() and (error := task.exception()) is not None:
                        failures.append(error)
                        _log.critical("%s failed; draining the group", task.get_name(), exc_info=error)
                        self.drain()
        finally:
            abandoned.cancel()
        if self._tasks:
            names = ", ".join(sorted(task.get_name() for task in self._tasks))
            _log.critical("abandoned tasks that ignored their cancellation: %s", names)
        if failures:
            raise failures[0]


class LoopGroup:
    """Runs several loops until they end or are stopped.

    - A loop that crashes is restarted with exponential backoff; the others are not affected. A loop that crashes
      repeatedly makes the group not ready and is named in the log and the metrics.
    - SIGTERM and SIGINT drain: no loop takes more work, and each finishes its work in progress. After `drain_seconds`,
      or at a second signal, the rest is cancelled, and loops hand back their messages. A third signal kills the
      process.
    - With a `health_port`: `/live` (the event loop responds), `/ready` (all loops run and take work), `/health` (both),
      `/metrics`.
    - A watchdog detects a stuck event loop, logs its stack, and may end the process.

    Args:
        loops: The loops, optionally by name in a mapping. A function creates a new loop for every start.
        restart: The restart policy for crashed loops.
        health_port: The port for health probes; None to disable, 0 for a free port.
        health_host: The interface for health probes: "0.0.0.0" for probes from outside, as in Kubernetes.
        stall_seconds: An event loop that does not respond for this long is stuck; None disables the watchdog.
        exit_on_stall: Whether to end the process when the event loop is stuck.
        drain_seconds: Time limit of a drain, after which remaining work is cancelled.
        watch: Mailboxes by name whose depth is included in the metrics.
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
        watch: Mapping[str, Mailbox[Any]] = EMPTY,
    ) -> None:
        if not loops:
            raise ConfigurationError("a LoopGroup requires at least one loop")
        if drain_seconds < 0:
            raise ConfigurationError(f"drain_seconds must be at least 0 (got {drain_seconds})")
        if exit_on_stall and stall_seconds is None:
            raise ConfigurationError("exit_on_stall needs stall_seconds")
        policy = RestartPolicy() if restart is None else restart
        self.loops = [Supervised(name, loop, policy) for name, loop in _named(loops)]
        self._lifecycle = lifecycle = GroupLifecycle(self.loops, drain_seconds)
        self._watchdog = None if stall_seconds is None else Watchdog(stall_seconds, exit_on_stall=exit_on_stall)
        self._depths = MailboxDepths(watch)
        self._pages = GroupPages(lifecycle, self._watchdog, self._depths)
        self._health: Probe | None = None
        if health_port is not None:
            pages = self._pages
            self._health = Probe(
                health_host, health_port, watchdog=self._watchdog, not_ready=pages.not_ready, render=pages.render
            )

    @property
    def state(self) -> GroupState:
        """Where the group stands."""
        return self._lifecycle.state

    @property
    def hurried(self) -> bool:
        """Whether what was under way had to be cancelled."""
        return self._lifecycle.hurried

    @property
    def health_address(self) -> tuple[str, int] | None:
        """Where probes are answered, while the group runs."""
        return None if self._health is None else self._health.address

    def run_sync(self) -> None:
        """Run the group to its end in this thread, which must have no event loop yet."""
        asyncio.run(self.run())

    async def run(self) -> None:
        """Run every loop until all have ended.

        Signals are handled if this is the main thread.

        Raises:
            LoopCrashedError: a loop crashed too often; the others were drained.
            ConfigurationError: a loop, or the group, cannot work as it is set up; the other loops were drained.
            MailboxAccessError: a loop's server refuses it; the other loops were drained.
        """
        lifecycle = self._lifecycle
        lifecycle.attach()
        with ExitStack() as stack:
            if self._health is not None:
                self._health.start()
                stack.callback(self._health.close)
            if self._watchdog is not None:
                self._watchdog.start()
                stack.callback(self._watchdog.stop)
            depths = asyncio.create_task(self._depths.watch(), name="fairtrial depths")
            stack.callback(depths.cancel)
            stack.enter_context(handle_signals(lambda: self.state == "running", lifecycle.drain, lifecycle.hurry))
            stack.callback(lifecycle.end)
            lifecycle.start()
            await lifecycle.wait()

    def stop(self) -> None:
        """Drain: as the first signal does. From any thread."""
        self._lifecycle.request(self._lifecycle.drain)

    def hurry(self) -> None:
        """Cancel what is left: as the second signal does. From any thread."""
        self._lifecycle.request(self._lifecycle.hurry)


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
