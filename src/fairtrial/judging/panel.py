"""Several judges, one verdict, and how far they agree."""

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
        raise ConfigurationError("a panel needs at least two judges")
    members = [resolve(judge) for judge in judges]
    return Combined("panel", members, _majority, names=_names(members))


def _names(members: Sequence[Scorer]) -> list[str]:
    """The judges' names; judges of the same criterion are told apart by their models."""
    names = [member.name for member in members]
    return [
        f"{name} ({member.adapter.model})" if names.count(name) > 1 and isinstance(member, Judging) else name
        for name, member in zip(names, members, strict=True)
    ]


def _majority(parts: Sequence[tuple[str, Score]]) -> Score:
    passes = sum(part.passed for _, part in parts)
    passed = 2 * passes > len(parts)
    agreement = max(passes, len(parts) - passes) / len(parts)
    merged = merge(parts, value=mean_value(parts), passed=passed)
    return Score(merged.value, passed, merged.reason, (*merged.metrics, Metric("agreement", agreement)))
