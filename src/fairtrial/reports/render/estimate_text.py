"""The words, numbers and bars of an estimate."""

from __future__ import annotations

from fairtrial.base import formatting
from fairtrial.reports.figures.estimates import Estimate
from fairtrial.reports.figures.metrics import CRITERION, is_verdict
from fairtrial.reports.render.document import Bar

TITLES = {
    "pass_rate": "pass rate",
    "pass_rate_all": "pass rate, errors as failures",
    "mean_score": "mean score",
    "mean_score_all": "mean score, errors as 0",
    "mean_reward": "mean reward",
}
"""The titles of estimates that every run may have."""


def title_of(name: str) -> str:
    """Return the title of an estimate."""
    if name.startswith(CRITERION):
        return f"pass rate of {name.removeprefix(CRITERION)}"
    return TITLES.get(name, name)


def is_rate(estimate: Estimate) -> bool:
    """True if an estimate is a share, shown in percent."""
    return is_verdict(estimate.metric)


def value(estimate: Estimate, number: float | None) -> str:
    """Format a value of an estimate."""
    return formatting.rate(number) if is_rate(estimate) else formatting.number(number)


def span(estimate: Estimate) -> str:
    """Format the interval of an estimate."""
    if estimate.low is None or estimate.high is None:
        return formatting.UNDEFINED
    return f"{value(estimate, estimate.low)} to {value(estimate, estimate.high)}"


def bar(estimate: Estimate, bounds: tuple[float, float] | None) -> Bar | None:
    """Return the bar of an estimate; None if it is undefined or its scale is unknown."""
    if estimate.low is None or estimate.high is None or estimate.value is None or bounds is None:
        return None
    return Bar(estimate.low, estimate.value, estimate.high, *bounds)
