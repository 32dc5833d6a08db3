"""A judge that checks a list of criteria with signed points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError, OutputParseError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.judges.judge import Judging, material_of
from fairtrial.scoring.evaluator import Case
from fairtrial.scoring.score import SHARE, Metric, Score


@first_is(str)
@dataclass(frozen=True, slots=True)
class RubricItem:
    """One criterion of a rubric. Points below 0 are for what an output must not do."""

    criterion: str
    points: float

    def __post_init__(self) -> None:
        if not self.criterion.strip() or not math.isfinite(self.points) or self.points == 0:
            raise ConfigurationError(
                f"a rubric item must have a criterion and points that are finite and not 0 (got {self.criterion!r}, "
                f"{self.points!r})"
            )


@dataclass(frozen=True, slots=True)
class ItemVerdict:
    """The verdict on one criterion: its number, the reason, and whether it is met."""

    criterion: int
    reason: str
    met: Literal["yes", "no"]


@dataclass(frozen=True, slots=True)
class RubricOutput:
    """The verdicts on all criteria."""

    verdicts: tuple[ItemVerdict, ...]


class Rubric(Judging):
    """Checks every criterion of a rubric in one call."""

    __slots__ = ("_pass_at", "items")

    def __init__(
        self, adapter: ProviderAdapter | None, items: Sequence[RubricItem] | None, *, pass_at: float, **rest: Any
    ) -> None:
        super().__init__(adapter, "; ".join(item.criterion for item in items or ()) or "the sample's rubric", **rest)
        self.items = None if items is None else tuple(items)
        self._pass_at = pass_at

    @property
    def question(self) -> str | None:
        """What it asks; None if the criteria come from the samples."""
        return None if self.items is None else _question(self.items)

    async def score(self, case: Case) -> Score:
        """Ask about all criteria in one call."""
        items = _items(self.reference(case)) if self.items is None else self.items
        guarded = self.guarded(case)
        if guarded is not None:
            return guarded
        pieces = material_of(case.sample, case.output, include_input=self.include_input)
        if self.items is None:
            pieces.pop("reference_answer", None)  # It is the rubric.
        completion, output, asked = await self.ask(case, pieces, _question(items), RubricOutput)
        numbers = [verdict.criterion for verdict in output.verdicts]
        if numbers != list(range(1, len(items) + 1)):
            raise OutputParseError(
                f"judge {self.name!r} must answer criteria 1 to {len(items)} (got {numbers})", raw=completion.raw
            )
        share = rubric_share(items, [verdict.met == "yes" for verdict in output.verdicts])
        metrics = [_metric(item, verdict) for item, verdict in zip(items, output.verdicts, strict=True)]
        failed = [f"{metric.name} {metric.reason}".rstrip() for metric in metrics if not metric.passed]
        metrics.append(Metric("points", share, higher_is_better=True, bounds=rubric_bounds(items)))
        value = min(max(share, 0.0), 1.0)
        details = self.provenance(case, completion, asked)
        return self.verdict(value, value >= self._pass_at, "; ".join(failed), details, metrics)


def rubric_share(items: Sequence[RubricItem], met: Sequence[bool]) -> float:
    """Return the points of the met criteria as a share of the positive points; below 0 if harm outweighs."""
    earned = math.fsum(item.points for item, is_met in zip(items, met, strict=True) if is_met)
    return earned / math.fsum(item.points for item in items if item.points > 0)


def rubric_bounds(items: Sequence[RubricItem]) -> tuple[float, float]:
    """Return the least and the greatest share of points."""
    return rubric_share(items, [item.points < 0 for item in items]), 1.0


def _metric(item: RubricItem, verdict: ItemVerdict) -> Metric:
    met = verdict.met == "yes"
    good = met == (item.points > 0)
    return Metric(
        f"{verdict.criterion}: {item.criterion}",
        float(good),
        metadata={"met": met, "points": item.points},
        passed=good,
        reason=verdict.reason,
        higher_is_better=True,
        bounds=SHARE,
    )


def _question(items: Sequence[RubricItem]) -> str:
    listed = "\n".join(f"{number}. {item.criterion}" for number, item in enumerate(items, 1))
    return (
        "Decide for each criterion, on its own, whether the output to assess meets it. Some criteria describe faults: "
        f"answer yes if the output has the fault.\n{listed}\n\n"
        'Answer with a JSON object {"verdicts": [...]} that holds one object for each criterion, in order: '
        '"criterion", its number, then "reason", one sentence, then "met", "yes" or "no".'
    )


def _items(given: Any) -> tuple[RubricItem, ...]:
    """Return the items of a rubric: a mapping of criteria to points, or items, pairs or objects."""
    rows: Iterable[Any] = given.items() if isinstance(given, Mapping) else given if isinstance(given, Sequence) else ()
    items = tuple(_item(row) for row in rows) if not isinstance(given, str) else ()
    if not any(item.points > 0 for item in items):
        raise ConfigurationError(
            "a rubric must have at least one criterion with points above 0, as in "
            f'{{"Names a doctor.": 5, "Gives a dose.": -8}} (got {given!r})'
        )
    return items


def _item(row: Any) -> RubricItem:
    if isinstance(row, RubricItem):
        return row
    try:
        criterion, points = (row["criterion"], row["points"]) if isinstance(row, Mapping) else row
        return RubricItem(criterion, float(points))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"a rubric item must have a criterion and points (got {row!r})") from None


def rubric(
    adapter: ProviderAdapter,
    items: Mapping[str, float] | Sequence[RubricItem | tuple[str, float]] | None = None,
    *,
    pass_at: float = 0.5,
    include_input: bool = True,
    name: str = "rubric",
) -> Rubric:
    """A judge that checks criteria with points; negative points are for faults.

    The value is the points of the met criteria over the sum of the positive points, clipped to 0 to 1; the metric
    `points` is the same share unclipped, and every criterion is a metric. Arora et al. (2025), HealthBench,
    arXiv:2505.08775.

    Args:
        adapter: The judge's model.
        items: The criteria and their points. Without them, each sample's `expected` is its rubric: a mapping, or a list
            of objects with "criterion" and "points".
        pass_at: The value from which it passes.
        include_input: Show the judge the sample's input too.
        name: Its name in reports.
    """
    chosen = None if items is None else _items(items)
    return Rubric(adapter, chosen, pass_at=pass_at, include_input=include_input, name=name)
