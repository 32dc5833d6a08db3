"""Judges with a rubric, a checklist, a panel, or two answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError, NothingToScoreError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.judges.judge import Judging, is_empty, material_of, short_name
from fairtrial.scoring.combine import Combined
from fairtrial.scoring.evaluator import Case, Evaluator, Scorer, resolve
from fairtrial.scoring.score import SHARE, Metric, Score, mean_value, merge


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question: its number, the reason, and yes or no."""

    question: int
    reason: str
    answer: Literal["yes", "no"]


@dataclass(frozen=True, slots=True)
class ChecklistOutput:
    """The answers to all questions."""

    answers: tuple[Answer, ...]


class Checklist(Judging):
    """Asks several yes/no questions about one output."""

    __slots__ = ("questions",)

    def __init__(self, adapter: ProviderAdapter, questions: Sequence[str], **rest: Any) -> None:
        super().__init__(adapter, "; ".join(questions), **rest)
        self.questions = tuple(questions)

    @property
    def question(self) -> str:
        """What it asks: all questions at once."""
        listed = "\n".join(f"{number}. {question}" for number, question in enumerate(self.questions, 1))
        return (
            f"Answer each question about the output to assess with yes or no:\n{listed}\n\n"
            'Answer with a JSON object {"answers": [...]} that holds one object for each question, in order: '
            '"question", its number, then "reason", one sentence, then "answer", "yes" or "no".'
        )

    async def score(self, case: Case) -> Score:
        """Ask all questions in one call."""
        return self.empty() if is_empty(case.output) else await self.answered(case)

    async def answered(self, case: Case) -> Score:
        """Return the score of the answers to all questions."""
        completion, verdict, asked = await self.ask(case, self.material(case), self.question, ChecklistOutput)
        numbers = [answer.question for answer in verdict.answers]
        self.check_numbers("questions", numbers, len(self.questions), completion)
        metrics = [
            _metric(f"{answer.question}: {question}", answer.answer == "yes", answer.reason)
            for answer, question in zip(verdict.answers, self.questions, strict=True)
        ]
        value = sum(metric.value for metric in metrics) / len(metrics)
        return self.share(case, value, _failures(metrics), (completion, asked), metrics)


def _metric(name: str, good: bool, reason: str, metadata: Mapping[str, Any] = EMPTY) -> Metric:
    return Metric(name, float(good), 0.0, metadata, good, reason, higher_is_better=True, bounds=SHARE)


def _failures(metrics: Sequence[Metric]) -> str:
    return "; ".join(f"{metric.name} {metric.reason}".rstrip() for metric in metrics if not metric.passed)


def checklist(
    adapter: ProviderAdapter,
    questions: Sequence[str],
    *,
    pass_at: float = 1.0,
    include_input: bool = True,
    name: str | None = None,
) -> Checklist:
    """A judge that answers yes/no questions; the value is the share of yes, and it passes from `pass_at` on.

    Write the questions so that yes is good.
    """
    if not questions:
        raise ConfigurationError("a checklist must have at least one question (got none)")
    return Checklist(adapter, questions, pass_at=pass_at, include_input=include_input, name=name or "checklist")


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

    __slots__ = ("items",)

    def __init__(self, adapter: ProviderAdapter | None, items: Sequence[RubricItem] | None, **rest: Any) -> None:
        super().__init__(adapter, "; ".join(item.criterion for item in items or ()) or "the sample's rubric", **rest)
        self.items = None if items is None else tuple(items)

    @property
    def question(self) -> str | None:
        """What it asks; None if the criteria come from the samples."""
        return None if self.items is None else _question(self.items)

    async def score(self, case: Case) -> Score:
        """Ask about all criteria in one call."""
        items = _items(self.reference(case)) if self.items is None else self.items
        if is_empty(case.output):
            return self.empty()
        pieces = material_of(case.sample, case.output, include_input=self.include_input)
        if self.items is None:
            pieces.pop("reference_answer", None)  # It is the rubric.
        completion, output, asked = await self.ask(case, pieces, _question(items), RubricOutput)
        numbers = [verdict.criterion for verdict in output.verdicts]
        self.check_numbers("criteria", numbers, len(items), completion)
        share = rubric_share(items, [verdict.met == "yes" for verdict in output.verdicts])
        metrics = [_item_metric(item, verdict) for item, verdict in zip(items, output.verdicts, strict=True)]
        points = Metric("points", share, higher_is_better=True, bounds=rubric_bounds(items))
        value = min(max(share, 0.0), 1.0)
        return self.share(case, value, _failures(metrics), (completion, asked), [*metrics, points])


def rubric_share(items: Sequence[RubricItem], met: Sequence[bool]) -> float:
    """Return the points of the met criteria as a share of the positive points; below 0 if harm outweighs."""
    earned = math.fsum(item.points for item, is_met in zip(items, met, strict=True) if is_met)
    return earned / math.fsum(item.points for item in items if item.points > 0)


def rubric_bounds(items: Sequence[RubricItem]) -> tuple[float, float]:
    """Return the least and the greatest share of points."""
    return rubric_share(items, [item.points < 0 for item in items]), 1.0


def _item_metric(item: RubricItem, verdict: ItemVerdict) -> Metric:
    met = verdict.met == "yes"
    details = {"met": met, "points": item.points}
    return _metric(f"{verdict.criterion}: {item.criterion}", met == (item.points > 0), verdict.reason, details)


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


@dataclass(frozen=True, slots=True)
class PairOutput:
    """The reply of a pairwise judge: the reason, then the choice."""

    reason: str
    better: Literal["first", "second", "equal"]


class PairwiseJudge(Judging):
    """A judge that compares the output with another. A preference that depends on the order counts as a tie."""

    __slots__ = ("_other",)

    def __init__(
        self, adapter: ProviderAdapter, criterion: str, other: Callable[[Case], Any] | None, **rest: Any
    ) -> None:
        super().__init__(adapter, criterion, **rest)
        self._other = other

    async def score(self, case: Case) -> Score:
        """Ask twice, with the two outputs in both orders."""
        other = self.reference(case) if self._other is None else self._other(case)
        if is_empty(other):
            raise NothingToScoreError(f"judge {self.name!r} has no other output to compare with")
        if is_empty(case.output):
            return self.empty()
        answers: dict[bool, tuple[float, str, dict[str, Any]]] = {}
        errors: list[Exception] = []

        async def ask(ours_first: bool) -> None:
            try:
                answers[ours_first] = await self._ask_once(case, other, ours_first=ours_first)
            except Exception as error:  # A task group would wrap it, and hide its type and its `retry_after`.
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(ask, True)
            await ask(False)
        if errors:
            raise errors[0]
        (first, why_first, kept_first), (second, why_second, kept_second) = answers[True], answers[False]
        agreed = first == second
        value = first if agreed else 0.5
        reason = (
            why_first if agreed else f"the verdict depends on the order, so it is a tie ({why_first} / {why_second})"
        )
        metrics = [
            Metric("ours_first", first, metadata=kept_first, bounds=SHARE),
            Metric("ours_second", second, metadata=kept_second, bounds=SHARE),
            Metric("consistent", float(agreed), bounds=SHARE),
        ]
        return self.verdict(value, value >= 0.5, reason, metrics=metrics)

    @property
    def question(self) -> str:
        """What it asks."""
        return (
            f"Criterion: {self.criterion}\n\nWhich of the two outputs meets the criterion better? Their order says "
            'nothing about them.\n\nAnswer with a JSON object: first "reason", one or two sentences, then "better", '
            'which is "first", "second" or "equal".'
        )

    async def _ask_once(self, case: Case, other: Any, *, ours_first: bool) -> tuple[float, str, dict[str, Any]]:
        both = (case.output, other) if ours_first else (other, case.output)
        pieces = pair_of(case.sample, *both, include_input=self.include_input)
        completion, verdict, asked = await self.ask(case, pieces, self.question, PairOutput)
        ours = "first" if ours_first else "second"
        value = 0.5 if verdict.better == "equal" else float(verdict.better == ours)
        return value, verdict.reason, self.provenance(case, completion, asked)


def pair_of(sample: Sample[Any, Any], first: Any, second: Any, *, include_input: bool) -> dict[str, Any]:
    """Return what a judge of two outputs sees, in order."""
    pieces: dict[str, Any] = {"input": sample.input} if include_input and sample.input is not None else {}
    return {**pieces, "first_output": first, "second_output": second}


def pairwise_judge(
    adapter: ProviderAdapter,
    criterion: str,
    *,
    other: Callable[[Case], Any] | None = None,
    include_input: bool = True,
    name: str | None = None,
) -> PairwiseJudge:
    """A judge that compares the output with another one: a win is 1, a tie 0.5, a loss 0; a win or a tie passes.

    Args:
        adapter: The judge's model.
        criterion: What makes one output better.
        other: Returns the output to compare with; by default the sample's `expected`.
        include_input: Show the judge the sample's input too.
        name: Its name in reports; by default the beginning of the criterion.
    """
    return PairwiseJudge(adapter, criterion, other, include_input=include_input, name=name or short_name(criterion))
