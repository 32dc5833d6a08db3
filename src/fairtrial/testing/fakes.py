"""Stand-ins for user code and for time."""

from __future__ import annotations

from collections.abc import Mapping

from fairtrial.frozen import EMPTY
from fairtrial.session.session import Session
from fairtrial.session.views import RecordedView


def session_of(*events: object, tags: Mapping[str, str] = EMPTY) -> RecordedView:
    """The session of a trial in which exactly these events happened."""
    session = Session(tags=tags)
    for event in events:
        session.record(event)
    return session.view()


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._start = now

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._now

    def monotonic(self) -> float:
        """Seconds since this clock was made."""
        return self._now - self._start

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
