"""A requests-per-second quota."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class TokenBucket:
    """Grants `rate` requests per second on average, and up to `burst` at once after a pause."""

    def __init__(self, rate: float, burst: int | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        if rate <= 0:
            raise ValueError(f"the rate of a quota must be more than 0 requests per second (got {rate!r})")
        self._rate = rate
        self._burst = float(max(1, int(rate)) if burst is None else burst)
        if self._burst < 1:
            raise ValueError(f"the burst of a quota must be at least 1 (got {burst!r})")
        self._clock = clock
        self._tokens = self._burst
        self._filled_at = clock()

    def take(self) -> bool:
        """Take one request from the bucket; returns whether it was granted."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
