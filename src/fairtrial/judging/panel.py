"""Panels of judges and their agreement."""

from __future__ import annotations

from collections.abc import Sequence

from fairtrial.errors import ConfigurationError
from fairtrial.judging.judge import Judging
from fairtrial.scoring.combine import Combined
from fairtrial.scoring.evaluator import Evaluator, Scorer, resolve
from fairtrial.scoring.score import Metric, Score, mean_value, merge


def panel(*judges: Evaluator | Scorer) -> Combined:
    """Passes if more than half pass; the value is the mean, and `agreement` is the share on the majority's side.

    Small models of different families make a better panel than one large model asked several times.
    """
    if len(judges) < 2:
        raise ConfigurationError(f"a panel must have at least two judges (got {len(judges)})")
    members = [resolve(judge) for judge in judges]
    return Combined("panel", members, _majority, names=_names(members))


def _names(members: Sequence[Scorer]) -> list[str]:
    """Return the names of the judges; judges of the same criterion are named after their models."""
    names = [member.name for member in members]
    return [
        f"{name} ({member.adapter.model})"
        if names.count(name) > 1 and isinstance(member, Judging) and member.adapter is not None
        else name
        for name, member in zip(names, members, strict=True)
    ]


def _majority(parts: Sequence[tuple[str, Score]]) -> Score:
    passes = sum(part.passed for _, part in parts)
    passed = 2 * passes > len(parts)
    agreement = max(passes, len(parts) - passes) / len(parts)
    merged = merge(parts, value=mean_value(parts), passed=passed)
    return Score(merged.value, passed, merged.reason, (*merged.metrics, Metric("agreement", agreement)))
