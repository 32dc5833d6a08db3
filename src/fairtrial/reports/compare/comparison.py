"""A comparison, and what it consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from typing import TYPE_CHECKING, ClassVar, Literal, overload

from fairtrial.base.frozen import first_is
from fairtrial.reports.compare.looks import TestLooks
from fairtrial.reports.compare.pairing import ChangedSamples
from fairtrial.reports.figures.analysis_plan import PlanCheck
from fairtrial.reports.figures.metrics import ExperimentSource
from fairtrial.reports.render.renderable import Renderable
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.reports.compare.pairing import SampleChanges
    from fairtrial.reports.render.document import Document

type Verdict = Literal["better", "worse", "higher", "lower", "as good as", "no detectable difference", "unknown"]
"""What a candidate is to the baseline. "higher" and "lower" are for metrics of which nobody said which way is better;
"as good as" says that the difference is smaller than the one that matters."""
type Direction = Literal["gained", "lost"]

SHOWN = 100
"""How many flipped samples are named in a record; `Comparison.flipped` has them all."""

_PAGE = 50  # Samples per batch.


@dataclass(frozen=True, slots=True)
class Side:
    """One of the compared experiments and the outcomes of its trials.

    `failures` are task errors and timeouts; `missing` are trials that say nothing about the system: scorer errors,
    dead letters, trials that were not run.
    """

    name: str
    run_id: str
    experiment: str
    samples: int
    trials: int
    scored: int
    failures: int
    missing: int

    @property
    def missing_share(self) -> float:
        """The share of planned trials that are missing."""
        return self.missing / self.trials if self.trials else 0.0


@dataclass(frozen=True, slots=True)
class ScoredOnly:
    """The same comparison on pairs scored on both sides, without errors."""

    n: int
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric of a candidate compared with the baseline. Undefined values are None; `notes` say why.

    `wins` are samples on which the candidate is better; `difference` is candidate - baseline, whichever is better.
    `adjusted_p` allows for all the tests made together. `mde` is the true difference that this comparison would have
    found with power .8, `needed` the number of samples that would find one of `smallest_difference`, the smallest that
    matters, with that power. `lower_is_better` is None if nobody declared it; `wins` then count what is higher.
    `same_as` names an earlier metric that has the same numbers, and so the same answer. `labels` are the numbers of
    people's labels, the candidate's and the baseline's, by which both sides were corrected; None if they were not.
    `drawn` says whether the labelled trials are known to be random samples; else the rates only hold if they are.
    `missing` counts the pairs without a value on one side, and `worst` is the interval that holds whatever these would
    have been: None if none is missing, or if the metric has no declared range. "As good as" must hold for `worst` too.
    `uncounted` are failures of the system that the metric has no worst value for. `headline` is the part of `sentence`
    with the verdict.
    """

    metric: str
    lower_is_better: bool | None
    n: int
    clusters: int | None
    baseline: float | None
    candidate: float | None
    wins: int
    losses: int
    ties: int
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    adjusted_p: float | None
    method: str | None
    test: str | None
    mde: float | None
    needed: int | None
    verdict: Verdict
    sentence: str
    scored_only: ScoredOnly | None
    same_as: str | None
    notes: tuple[str, ...]
    smallest_difference: float | None = None
    labels: tuple[int, int] | None = None
    missing: int = 0
    worst: tuple[float, float] | None = None
    drawn: bool | None = None
    uncounted: int = 0
    headline: str = ""


@dataclass(frozen=True, slots=True)
class SliceComparison:
    """A candidate compared with the baseline on a slice of the samples."""

    name: str
    by: str
    n: int
    metrics: tuple[MetricComparison, ...]

    def __getitem__(self, metric: str) -> MetricComparison:
        return _named(self.metrics, metric)


@dataclass(frozen=True, slots=True)
class SliceTest:
    """Whether the slices by one key differ from each other in the change of one metric.

    `slices` counts those with enough samples to take part. `adjusted_p` allows for all such tests of the comparison.
    """

    by: str
    metric: str
    slices: int
    n: int
    p: float
    adjusted_p: float
    differ: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Flips:
    """Samples whose share of passes went up or down, largest change first, with a limited number of ids."""

    gained: tuple[str, ...]
    lost: tuple[str, ...]
    gained_count: int
    lost_count: int


@dataclass(frozen=True, slots=True)
class CandidateComparison:
    """One candidate compared with the baseline: `comparison["terse"]["passed"].verdict`.

    `matched` counts the samples that are the same on both sides, `changed` those whose id means something else.
    """

    candidate: Side
    matched: int
    only_baseline: int
    only_candidate: int
    missing_share: float
    metrics: tuple[MetricComparison, ...]
    slices: tuple[SliceComparison, ...]
    flips: Flips
    warnings: tuple[str, ...]
    slice_tests: tuple[SliceTest, ...] = ()
    changed: ChangedSamples | None = None

    @property
    def name(self) -> str:
        """The candidate's name."""
        return self.candidate.name

    @property
    def verdict(self) -> Verdict:
        """The verdict on the first metric."""
        return self.metrics[0].verdict

    def __getitem__(self, metric: str) -> MetricComparison:
        return _named(self.metrics, metric)

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{metric.metric} {metric.verdict}" for metric in self.metrics[:3])
        return f"<CandidateComparison {self.name}: {verdicts}>"


@dataclass(frozen=True, slots=True)
class Flip:
    """A sample that flipped, with its results on both sides."""

    sample_id: str
    baseline: tuple[EvalResult, ...]
    candidate: tuple[EvalResult, ...]


class FlippedSamples(Sequence[Flip]):
    """Flipped samples, largest change first; their results are read lazily from the stores."""

    def __init__(self, ids: Sequence[str], baseline: ExperimentSource, candidate: ExperimentSource) -> None:
        self.ids = tuple(ids) if isinstance(ids, list) else ids
        self.sides = (baseline, candidate)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Flip]:
        for some in batched(self.ids, _PAGE):
            yield from self._read(some)

    @overload
    def __getitem__(self, index: int) -> Flip: ...
    @overload
    def __getitem__(self, index: slice) -> FlippedSamples: ...
    def __getitem__(self, index: int | slice) -> Flip | FlippedSamples:
        if isinstance(index, slice):
            return FlippedSamples(self.ids[index], *self.sides)
        return next(self._read((self.ids[index],)))

    def _read(self, ids: Sequence[str]) -> Iterator[Flip]:
        found: list[dict[str, list[EvalResult]]] = []
        for side in self.sides:
            by_id: dict[str, list[EvalResult]] = {}
            for result in side.store.results(side.run.run_id, experiment=side.name, sample_ids=ids):
                by_id.setdefault(result.sample_id, []).append(result)
            found.append(by_id)
        baseline, candidate = found
        for one in ids:
            yield Flip(one, tuple(baseline.get(one, ())), tuple(candidate.get(one, ())))

    def __repr__(self) -> str:
        return f"<{len(self)} flipped samples>"


@first_is(Side)
@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Renderable):
    """Candidates against one baseline: `comparison["terse"]["passed"].verdict`, or print it.

    `tests` counts the tests that were made together, for which adjusted p-values allow; with a plan, the primary metric
    and the others are adjusted separately. `looks` are those at the test split that it is on, if any.
    `print(comparison.in_detail())` shows the tests, the trials and the comparison without errors too. `plan` says
    whether it is as planned; None without a plan.
    """

    json_format: ClassVar[str] = "fairtrial.comparison/1"
    baseline: Side
    candidates: tuple[CandidateComparison, ...]
    alpha: float
    tests: int
    warnings: tuple[str, ...]
    plan: PlanCheck | None = None
    looks: TestLooks | None = None
    # How each sample changed, for each candidate, and where to read the results of the baseline and the candidates;
    # neither belongs to the record.
    changes: tuple[SampleChanges, ...] = field(default=(), repr=False, compare=False)
    sources: tuple[ExperimentSource, ...] = field(default=(), repr=False, compare=False)

    def __getitem__(self, candidate: str) -> CandidateComparison:
        for one in self.candidates:
            if one.name == candidate:
                return one
        known = ", ".join(one.name for one in self.candidates)
        raise KeyError(f"no candidate {candidate!r} in this comparison; it has {known}")

    @property
    def verdict(self) -> Verdict:
        """The verdict on the first metric, if there is one candidate."""
        if len(self.candidates) != 1:
            names = ", ".join(one.name for one in self.candidates)
            raise ValueError(
                f"this comparison has {len(self.candidates)} candidates ({names}): ask for one, as in "
                f'comparison["{self.candidates[-1].name}"].verdict'
            )
        return self.candidates[0].verdict

    def flipped(self, direction: Direction = "lost", candidate: str | None = None) -> FlippedSamples:
        """Return all samples that the candidate lost (or gained), with the results of both sides."""
        if not self.sources:
            raise ValueError("this comparison was made of numbers alone and has no results to show")
        if candidate is None and len(self.candidates) > 1:
            raise ValueError(f"say whose: {', '.join(one.name for one in self.candidates)}")
        wanted = self.candidates[0] if candidate is None else self[candidate]
        place = self.candidates.index(wanted)
        return FlippedSamples(self.changes[place].ids_of(direction), self.sources[0], self.sources[place + 1])

    def document(self, cases: int) -> Document:
        """Return what is shown, with at most `cases` flipped samples in each direction."""
        from fairtrial.reports.compare.document import comparison_document

        return comparison_document(self, cases)

    def in_detail(self) -> DetailedComparison:
        """Return the same comparison, to be printed with every detail."""
        return DetailedComparison(self)

    def to_latex(self) -> str:
        """Return the table of differences for a paper; it needs no LaTeX package, and foreign text is escaped."""
        from fairtrial.reports.compare.methods import comparison_table

        return comparison_table(self)

    def methods(self) -> str:
        """Return a paragraph for the methods section of a paper, made of what was done."""
        from fairtrial.reports.compare.methods import methods_paragraph

        return methods_paragraph(self)

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(one.name for one in self.candidates)} with {self.baseline.name}>"


class DetailedComparison(Renderable):
    """A comparison that is printed with every detail."""

    __slots__ = ("comparison",)

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def document(self, cases: int) -> Document:
        """Return what is shown, with at most `cases` flipped samples in each direction."""
        from fairtrial.reports.compare.document import comparison_document

        return comparison_document(self.comparison, cases, detailed=True)


def _named(metrics: Sequence[MetricComparison], metric: str) -> MetricComparison:
    for one in metrics:
        if one.metric == metric:
            return one
    raise KeyError(f"metric {metric!r} was not compared; these were: {', '.join(one.metric for one in metrics)}")
