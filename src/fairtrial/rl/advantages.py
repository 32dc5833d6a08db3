"""Rewards as advantages."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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


type AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "mean"]
"""How rewards become advantages; see `advantages`."""
type Convention = Literal["trl", "verl"]
"""The trainer whose small constants and treatment of groups of one are reproduced."""

_EPSILON: dict[str, float] = {"trl": 1e-4, "verl": 1e-6}


def advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable] | None = None,
    *,
    kind: AdvantageKind = "grpo",
    convention: Convention = "trl",
) -> list[float | None]:
    """Return the advantage of each reward within its group; None, for an unscored rollout, stays None.

    - `grpo`: (reward - mean) / (sample standard deviation + epsilon)
    - `dr_grpo`: reward - mean
    - `rloo`: reward - mean of the others
    - `mean`: reward - mean, and 0 for a group of one under both conventions

    Unscored members count neither for the mean nor for the deviation. The conventions differ in epsilon (`trl` 1e-4,
    `verl` 1e-6) and in groups with one scored member: 0 under `trl`; under `verl` the mean counts as 0 and the
    deviation as 1, so the advantage is the reward itself.

    Args:
        rewards: The rewards.
        groups: The group of each reward; by default all rewards are one group.
        kind: The formula.
        convention: The trainer whose numbers are reproduced.
    """
    check_kind(kind, convention)
    labels: Sequence[Hashable] = [None] * len(rewards) if groups is None else groups
    if len(labels) != len(rewards):
        raise ConfigurationError(f"groups must name the group of each of {len(rewards)} rewards (got {len(labels)})")
    members: dict[Hashable, list[int]] = {}
    for position, (reward, label) in enumerate(zip(rewards, labels, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise ConfigurationError(
                f"a reward must be a finite number, or None if it is unknown (got {reward} at position {position})"
            )
        members.setdefault(label, []).append(position)
    found: list[float | None] = [None] * len(rewards)
    for positions in members.values():
        scored = [reward for position in positions if (reward := rewards[position]) is not None]
        for position, value in zip(positions, group_advantages(scored, kind, convention), strict=True):
            found[position] = value
    return found


def check_kind(kind: str, convention: str) -> None:
    """Refuse an unknown kind or convention."""
    for what, value, allowed in (
        ("kind of advantage", kind, get_args(AdvantageKind.__value__)),
        ("convention", convention, get_args(Convention.__value__)),
    ):
        if value not in allowed:
            raise ConfigurationError(f"the {what} must be one of {', '.join(allowed)} (got {value!r})")


def group_advantages(rewards: Sequence[float], kind: str, convention: str) -> list[float]:
    """Return the advantages of the scored members of one group."""
    count = len(rewards)
    if count == 1:
        if convention == "trl" or kind == "mean":
            return [0.0]
        return [rewards[0] / (1.0 + _EPSILON[convention]) if kind == "grpo" else float(rewards[0])]
    if min(rewards) == max(rewards):
        return [0.0] * count  # Exactly: rounding of the mean would otherwise be divided by epsilon.
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if kind == "rloo":
        return [value * count / (count - 1) for value in centred]
    if kind != "grpo":
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
    return [value / (deviation + _EPSILON[convention]) for value in centred]
