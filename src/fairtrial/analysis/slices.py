"""Ways to slice samples: by metadata, by what an input is like, by a metric. Needs no numbers yet, so without numpy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.errors import ConfigurationError

type SliceBy = str | ByInput | ByMetric | Callable[[Any], Hashable]
"""A metadata key, `by_input`, `by_metric`, or a plain function of the input, which then names the slices."""


@dataclass(frozen=True, slots=True)
class ByInput:
    """Samples by what a function says of their input."""

    name: str
    predicate: Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class ByMetric:
    """Samples by a metric, cut at these values, or into so many parts of equal size."""

    metric: str
    at: tuple[float, ...] = ()
    quantiles: int | None = None


def by_input(name: str, predicate: Callable[[Any], Hashable]) -> ByInput:
    """Slices by what `predicate` says of a sample's input, which it gets as plain JSON: yes or no, or one of a few."""
    return ByInput(name, predicate)


def by_metric(metric: str, *, at: float | Sequence[float] = (), quantiles: int | None = None) -> ByMetric:
    """Slices by the value of a metric: below and from each threshold in `at`, or in `quantiles` parts of equal size.

    In a comparison a sample's value is the average of both sides. By one side alone, samples where it was unlucky
    would gather in the low slice and the other side would look better there, without being so.
    """
    cuts = (float(at),) if isinstance(at, int | float) else tuple(sorted(float(one) for one in at))
    if bool(cuts) == (quantiles is not None):
        raise ConfigurationError(f"slices by {metric!r} need either at=, where to cut, or quantiles=, how many parts")
    if quantiles is not None and quantiles < 2:
        raise ConfigurationError(f"slices by {metric!r}: quantiles counts the parts, at least 2, not {quantiles}")
    return ByMetric(metric, cuts, quantiles)
