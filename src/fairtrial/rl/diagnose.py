"""Can a policy learn from these rollouts? The figures that show it, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fairtrial.base.formatting import number, rate
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.reports.report import EvalReport, ExperimentReport
from fairtrial.rl.advantages import AdvantageKind, Convention
from fairtrial.rl.groups import Group, Rollout, best_at_k, groups, load_group, reward_bounds
from fairtrial.scoring.score import Metric
from fairtrial.stats.association import RankCorrelation, rank_correlation
from fairtrial.stats.intervals import MeanEstimate, mean_interval

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
    return _with_remarks(made)


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


def _with_remarks(made: Diagnosis) -> Diagnosis:
    return replace(made, remarks=tuple(_remarks(made)))


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
        if (
            found.interval is not None
            and found.value is not None
            and min(abs(found.interval.low), abs(found.value)) > (_STRONG)
        ):
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
