"""Training looked at: learning curves, reward hacking, diagnoses."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fairtrial.base.formatting import number, rate
from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import Range, widen
from fairtrial.reports.render.plots import STYLE
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.rl.advantages import AdvantageKind, Convention, SampleValues, sample_values
from fairtrial.rl.groups import Group, Rollout, best_at_k, groups, load_group, reward_bounds
from fairtrial.scoring.score import Metric
from fairtrial.stats.agreement import RankCorrelation, rank_correlation
from fairtrial.stats.intervals import MeanEstimate, mean_interval
from fairtrial.stats.paired import PairedDifference, paired_difference
from fairtrial.store.open import open_store
from fairtrial.store.protocol import RunRecord, RunStore

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 740, 24, 276


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation run: the training step, the name of the run, and the mean with its interval."""

    step: int
    run: str
    estimate: MeanEstimate


@first_is(str)
@dataclass(frozen=True, slots=True)
class Curve:
    """Means over training steps; print it as a table, or draw it with `to_svg`."""

    metric: str
    points: tuple[CurvePoint, ...]

    def __str__(self) -> str:
        rows = [("step", "run", self.metric, "interval", "n")]
        for point in self.points:
            found = point.estimate
            span = found.interval
            interval = "" if span is None else f"{number(span.low)} to {number(span.high)}"
            mean = "" if found.mean is None else number(found.mean)
            rows.append((str(point.step), point.run, mean, interval, str(found.n)))
        widths = [max(len(row[at]) for row in rows) for at in range(5)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def to_svg(self) -> str:
        """Draw the means as a line over the steps, each with its interval."""
        known = [point for point in self.points if point.estimate.mean is not None]
        ends = [end for point in known for end in _ends(point.estimate)]
        low, high = min(ends, default=0.0), max(ends, default=1.0)
        low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
        first, last = known[0].step if known else 0, known[-1].step if known else 1

        def x(step: int) -> float:
            return round(_LEFT + (step - first) / max(last - first, 1) * (_RIGHT - _LEFT), 1)

        def y(value: float) -> float:
            return round(_BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP), 1)

        parts = [f'<line class="zero" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>']
        for value in (low, (low + high) / 2, high):
            parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
            parts.append(f'<text class="muted" x="{_LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:.3g}</text>')
        line = " ".join(f"{x(point.step)},{y(point.estimate.mean or 0.0)}" for point in known)
        parts.append(f'<polyline class="span" fill="none" points="{line}"/>')
        for point in known:
            at = x(point.step)
            bottom, top = _ends(point.estimate)
            parts.append(f'<line class="span" x1="{at}" x2="{at}" y1="{y(bottom)}" y2="{y(top)}"/>')
            parts.append(f'<circle class="dot" cx="{at}" cy="{y(point.estimate.mean or 0.0)}" r="4"/>')
        for step in dict.fromkeys((first, last)):
            parts.append(f'<text class="muted" x="{x(step)}" y="{_BOTTOM + 18}" text-anchor="middle">{step}</text>')
        parts.append(
            f'<text class="muted" x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>'
        )
        title = html.escape(plain(f"{self.metric} by training step"))
        description = "; ".join(f"step {point.step}: {point.estimate.mean:.4g}" for point in known)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ft-plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
            f"<title>{title}</title><desc>{html.escape(plain(description, limit=4000))}</desc>"
            f"<style>{STYLE}</style>{''.join(parts)}</svg>"
        )


def curve(
    store: RunStore | Path | str,
    *,
    tags: Mapping[str, str] = EMPTY,
    suite: str | None = None,
    metric: str = "reward",
    experiment: str | None = None,
    level: float = 0.95,
) -> Curve:
    """Return the means of the evaluation runs of a training run by step.

    A run belongs to it if it has these tags, as in `suite.run(tags={"train": "run-7", "step": "120"})`; of several
    runs with one step, the latest counts.

    Args:
        store: The store, or its URL.
        tags: The tags of the runs, besides `step`.
        suite: Only runs of this suite; needed if runs of several suites have these tags.
        metric: "reward", "value", "passed", or the name of a metric.
        experiment: The experiment, if runs have several.
        level: The level of the intervals.
    """
    opened = open_store(str(store)) if isinstance(store, str | Path) else store
    found: dict[int, RunRecord] = {}
    for run in opened.runs(suite=suite):  # Newest first.
        step = run.tags.get("step", "")
        if step.isdecimal() and all(run.tags.get(name) == value for name, value in tags.items()):
            found.setdefault(int(step), run)
    suites = sorted({run.suite for run in found.values()})
    if len(suites) > 1:
        raise ConfigurationError(f"the runs must be of one suite (got {', '.join(suites)}): name it with suite=...")
    if not found:
        shown = ", ".join(f"{name}={value}" for name, value in tags.items()) or "a step"
        raise ConfigurationError(
            f"no run is tagged with {shown} and a step\ntag them: suite.run(tags={{'train': 'run-7', 'step': '120'}})"
        )
    points = tuple(_point(opened, step, found[step], metric, experiment, level) for step in sorted(found))
    return Curve(metric, points)


def _point(store: RunStore, step: int, run: RunRecord, metric: str, experiment: str | None, level: float) -> CurvePoint:
    report: EvalReport = EvalReport(store, run)
    found = sample_values(report if experiment is None else report[experiment], metric)
    values = list(found.values.values())
    estimate = mean_interval(values, clusters=found.labels, bounds=found.bounds, level=level)
    return CurvePoint(step, run.name, estimate)


def _ends(estimate: MeanEstimate) -> tuple[float, float]:
    mean = estimate.mean or 0.0
    return (mean, mean) if estimate.interval is None else (estimate.interval.low, estimate.interval.high)


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
        return "\n".join([sentence, *(f"{name}: {_change_text(change)}" for name, change in changes)])


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
    return paired_difference(
        [after.values[name] for name in common],
        [before.values[name] for name in common],
        clusters=labels if len(set(labels)) < len(labels) else None,
        bounds=ranges[metric],
        level=level,
        seed=seed,
    )


def _change_text(change: PairedDifference) -> str:
    if change.interval is None or change.difference is None:
        return f"unknown: {change.reason}"
    low, high = (number(end) for end in (change.interval.low, change.interval.high))
    return f"{change.difference:+.4g} [{low}, {high}], {change.n:,} pairs"


_STRONG = 0.5  # A rank correlation from which a quantity explains much of the reward.
_MANY = 0.5  # The share of groups from which one kind of them is worth a remark.


@dataclass(frozen=True, slots=True)
class RewardSpread:
    """The distribution of rewards; all None without a scored rollout."""

    low: float | None
    lower_quartile: float | None
    median: float | None
    upper_quartile: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The figures of `diagnose`; print it to read them.

    Attributes:
        rollouts: The number of rollouts.
        scored: Those with a reward.
        truncated: Those ended by a limit.
        failed: Those whose task raised an error.
        groups: The number of groups.
        mixed: Groups whose rewards differ: only they teach anything.
        too_easy: Groups with equal rewards whose rollouts all passed.
        too_hard: Groups with equal rewards of which not all rollouts passed.
        identical: Rollouts that say the same as an earlier one of their group.
        cached: Rollouts with answers from the response cache.
        mean_reward: The mean reward, by group, with its interval.
        spread: The distribution of rewards.
        best: The mean of the best reward of a group of `group_size`.
        group_size: The largest number of scored rollouts in a group.
        truncated_reward: The mean reward of truncated rollouts; None if there are none.
        advantages: The lowest and highest advantage.
        correlations: The rank correlation of the reward with length, turns, and each metric without a weight.
        shares: The share of the reward's variance that comes from each metric with a weight; they sum to 1.
        token_rows: Token rows by rollout with tokens, on average; None if no tokens were recorded.
        remarks: What is wrong, and what to do about it.
    """

    rollouts: int
    scored: int
    truncated: int
    failed: int
    groups: int
    mixed: int
    too_easy: int
    too_hard: int
    identical: int
    cached: int
    mean_reward: MeanEstimate
    spread: RewardSpread
    best: MeanEstimate
    group_size: int
    truncated_reward: float | None
    advantages: tuple[float, float] | None
    correlations: dict[str, RankCorrelation]
    shares: dict[str, float]
    token_rows: float | None
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(slots=True)
class _Observed:
    """What one pass over the groups collects."""

    groups: list[Group] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    truncated_rewards: list[float] = field(default_factory=list)
    quantities: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    parts: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("truncated", "failed", "easy", "hard", "identical", "cached"), 0)
    )
    rows: list[int] = field(default_factory=list)

    def add(self, group: Group) -> None:
        # Copies without what was loaded: sessions of a large run do not fit into memory.
        self.groups.append(replace(group, rollouts=tuple(replace(one) for one in group.rollouts)))
        if group.signal == "all_equal":
            self.counts["easy" if all(one.result.passed for one in group.scored) else "hard"] += 1
        texts = ["\n".join(message.text for message in _said(one)) for one in group.rollouts]
        self.counts["identical"] += len(texts) - len(set(texts))
        for rollout, text in zip(group.rollouts, texts, strict=True):
            self._add_rollout(rollout, text)

    def _add_rollout(self, rollout: Rollout, text: str) -> None:
        status = rollout.status
        self.counts["truncated"] += status == "truncated"
        self.counts["failed"] += status == "failed"
        self.counts["cached"] += rollout.result.cache_hits > 0
        if rollout.calls:
            self.rows.append(len(rollout.rows()))
        score = rollout.result.score
        if rollout.reward is None or score is None:
            return
        self.rewards.append(rollout.reward)
        if status == "truncated":
            self.truncated_rewards.append(rollout.reward)
        facts = {"length": float(len(text)), "turns": float(len(_said(rollout)))}
        facts.update((metric.name, metric.value) for metric in score.metrics if metric.weight == 0)
        for name, value in facts.items():
            self.quantities.setdefault(name, []).append((value, rollout.reward))
        for name, value in _weighted_parts(score.metrics):
            self.parts.setdefault(name, []).append((value, rollout.reward))


def diagnose(
    report: EvalReport | ExperimentReport, *, advantage: AdvantageKind = "grpo", convention: Convention = "trl"
) -> Diagnosis:
    """Describe the rollouts of a run as training data; print the result.

    Args:
        report: The report of a run with repeats, or of one experiment of it.
        advantage: The formula of the advantages; see `advantages`.
        convention: The trainer whose numbers are reproduced.
    """
    seen = _Observed()
    for group in groups(report, advantage=advantage, convention=convention):
        seen.add(load_group(group))
    rewards, counts = sorted(seen.rewards), seen.counts
    size = max((len(group.scored) for group in seen.groups), default=0)
    found = [value for group in seen.groups for value in group.advantages if value is not None]
    bounds = reward_bounds(seen.groups)
    made = Diagnosis(
        sum(len(group.rollouts) for group in seen.groups),
        len(rewards),
        counts["truncated"],
        counts["failed"],
        len(seen.groups),
        sum(group.signal == "mixed" for group in seen.groups),
        counts["easy"],
        counts["hard"],
        counts["identical"],
        counts["cached"],
        mean_interval([[one.reward or 0.0 for one in group.scored] for group in seen.groups], bounds=bounds),
        RewardSpread(*(_quantile(rewards, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0))),
        best_at_k(seen.groups, max(size, 1)),
        size,
        _mean(seen.truncated_rewards),
        (min(found), max(found)) if found else None,
        {name: rank_correlation(*zip(*pairs, strict=True)) for name, pairs in seen.quantities.items()},
        _variance_shares(seen.parts, seen.rewards),
        _mean([float(count) for count in seen.rows]),
    )
    return replace(made, remarks=tuple(_remarks(made)))


def _said(rollout: Rollout) -> list[ChatMessage]:
    return [message for message in rollout.messages if message.role == "assistant"]


def _weighted_parts(metrics: Sequence[Metric]) -> Iterator[tuple[str, float]]:
    total = sum(metric.weight for metric in metrics)
    for metric in metrics:
        if metric.weight > 0:
            yield metric.name, metric.value * metric.weight / total


def _variance_shares(parts: dict[str, list[tuple[float, float]]], rewards: Sequence[float]) -> dict[str, float]:
    """Return the covariance of each part with the reward, as a share of the reward's variance."""
    mean = _mean(rewards)
    spread = 0.0 if mean is None else sum((reward - mean) ** 2 for reward in rewards)
    if mean is None or spread == 0.0:
        return {}
    shares: dict[str, float] = {}
    for name, pairs in parts.items():
        own = sum(value for value, _ in pairs) / len(pairs)
        shares[name] = sum((value - own) * (reward - mean) for value, reward in pairs) / spread
    return shares


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _remarks(made: Diagnosis) -> Iterator[str]:
    if made.group_size < 2:
        yield "No group has two scored rollouts, so there are no advantages: run with EvalConfig(repeats=8)."
        return
    if made.too_easy > _MANY * made.groups:
        yield "Most groups pass throughout: the samples are too easy to learn from."
    if made.too_hard > _MANY * made.groups:
        yield "Most groups have equal rewards without passing: the samples are too hard, or the reward is too coarse."
    if made.identical > _MANY * made.rollouts * (1 - made.groups / made.rollouts):
        yield "Most rollouts repeat another one of their group: check temperature, seeds and caches."
    if made.cached:
        yield f"{made.cached:,} rollouts have answers from the response cache, which were sampled by other weights."
    if made.scored < made.rollouts:
        yield f"{made.rollouts - made.scored:,} rollouts have no reward: trainers leave them out."
    for name, found in made.correlations.items():
        if found.interval is None or found.value is None:
            continue
        if min(abs(found.interval.low), abs(found.value)) > _STRONG:
            yield f"The reward follows {name} (rank correlation {found.value:.2f}): a policy may learn that alone."
    for name, share in made.shares.items():
        if share == 0.0:
            yield f"Metric {name} never varies, so it teaches nothing."


def _lines(made: Diagnosis) -> Iterator[str]:
    spread = made.spread
    yield (
        f"rollouts   {made.rollouts:,} in {made.groups:,} groups; {made.scored:,} scored, "
        f"{made.truncated:,} truncated, {made.failed:,} failed"
    )
    yield f"reward     mean {_shown(made.mean_reward)}"
    if spread.low is not None:
        named = zip(
            ("lowest", "25%", "median", "75%", "highest"),
            (spread.low, spread.lower_quartile, spread.median, spread.upper_quartile, spread.high),
            strict=True,
        )
        yield "           " + ", ".join(f"{name} {number(value)}" for name, value in named if value is not None)
    if made.truncated_reward is not None:
        yield f"           mean of truncated rollouts {number(made.truncated_reward)}"
    if made.groups:
        yield (
            f"groups     {rate(made.mixed / made.groups)} mixed, {rate(made.too_easy / made.groups)} too easy, "
            f"{rate(made.too_hard / made.groups)} too hard"
        )
    if made.group_size > 1:
        yield f"best of {made.group_size:<2} mean {_shown(made.best)}"
    if made.advantages is not None:
        yield f"advantages {number(made.advantages[0])} to {number(made.advantages[1])}"
    yield f"identical  {made.identical:,} rollouts repeat another one of their group"
    for name, found in made.correlations.items():
        if found.value is not None:
            yield f"follows    {name}: rank correlation {found.value:.2f} (n = {found.n:,})"
    for name, share in made.shares.items():
        yield f"variance   {name}: {rate(share)} of the reward's"
    rows = "not recorded" if made.token_rows is None else f"{made.token_rows:.2f} rows by rollout"
    yield f"tokens     {rows}"
    yield from made.remarks


def _shown(estimate: MeanEstimate) -> str:
    if estimate.mean is None:
        return f"unknown: {estimate.reason}"
    span = "" if estimate.interval is None else f" [{number(estimate.interval.low)}, {number(estimate.interval.high)}]"
    return f"{number(estimate.mean)}{span} (n = {estimate.n:,})"
