"""Trying again, politely and not forever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fairtrial.errors import ConfigurationError, ModelError, RateLimitedError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When and how often a failed model call is tried again. Only errors that say so (`retryable`) are.

    Attributes:
        attempts: How often it is tried in all. Refusals for the rate have a larger count of their own: they are the
            provider's way to say "later", not "no".
        rate_limited_attempts: How often it is tried in all when it was refused for the rate.
        base_seconds: The longest first pause; it doubles with every failure.
        max_seconds: The longest pause, unless the provider asks for a longer one.
    """

    attempts: int = 5
    rate_limited_attempts: int = 20
    base_seconds: float = 0.5
    max_seconds: float = 30.0
    random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.attempts, self.rate_limited_attempts) < 1 or self.base_seconds < 0 or self.max_seconds < 0:
            raise ConfigurationError("a retry policy needs at least one attempt and pauses of at least 0 seconds")

    def pause(self, error: ModelError, failures: int, refusals: int) -> float | None:
        """How long to wait after this many failures and refusals for the rate; None to give up.

        Full jitter: calls that failed together must not come back together.
        """
        if not error.retryable:
            return None
        if failures >= self.attempts or refusals >= self.rate_limited_attempts:
            return None
        count = refusals if isinstance(error, RateLimitedError) else failures
        drawn = self.random.uniform(0.0, min(self.max_seconds, self.base_seconds * 2.0 ** (count - 1)))
        # Not before the time the provider named, and spread out behind it.
        return drawn if error.retry_after is None else error.retry_after + drawn


NO_RETRY = RetryPolicy(attempts=1, rate_limited_attempts=1)
