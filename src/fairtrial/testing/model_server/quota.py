"""A requests-per-second quota."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class TokenBucket:
    """Grants `rate` requests per second on average, and up to `burst` at once after a pause."""

    def __init__(self, rate: float, burst: int | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        if rate <= 0:
            raise ValueError(f"a quota is more than 0 requests per second, not {rate!r}")
        self._rate = rate
        self._burst = float(max(1, int(rate)) if burst is None else burst)
        if self._burst < 1:
            raise ValueError(f"a burst is 1 or more, not {burst!r}")
        self._clock = clock
        self._tokens = self._burst
        self._filled_at = clock()

    def take(self) -> bool:
        """Whether one more request is granted now; if so, it is taken from the bucket."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
