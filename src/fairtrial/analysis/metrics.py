"""The names of metrics and the classes of outcomes. Imported by much that makes no numbers, so without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fairtrial.trials.result import Outcome

type View = Literal["scored", "system", "all"]
"""Which trials count: those scored; also the failures of the system (task errors and timeouts), as the worst score;
or every error as the worst score. A trial that was not run never counts."""

NOT_RUN, SCORED, FAILED, MISSING = range(4)
OUTCOME_CLASS: Mapping[Outcome, int] = {
    "scored": SCORED,
    "task_error": FAILED,
    "timeout": FAILED,
    "scorer_error": MISSING,  # What the system did may have been good: the fault is ours.
    "dead_letter": MISSING,
    "not_run": NOT_RUN,
}
LAST_COUNTED: Mapping[View, int] = {"scored": SCORED, "system": FAILED, "all": MISSING}
ERRORS: tuple[Outcome, ...] = ("task_error", "scorer_error", "timeout", "dead_letter")

PASSED, VALUE, REWARD = "passed", "value", "reward"
COSTS = ("latency_ms", "tokens", "cost_usd")
"""What every trial has beside its score; less of it is better."""
BUILT_IN = (PASSED, VALUE, REWARD, *COSTS)
UNIT = (0.0, 1.0)
VERDICT_PREFIX = f"{PASSED}:"
CRITERION = "pass_rate:"
"""What begins the name of an estimate that is the pass rate of one criterion."""


def verdict_column(criterion: str) -> str:
    """The column with the verdicts on a criterion: "passed:polite"."""
    return VERDICT_PREFIX + criterion


def is_verdict(metric: str) -> bool:
    """Whether a metric says of each trial whether it, or one criterion of it, passed: its mean is a rate."""
    return metric == PASSED or metric.startswith(VERDICT_PREFIX)
