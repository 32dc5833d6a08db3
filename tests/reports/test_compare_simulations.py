"""Power of whole comparisons, by seeded simulation on columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.comparison import Comparison
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns

pytestmark = [pytest.mark.long, pytest.mark.proves("R113")]

RUNS = 2_000
type Array = NDArray[np.float64]
type Rng = np.random.Generator


def versus(sides: Sequence[Columns], run: int, metrics: Sequence[str], **given: Any) -> Comparison:
    settings = ComparisonSettings(draws=499, seed=run)
    return compare_columns(sides[0], sides[1:], metrics=metrics, settings=settings, **given)


# --- a true difference at the reported minimum detectable effect ---------------------------------------------------

type Draw = Callable[[Rng, float], list[Columns]]


def detected(draw: Draw, rng: Rng, metric: str, metrics: Sequence[str], runs: int) -> float:
    """How often the difference that is reported as just detectable, when it is the true one, is found."""
    effect = 0.1
    for pilot in range(5):
        found = [versus(draw(rng, effect), 40 * pilot + run, metrics)["b"][metric].mde for run in range(30)]
        effect = (effect + float(np.mean([one for one in found if one is not None]))) / 2
    return sum(versus(draw(rng, effect), run, metrics)["b"][metric].verdict == "better" for run in range(runs)) / runs


def pass_fail(n: int, disagreement: float) -> Draw:
    def draw(rng: Rng, effect: float) -> list[Columns]:
        shares = [disagreement / 2 + effect, disagreement / 2, 1 - disagreement - effect]
        change = rng.choice([1.0, -1.0, 0.0], size=n, p=shares)
        noise = rng.choice([1.0, -1.0, 0.0], size=n, p=[0.1, 0.1, 0.8])
        return [
            Columns.of({"passed": np.maximum(sign * change, 0.0), "other": np.maximum(sign * noise, 0.0)}, name=name)
            for name, sign in (("a", -1), ("b", 1))
        ]

    return draw


def graded(n: int) -> Draw:
    def draw(rng: Rng, effect: float) -> list[Columns]:
        base = rng.uniform(0.2, 0.6, n)
        a, b = base + rng.normal(0, 0.1, n), base + effect + rng.normal(0, 0.1, n)
        return [Columns.of({"value": np.clip(side, 0, 1)}, name=name) for name, side in (("a", a), ("b", b))]

    return draw


@pytest.mark.parametrize(
    ("n", "metrics"),
    [
        (50, ["passed"]),
        (300, ["passed", "other"]),
    ],
    ids=lambda given: str(given),
)
def test_a_pass_fail_difference_at_the_reported_effect_is_found_four_times_in_five(
    n: int, metrics: Sequence[str]
) -> None:
    rng = np.random.default_rng([n, len(metrics)])
    assert 0.75 <= detected(pass_fail(n, 0.2), rng, "passed", metrics, RUNS // 2) <= 0.87


@pytest.mark.parametrize(("n", "runs"), [(50, 500), (200, 300)])
def test_a_graded_difference_at_the_reported_effect_is_found_four_times_in_five(n: int, runs: int) -> None:
    rng = np.random.default_rng([n, 3])
    assert 0.75 <= detected(graded(n), rng, "value", ["value"], runs) <= 0.87
