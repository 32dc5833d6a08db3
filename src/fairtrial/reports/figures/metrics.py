"""Metrics and costs by name, and where an experiment's values come from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fairtrial.errors import ConfigurationError
from fairtrial.store.column_cache import cached_totals
from fairtrial.store.protocol import RunRecord, RunStore, Totals
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import TRIAL_FIGURES, Outcome

_CLUSTER_KEY = EvalConfig().cluster


def run_totals(store: RunStore, run: RunRecord) -> list[Totals]:
    """Return the sums of each experiment: those that the store computed when the column file of the run was written.

    Without a file that has the final state of the run, the store computes them now.
    """
    address = getattr(store, "identity", None)
    if isinstance(address, str) and run.finished_at is not None:
        found = cached_totals(address, store.get_run(run.run_id))
        if found is not None:
            return found
    return store.totals(run.run_id)


def code_versions(store: RunStore, run: RunRecord) -> int:
    """Return the number of code versions that the stored results of a run come from.

    A run whose old results were all replaced has one, whatever has executed it before.
    """
    if run.identity is None:  # Stored by a version that did not record the code of each result.
        return 2 if run.noted.code_changed else 1
    versions = run.identity.get("code")
    several = isinstance(versions, Sequence) and not isinstance(versions, str) and len(versions) > 1
    return max(len(store.codes(run.run_id)), 1) if several or run.parent_run is not None else 1


@dataclass(frozen=True, slots=True)
class ExperimentSource:
    """One experiment of a stored run: the store, the run's record and the experiment's name."""

    store: RunStore
    run: RunRecord
    name: str

    @property
    def cluster_key(self) -> str:
        """Return the metadata key of clusters in this run; "" if samples were declared independent."""
        key = self.run.config.get("cluster", _CLUSTER_KEY)
        return key if isinstance(key, str) else _CLUSTER_KEY


class _HasSource(Protocol):
    @property
    def source(self) -> ExperimentSource: ...


class SingleExperiment(Protocol):
    """The report of one experiment: an `ExperimentReport`, or an `EvalReport` that has only one."""

    def only(self, example: str) -> _HasSource:
        """Return the only experiment; with several, raise an error with the example."""
        ...


def source_of(report: SingleExperiment, example: str) -> ExperimentSource:
    """Return the source of a report's only experiment; with several, raise an error with the example."""
    if not hasattr(report, "only"):
        raise ConfigurationError(
            f"this must be a report or one of its experiments (got {report!r:.80}): as in "
            'EvalReport.load("runs.db", "support@1")["baseline"]'
        )
    return report.only(example).source


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
    "user_error": MISSING,
    "not_run": NOT_RUN,
}
LAST_COUNTED: Mapping[View, int] = {"scored": SCORED, "system": FAILED, "all": MISSING}
ERRORS: tuple[Outcome, ...] = ("task_error", "scorer_error", "timeout", "dead_letter", "user_error")

PASSED, VALUE, REWARD = "passed", "value", "reward"
LATENCY, TOKENS, COST = "latency_ms", "tokens", "cost_usd"
COSTS = tuple(TRIAL_FIGURES)
"""What every trial has beside its score; less of it is better."""
BUILT_IN = (PASSED, VALUE, REWARD, *COSTS)
UNIT = (0.0, 1.0)
NOTHING_SCORED = "No trial was scored."
OVERSTATED = "The size is likely overstated, because the run stopped when it looked large."
SMALLEST_DIFFERENCE = 0.05
"""The smallest difference that matters, unless told otherwise: five points of a pass rate."""
VERDICT_PREFIX = f"{PASSED}:"
CRITERION = "pass_rate:"
"""What begins the name of an estimate that is the pass rate of one criterion."""


type Range = tuple[float, float]
"""The bounds between which a metric lies by nature."""


def widen(ranges: dict[str, Range | None], name: str, bounds: Range | None) -> None:
    """Add bounds that a metric declares, or None if it declares none: then it has none."""
    known = ranges.get(name, bounds)
    ranges[name] = None if known is None or bounds is None else (min(known[0], bounds[0]), max(known[1], bounds[1]))


def verdict_column(criterion: str) -> str:
    """Return the column with the verdicts on a criterion: "passed:polite"."""
    return VERDICT_PREFIX + criterion


def is_verdict(metric: str) -> bool:
    """True if a metric is a verdict (passed or failed) on trials or on one criterion: its mean is a rate."""
    return metric == PASSED or metric.startswith(VERDICT_PREFIX)


_QUANTILE = re.compile(r"(?:median|p(\d{1,2}(?:\.\d+)?)):(.+)", re.DOTALL)


def quantile_name(metric: str, share: float) -> str:
    """Return the name of a quantile: "median:latency_ms", "p95:latency_ms"."""
    return f"{'median' if share == 0.5 else f'p{100 * share:g}'}:{metric}"


def parse_quantile(name: str) -> tuple[str, float] | None:
    """Return the metric and the share of a quantile's name; None if it is not a quantile."""
    found = _QUANTILE.fullmatch(name)
    if found is None:
        return None
    share = 0.5 if found[1] is None else round(float(found[1]) / 100, 12)
    return (found[2], share) if 0 < share < 1 else None


GEOMETRIC = "geomean:"
"""What begins the name of a ratio of geometric means, as in "geomean:latency_ms"."""


def is_ratio(name: str) -> bool:
    """True for the name of a ratio of geometric means, whose differences are shares of the baseline."""
    return name.startswith(GEOMETRIC) and name != GEOMETRIC


def measured_metric(name: str) -> str:
    """Return the metric of a name: "latency_ms" for "p95:latency_ms" or "geomean:latency_ms", else the name itself."""
    if is_ratio(name):
        return name.removeprefix(GEOMETRIC)
    quantile = parse_quantile(name)
    return name if quantile is None else quantile[0]


def is_mean(name: str) -> bool:
    """True if a name is a metric itself, which is compared by its mean."""
    return measured_metric(name) == name


def unknown_metric(name: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for a metric that no trial has, with the names of those that there are."""
    names = sorted({PASSED, VALUE, *known})
    near = difflib.get_close_matches(name, [*names, *COSTS])
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigurationError(f"no metric {name!r}: the metrics are {', '.join(names)}{hint}")
