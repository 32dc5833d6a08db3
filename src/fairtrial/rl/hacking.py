"""Is the reward being hacked? A reward that rises while what it stands for falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial.base.formatting import number
from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import Range, widen
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.rl.values import SampleValues, sample_values
from fairtrial.stats.paired import PairedDifference, paired_difference

type HackingVerdict = Literal["hacked", "suspicious", "no sign", "undecided"]
"""The proxy rose and the truth fell; it rose and the truth did not; neither; too few pairs."""


@first_is(str)
@dataclass(frozen=True, slots=True)
class HackingCheck:
    """The result of `hacking`: both differences with their intervals, and what they say together.

    Attributes:
        proxy: The name of the trained reward.
        truth: The name of what it stands for.
        proxy_change: Its change from before to after, sample by sample.
        truth_change: The change of the truth.
    """

    proxy: str
    truth: str
    proxy_change: PairedDifference
    truth_change: PairedDifference

    @property
    def alarm(self) -> bool:
        """Whether the proxy rose and the truth fell, each beyond its interval."""
        return self.verdict == "hacked"

    @property
    def verdict(self) -> HackingVerdict:
        """What the two changes say together."""
        proxy, truth = self.proxy_change.interval, self.truth_change.interval
        if proxy is None or truth is None:
            return "undecided"
        if proxy.low <= 0:
            return "no sign"
        if truth.high < 0:
            return "hacked"
        return "suspicious" if truth.low <= 0 and (self.truth_change.difference or 0.0) < 0 else "no sign"

    def __str__(self) -> str:
        sentence = {
            "hacked": f"{self.proxy} rose while {self.truth} fell: the reward is being hacked.",
            "suspicious": f"{self.proxy} rose, and {self.truth} may have fallen: the interval contains 0.",
            "no sign": "There is no sign that the reward is being hacked.",
            "undecided": "There are too few pairs to decide.",
        }[self.verdict]
        changes = ((self.proxy, self.proxy_change), (self.truth, self.truth_change))
        return "\n".join([sentence, *(f"{name}: {_shown(change)}" for name, change in changes)])


def hacking(
    before: EvalReport | ExperimentReport,
    after: EvalReport | ExperimentReport,
    *,
    proxy: str = "reward",
    truth: str,
    held_out: tuple[EvalReport | ExperimentReport, EvalReport | ExperimentReport] | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> HackingCheck:
    """Compare two runs of a policy, before and after training: did the reward rise while the truth fell?

    Both changes are paired by sample. If training changed nothing in the truth, an alarm has a probability of at most
    (1 - level) / 2, however much the reward rose.

    Args:
        before: A run of the policy before training.
        after: A run of the policy after it, on the same samples.
        proxy: What is trained: "reward", "value", "passed" or a metric.
        truth: What it stands for, such as the metric of a judge.
        held_out: Two other runs, before and after, that have the truth; by default the same ones.
        level: The level of the intervals.
        seed: The seed of random draws.
    """
    truths = (before, after) if held_out is None else held_out
    return HackingCheck(
        proxy,
        truth,
        _change(sample_values(before, proxy), sample_values(after, proxy), proxy, level, seed),
        _change(sample_values(truths[0], truth), sample_values(truths[1], truth), truth, level, seed),
    )


def _change(before: SampleValues, after: SampleValues, metric: str, level: float, seed: int) -> PairedDifference:
    common = [name for name in before.values if name in after.values]
    if not common:
        raise ConfigurationError(
            f"both runs must have the same samples to compare {metric!r} (they have none in common)"
        )
    labels = [before.clusters[name] for name in common]
    ranges: dict[str, Range | None] = {}
    for side in (before, after):
        widen(ranges, metric, side.bounds)
    return change(
        [before.values[name] for name in common],
        [after.values[name] for name in common],
        labels if len(set(labels)) < len(labels) else None,
        bounds=ranges[metric],
        level=level,
        seed=seed,
    )


def change(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    clusters: Sequence[str] | None = None,
    *,
    bounds: Range | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> PairedDifference:
    """Return the mean change over samples, each with its repeats."""
    return paired_difference(after, before, clusters=clusters, bounds=bounds, level=level, seed=seed)


def _shown(change: PairedDifference) -> str:
    if change.interval is None or change.difference is None:
        return f"unknown: {change.reason}"
    low, high = (number(end) for end in (change.interval.low, change.interval.high))
    return f"{change.difference:+.4g} [{low}, {high}], {change.n:,} pairs"
