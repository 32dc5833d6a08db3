"""Identical systems compared in many slices, or by many metrics, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from fairtrial.reports import by_metric
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.rules import GateRules, SliceRule
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.stats import Heterogeneity, heterogeneity

from . import ALARMS, GATE_ERRORS, Array, Design, Rng, draw_outcomes, draw_rates, share

type Drawn = tuple[Array, np.ndarray[tuple[int], np.dtype[np.intp]], np.ndarray[tuple[int], np.dtype[np.intp]] | None]
"""Values, their slices, and their clusters."""

CALLED = ("better", "worse", "higher", "lower")


def designs() -> Iterator[Design]:
    """Return the designs."""
    cell = "10 pass/fail and 10 graded, 200 samples"
    yield Design("20 metrics of identical systems", "any false alarm", ALARMS, share(many_metrics), cell, quick=25)
    for n in (300, 1000):
        once = partial(many_slices, n)
        cell = f"10 topics and 5 kinds, {n} samples"
        yield Design(
            "slices of identical systems",
            "any false alarm in a slice",
            ALARMS,
            share(once),
            cell,
            quick=60 if n == 300 else 0,
        )
    yield Design(
        "slices by a metric of identical systems",
        "any false alarm in a slice",
        ALARMS,
        share(slices_by_metric),
        "below or above 0.75, 80 samples x 2",
        quick=60,
    )
    for cell, draw in HETEROGENEITY.items():
        measure = share(partial(heterogeneity_alarm, draw))
        name = "slices with the same change or rate"
        yield Design(name, "called different", ALARMS, measure, cell, quick=100 if "crossed" in cell else 0)
    for n in (300, 1000):
        for status, rate, margin in (("fail", 0.9, 0.1), ("fail", 0.9, 0.0)):
            yield Design(
                "gate on 10 slices of equal systems",
                status.upper(),
                GATE_ERRORS,
                share(partial(sliced_gate, n, rate, margin, status)),
                f"margin {margin}, {n} samples",
                quick=60 if n == 300 and margin == 0 else 0,
            )


def many_metrics(rng: Rng) -> bool:
    """Whether any of 20 metrics of identical systems is called different."""
    n = 200
    chances = [draw_rates(rng, rate, 0.5, n) for rate in np.linspace(0.5, 0.98, 10)]
    bases = [rng.beta(4, 1, n) for _ in range(10)]
    sides = []
    for name in "ab":
        values = {f"passes{place}": draw_outcomes(rng, chance) for place, chance in enumerate(chances)}
        values |= {f"score{place}": np.clip(base + rng.normal(0, 0.1, n), 0, 1) for place, base in enumerate(bases)}
        sides.append(Columns.of(values, name=name, ranges=dict.fromkeys(values, (0.0, 1.0))))
    made = compare_columns(sides[0], sides[1:], metrics=tuple(sides[0].values), settings=ComparisonSettings(draws=999))
    return any(metric.verdict in CALLED for metric in made.candidates[0].metrics)


def many_slices(n: int, rng: Rng) -> bool:
    """Whether any slice of identical systems is called different."""
    groups = {
        "topic": [f"topic {code}" for code in rng.integers(0, 10, n)],
        "kind": [f"kind {code}" for code in rng.integers(0, 5, n)],
    }
    chance = draw_rates(rng, 0.8, 0.5, n)
    sides = [Columns.of({"passed": draw_outcomes(rng, chance)}, name=name, groups=groups) for name in "ab"]
    made = compare_columns(sides[0], sides[1:], metrics=["passed"], slice_by=["topic", "kind"])
    return any(part["passed"].verdict in CALLED for part in made.candidates[0].slices)


def slices_by_metric(rng: Rng) -> bool:
    """Whether a slice by the outcomes themselves is called different."""
    chance = np.broadcast_to(rng.uniform(0.2, 0.8, 80)[:, None], (80, 2))
    sides = [Columns.of({"passed": draw_outcomes(rng, chance)}, name=name) for name in "ab"]
    made = compare_columns(
        sides[0],
        sides[1:],
        metrics=["passed"],
        slice_by=by_metric("passed", at=0.75),
        settings=ComparisonSettings(draws=499),
    )
    return any(part["passed"].verdict in CALLED for part in made.candidates[0].slices)


def heterogeneity_alarm(draw: Callable[[Rng], Drawn], rng: Rng) -> bool:
    """Whether slices are said to differ from each other."""
    values, slices, clusters = draw(rng)
    # Random patterns of their own for each run: with one set for all of them they would share its luck.
    found = heterogeneity(values, slices, clusters=clusters, draws=499, seed=int(rng.integers(1 << 30)))
    return isinstance(found, Heterogeneity) and found.p_value <= 0.05


def changes_in_slices(n: int, unequal: Sequence[float], gain: float, rng: Rng) -> Drawn:
    """Draw changes of pass/fail pairs, of which each slice has a share of unequal ones beside those of the gain."""
    slices = rng.integers(0, len(unequal), n)
    level, share_of = rng.random(n), np.asarray(unequal)[slices]
    won, lost = level < share_of / 2 + gain, level > 1 - share_of / 2
    return won.astype(float) - lost, slices, None


def rates_in_slices(rng: Rng) -> Drawn:
    """Draw passes and failures of 150 samples in slices of very unequal sizes."""
    slices = np.repeat([0, 1, 2], [5, 25, 120])
    return draw_outcomes(rng, np.full(150, 0.9)), slices, None


def noise_in_slices(rng: Rng) -> Drawn:
    """Draw graded changes that spread ten times as much in a small slice as in a large one."""
    slices = np.repeat([0, 1], [20, 200])
    return rng.normal(0, np.where(slices == 0, 1.0, 0.1)), slices, None


def clustered_slices(clusters: int, size: int, crossed: bool, rng: Rng) -> Drawn:
    """Draw changes of clusters, each in one of four slices or crossed with them, with an ICC of .5."""
    labels = np.repeat(np.arange(clusters), size)
    values = np.sqrt(0.5) * (rng.normal(size=clusters)[labels] + rng.normal(size=labels.size))
    return values, rng.integers(0, 4, labels.size) if crossed else labels % 4, labels


HETEROGENEITY: dict[str, Callable[[Rng], Drawn]] = {
    "10 slices of 300 pairs, 20% unequal": partial(changes_in_slices, 300, [0.2] * 10, 0.0),
    "3 slices of 200 pairs, 5%, 20% and 50% unequal, 10% more won": partial(
        changes_in_slices, 200, [0.05, 0.2, 0.5], 0.1
    ),
    "2 slices of 60 pairs, 5% and 60% unequal": partial(changes_in_slices, 60, [0.05, 0.6], 0.0),
    "10 slices of 5,000 pairs, 20% unequal": partial(changes_in_slices, 5_000, [0.2] * 10, 0.0),
    "pass rate 0.9, slices of 5, 25 and 120": rates_in_slices,
    "graded, slices of 20 and 200, the small one noisier": noise_in_slices,
    "4 slices of 6 clusters of 10": partial(clustered_slices, 24, 10, False),
    "4 slices of 10 clusters of 5": partial(clustered_slices, 40, 5, False),
    "4 slices crossed with 12 clusters of 20": partial(clustered_slices, 12, 20, True),
}


def sliced_gate(n: int, rate: float, margin: float, status: str, rng: Rng) -> bool:
    """Whether a gate with a margin in each of ten slices says `status` to equal systems."""
    groups = {"topic": [f"topic {code}" for code in rng.integers(0, 10, n)]}
    chance = draw_rates(rng, rate, 0.5, n)
    old, new = (Columns.of({"passed": draw_outcomes(rng, chance)}, name=name, groups=groups) for name in "ab")
    return gate_columns(new, GateRules(slices=(SliceRule("topic", margin=margin),)), old).status == status
