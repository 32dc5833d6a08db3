"""Advantages: the rewards of a group relative to each other, as trainers compute them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

from fairtrial.errors import ConfigurationError

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
