"""Panels of judges and their agreement."""

from __future__ import annotations

from collections.abc import Sequence

from fairtrial.errors import ConfigurationError
from fairtrial.models.judges.judge import Judging
from fairtrial.scoring.combine import Combined
from fairtrial.scoring.evaluator import Case, Evaluator, Scorer, resolve
from fairtrial.scoring.score import SHARE, Metric, Score, mean_value, merge


class JudgePanel(Combined):
    """A panel of judges that gives a verdict if enough of them do."""

    __slots__ = ("quorum",)

    def __init__(self, members: Sequence[Scorer], quorum: int) -> None:
        super().__init__("panel", members, _majority, names=_names(members))
        self.quorum = quorum

    async def parts(self, case: Case) -> list[tuple[str, Score]]:
        """Return the scores of the members that gave one; raises the first error if they are too few."""
        outcomes = await self.outcomes(case)
        parts = [(name, score) for name, score in outcomes if isinstance(score, Score)]
        if len(parts) < self.quorum:
            raise next(error for _, error in outcomes if isinstance(error, Exception))
        return parts


def panel(*judges: Evaluator | Scorer, quorum: int | None = None) -> Combined:
    """Passes if more than half pass; the value is the mean, and `agreement` is the share on the majority's side.

    Small models of different families make a better panel than one large model asked several times.

    Args:
        judges: The members.
        quorum: How many members must give a verdict; by default all. The others may fail, and have no vote.
    """
    if len(judges) < 2:
        raise ConfigurationError(f"a panel must have at least two judges (got {len(judges)})")
    if quorum is not None and not 1 <= quorum <= len(judges):
        raise ConfigurationError(f"the quorum of a panel must be from 1 to {len(judges)}, its judges (got {quorum})")
    members = [resolve(judge) for judge in judges]
    return JudgePanel(members, len(members) if quorum is None else quorum)


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
    return Score(merged.value, passed, merged.reason, (*merged.metrics, Metric("agreement", agreement, bounds=SHARE)))
