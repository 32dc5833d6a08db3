"""How many requests to keep in the mailbox: enough that no worker waits, few enough that the queue stays small."""

from __future__ import annotations

from fairtrial.mailbox.protocol import MailboxDepth

_GROWTH = 1.5
_DECAY = 0.9


class Window:
    """The number of requests that may be in the mailbox at once, waiting or being worked on.

    The aim is that as many wait as are worked on, and never fewer than `floor`. It is found by trying, not computed
    from speed and latency: a slow spell would make such a window smaller, and that the fleet slower still.

    Args:
        floor: The least number that should be waiting.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self.size = floor

    def look(self, depth: MailboxDepth, *, full: bool, crowded: bool) -> None:
        """Take note of the mailbox.

        Args:
            depth: What is in it.
            full: Whether the window has held anything back lately.
            crowded: Whether results pile up: then more requests would only make more of them.
        """
        aim = max(self._floor, depth.in_flight)
        if full and not crowded and 2 * depth.waiting < aim:
            self.size = round(self.size * _GROWTH)
        elif depth.waiting > 2 * aim:
            self.size = max(self._floor, round(self.size * _DECAY))
