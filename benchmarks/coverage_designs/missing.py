"""Trials without a score, not at random: the failures of a worse system break its scorer, or crash it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from fairtrial.reports.figures.rules import GateRules, SliceRule
from fairtrial.reports.gate.gate import gate_columns

from . import COVERAGE, GATE_ERRORS, Array, Design, Rng, share, share_or_warned

RATE = 0.9


def designs() -> Iterator[Design]:
    """Return the designs."""
    for n in (500, 2000, 5000):
        for hidden in (0.03, 0.045):
            cell = f"n {n}, worse by {hidden}, margin 0.02"
            quick = 60 if (n, hidden) == (2000, 0.045) else 0
            yield Design(
                "extra failures that cannot be scored",
                "PASS of the margin",
                GATE_ERRORS,
                share(partial(gated, n, hidden, MISSING, GateRules(margin=0.02))),
                cell,
                quick=quick,
            )
            yield Design(
                "extra failures that cannot be scored",
                "coverage of the comparison",
                COVERAGE,
                share_or_warned(partial(difference_covered, n, hidden, MISSING)),
                f"n {n}, worse by {hidden}",
                quick=quick,
            )
        yield Design(
            "extra failures that cannot be scored",
            "PASS of the floor",
            GATE_ERRORS,
            share(partial(gated, n, 0.045, MISSING, GateRules(min_pass_rate=0.875))),
            f"n {n}, rate 0.855, floor 0.875",
            quick=60 if n == 2000 else 0,
        )
    for n in (500, 2000, 10_000):
        yield Design(
            "extra failures that cannot be scored",
            '"as good as"',
            GATE_ERRORS,
            share(partial(as_good, n, 0.05)),
            f"n {n}, worse by the 0.05 that matter",
            quick=60 if n == 2000 else 0,
        )
    for n in (500, 2000):
        yield Design(
            "extra failures that crash",
            "PASS of the margin",
            GATE_ERRORS,
            share(partial(gated, n, 0.045, FAILED, GateRules(margin=0.02))),
            f"n {n}, worse by 0.045, margin 0.02",
        )
        yield Design(
            "extra failures that crash",
            "coverage of the comparison",
            COVERAGE,
            share(partial(difference_covered_plainly, n, 0.045)),
            f"n {n}, worse by 0.045",
        )
    yield Design(
        "half of a slice cannot be scored",
        "PASS of its floor",
        GATE_ERRORS,
        lambda _runs, _rng: float(half_of_a_slice()),
        "40 of 1,000 samples, rate 0.5, floor 0.8",
        exact=True,
        quick=1,
    )
    yield Design(
        "metric that a tenth of the trials has",
        "PASS of its floor",
        GATE_ERRORS,
        share(rare_metric),
        "n 1,000, floor 0.8",
        quick=60,
    )


def draw(n: int, hidden: float, outcome: int, rng: Rng) -> tuple[Columns, Columns]:
    """Draw a system that is worse by `hidden`, its extra failures ending in `outcome`, and its baseline."""
    old = (rng.random(n) < RATE).astype(float)
    level = rng.random(n)
    lost = (level >= RATE - hidden) & (level < RATE)
    new: Array = np.where(lost, np.nan, level < RATE - hidden)
    outcomes = np.where(lost, outcome, SCORED)
    return Columns.of({"passed": new}, name="new", outcomes=outcomes), Columns.of({"passed": old}, name="old")


def gated(n: int, hidden: float, outcome: int, rules: GateRules, rng: Rng) -> bool:
    """Whether the worse system passes."""
    new, old = draw(n, hidden, outcome, rng)
    return gate_columns(new, rules, old if rules.compares else None).status == "pass"


def as_good(n: int, hidden: float, rng: Rng) -> bool:
    """Whether the worse system is called as good as its baseline, which has the same verdicts on the other samples."""
    new, old = draw(n, hidden, MISSING, rng)
    old = Columns.of({"passed": np.where(np.isnan(new.values["passed"]), 1.0, new.values["passed"])}, name="old")
    return compare_columns(old, [new], metrics=["passed"]).candidates[0].verdict == "as good as"


def difference_covered(n: int, hidden: float, outcome: int, rng: Rng) -> tuple[bool, bool]:
    """Whether the interval of a comparison contains the loss, and whether a warning names the missing trials."""
    new, old = draw(n, hidden, outcome, rng)
    made = compare_columns(old, [new], metrics=["passed"], settings=ComparisonSettings()).candidates[0]
    metric = made.metrics[0]
    covered = metric.low is not None and metric.high is not None and metric.low <= -hidden <= metric.high
    return covered, any("missing" in warning for warning in made.warnings)


def difference_covered_plainly(n: int, hidden: float, rng: Rng) -> bool:
    """Whether the interval of a comparison contains a loss that consists of crashes."""
    return difference_covered(n, hidden, FAILED, rng)[0]


def half_of_a_slice() -> bool:
    """Whether a slice passes of which the failing half could not be scored."""
    hidden = np.arange(1000) < 20
    values = np.where(hidden, np.nan, 1.0)
    columns = Columns.of(
        {"passed": values},
        outcomes=np.where(hidden, MISSING, SCORED),
        groups={"topic": ["rare"] * 40 + ["common"] * 960},
    )
    rules = GateRules(slices=(SliceRule("topic", value="rare", min_pass_rate=0.8),))
    return gate_columns(columns, rules).status == "pass"


def rare_metric(rng: Rng) -> bool:
    """Whether a metric passes that nine tenths of the trials lack."""
    values = np.where(np.arange(1000) < 100, rng.uniform(0.85, 1, 1000), np.nan)
    columns = Columns.of({"passed": np.ones(1000), "faithful": values})
    return gate_columns(columns, GateRules(floors={"faithful": 0.8})).status == "pass"
