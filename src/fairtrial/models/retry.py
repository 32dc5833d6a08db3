"""The retry policy of model calls."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fairtrial.base.backoff import longest_pause
from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError, ModelError, RateLimitedError


@first_is(int)
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When and how often a failed model call is retried. Only errors marked as `retryable` are.

    Attributes:
        attempts: The largest number of attempts. Rate-limit refusals are counted separately, with a higher limit,
            because they only mean that the call came too early.
        rate_limited_attempts: The largest number of rate-limit refusals before the call fails.
        timeout_attempts: The largest number of attempts that time out: each of them may have to be paid for, and an
            answer that takes longer than the time limit will do so again.
        base_seconds: The upper limit of the first pause; it doubles with every failure.
        max_seconds: The longest pause, unless the provider asks for a longer one.
    """

    attempts: int = 5
    rate_limited_attempts: int = 20
    timeout_attempts: int = 2
    base_seconds: float = 0.5
    max_seconds: float = 30.0
    random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        attempts = min(self.attempts, self.rate_limited_attempts, self.timeout_attempts)
        if attempts < 1 or self.base_seconds < 0 or self.max_seconds < 0:
            raise ConfigurationError("a retry policy needs at least one attempt and pauses of at least 0 seconds")

    def pause(self, error: ModelError, failures: int, refusals: int, timeouts: int = 0) -> float | None:
        """Return how long to wait after this many failures, rate-limit refusals and timeouts; None to give up.

        Timeouts are failures too.

        Pauses have full jitter, so that calls that failed together are not retried together.
        """
        if not error.retryable:
            return None
        if failures >= self.attempts or refusals >= self.rate_limited_attempts or timeouts >= self.timeout_attempts:
            return None
        count = refusals if isinstance(error, RateLimitedError) else failures
        drawn = self.random.uniform(0.0, longest_pause(count, first=self.base_seconds, longest=self.max_seconds))
        # After the time that the provider named, with jitter.
        return drawn if error.retry_after is None else error.retry_after + drawn


NO_RETRY = RetryPolicy(attempts=1, rate_limited_attempts=1)
