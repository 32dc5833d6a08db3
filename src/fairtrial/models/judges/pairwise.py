"""A judge that compares two outputs, in both orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from fairtrial.data.sample import Sample
from fairtrial.errors import NothingToScoreError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.judges.judge import Judging, is_empty, short_name
from fairtrial.scoring.evaluator import Case
from fairtrial.scoring.score import SHARE, Metric, Score


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
            return self.verdict(0.0, False, "the output is empty; the judge was not asked")
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
