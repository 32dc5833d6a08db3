"""The report of a run. Figures are computed in the store; only sums are held in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, cast, get_args, overload

from fairtrial.base.codec import from_json
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import CodecError, ConfigurationError, FairtrialError, StoreError
from fairtrial.reports.figures.metrics import ERRORS, ExperimentSource, run_totals
from fairtrial.reports.figures.summaries import group_by, summarize
from fairtrial.reports.render.renderable import WithTestCases
from fairtrial.reports.report.experiment import ExperimentReport, RunReport
from fairtrial.reports.report.results import Results, TrialTable, store_results
from fairtrial.reports.run_names import find_run, name_of
from fairtrial.store.export import ExportFormat, export_results
from fairtrial.store.open import find_database, open_store
from fairtrial.store.portable import only_run, open_saved, save_run
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import EvalResult, OutputT

if TYPE_CHECKING:
    import pandas
    import polars

    from fairtrial.reports.figures.estimates import Estimate
    from fairtrial.stats import Interval

_TABLES: tuple[str, ...] = get_args(ExportFormat.__value__)

type ReportFormat = ExportFormat | Literal["html", "md", "json", "xml"]
"""Tables of results, one row per trial; or the report itself as a page, Markdown, JSON or JUnit XML."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a report has read of its run, and the state that the run had."""

    state: tuple[int, float | None]
    parts: Mapping[str, ExperimentReport]
    results: Sequence[EvalResult[Any]]


class EvalReport(RunReport, Generic[OutputT]):  # noqa: UP046 - they have defaults
    """The report of a run: one `ExperimentReport` for each experiment, and the figures that can be added up.

    With one experiment its figures are here too; with several, `report["terse"].pass_rate` says whose is meant.

    A report is read from a store; `EvalReport(results=...)` makes one of results that are at hand.

    Args:
        store: Where the run is.
        run: The run.
        results: Results to report on, instead of a stored run.
        run_id: The id of the run that is made of them; by default a new one.
        dataset_name: A name for their dataset.
        config: The settings they were made with.
        output_types: What the tasks of the experiments return, so that outputs of results have these types; without
            it they are JSON values, as stored.
    """

    file_formats: ClassVar[tuple[str, ...]] = (*WithTestCases.file_formats, *_TABLES)

    @overload
    def __init__(self, store: RunStore, run: RunRecord, *, output_types: Mapping[str, Any] = EMPTY) -> None: ...
    @overload
    def __init__(
        self,
        *,
        results: Iterable[EvalResult[OutputT]],
        run_id: str = "",
        dataset_name: str = "",
        config: EvalConfig | None = None,
    ) -> None: ...
    def __init__(
        self,
        store: RunStore | None = None,
        run: RunRecord | None = None,
        *,
        results: Iterable[EvalResult[OutputT]] | None = None,
        run_id: str = "",
        dataset_name: str = "",
        config: EvalConfig | None = None,
        output_types: Mapping[str, Any] = EMPTY,
    ) -> None:
        if results is not None:
            store, run = store_results(results, run_id=run_id, dataset_name=dataset_name, config=config)
        if store is None or run is None:
            raise TypeError("an EvalReport is made of a store and a run, or of results=...")
        _check_types(store, run)
        self.store = store
        self.run = run
        self._output_types = output_types
        self._reading: _Reading | None = None

    @staticmethod
    def of[O](results: Iterable[EvalResult[O]], *, dataset_name: str = "") -> EvalReport[O]:
        """Create a report from results: synthetic, filtered, or combined from several reports.

        It is a run of its own, in memory. Every sample has its place in it, in the order of the results; two results
        of one sample, experiment and repeat are refused.
        """
        return EvalReport(results=results, dataset_name=dataset_name)

    def _read(self) -> _Reading:
        """Return what was read of the run. It is read again after its end, and after each change of stored results."""
        try:
            run = self.store.get_run(self.run_id)
        except StoreError:  # Deleted or closed since.
            if self._reading is None:
                raise
            return self._reading
        state = (run.revision, run.finished_at)
        if self._reading is None or self._reading.state != state:
            parts = {
                totals.experiment: ExperimentReport(self.store, self.run, totals)
                for totals in run_totals(self.store, self.run)
            }
            count = sum(sum(part.totals.outcomes.values()) for part in parts.values())
            self._reading = _Reading(state, parts, Results(self.store, self.run_id, count, self._output_types))
        return self._reading

    @property
    def _parts(self) -> Mapping[str, ExperimentReport]:
        return self._read().parts

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
        """The status of the run, such as "finished"."""
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
        """The figures of early stopping, if the run could stop early; None for other runs.

        All keys: `fairtrial.store.notes.AdaptiveNote`.
        """
        note = self.run.noted.adaptive
        return None if note is None else note.to_json()

    @property
    def experiments(self) -> tuple[str, ...]:
        """The names of the experiments."""
        return self.run.experiments

    def __getitem__(self, experiment: str) -> ExperimentReport:
        try:
            return self._parts[experiment]
        except KeyError:
            names = ", ".join(self.experiments)
            raise KeyError(f"no experiment {experiment!r} in run {self.run_id}; it has {names}") from None

    def only(self, example: str) -> ExperimentReport:
        """Return the only experiment; with several, raise an error with the example."""
        if len(self.experiments) == 1:
            return self[self.experiments[0]]
        names = ", ".join(self.experiments)
        raise ConfigurationError(f"this report covers {len(self.experiments)} experiments ({names}): {example}")

    def _only(self, figure: str) -> ExperimentReport:
        return self.only(f'they have no common {figure}; ask for one, as in report["{self.experiments[-1]}"].{figure}')

    @property
    def planned(self) -> int:
        """Trials in the plan."""
        return self.run.planned

    @property
    def total(self) -> int:
        """Trials with a result, of any outcome."""
        return sum(part.total for part in self._parts.values())

    @property
    def successful(self) -> int:
        """Trials that were scored."""
        return sum(part.successful for part in self._parts.values())

    total_samples, successful_samples = total, successful  # The names of a specification.

    @property
    def errors(self) -> Mapping[str, int]:
        """The number of trials for each kind of error."""
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
        """The cost of the task's model calls; None if no price is known."""
        costs = [part.cost_usd for part in self._parts.values() if part.cost_usd is not None]
        return sum(costs) if costs else None

    @property
    def judge_cost_usd(self) -> float | None:
        """The cost of the judges' model calls; None if no price is known."""
        costs = [part.judge_cost_usd for part in self._parts.values() if part.judge_cost_usd is not None]
        return sum(costs) if costs else None

    @property
    def cache_hits(self) -> int:
        """Model calls answered by the response cache."""
        return sum(part.cache_hits for part in self._parts.values())

    @property
    def unpriced_calls(self) -> int:
        """Model calls of tasks and judges without a known price: if there are any, costs are lower bounds."""
        return sum(part.unpriced_calls for part in self._parts.values())

    @property
    def cut_off_calls(self) -> int:
        """Answers to the task that were cut off by a token limit."""
        return sum(part.cut_off_calls for part in self._parts.values())

    @property
    def refused_calls(self) -> int:
        """Calls of the task that the model or a filter declined, whether they were scored or not."""
        return sum(part.refused_calls for part in self._parts.values())

    @property
    def unknown_endings(self) -> Mapping[str, int]:
        """Answers to the task by the unknown reason with which they ended; they count as complete."""
        return sum((Counter(part.unknown_endings) for part in self._parts.values()), Counter())

    @property
    def pass_rate(self) -> float | None:
        """The mean over samples of the share of a sample's scored trials that passed.

        None if no trial was scored; `print(report)` then shows a dash.
        """
        return self._only("pass_rate").pass_rate

    @property
    def pass_rate_all(self) -> float | None:
        """The mean over samples of the share of a sample's finished trials that passed: an error is a failure."""
        return self._only("pass_rate_all").pass_rate_all

    @property
    def mean_score(self) -> float | None:
        """The mean over samples of the mean value of a sample's scored trials."""
        return self._only("mean_score").mean_score

    @property
    def mean_reward(self) -> float | None:
        """The mean over samples of the mean reward of scored trials; the mean score unless metrics have weights."""
        return self._only("mean_reward").mean_reward

    @property
    def criteria(self) -> Mapping[str, Estimate]:
        """The pass rate of every criterion, with its interval; a score without criteria counts as one criterion."""
        return self._only("criteria").criteria

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """All rates and means with their intervals, allowing for repeats and clusters."""
        return self._only("estimates").estimates

    @property
    def pass_rate_interval(self) -> Interval | None:
        """The interval of the pass rate over scored trials."""
        return self._only("pass_rate_interval").pass_rate_interval

    @property
    def pass_rate_all_interval(self) -> Interval | None:
        """The interval of the pass rate, with errors as failures."""
        return self._only("pass_rate_all_interval").pass_rate_all_interval

    @property
    def mean_score_interval(self) -> Interval | None:
        """The interval of the mean value of scored trials."""
        return self._only("mean_score_interval").mean_score_interval

    @property
    def mean_latency_ms(self) -> float | None:
        """The mean duration of the task, in milliseconds."""
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
    def results(self) -> Sequence[EvalResult[OutputT]]:
        """All results in plan order, streamed from the store."""
        return self._read().results

    def failed_samples(self) -> Sequence[EvalResult[OutputT]]:
        """The scored results that did not pass, streamed from the store."""
        count = sum(part.successful - part.totals.passed for part in self._parts.values())
        return Results(self.store, self.run_id, count, self._output_types, passed=False)

    def group_by(self, key: str | Callable[[EvalResult], Any]) -> dict[Any, dict[str, Any]]:
        """Summarize the results for each value of a metadata key, or of a function of a result."""
        if callable(key):
            return {value: summarize(group) for value, group in group_by(self.results, key).items()}
        return self._only("group_by").group_by(key)

    def trials(self) -> TrialTable:
        """Return the trials as a table that can be filtered, shown, and converted to pandas or polars."""
        return TrialTable(self.store, self.run)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with a row for every trial."""
        return self.trials().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame with a row for every trial."""
        return self.trials().to_polars()

    def refresh(self) -> EvalReport[OutputT]:
        """Return the report with the current state of the run."""
        return EvalReport(self.store, self.store.get_run(self.run_id), output_types=self._output_types)

    def save(self, path: Path | str) -> None:
        """Write the whole run to a file that `load` can read; missing folders are created."""
        save_run(self.store, self.run_id, Path(path))

    @classmethod
    def load(cls, store: RunStore | Path | str, run: str | None = None) -> EvalReport:
        """Load the report of a saved run, or of a run in a store.

        Args:
            store: A file that `save` wrote, the file or URL of a store, or an open store.
            run: The run, as on the command line: `"support"` (its latest run), `"support@3"`, or the start of an id.
                A store with one run needs none.

        Raises:
            StoreError: there are several runs, and none was named; or there is no such run (`UnknownRunError`).
        """
        if not isinstance(store, Path | str):
            return cls._load(store, run, "the store", "store")
        database = find_database(str(store)) if "://" in str(store) else Path(store)
        if isinstance(database, Path):
            opened, source, argument = open_saved(database), str(store), repr(str(store))
        else:  # The URL of a server is not repeated: it may contain a password.
            opened, source, argument = open_store(database), "the store", "url"
        try:
            return cls._load(opened, run, source, argument)
        except FairtrialError:
            opened.close()
            raise

    @classmethod
    def _load(cls, store: RunStore, run: str | None, source: str, argument: str) -> EvalReport:
        if run is None:
            return cls(store, only_run(store, source, argument))
        named = find_run(store, run)
        if named.experiment is not None:
            name = name_of(named.run)
            raise ConfigurationError(
                f"EvalReport.load() opens whole runs (got {run!r})\n"
                f"open {name!r} and take its experiment: EvalReport.load({argument}, {name!r})[{named.experiment!r}]"
            )
        return cls(store, named.run)

    def export(self, path: Path | str, format: ReportFormat | None = None) -> None:
        """Write the results as csv, jsonl or parquet, or the report as html, md, json or xml (JUnit).

        By default the format is that of the file's suffix. Only a few results are in memory at a time.
        """
        chosen = self._file_format(path, format)
        if chosen in _TABLES:
            export_results(self.store, self.run_id, path, cast("ExportFormat", chosen))
        else:
            super().export(path, chosen)

    @property
    def parts(self) -> list[ExperimentReport]:
        """The experiments, in their order."""
        return [self[name] for name in self.experiments]

    def __repr__(self) -> str:
        return f"<EvalReport {self.run.suite} {self.run_id}: {self.total} of {self.planned} trials>"


def _check_types(store: object, run: object) -> None:
    """Refuse a path for a store and a name for a run, with the call that takes them."""
    if isinstance(run, RunRecord) and not isinstance(store, str | Path):
        return
    argument = repr(str(store)) if isinstance(store, str | Path) and "://" not in str(store) else "store"
    name = run.name if isinstance(run, RunRecord) else run
    raise ConfigurationError(
        f"EvalReport() takes an open store and a RunRecord (got {type(store).__name__} and {type(run).__name__})\n"
        f"to open a run by name, use EvalReport.load({argument}, {name!r})"
    )


def sources_of(report: EvalReport | ExperimentReport) -> list[ExperimentSource]:
    """Return the sources of all experiments of a report."""
    return [part.source for part in report.parts]
