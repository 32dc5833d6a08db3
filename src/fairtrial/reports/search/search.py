"""A search for a better text of a parameter: runs of one suite, told apart by their tags.

Every evaluation of a candidate is a run of the suite `NAME+search`, on samples of the train or the validation split,
and so is every question to the model that proposes candidates. The last comparison is a run of `NAME+test` with two
experiments. The text of a candidate is the parameter of its experiment, its id and its parents are tags. How the search
ended is a note of its first run, that of the baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from fairtrial.errors import UnknownRunError
from fairtrial.reports.figures.metrics import PASSED, VALUE, ExperimentSource, run_totals
from fairtrial.reports.render.renderable import Renderable

if TYPE_CHECKING:
    from fairtrial.reports.compare.comparison import Comparison, MetricComparison
    from fairtrial.reports.render.document import Document
    from fairtrial.store.protocol import RunRecord, RunStore

SEARCHING, TESTING = "+search", "+test"
"""What the suites of a search are called, after the name of the suite that it improves."""
BASELINE, WINNER = "baseline", "winner"
"""The experiments of the run on the test split."""
SEARCH, CANDIDATE, PARENTS, PARAMETER, OPTIMIZER = "search", "candidate", "parents", "parameter", "optimizer"
"""The tags of the runs. Questions to the model that proposes candidates have no candidate."""


@dataclass(frozen=True, slots=True)
class SplitScore:
    """The mean score of a candidate on a split, over the samples that were scored; errors are left out and named.

    Attributes:
        samples: Number of samples with a score.
        mean: Their mean score; None without any.
        low: Lower end of its interval, which does not allow for the choice among candidates.
        high: Upper end.
        errors: The ids of the samples without a score, after every retry.
        runs: The ids of the runs, the oldest first.
    """

    samples: int
    mean: float | None
    low: float | None
    high: float | None
    errors: tuple[str, ...]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SearchCandidate:
    """A text that the search evaluated.

    Attributes:
        id: The start of the hash of the text.
        number: Its place among the candidates; 0 is the baseline.
        text: The text of the parameter.
        parents: The ids of the candidates that it was made from; texts that were never evaluated are left out.
        train: Its scores on samples of the train split; None without any.
        validation: Its scores on the validation split; None if it did not come that far.
    """

    id: str
    number: int
    text: str
    parents: tuple[str, ...]
    train: SplitScore | None
    validation: SplitScore | None

    @property
    def name(self) -> str:
        """Its name on screens."""
        return f"candidate {self.number}" if self.number else BASELINE


@dataclass(frozen=True)  # No slots: what a cached property keeps is in the instance.
class Search(Renderable):
    """A search for a better text of a parameter.

    Attributes:
        name: The name of the search.
        suite: The suite that it improves.
        parameter: The parameter of its experiments.
        optimizer: What proposes candidates.
        status: "unfinished" until the search has ended; then "untested" if its run on the test split is missing or
            unfinished, "tested", or "no candidate" if the validation split showed none that is better.
        ended: Why the search ended; empty before.
        best: The id of the candidate that the validation split chose; None before the end.
        candidates: The baseline, then the others in the order of their first evaluation.
        trials: Number of trials that were executed for the search and the test.
        cost_usd: What they cost, judges and proposals included.
        unpriced: Number of calls without a known price.
        test_run: The id of the run on the test split; None without one.
    """

    json_format: ClassVar[str] = "fairtrial.search/1"
    name: str
    suite: str
    parameter: str
    optimizer: str
    status: str
    ended: str
    best: str | None
    candidates: tuple[SearchCandidate, ...]
    trials: int
    cost_usd: float
    unpriced: int
    test_run: str | None
    store: RunStore = field(repr=False, compare=False)

    def __getitem__(self, id: str) -> SearchCandidate:
        return next(one for one in self.candidates if one.id == id)

    @property
    def winner(self) -> SearchCandidate | None:
        """The candidate that the validation split chose; None before the end, or if it is the baseline."""
        return None if self.best in (None, self.candidates[0].id) else self[str(self.best)]

    @cached_property
    def comparison(self) -> Comparison | None:
        """Baseline and winner on the test split, once both have results; it is one look at the split."""
        if self.status != "tested":
            return None
        from fairtrial.reports.compare.compare import compare
        from fairtrial.reports.report import EvalReport

        report = EvalReport(self.store, self.store.get_run(str(self.test_run)))
        return compare(report[BASELINE], report[WINNER])

    @property
    def tested(self) -> MetricComparison | None:
        """The metric that was tested: the first of the comparison."""
        return None if self.comparison is None else self.comparison.candidates[0].metrics[0]

    @property
    def validation_gain(self) -> float | None:
        """What the winner gained on the split that chose it: an optimistic figure."""
        sides = (self.winner, self.candidates[0])
        new, old = (None if one is None or one.validation is None else one.validation.mean for one in sides)
        return None if new is None or old is None else new - old

    @property
    def optimism(self) -> float | None:
        """By how much the gain on the validation split exceeds that on the test split."""
        gain, test = self.validation_gain, self.tested
        return None if gain is None or test is None or test.difference is None else gain - test.difference

    def document(self, cases: int) -> Document:
        """Return what is shown, with at most `cases` flipped samples in each direction."""
        from fairtrial.reports.search.document import search_document

        return search_document(self, cases)

    def to_json(self) -> dict[str, object]:  # type: ignore[override]  # plain JSON, as there
        """Return all figures as JSON values; docs/reference/json.md describes them."""
        comparison = None if self.comparison is None else self.comparison.to_json()
        figures = {"validation_gain": self.validation_gain, "optimism": self.optimism, "comparison": comparison}
        return {**super().to_json(), **figures}


def find_searches(store: RunStore, suite: str | None = None) -> list[str]:
    """Return the names of the searches in a store, or of those that improve a suite; the newest first."""
    runs = store.runs(suite=None if suite is None else suite + SEARCHING)
    return list(dict.fromkeys(run.tags[SEARCH] for run in runs if _is_search(run)))


def read_search(store: RunStore, name: str) -> Search:
    """Read a search by its name.

    Raises:
        UnknownRunError: there is none.
    """
    every = [run for run in reversed(store.runs()) if run.tags.get(SEARCH) == name]
    runs = [run for run in every if _is_search(run)]
    first = next((run for run in runs if CANDIDATE in run.tags), None)
    if first is None:
        raise UnknownRunError(f"there is no search {name!r} in this store")
    note, tested = first.noted.search, [run for run in every if run.suite.endswith(TESTING)]
    candidates = _candidates(store, runs, first.tags[PARAMETER])
    test = next((run for run in reversed(tested) if note is not None and run.tags[CANDIDATE] == note.best), None)
    if note is None:
        status = "unfinished"
    elif note.best == candidates[0].id:
        status = "no candidate"
    else:
        status = "tested" if test is not None and test.status == "finished" else "untested"
    trials, cost, unpriced = spent(store, every)
    return Search(
        name=name,
        suite=first.suite.removesuffix(SEARCHING),
        parameter=first.tags[PARAMETER],
        optimizer=first.tags[OPTIMIZER],
        status=status,
        ended="" if note is None else note.ended,
        best=None if note is None else note.best,
        candidates=candidates,
        trials=trials,
        cost_usd=cost,
        unpriced=unpriced,
        test_run=None if test is None else test.run_id,
        store=store,
    )


def search_of(run: RunRecord) -> str | None:
    """Return the name of the search that a run belongs to; None if it belongs to none."""
    return run.tags.get(SEARCH) if run.suite.endswith((SEARCHING, TESTING)) else None


def spent(store: RunStore, runs: Iterable[RunRecord]) -> tuple[int, float, int]:
    """Return the trials of runs, what they cost, and the number of calls without a known price."""
    totals = [one for run in runs for one in run_totals(store, run)]
    return (
        sum(sum(one.outcomes.values()) for one in totals),
        sum(one.total_cost_usd for one in totals),
        sum(one.unpriced_calls + one.unpriced_judge_calls for one in totals),
    )


def tested_metric(store: RunStore, run: RunRecord) -> str:
    """Return the metric to test: pass or fail if every score of a run is 0 or 1, else the value."""
    from fairtrial.reports.figures.column_reader import read_columns

    values = read_columns(ExperimentSource(store, run, run.experiments[0]), metrics=(VALUE,)).values[VALUE]
    return PASSED if all(value in (0, 1) or value != value for value in values.flat) else VALUE


def _is_search(run: RunRecord) -> bool:
    return SEARCH in run.tags and run.suite.endswith(SEARCHING)


def _candidates(store: RunStore, runs: Sequence[RunRecord], parameter: str) -> tuple[SearchCandidate, ...]:
    by_id: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        if CANDIDATE in run.tags and run.noted.split is not None:
            by_id.setdefault(run.tags[CANDIDATE], {}).setdefault(run.noted.split.name, []).append(run)
    made = []
    for number, (id, splits) in enumerate(by_id.items()):
        first = next(iter(splits.values()))[0]
        scores = [split_score(store, splits[name]) if name in splits else None for name in ("train", "validation")]
        parents = tuple(one for one in first.tags.get(PARENTS, "").split() if one in by_id and one != id)
        made.append(SearchCandidate(id, number, str(first.params[first.experiments[0]][parameter]), parents, *scores))  # type: ignore[index,call-overload]
    return tuple(made)


def split_score(store: RunStore, runs: Sequence[RunRecord]) -> SplitScore:
    """Return the score of a candidate over its runs on one split, which share no sample."""
    import numpy as np

    from fairtrial import stats
    from fairtrial.reports.figures.column_reader import read_columns

    parts = [read_columns(ExperimentSource(store, run, run.experiments[0]), metrics=(VALUE,)) for run in runs]
    found = [part.scores(VALUE, "scored") for part in parts]
    scores = stats.Repeats(*(np.concatenate([getattr(one, name) for one in found]) for name in ("flat", "counts")))
    ids = [id for part in parts for id in part.ids]
    errors = tuple(id for id, repeats in zip(ids, scores.counts, strict=True) if not repeats)
    clusters = None
    if any(part.clusters is not None for part in parts):  # They have numbers of their own in each run.
        own = [np.arange(len(part.ids)) if part.clusters is None else part.clusters for part in parts]
        starts = np.cumsum([0, *(len(part.ids) for part in parts)])
        clusters = np.concatenate([codes + start for codes, start in zip(own, starts, strict=False)])
    mean = stats.mean_interval(scores, clusters=clusters)
    low, high = (None, None) if mean.interval is None else (mean.interval.low, mean.interval.high)
    return SplitScore(mean.n, mean.mean, low, high, errors, tuple(run.run_id for run in runs))
