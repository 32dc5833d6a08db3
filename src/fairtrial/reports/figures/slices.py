"""Ways to slice samples: by metadata, by a function of the input, by a metric. Does not import numpy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.errors import ConfigurationError

type SliceBy = str | ByInput | ByMetric | Callable[[Any], Hashable]
"""A metadata key, `by_input`, `by_metric`, or a plain function of the input, which then names the slices."""


@dataclass(frozen=True, slots=True)
class ByInput:
    """Slice samples by a function of their input."""

    name: str
    predicate: Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class ByMetric:
    """Slice samples by a metric: at thresholds, or into parts of equal size."""

    metric: str
    at: tuple[float, ...] = ()
    quantiles: int | None = None


def by_input(name: str, predicate: Callable[[Any], Hashable]) -> ByInput:
    """Slice by the result of `predicate` on the input of a sample, passed as plain JSON."""
    return ByInput(name, predicate)


def by_metric(metric: str, *, at: float | Sequence[float] = (), quantiles: int | None = None) -> ByMetric:
    """Slice by a metric: below and from each threshold in `at`, or in `quantiles` parts of equal size.

    In a comparison a sample's value is the average of both sides. By one side alone, samples where it was unlucky
    would gather in the low slice and the other side would look better there, without being so.
    """
    cuts = (float(at),) if isinstance(at, int | float) else tuple(sorted(float(one) for one in at))
    if bool(cuts) == (quantiles is not None):
        raise ConfigurationError(f"slices by {metric!r} need either at=, where to cut, or quantiles=, how many parts")
    if quantiles is not None and quantiles < 2:
        raise ConfigurationError(f"slices by {metric!r}: quantiles must be at least 2 (got {quantiles})")
    return ByMetric(metric, cuts, quantiles)
