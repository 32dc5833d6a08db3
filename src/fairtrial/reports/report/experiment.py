"""The report of one experiment: counts and means from sums, the rest from one pass over its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

from fairtrial.base.frozen import JSON
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import CRITERION, ExperimentSource, run_totals
from fairtrial.reports.figures.summaries import TotalsAnalysis, group_by, summarize
from fairtrial.reports.render.renderable import Renderable, WithTestCases
from fairtrial.reports.report.results import Results, TrialTable
from fairtrial.store.protocol import RunRecord, RunStore, Totals
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    import pandas
    import polars

    from fairtrial.reports.compare.comparison import Comparison
    from fairtrial.reports.figures.estimates import Estimate
    from fairtrial.reports.figures.figures import Figures
    from fairtrial.reports.render.document import Document
    from fairtrial.reports.report.answer import ReportAnswer
    from fairtrial.stats import Interval


class RunReport(WithTestCases):
    """What shows a run, with all of its experiments or one."""

    store: RunStore
    run: RunRecord

    @property
    def parts(self) -> Sequence[ExperimentReport]:
        """The experiments, in their order."""
        raise NotImplementedError

    def document(self, cases: int) -> Document:
        """Return what is shown, with at most `cases` trials of each kind."""
        from fairtrial.reports.report.document import report_document

        return report_document(self, cases)

    def answer(self) -> ReportAnswer:
        """Return what is shown first: a row for each experiment, how they compare, the worst trials, next commands."""
        from fairtrial.reports.report.document import report_answer

        return report_answer(self)

    def in_detail(self) -> DetailedReport:
        """Return the same report, to be printed with criteria, means, quantiles and slices."""
        return DetailedReport(self)

    def to_json(self) -> dict[str, JSON]:
        """Return all figures as JSON values; docs/reference/json.md describes them."""
        from fairtrial.reports.report.run_json import report_json

        return report_json(self)

    def write_junit(self, file: IO[str]) -> None:
        """Write a test suite for each experiment of a run, with a test case for each result."""
        from fairtrial.reports.report.run_json import write_run

        write_run(self, file)


class DetailedReport(Renderable):
    """A report that is printed with every detail."""

    __slots__ = ("_report",)

    def __init__(self, report: RunReport) -> None:
        self._report = report

    def document(self, cases: int) -> Document:
        """Return what is shown, with at most `cases` trials of each kind."""
        from fairtrial.reports.report.document import report_document

        return report_document(self._report, cases, full=True)


class ComparedReport(Renderable):
    """The report of a run, shown with comparisons of its experiments with a baseline."""

    def __init__(self, report: RunReport, comparisons: Sequence[Comparison]) -> None:
        self._report = report
        self._comparisons = tuple(comparisons)

    def document(self, cases: int) -> Document:
        """Return what is shown: the report, with the comparisons before the list of trials."""
        from fairtrial.reports.report.document import report_with_comparisons

        return report_with_comparisons(self._report, self._comparisons, cases)


class ExperimentReport(TotalsAnalysis, RunReport):
    """The figures of one experiment of a run. Undefined figures are None, never 0."""

    def __init__(self, store: RunStore, run: RunRecord, totals: Totals) -> None:
        self.source = ExperimentSource(store, run, totals.experiment)
        self.store, self.run, self.name = store, run, totals.experiment
        super().__init__(totals)

    @classmethod
    def read(cls, source: ExperimentSource) -> ExperimentReport:
        """Read the sums of an experiment."""
        found = run_totals(source.store, source.run)
        return cls(source.store, source.run, next(one for one in found if one.experiment == source.name))

    @property
    def parts(self) -> Sequence[ExperimentReport]:
        """The experiment itself."""
        return (self,)

    def only(self, example: str) -> ExperimentReport:
        """Return the experiment itself."""
        return self

    @property
    def planned(self) -> int:
        """Trials in the plan."""
        return self.run.dataset_size * self.run.repeats

    @property
    def not_run(self) -> int:
        """Planned trials without a result."""
        return self.planned - self.total

    @cached_property
    def figures(self) -> Figures:
        """All rates and means with their intervals, computed once."""
        # numpy and scipy take longer to load than a run without intervals takes to be shown.
        from fairtrial.reports.figures.figures import read_figures

        return read_figures(self.source)

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """All rates and means with their intervals, allowing for repeats and clusters."""
        return self.figures.estimates

    @property
    def pass_rate_interval(self) -> Interval | None:
        """The interval of the pass rate over scored trials."""
        return self.figures.interval("pass_rate")

    @property
    def pass_rate_all_interval(self) -> Interval | None:
        """The interval of the pass rate, with errors as failures."""
        return self.figures.interval("pass_rate_all")

    @property
    def mean_score_interval(self) -> Interval | None:
        """The interval of the mean value of scored trials."""
        return self.figures.interval("mean_score")

    @property
    def mean_score_all_interval(self) -> Interval | None:
        """The interval of the mean value, with errors as 0."""
        return self.figures.interval("mean_score_all")

    @property
    def scores_by_criterion(self) -> Mapping[str, float]:
        """The mean over samples of every criterion and metric, in the scored trials that have it.

        Scores without any are a criterion of their own, under the evaluator's name.
        """
        found = self.store.metric_totals(self.run.run_id).get(self.name, {})
        if not found and self.mean_score is not None:
            return {self.run.evaluator: self.mean_score}
        # A sample may lack the metric in some of its trials, have a weight, or not be in the figures.
        if self.run.repeats > 1 or self.run.noted.is_adaptive or self.run.noted.sampling is not None:
            means = {estimate.name: estimate.value for estimate in self.estimates}
            return {name: mean for name in found if (mean := means.get(name)) is not None}
        return {name: totals.mean for name, totals in found.items()}

    @property
    def criteria(self) -> Mapping[str, Estimate]:
        """The pass rate of every criterion, with its interval; a score without criteria counts as one criterion."""
        found = {
            estimate.name.removeprefix(CRITERION): estimate
            for estimate in self.estimates
            if estimate.name.startswith(CRITERION)
        }
        whole = self.figures.get("pass_rate")
        return found if found or whole is None else {self.run.evaluator: whole}

    @property
    def adaptive(self) -> Mapping[str, Any] | None:
        """This experiment's figures if the run stopped by its own rule: `estimate`, `low`, `high`, `n` and others.

        They take the place of ordinary intervals, which do not hold for such a run; None for other runs. All keys:
        `fairtrial.store.notes.AdaptiveRate`.
        """
        note = self.run.noted.adaptive
        return None if note is None else note.experiments[self.name].to_json()

    def group_by(self, key: str | Callable[[EvalResult], Any]) -> dict[Any, dict[str, Any]]:
        """Summarize the results for each value of a metadata key, or of a function of a result."""
        if callable(key):
            return {value: summarize(group) for value, group in group_by(self.results, key).items()}
        groups = {
            tuple(value) if isinstance(value, list) else value: TotalsAnalysis(totals).summary
            for value, totals in self.store.group_totals(self.run.run_id, key)
            if totals.experiment == self.name
        }
        if set(groups) == {None}:
            keys = metadata_keys(self.store, self.run.run_id)
            hint = f"it has {', '.join(keys)}" if keys else "its samples have no metadata"
            raise ConfigurationError(f"no sample of run {self.run.run_id} has metadata {key!r}; {hint}")
        return groups

    @property
    def results(self) -> Sequence[EvalResult]:
        """The results, streamed from the store."""
        return Results(self.store, self.run.run_id, sum(self.totals.outcomes.values()), experiment=self.name)

    def failed_samples(self) -> Sequence[EvalResult]:
        """The scored results that did not pass, streamed from the store."""
        count = self.successful - self.totals.passed
        return Results(self.store, self.run.run_id, count, experiment=self.name, passed=False)

    def trials(self) -> TrialTable:
        """Return the trials as a table that can be filtered, shown, and converted to pandas or polars."""
        return TrialTable(self.store, self.run, experiment=self.name)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with a row for every trial."""
        return self.trials().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame with a row for every trial."""
        return self.trials().to_polars()

    def __repr__(self) -> str:
        return f"<ExperimentReport {self.name} of {self.run.run_id}: {self.total} of {self.planned} trials>"


def metadata_keys(store: RunStore, run_id: str) -> list[str]:
    """Return the metadata keys of the samples of a run."""
    return sorted({key for _, sample in store.samples(run_id) for key in sample.metadata})
