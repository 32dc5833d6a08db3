"""Wilson's interval of a rate without numpy and scipy, for the progress display of runs."""

from __future__ import annotations

from math import sqrt

Z_95 = 1.959963984540054
"""The normal quantile of a 95% interval."""


def wilson_bounds(rate: float, n: float, z: float) -> tuple[float, float]:
    """All p with |rate - p| <= z sqrt(p(1-p)/n), in closed form. Wilson (1927). `n` is more than 0."""
    z2 = z * z / n
    centre = (rate + z2 / 2) / (1 + z2)
    half = sqrt(rate * (1 - rate) * z2 + z2 * z2 / 4) / (1 + z2)
    # Rounding may leave the end a hair inside the rate it must contain when the rate is 0 or 1.
    return 0.0 if rate == 0 else max(0.0, centre - half), 1.0 if rate == 1 else min(1.0, centre + half)
