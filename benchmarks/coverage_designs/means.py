"""Means and quantiles of metrics without a range: latency, tokens, cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from fairtrial.stats import Interval, mean_interval, quantile_interval

from . import COVERAGE, GATE_ERRORS, Array, Design, Rng, contains, share, share_or_warned

UPPER_TAIL = 1.6448536269514722  # The 95th percentile of a standard normal variable.
QUANTILES = {0.5: 1.0, 0.95: float(np.exp(UPPER_TAIL))}  # Of lognormal values.
SIZES = (20, 30, 40, 50, 100, 300, 1000)
VALUES: dict[str, tuple[float, Callable[[Rng, int], Array]]] = {
    **{
        f"lognormal {sigma:g}": (float(np.exp(sigma**2 / 2)), lambda rng, n, sigma=sigma: rng.lognormal(0, sigma, n))  # type: ignore[misc]  # sigma is bound
        for sigma in (0.5, 1.0, 1.5, 2.0)
    },
    "1 s, but 2% take 60 s": (
        2.18,
        lambda rng, n: np.where(rng.random(n) < 0.02, 60.0, 1.0) * rng.uniform(0.8, 1.2, n),
    ),
    "exponential": (1.0, lambda rng, n: rng.exponential(1.0, n)),
    "gamma 0.5": (0.5, lambda rng, n: rng.gamma(0.5, 1.0, n)),
    "normal": (10.0, lambda rng, n: rng.normal(10.0, 1.0, n)),
}
UNSEEN = "1 s, but 2% take 60 s"
"""Nothing in the data tells of the 60 s before the first of them: at n 100 none has come in 13% of runs."""


def designs() -> Iterator[Design]:
    """Return the designs."""
    for n in (30, 100, 300):
        for at, truth in QUANTILES.items():
            once = partial(quantile_covered, partial(lognormal, n), at, truth, None)
            yield Design(
                "quantile of lognormal values", "coverage", COVERAGE, share(once), _cell(at, f"n {n}"), quick=200
            )
    for at, truth in QUANTILES.items():
        for correlation in (0.3, 0.8, 0.95):
            for n, repeats in ((30, 5), (100, 3), (200, 3)):
                draw = partial(correlated, np.repeat(np.arange(n), repeats), correlation, repeats)
                once = partial(quantile_covered, draw, at, truth, None)
                cell = _cell(at, f"{n} x {repeats} repeats, correlation {correlation}")
                yield Design("quantile over repeats", "coverage", COVERAGE, share(once), cell)
        for correlation in (0.1, 0.5, 0.9):
            for name, sizes in (("40 of 5", [5] * 40), ("100 of 3", [3] * 100), ("20 of 2 to 60", [2, 8, 20, 60] * 5)):
                labels = np.repeat(np.arange(len(sizes)), sizes)
                once = partial(quantile_covered, partial(correlated, labels, correlation, None), at, truth, labels)
                cell = _cell(at, f"{name}, correlation {correlation}")
                yield Design("quantile in clusters", "coverage", COVERAGE, share(once), cell)
    for kind, (truth, draw_values) in VALUES.items():
        for n in SIZES:
            quick = 200 if n <= 100 and kind != UNSEEN else 0
            cell = f"{kind}, n {n}"
            if kind != UNSEEN or n >= 300:
                covered = share_or_warned(partial(mean_covered, partial(_sized, draw_values, n), truth))
                yield Design("mean without a range", "coverage", COVERAGE, covered, cell, quick=quick)
                passed = share_or_warned(partial(ceiling_passed, partial(_sized, draw_values, n), truth), good=False)
                yield Design("ceiling at the true mean", "wrong passes", GATE_ERRORS, passed, cell, quick=quick)


def lognormal(n: int, rng: Rng) -> Array:
    """Draw latencies."""
    return rng.lognormal(0, 1, n)


def correlated(labels: Array, correlation: float, repeats: int | None, rng: Rng) -> Array:
    """Draw lognormal values whose logarithms are correlated within a group; in rows of repeats, if there are any."""
    shared = rng.normal(size=int(labels.max()) + 1)[labels]
    values = np.exp(np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * rng.normal(size=labels.size))
    return values if repeats is None else values.reshape(-1, repeats)


def quantile_covered(draw: Callable[[Rng], Array], at: float, truth: float, clusters: Array | None, rng: Rng) -> bool:
    """Whether the interval of a quantile contains the truth; an end that is open excludes nothing."""
    found = quantile_interval(draw(rng), at, clusters=clusters)
    return (found.low is None or found.low <= truth) and (found.high is None or truth <= found.high)


def mean_covered(draw: Callable[[Rng], Array], truth: float, rng: Rng) -> tuple[bool, bool]:
    """Whether the interval of a mean contains the truth, and whether the tail is called heavy."""
    found = mean_interval(draw(rng), bounds=None)
    return contains(found.interval, truth), found.heavy_tail


def ceiling_passed(draw: Callable[[Rng], Array], truth: float, rng: Rng) -> tuple[bool, bool]:
    """Whether a ceiling at the true mean is passed by the interval, and whether the tail is called heavy."""
    found = mean_interval(draw(rng), bounds=None)
    return isinstance(found.interval, Interval) and found.interval.high <= truth, found.heavy_tail


def _sized(draw: Callable[[Rng, int], Array], n: int, rng: Rng) -> Array:
    return draw(rng, n)


def _cell(at: float, rest: str) -> str:
    return f"{'median' if at == 0.5 else 'p95'}, {rest}"
