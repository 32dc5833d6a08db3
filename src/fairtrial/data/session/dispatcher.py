"""Dispatch events to subscribers while they happen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakSet

from fairtrial.data.session.state import StateSlices

log = logging.getLogger("fairtrial.data.session")

type Handler[T] = Callable[[T], object]


class ControlDispatcher:
    """Dispatches events to the subscribers of their type, in the thread in which they happen.

        bus = ControlDispatcher()
        bus.subscribe(ToolInvoked, lambda call: print(call.name))
        session = Session(dispatcher=bus)               # or EvalSuite(...).run(bus=bus), for every trial's session

    As the bus of a run it hears what the trials record, as it is recorded, and the events of the run itself;
    `current_trial()` in a handler says which trial it is. What code in a child process records is not heard. A handler
    that raises is logged, and nothing else.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._handlers: tuple[tuple[type, Handler[Any]], ...] = ()
        self._slices: WeakSet[StateSlices] = WeakSet()  # Of sessions: a run's bus outlives those of its trials.

    def subscribe[T](self, kind: type[T], handler: Handler[T]) -> None:
        """Subscribe a handler to events of a type and its subtypes; `object` means all events."""
        with self._lock:
            self._handlers = (*self._handlers, (kind, handler))

    def unsubscribe[T](self, kind: type[T], handler: Handler[T]) -> None:
        """Remove a subscription, if there is one."""
        with self._lock:
            self._handlers = tuple(entry for entry in self._handlers if entry != (kind, handler))

    def publish(self, event: object) -> None:
        """Dispatch an event to the handlers and to the state slices of sessions that use this dispatcher."""
        self.pass_on(event)
        with self._lock:
            slices = tuple(self._slices)
        for one in slices:
            _call(((object, one.reduce),), event)

    dispatch = publish

    def __reduce__(self) -> tuple[type[ControlDispatcher], tuple[()]]:
        return ControlDispatcher, ()  # In a child process there is nobody to hear it.

    def pass_on(self, event: object) -> None:
        """Dispatch an event that a session has recorded; the state of other sessions does not change."""
        _call(self._handlers, event)

    def attach(self, slices: StateSlices) -> None:
        """Connect the slices of a session to events that no session recorded, while the session exists."""
        with self._lock:
            self._slices.add(slices)


def _call(handlers: tuple[tuple[type, Handler[Any]], ...], event: object) -> None:
    for kind, handler in handlers:
        if isinstance(event, kind):
            try:
                handler(event)
            except Exception:
                log.exception("a handler of %s events raised", type(event).__name__)
