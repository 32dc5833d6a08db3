"""Fake sessions and clocks."""

from __future__ import annotations

from collections.abc import Mapping

from fairtrial.base.frozen import EMPTY
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import RecordedView


def session_of(*events: object, tags: Mapping[str, str] = EMPTY) -> RecordedView:
    """Return the session of a trial with exactly these events."""
    session = Session(tags=tags)
    for event in events:
        session.record(event)
    return session.view()


class FakeClock:
    """A clock that only `advance` moves."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._start = now

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds since this clock was made."""
        return self._now - self._start

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds
