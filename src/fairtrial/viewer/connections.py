"""Connections of browsers: time limits for heads, and anonymous ones that cannot keep the owner out."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from fairtrial.base.foreign import HEAD_SECONDS

MAX_ANONYMOUS = 64
_numbers = count()


class ViewConnection(H11Protocol):
    """A connection that must send the head of its request in time.

    At more than `MAX_ANONYMOUS` connections without a session, the oldest of them is closed: a browser, which sends its
    request at once, is answered beside any number of idle clients. Connections with a session are not counted.
    """

    _number = -1
    _had_session = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head; close the oldest anonymous connections if there are too many."""
        super().connection_made(transport)
        self._number = next(_numbers)
        self._wait()
        anonymous = [one for one in self.connections if isinstance(one, ViewConnection) and one._is_anonymous()]
        for one in sorted(anonymous, key=lambda one: one._number)[:-MAX_ANONYMOUS]:
            one.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass data on; the time of a head begins with its first byte."""
        if self._timer is None and self._is_waiting:
            self._wait()
        self._note_session()  # Before the next request takes the place of this one.
        super().data_received(data)
        if not self._is_waiting:
            self._stop_waiting()

    def _note_session(self) -> None:
        scope: Any = self.scope
        if scope is not None and scope.get("fairtrial.data.session") is not None:
            self._had_session = True

    def _is_anonymous(self) -> bool:
        """Return whether no request of this connection had a session, and it is open."""
        self._note_session()
        return not self._had_session and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_waiting(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_waiting)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_waiting(self) -> None:
        self._timer = None
        if self._is_waiting:
            self.transport.abort()
