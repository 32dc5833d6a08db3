"""Scores of tools that have several named numbers per trial and no range that all of them keep to.

Numbers are never rescaled. A score that leaves 0 to 1 anywhere in a run is a metric of the run and no verdict. The
first score that does not is the value of its trials: the figure that the source reports first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fairtrial.base.frozen import EMPTY
from fairtrial.base.types import JSON
from fairtrial.scoring.score import Metric, Score

_LONGEST_REASON = 4_000


@dataclass(frozen=True, slots=True)
class SourceScore:
    """One number of the source. `value` is None if the source has none for this trial, as for NaN."""

    name: str
    value: float | None
    passed: bool | None = None  # The source's own verdict.
    reason: str = ""
    higher_is_better: bool | None = True  # None: a measurement, such as a duration, that is never the value of a trial.
    metadata: Mapping[str, JSON] = EMPTY

    def __post_init__(self) -> None:
        if not self.name:  # Any text is a key of a JSON object, and a metric must have a name.
            object.__setattr__(self, "name", "unnamed")


@dataclass(slots=True)
class ScoreRanges:
    """Which scores of a run leave 0 to 1, and which one is the value of its trials."""

    names: dict[str, None] = field(default_factory=dict)  # In the order of the source, without measurements.
    wide: set[str] = field(default_factory=set)

    def add(self, scores: Iterable[SourceScore]) -> None:
        """Take note of the scores of a trial."""
        for score in scores:
            if score.value is None or score.higher_is_better is None:
                continue
            self.names[score.name] = None
            if not 0.0 <= score.value <= 1.0 or score.higher_is_better is False:
                self.wide.add(score.name)

    @property
    def headline(self) -> str | None:
        """The score that is the value of a trial; None if all leave 0 to 1."""
        return next((name for name in self.names if name not in self.wide), None)

    def remarks(self) -> list[str]:
        """Say which scores are only metrics."""
        if not self.names:
            return []
        if self.headline is None:
            listed = ", ".join(self.names)
            return [f"no score stays within 0 to 1 ({listed}): they are metrics, and no trial has a value or passes"]
        found = []
        if self.wide:
            wide = ", ".join(name for name in self.names if name in self.wide)
            found.append(f"imported as metrics only, as not from 0 to 1, or as lower is better: {wide}")
        if len(self.names) - len(self.wide) > 1:
            found.append(f"{self.headline} is the value of a trial; the other scores are metrics")
        return found

    def score(
        self, scores: Sequence[SourceScore], *, value: float | None = None, passed: bool | None = None
    ) -> Score | None:
        """Return the score of a trial; None if the source has none.

        Value and verdict are those of the source if it has them. Without a verdict, a value of at least 0.5 passes.
        """
        metrics = [self._metric(score) for score in scores if score.value is not None]
        deciding = self.headline
        headline = next((score for score in scores if score.name == deciding), None)
        if value is None and headline is not None:
            value = headline.value
        if value is None:
            if passed is None and (self.headline is not None or not metrics):
                return None
            value = float(bool(passed))
        if passed is None and headline is not None:
            passed = headline.passed
        if passed is None:
            passed = self.headline is not None and value >= 0.5
        reason = "" if headline is None else headline.reason
        return Score(value, passed, reason[:_LONGEST_REASON], _distinct(metrics))

    def _metric(self, score: SourceScore) -> Metric:
        value = score.value or 0.0
        passed = score.passed
        judged = score.higher_is_better is True and score.name not in self.wide
        if passed is None and judged:
            passed = value >= 0.5
        direction = score.higher_is_better if judged or score.higher_is_better is False else None
        reason = score.reason[:_LONGEST_REASON]
        return Metric(score.name, value, 0.0, score.metadata, passed, reason, direction)


def _distinct(metrics: Iterable[Metric]) -> list[Metric]:
    return list({metric.name: metric for metric in metrics}.values())
