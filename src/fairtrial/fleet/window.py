"""How many requests to keep out: enough that no worker waits, few enough that the queue stays small."""

from __future__ import annotations

from fairtrial.mailbox.protocol import MailboxDepth

_SECONDS = 0.5
_DECAY = 0.9


class Window:
    """The number of trials that may be out at once.

    Twice what the workers have in flight, so that as many wait as are worked on, and at least what comes back in half
    a second, for work that is done faster than one can look. It grows at once and shrinks slowly.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._before: tuple[float, int] | None = None
        self._rate = 0.0
        self.size = floor

    def look(self, depth: MailboxDepth, returned: int, now: float) -> None:
        """Take note of the mailbox and of how many results have come back in all."""
        if self._before is None:
            self._before = (now, returned)
        elif (
            seconds := now - self._before[0]
        ) >= _SECONDS:  # Results come in batches: a shorter look would see bursts.
            self._rate = max((returned - self._before[1]) / seconds, self._rate * _DECAY)
            self._before = (now, returned)
        wanted = max(self._floor, 2 * depth.in_flight, round(self._rate * _SECONDS))
        self.size = max(wanted, round(self.size * _DECAY))
