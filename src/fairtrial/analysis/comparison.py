"""What a comparison says, as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from typing import Literal, overload

from fairtrial.analysis.source import ExperimentSource
from fairtrial.trials.result import EvalResult

type Verdict = Literal["better", "worse", "no detectable difference", "unknown"]
type Direction = Literal["gained", "lost"]

SHOWN = 100
"""How many flipped samples are named in a record; `Comparison.flipped` has them all."""

_PAGE = 50  # Samples whose results are read together.


@dataclass(frozen=True, slots=True)
class Side:
    """One of the compared experiments and what became of its trials.

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
    """The same comparison on the pairs that were scored on both sides, errors left out."""

    n: int
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric of a candidate against the baseline. What is undefined is None, and `notes` say why.

    `wins` are samples on which the candidate is better; `difference` is candidate - baseline, whichever is better.
    `adjusted_p` allows for all the tests made together. `mde` is the true difference that this comparison would have
    found with power .8, `needed` the number of samples at which a true difference like the observed one would show.
    `same_as` names an earlier metric that has the same numbers, and so the same answer.
    """

    metric: str
    lower_is_better: bool
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


@dataclass(frozen=True, slots=True)
class SliceComparison:
    """A candidate against the baseline on some of the samples."""

    name: str
    by: str
    n: int
    metrics: tuple[MetricComparison, ...]

    def __getitem__(self, metric: str) -> MetricComparison:
        return _named(self.metrics, metric)


@dataclass(frozen=True, slots=True)
class Flips:
    """Samples whose share of passes went up or down, the largest change first; as many ids as are worth listing."""

    gained: tuple[str, ...]
    lost: tuple[str, ...]
    gained_count: int
    lost_count: int


@dataclass(frozen=True, slots=True)
class CandidateComparison:
    """One candidate against the baseline: `comparison["terse"]["passed"].verdict`."""

    candidate: Side
    matched: int
    only_baseline: int
    only_candidate: int
    missing_share: float
    metrics: tuple[MetricComparison, ...]
    slices: tuple[SliceComparison, ...]
    flips: Flips
    warnings: tuple[str, ...]

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


@dataclass(frozen=True, slots=True)
class Flip:
    """A sample that flipped, with its results on both sides."""

    sample_id: str
    baseline: tuple[EvalResult, ...]
    candidate: tuple[EvalResult, ...]


class FlippedSamples(Sequence[Flip]):
    """Flipped samples, the largest change first; their results are read from the stores as they are asked for."""

    def __init__(self, ids: Sequence[str], baseline: ExperimentSource, candidate: ExperimentSource) -> None:
        self.ids = tuple(ids)
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


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """Candidates against one baseline: `comparison["terse"]["passed"].verdict`.

    `tests` counts the tests that were made together, for which adjusted p-values allow.
    """

    baseline: Side
    candidates: tuple[CandidateComparison, ...]
    alpha: float
    tests: int
    warnings: tuple[str, ...]
    # (gained, lost) of each candidate with where to read their results; none of it belongs to the record.
    sources: tuple[tuple[FlippedSamples, FlippedSamples], ...] = field(default=(), repr=False, compare=False)

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
        """All samples that the candidate lost (or gained) against the baseline, with both sides' results."""
        if not self.sources:
            raise ValueError("this comparison was made of numbers alone and has no results to show")
        if candidate is None and len(self.candidates) > 1:
            raise ValueError(f"say whose: {', '.join(one.name for one in self.candidates)}")
        wanted = self.candidates[0] if candidate is None else self[candidate]
        gained, lost = self.sources[self.candidates.index(wanted)]
        return gained if direction == "gained" else lost


def _named(metrics: Sequence[MetricComparison], metric: str) -> MetricComparison:
    for one in metrics:
        if one.metric == metric:
            return one
    raise KeyError(f"metric {metric!r} was not compared; these were: {', '.join(one.metric for one in metrics)}")
