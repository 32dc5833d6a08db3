"""A judge of short factual answers with three labels, and the F-score of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.judges.judge import Judging, is_empty
from fairtrial.scoring.evaluator import Case
from fairtrial.scoring.score import SHARE, Metric, Score

type ShortAnswerLabel = Literal["correct", "incorrect", "not_attempted"]
LABELS: tuple[ShortAnswerLabel, ...] = ("correct", "incorrect", "not_attempted")

_QUESTION = """\
The input is a factual question, and the reference answer is true. Which label fits the output to assess?
- correct: it states the reference answer, and nothing in it contradicts that. Wording, language, true extra facts and \
hedging do not matter as long as the answer is clear. A number must agree to the last digit of the reference; a name \
may be shortened if it stays clear who or what is meant.
- incorrect: something in it contradicts the reference answer, even if the output is unsure or gives several candidates.
- not_attempted: it neither states nor contradicts the reference answer: it declines, asks back, or leaves out what \
was asked.

Answer with a JSON object: first "reason", one or two sentences, then "label", one of the labels."""


@dataclass(frozen=True, slots=True)
class ShortAnswerOutput:
    """The reply of the judge: the reason, then the label."""

    reason: str
    label: ShortAnswerLabel


class ShortAnswerJudge(Judging):
    """A judge that labels an answer as correct, incorrect or not attempted."""

    __slots__ = ()

    @property
    def question(self) -> str:
        """What it asks."""
        return _QUESTION

    async def score(self, case: Case) -> Score:
        """Ask for a label; an empty output is not attempted, without a call."""
        self.reference(case)
        if is_empty(case.output):
            return self._labelled("not_attempted", "the output is empty; the judge was not asked", {})
        completion, output, asked = await self.ask(case, self.material(case), self.question, ShortAnswerOutput)
        return self._labelled(output.label, output.reason, self.provenance(case, completion, asked))

    def _labelled(self, label: ShortAnswerLabel, reason: str, details: dict[str, Any]) -> Score:
        better = {"correct": True, "incorrect": False, "not_attempted": None}
        metrics = [Metric(each, float(each == label), higher_is_better=better[each], bounds=SHARE) for each in LABELS]
        passed = label == "correct"
        return self.verdict(float(passed), passed, reason, {"label": label, **details}, metrics)


def short_answer_judge(
    adapter: ProviderAdapter, *, include_input: bool = True, name: str = "short answer"
) -> ShortAnswerJudge:
    """A judge that labels answers to factual questions as correct, incorrect or not attempted; correct passes.

    The labels are metrics, so that reports give the rate of each. `short_answer_summary` computes the F-score of a run.
    Wei et al. (2024), Measuring short-form factuality in large language models, arXiv:2411.04368.
    """
    return ShortAnswerJudge(adapter, "The output states the reference answer.", include_input=include_input, name=name)


@first_is(int)
@dataclass(frozen=True, slots=True)
class ShortAnswerSummary:
    """The labels of a run: how many samples have each, in shares of samples, and the F-score.

    `f_score` is the harmonic mean of `correct` (of all) and `correct_given_attempted`; `low` and `high` are its 95%
    interval by Fieller's method over samples, None with fewer than ten samples or if all labels are equal.
    """

    samples: int
    correct: float
    incorrect: float
    not_attempted: float
    correct_given_attempted: float | None
    f_score: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" (95% interval {self.low:.1%} to {self.high:.1%})"
        return (
            f"F-score {self.f_score:.1%}{interval}: correct {self.correct:.1%}, incorrect {self.incorrect:.1%}, "
            f"not attempted {self.not_attempted:.1%} of {self.samples} samples"
        )


def short_answer_summary(results: Iterable[Any], *, name: str = "") -> ShortAnswerSummary:
    """Summarise the labels of `short_answer_judge`, of `report.results`. Repeats of a sample are averaged.

    Trials without a score (errors) count as not attempted: leaving them out would reward a system that fails.

    Args:
        results: The results of one experiment.
        name: The name of the judge, if it is a part of a combination: its metrics are then called `NAME.correct`.
    """
    prefix = f"{name}." if name else ""
    by_sample: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        score = result.score
        if score is None:
            right, wrong = 0.0, 0.0
        else:
            found = score.metric(f"{prefix}correct"), score.metric(f"{prefix}incorrect")
            if found[0] is None or found[1] is None:
                raise ConfigurationError(
                    f"the score of sample {result.sample_id!r} has no metric {prefix}correct: was it made by "
                    "short_answer_judge? Inside a combination, pass name= of the judge"
                )
            right, wrong = found[0], found[1]
        by_sample.setdefault(result.sample_id, []).append((right, wrong))
    if not by_sample:
        raise ConfigurationError("short_answer_summary needs at least one result (got none)")
    rows = [
        (math.fsum(right for right, _ in each) / len(each), math.fsum(wrong for _, wrong in each) / len(each))
        for each in by_sample.values()
    ]
    n = len(rows)
    correct, incorrect = math.fsum(right for right, _ in rows) / n, math.fsum(wrong for _, wrong in rows) / n
    attempted = correct + incorrect
    low, high = _fieller([(2 * right, 1 + right + wrong) for right, wrong in rows])
    return ShortAnswerSummary(
        n,
        correct,
        incorrect,
        1 - attempted,
        correct / attempted if attempted else None,
        2 * correct / (1 + attempted),
        low,
        high,
    )


_FEWEST = 10


def _fieller(pairs: list[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Return the 95% interval of a ratio of means: the ratios r for which y - r x has a mean that may be 0."""
    from scipy.stats import t as student

    n = len(pairs)
    if n < _FEWEST:
        return None, None
    y, x = math.fsum(one for one, _ in pairs) / n, math.fsum(other for _, other in pairs) / n
    spread = (n - 1) * n
    yy = math.fsum((one - y) ** 2 for one, _ in pairs) / spread
    xx = math.fsum((other - x) ** 2 for _, other in pairs) / spread
    xy = math.fsum((one - y) * (other - x) for one, other in pairs) / spread
    if yy <= 0:
        return None, None
    quantile = float(student.ppf(0.975, n - 1)) ** 2
    # (y - r x)^2 <= t^2 (yy - 2 r xy + r^2 xx), a quadratic in r. x is at least 1, so its leading factor is above 0
    # unless the sample is tiny.
    a, b, c = x * x - quantile * xx, x * y - quantile * xy, y * y - quantile * yy
    if a <= 0 or b * b < a * c:
        return None, None
    root = math.sqrt(b * b - a * c)
    return max((b - root) / a, 0.0), min((b + root) / a, 1.0)
