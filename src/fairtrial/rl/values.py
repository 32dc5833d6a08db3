"""The values of one quantity, sample by sample, with its repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import UNIT, Range, widen
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.store.protocol import REWARD_PLACE, ScoreRow, split_facts

BUILT_IN = ("reward", "value", "passed")


@dataclass(frozen=True, slots=True)
class SampleValues:
    """The scored values of each sample, and its cluster; samples without a value have an empty list.

    `bounds` are the range of the values, if it is declared.
    """

    values: dict[str, list[float]]
    clusters: dict[str, str]
    bounds: Range | None

    @property
    def labels(self) -> list[str] | None:
        """The cluster of each sample; None if every sample is its own."""
        return list(self.clusters.values()) if len(set(self.clusters.values())) < len(self.clusters) else None


def sample_values(report: EvalReport | ExperimentReport, metric: str) -> SampleValues:
    """Return the values of "reward", "value", "passed" or a metric in an experiment, by sample id.

    Raises:
        ConfigurationError: no trial has the metric, or the report has several experiments.
    """
    part = report.only('name one, as in report["policy"]') if isinstance(report, EvalReport) else report
    run, store = part.run, part.store
    cluster = run.config.get("cluster", "cluster")
    key = cluster if isinstance(cluster, str) else "cluster"
    facts = {ordinal: (sample_id, label) for ordinal, sample_id, (label,) in store.sample_facts(run.run_id, (key,))}
    values: dict[str, list[float]] = {}
    clusters: dict[str, str] = {}
    names: set[str] = set()
    ranges: dict[str, Range | None] = {}
    for row in store.scores(run.run_id, experiment=part.name):
        sample_id, label = facts[run.split(row.ordinal)[0]]
        found = values.setdefault(sample_id, [])
        clusters[sample_id] = f"sample {sample_id}" if label is None else f"cluster {label!r}"
        names.update(row.metrics)
        value = _value(row, metric)
        if value is not None:
            found.append(value)
            widen(ranges, metric, declared_range(row, metric))
    if metric not in BUILT_IN and metric not in names:
        known = ", ".join((*BUILT_IN, *sorted(names)))
        raise ConfigurationError(f"no trial of run {run.name} has the metric {metric!r}; there are {known}")
    return SampleValues(values, clusters, ranges.get(metric))


def declared_range(row: ScoreRow, metric: str) -> Range | None:
    """Return the range that a scored trial declares for "reward", "value", "passed" or a metric."""
    ranges: Mapping[int, Range | None] = split_facts(row.verdicts)[1] if row.verdicts else {}
    if metric in BUILT_IN:
        return ranges.get(REWARD_PLACE, UNIT) if metric == "reward" else UNIT
    return ranges.get(list(row.metrics).index(metric))


def _value(row: ScoreRow, metric: str) -> float | None:
    if row.outcome != "scored":
        return None
    if metric == "reward":
        return row.reward
    if metric == "value":
        return row.value
    if metric == "passed":
        return None if row.passed is None else float(row.passed)
    return row.metrics.get(metric)
