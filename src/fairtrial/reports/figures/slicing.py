"""Slices of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.columns import Columns, FloatArray

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


MOST_SLICES = 100
"""A key with more values than this does not make slices but an index."""

SMALL_SLICE = 30
"""Below this many samples a slice is named as small."""


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """A subset of the samples: `rows`, with the slicing key `by` and its `value`."""

    by: str
    value: Hashable
    name: str
    rows: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Needs:
    """The data needed for slices: metadata keys, functions of inputs, metrics."""

    keys: tuple[str, ...]
    inputs: dict[str, Callable[[Any], Hashable]]
    metrics: tuple[str, ...]


def normalize_slices(slice_by: SliceBy | Sequence[SliceBy]) -> tuple[str | ByInput | ByMetric, ...]:
    """Return the ways to slice as a tuple; a single one need not be in a list."""
    ways: Sequence[SliceBy] = (
        (slice_by,) if isinstance(slice_by, str | ByInput | ByMetric) or callable(slice_by) else slice_by
    )
    found: list[str | ByInput | ByMetric] = []
    for way in ways:
        if isinstance(way, str | ByInput | ByMetric):
            found.append(way)
        elif callable(way):
            name = getattr(way, "__name__", type(way).__name__)
            if name == "<lambda>":
                raise ConfigurationError("a function without a name cannot name its slices: use by_input(name, ...)")
            found.append(ByInput(name, way))
        else:
            raise ConfigurationError(f"slice_by must be metadata keys, by_input, by_metric or functions (got {way!r})")
    names = [name_of_slices(way) for way in found]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"two of the slices share a name: {', '.join(names)}")
    return tuple(found)


def needs(ways: Sequence[str | ByInput | ByMetric]) -> Needs:
    """Return the data needed for these slices."""
    return Needs(
        tuple(way for way in ways if isinstance(way, str)),
        {way.name: way.predicate for way in ways if isinstance(way, ByInput)},
        tuple(way.metric for way in ways if isinstance(way, ByMetric)),
    )


def cut(ways: Sequence[str | ByInput | ByMetric], *sides: Columns) -> Iterator[Slice]:
    """Yield the slices of the common samples; groups come from the first side that has them."""
    for way in ways:
        if isinstance(way, ByMetric):
            yield from _by_metric(way, sides)
        else:
            yield from _by_group(way, sides)


def name_of_slices(way: str | ByInput | ByMetric) -> str:
    """Return the name under which slices are shown: a metadata key, or that of a function or metric."""
    return way if isinstance(way, str) else way.name if isinstance(way, ByInput) else way.metric


def _by_group(way: str | ByInput, sides: Sequence[Columns]) -> Iterator[Slice]:
    by = name_of_slices(way)
    labels = next((side.groups[by] for side in sides if by in side.groups), None)
    if labels is None:
        raise ConfigurationError(f"nothing was read to slice by {by!r}")
    # 1, 1.0 and True are equal in Python and three values in JSON.
    places: dict[tuple[str, Hashable], list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault((type(label).__name__, label), []).append(place)
    if len(places) > MOST_SLICES:
        raise ConfigurationError(
            f"{by!r} has {len(places):,} different values; slice by something with at most {MOST_SLICES}"
        )
    if labels and all(label is None for label in labels):
        raise ConfigurationError(f"no sample has {by!r} in its metadata, so there is nothing to slice by")
    for _, label in sorted(places, key=lambda found: (found[1] is None, found[0], str(found[1]))):
        rows = np.zeros(len(labels), dtype=np.bool_)
        rows[places[type(label).__name__, label]] = True
        yield Slice(by, label, _group_name(by, label, of_input=isinstance(way, ByInput)), rows)


def _group_name(by: str, label: Hashable, *, of_input: bool) -> str:
    if of_input and isinstance(label, bool):
        return by if label else f"not {by}"
    return f"{by} not given" if label is None else f"{by} = {label}"


def _by_metric(way: ByMetric, sides: Sequence[Columns]) -> Iterator[Slice]:
    means = np.mean([_sample_means(side, way.metric) for side in sides], axis=0)
    known = np.isfinite(means)
    if not known.any():
        raise ConfigurationError(f"no sample has the metric {way.metric!r} on every side, so it makes no slices")
    cuts = list(way.at)
    if way.quantiles is not None:
        shares = np.arange(1, way.quantiles) / way.quantiles
        cuts = np.unique(np.quantile(means[known], shares)).tolist()
    edges = [-np.inf, *cuts, np.inf]
    for low, high in pairwise(edges):
        rows = known & (means >= low) & (means < high)
        if rows.any():
            yield Slice(way.metric, (low, high), _range_name(way.metric, low, high), rows)
    if not known.all():
        yield Slice(way.metric, None, f"{way.metric} not given", ~known)


def _range_name(metric: str, low: float, high: float) -> str:
    if low == -np.inf:
        return f"{metric} < {high:g}"
    return f"{metric} >= {low:g}" if high == np.inf else f"{low:g} <= {metric} < {high:g}"


def _sample_means(side: Columns, metric: str) -> FloatArray:
    scores = side.scores(metric, "scored")
    means = np.full(len(side.ids), np.nan)
    some = scores.counts > 0
    means[some] = scores.only(some).means
    return means
