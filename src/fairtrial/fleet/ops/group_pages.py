"""What a group of loops answers to probes and to Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

from fairtrial.fleet.ops.metrics import Family, Reading, depth_families, exposition
from fairtrial.fleet.ops.supervise import Supervised
from fairtrial.fleet.ops.watchdog import Watchdog
from fairtrial.mailbox.protocol import MailboxDepth

_log = logging.getLogger(__name__)
_DEPTH_SECONDS = 5.0
_RENDER_SECONDS = 1.0


class Watched(Protocol):
    """A mailbox whose depth is shown among the metrics."""

    async def depth(self) -> MailboxDepth:
        """How many messages are where."""
        ...


class MailboxDepths:
    """The depths of mailboxes, asked for every few seconds.

    Attributes:
        depths: The last depth of each mailbox that answered.
        oldest: The age in seconds of the message that waits longest, of each mailbox that knows it.
    """

    def __init__(self, mailboxes: Mapping[str, Watched]) -> None:
        self._mailboxes = dict(mailboxes)
        self.depths: dict[str, MailboxDepth] = {}
        self.oldest: dict[str, float] = {}

    async def watch(self) -> None:
        """Ask until cancelled."""
        while self._mailboxes:
            for name, mailbox in self._mailboxes.items():
                await self._ask(name, mailbox)
            await asyncio.sleep(_DEPTH_SECONDS)

    async def _ask(self, name: str, mailbox: Watched) -> None:
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
        loops: The group's loops.
        phase: Returns the group's state.
        call: Calls a function in the group's event loop.
        watchdog: Says whether that event loop is stuck; None if it is not watched.
        depths: The depths of mailboxes.
    """

    def __init__(
        self,
        loops: Sequence[Supervised],
        phase: Callable[[], str],
        call: Callable[[Callable[[], None]], None],
        watchdog: Watchdog | None,
        depths: MailboxDepths,
    ) -> None:
        self._loops = loops
        self._phase = phase
        self._call = call
        self._watchdog = watchdog
        self._depths = depths
        self._last_metrics = ""

    def not_ready(self) -> str:
        """Why the group is not ready; nothing if it is."""
        if (phase := self._phase()) != "running":
            return f"the group is {phase}"
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
        self._call(render)
        try:
            self._last_metrics = await asyncio.wait_for(asyncio.wrap_future(rendered), _RENDER_SECONDS)
        except TimeoutError:
            pass
        ready = not self.not_ready()
        draining = self._phase() in ("draining", "hurrying")
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
