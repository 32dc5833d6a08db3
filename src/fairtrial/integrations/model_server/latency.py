"""Distributions of the server's latency."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import Field

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.record import Record

_NORMAL = NormalDist()


def _not_negative(**seconds: float) -> None:
    for name, value in seconds.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of seconds, at least 0 (got {value!r})")


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class FixedLatency(Record):
    """The same number of seconds every time."""

    seconds: float = 0.0
    kind: Literal["fixed"] = field(default="fixed", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _not_negative(seconds=self.seconds)

    def at(self, quantile: float) -> float:
        """The latency in seconds at this quantile, in [0, 1)."""
        return self.seconds


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class UniformLatency(Record):
    """Uniformly distributed between two numbers of seconds."""

    low: float
    high: float
    kind: Literal["uniform"] = field(default="uniform", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _not_negative(low=self.low, high=self.high)
        if self.low > self.high:
            raise ValueError(f"low must be at most high (got {self.low!r} and {self.high!r})")

    def at(self, quantile: float) -> float:
        """The latency in seconds at this quantile, in [0, 1)."""
        return self.low + (self.high - self.low) * quantile


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class LogNormalLatency(Record):
    """Log-normal with a long tail, as on real servers: `median` and `maximum` in seconds, `sigma` of the logarithm."""

    median: float
    sigma: float = 0.5
    maximum: float = 60.0
    kind: Literal["lognormal"] = field(default="lognormal", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _not_negative(median=self.median, sigma=self.sigma, maximum=self.maximum)

    def at(self, quantile: float) -> float:
        """The latency in seconds at this quantile, in [0, 1)."""
        # inv_cdf is not defined at 0, which is a possible draw.
        deviation = _NORMAL.inv_cdf(max(quantile, 1e-12))
        return min(self.median * math.exp(self.sigma * deviation), self.maximum)


type Latency = Annotated[FixedLatency | UniformLatency | LogNormalLatency, Field(discriminator="kind")]
"""Any of the latency distributions."""
