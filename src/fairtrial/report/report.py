"""The report of a run: every figure is computed where the results are, nothing is held but sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fairtrial.analysis.experiment import ExperimentAnalysis, RunAnalysis, TotalsAnalysis
from fairtrial.analysis.metrics import ERRORS
from fairtrial.analysis.source import ExperimentSource, adaptive_note
from fairtrial.analysis.summaries import group_by, summarize
from fairtrial.codec import from_json
from fairtrial.errors import CodecError, ConfigurationError, FairtrialError
from fairtrial.report.renderable import WithTestCases
from fairtrial.report.results import Results
from fairtrial.store.export import ExportFormat
from fairtrial.store.portable import load_run, save_run
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.analysis.estimates import Estimate
    from fairtrial.stats import Interval

type ReportFormat = ExportFormat | Literal["html", "md", "json", "xml"]
"""Tables of results, one row per trial; or the report itself as a page, Markdown, JSON or JUnit XML."""


class ExperimentReport(ExperimentAnalysis, WithTestCases):
    """The figures of one experiment of a run. Undefined figures are None, never 0."""

    def group_by(self, key: str | Callable[[EvalResult], Any]) -> dict[Any, dict[str, Any]]:
        """A summary for each value of a metadata key of the samples, or of what a function says of a result."""
        if callable(key):
            return {value: summarize(group) for value, group in group_by(self.results, key).items()}
        return {
            tuple(value) if isinstance(value, list) else value: TotalsAnalysis(totals).summary
            for value, totals in self.store.group_totals(self.run.run_id, key)
            if totals.experiment == self.name
        }

    @property
    def results(self) -> Sequence[EvalResult]:
        """The results, streamed from the store."""
        return Results(self.store, self.run.run_id, sum(self.totals.outcomes.values()), experiment=self.name)

    def failed_samples(self) -> Sequence[EvalResult]:
        """The scored results that did not pass, streamed from the store."""
        count = self.successful - self.totals.passed
        return Results(self.store, self.run.run_id, count, experiment=self.name, passed=False)

    def _record(self) -> RunAnalysis:
        return RunAnalysis(self.store, self.run, (self,))

    def __repr__(self) -> str:
        return f"<ExperimentReport {self.name} of {self.run.run_id}: {self.total} of {self.planned} trials>"


class EvalReport(WithTestCases):
    """The report of a run: one `ExperimentReport` for each experiment, and the figures that can be added up.

    With one experiment its figures are here too; with several, `report["terse"].pass_rate` says whose is meant.
    """

    def __init__(self, store: RunStore, run: RunRecord) -> None:
        self.store = store
        self.run = run

    @cached_property
    def _parts(self) -> Mapping[str, ExperimentReport]:
        return {
            totals.experiment: ExperimentReport(self.store, self.run, totals)
            for totals in self.store.totals(self.run_id)
        }

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.run.run_id

    @property
    def dataset_name(self) -> str:
        """The dataset's name."""
        return self.run.dataset_name

    @property
    def status(self) -> str:
        """ "finished", or how the run stands."""
        return self.run.status

    @cached_property
    def config(self) -> EvalConfig:
        """The settings of the run."""
        try:
            return from_json(EvalConfig, dict(self.run.config))
        except CodecError as error:
            raise FairtrialError(f"the settings of run {self.run_id} were stored by another version: {error}") from None

    @property
    def adaptive(self) -> Mapping[str, Any] | None:
        """What adaptive stopping found, if the run was allowed to stop by itself; None for other runs."""
        return adaptive_note(self.run)

    @property
    def experiments(self) -> tuple[str, ...]:
        """The names of the experiments."""
        return self.run.experiments

    def __getitem__(self, experiment: str) -> ExperimentReport:
        try:
            return self._parts[experiment]
        except KeyError:
            known = ", ".join(self.experiments)
            raise KeyError(f"no experiment {experiment!r} in run {self.run_id}; it has {known}") from None

    def only(self, example: str) -> ExperimentReport:
        """The report's one experiment; with several, an error that shows by `example` how to name one."""
        if len(self.experiments) == 1:
            return self[self.experiments[0]]
        names = ", ".join(self.experiments)
        raise ConfigurationError(f"this report covers {len(self.experiments)} experiments ({names}): {example}")

    def _only(self, figure: str) -> ExperimentReport:
        if len(self._parts) != 1:
            names = ", ".join(self.experiments)
            raise ValueError(
                f"this report covers {len(self._parts)} experiments ({names}) and they have no common {figure}: "
                f'ask for one, as in report["{self.experiments[-1]}"].{figure}'
            )
        return next(iter(self._parts.values()))

    @property
    def planned(self) -> int:
        """Trials in the plan."""
        return self.run.planned

    @property
    def total(self) -> int:
        """Trials with a result, of whatever outcome."""
        return sum(part.total for part in self._parts.values())

    @property
    def successful(self) -> int:
        """Trials that were scored."""
        return sum(part.successful for part in self._parts.values())

    @property
    def errors(self) -> Mapping[str, int]:
        """How many trials ended in each kind of error."""
        parts = [part.errors for part in self._parts.values()]
        return {
            name: sum(part.get(name, 0) for part in parts) for name in ERRORS if any(name in part for part in parts)
        }

    @property
    def not_run(self) -> int:
        """Planned trials without a result."""
        return self.planned - self.total

    @property
    def total_tokens(self) -> int:
        """Input and output tokens of all the task's model calls."""
        return sum(part.total_tokens for part in self._parts.values())

    @property
    def cost_usd(self) -> float | None:
        """What the task's model calls cost; None where no price is known."""
        known = [part.cost_usd for part in self._parts.values() if part.cost_usd is not None]
        return sum(known) if known else None

    @property
    def judge_cost_usd(self) -> float | None:
        """What the judges' model calls cost; None where no price is known."""
        known = [part.judge_cost_usd for part in self._parts.values() if part.judge_cost_usd is not None]
        return sum(known) if known else None

    @property
    def cache_hits(self) -> int:
        """Model calls that the response cache answered."""
        return sum(part.cache_hits for part in self._parts.values())

    @property
    def unpriced_calls(self) -> int:
        """Model calls of tasks and judges whose cost is not known: where there are any, costs are lower bounds."""
        return sum(part.unpriced_calls for part in self._parts.values())

    @property
    def pass_rate(self) -> float | None:
        """The share of scored trials that passed."""
        return self._only("pass_rate").pass_rate

    @property
    def pass_rate_all(self) -> float | None:
        """The share of all finished trials that passed: an error counts as a failure."""
        return self._only("pass_rate_all").pass_rate_all

    @property
    def mean_score(self) -> float | None:
        """The mean value of scored trials."""
        return self._only("mean_score").mean_score

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of scored trials; the mean score unless metrics have weights."""
        return self._only("mean_reward").mean_reward

    @property
    def criteria(self) -> Mapping[str, Estimate]:
        """The pass rate of every criterion, with its interval; a score without criteria is one of its own."""
        return self._only("criteria").criteria

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Every rate and mean with its interval; repeats and clusters are allowed for."""
        return self._only("estimates").estimates

    @property
    def pass_rate_interval(self) -> Interval | None:
        """Where the pass rate over scored trials may lie."""
        return self._only("pass_rate_interval").pass_rate_interval

    @property
    def pass_rate_all_interval(self) -> Interval | None:
        """Where the pass rate may lie, with errors as failures."""
        return self._only("pass_rate_all_interval").pass_rate_all_interval

    @property
    def mean_score_interval(self) -> Interval | None:
        """Where the mean value of scored trials may lie."""
        return self._only("mean_score_interval").mean_score_interval

    @property
    def mean_latency_ms(self) -> float | None:
        """How long the task took on average, in milliseconds."""
        return self._only("mean_latency_ms").mean_latency_ms

    @property
    def scores_by_criterion(self) -> Mapping[str, float]:
        """The mean of every criterion and metric over the scored trials that have it."""
        return self._only("scores_by_criterion").scores_by_criterion

    @property
    def summary(self) -> dict[str, Any]:
        """n, mean, std, min and max of the rewards, the mean score, the pass rates and the number of errors."""
        return self._only("summary").summary

    @property
    def results(self) -> Sequence[EvalResult]:
        """All results in plan order, streamed from the store."""
        count = sum(sum(part.totals.outcomes.values()) for part in self._parts.values())
        return Results(self.store, self.run_id, count)

    def failed_samples(self) -> Sequence[EvalResult]:
        """The scored results that did not pass, streamed from the store."""
        count = sum(part.successful - part.totals.passed for part in self._parts.values())
        return Results(self.store, self.run_id, count, passed=False)

    def group_by(self, key: str | Callable[[EvalResult], Any]) -> dict[Any, dict[str, Any]]:
        """A summary for each value of a metadata key of the samples, or of what a function says of a result."""
        if callable(key):
            return {value: summarize(group) for value, group in group_by(self.results, key).items()}
        return self._only("group_by").group_by(key)

    def refresh(self) -> EvalReport:
        """The report as the run stands now."""
        return EvalReport(self.store, self.store.get_run(self.run_id))

    def save(self, path: Path | str) -> None:
        """Write the run, whole, into one file that `load` reads anywhere."""
        save_run(self.store, self.run_id, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> EvalReport:
        """The report of a run that was saved."""
        store, run_id = load_run(Path(path))
        return cls(store, store.get_run(run_id))

    def export(self, path: Path | str, format: ReportFormat | None = None) -> None:
        """Write the results as csv, jsonl or parquet, or the report as html, md, json or xml (JUnit).

        The format is the file's suffix unless given. Whatever the number of results, few are held at a time.
        """
        from fairtrial.render.files import write

        write(self._record(), Path(path), format, name=type(self).__name__, tables=True)

    @property
    def parts(self) -> list[ExperimentReport]:
        """The experiments, in their order."""
        return [self[name] for name in self.experiments]

    def _record(self) -> RunAnalysis:
        return RunAnalysis(self.store, self.run, tuple(self.parts))

    def __repr__(self) -> str:
        return f"<EvalReport {self.run.suite} {self.run_id}: {self.total} of {self.planned} trials>"


def source_of(report: EvalReport | ExperimentReport, example: str) -> ExperimentSource:
    """Where the experiment that is meant is read; of several, `example` shows in an error how to name one."""
    return (report.only(example) if isinstance(report, EvalReport) else report).source
