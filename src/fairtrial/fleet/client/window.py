"""Flow control: how many requests to keep in the mailbox, so that no worker idles and the queue stays small."""

from __future__ import annotations

from fairtrial.mailbox.protocol import MailboxDepth

_GROWTH = 1.5
_STARVED_GROWTH = 2.0
_DECAY = 0.9


class Window:
    """The maximum number of requests in the mailbox, waiting or in progress.

    The target is as many waiting requests as there are in progress, and at least `floor`. The size is found by trial:
    one computed from throughput and latency would shrink in a slow phase and make the fleet slower still.

    Args:
        floor: The minimum number of waiting requests.

    Attributes:
        is_starved: Whether workers had taken every request at the last look, so that another look should follow soon.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self.size = floor
        self.is_starved = False

    def look(self, depth: MailboxDepth, *, full: bool, crowded: bool) -> None:
        """Adjust the window to the state of the mailbox.

        Args:
            depth: The depth of the request mailbox.
            full: Whether the window has been the limit since the last call.
            crowded: Whether there is a backlog of results, which more requests would only increase.
        """
        aim = max(self._floor, depth.in_flight)
        self.is_starved = full and not crowded and depth.waiting == 0
        if full and not crowded and 2 * depth.waiting < aim:
            self.size = round(self.size * (_STARVED_GROWTH if self.is_starved else _GROWTH))
        elif depth.waiting > 2 * aim:
            self.size = max(self._floor, round(self.size * _DECAY))
