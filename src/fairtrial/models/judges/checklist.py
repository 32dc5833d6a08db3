"""A judge that answers yes/no questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairtrial.errors import ConfigurationError, OutputParseError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.judges.judge import Judging
from fairtrial.scoring.evaluator import Case
from fairtrial.scoring.score import SHARE, Metric, Score


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

    __slots__ = ("_pass_at", "questions")

    def __init__(self, adapter: ProviderAdapter, questions: Sequence[str], *, pass_at: float, **rest: Any) -> None:
        super().__init__(adapter, "; ".join(questions), **rest)
        self.questions = tuple(questions)
        self._pass_at = pass_at

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
        guarded = self.guarded(case)
        if guarded is not None:
            return guarded
        completion, verdict, asked = await self.ask(case, self.material(case), self.question, ChecklistOutput)
        numbers = [answer.question for answer in verdict.answers]
        if numbers != list(range(1, len(self.questions) + 1)):
            raise OutputParseError(
                f"judge {self.name!r} must answer questions 1 to {len(self.questions)} (got {numbers})",
                raw=completion.raw,
            )
        yes = [answer.answer == "yes" for answer in verdict.answers]
        value = sum(yes) / len(yes)
        metrics = [
            Metric(
                f"{answer.question}: {question}",
                float(good),
                passed=good,
                reason=answer.reason,
                higher_is_better=True,
                bounds=SHARE,
            )
            for answer, question, good in zip(verdict.answers, self.questions, yes, strict=True)
        ]
        failed = [f"{metric.name} {metric.reason}".rstrip() for metric in metrics if not metric.passed]
        details = self.provenance(case, completion, asked)
        return self.verdict(value, value >= self._pass_at, "; ".join(failed), details, metrics)


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
