"""The figures of one experiment: counts and means from sums, the rest from one pass over its results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fairtrial.reports.figures.metrics import CRITERION, ERRORS, ExperimentSource, run_totals
from fairtrial.reports.figures.summaries import describe
from fairtrial.store.protocol import RunRecord, RunStore, SampleMeans, Totals
from fairtrial.store.totals import sample_means

if TYPE_CHECKING:
    from fairtrial.reports.figures.estimates import Estimate
    from fairtrial.reports.figures.figures import Figures
    from fairtrial.stats import Interval

_ROUNDING = 1e-15


class TotalsAnalysis:
    """Figures from the sums of an experiment, or of a slice of one."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals

    @property
    def total(self) -> int:
        """Trials with a result, of any outcome."""
        return sum(self.totals.outcomes.values()) - self.totals.outcomes.get("not_run", 0)

    @property
    def successful(self) -> int:
        """Trials that were scored."""
        return self.totals.outcomes.get("scored", 0)

    @property
    def errors(self) -> Mapping[str, int]:
        """The number of trials for each kind of error that occurred."""
        return {name: self.totals.outcomes[name] for name in ERRORS if self.totals.outcomes.get(name)}

    @property
    def means(self) -> SampleMeans:
        """The means over samples: the one place that makes a pass rate of stored results.

        Where all samples have as many scored trials, they are those over trials.
        """
        totals = self.totals
        if totals.sample_means is not None:
            return totals.sample_means
        passed, value, scored, finished = totals.passed, totals.value_sum, self.successful, self.total
        return sample_means((scored, passed, value, totals.reward_sum, finished, passed, value))

    @property
    def pass_rate(self) -> float | None:
        """The mean over samples of the share of a sample's scored trials that passed."""
        return self.means.pass_rate

    @property
    def pass_rate_all(self) -> float | None:
        """The mean over samples of the share of a sample's finished trials that passed: an error is a failure."""
        return self.means.pass_rate_all

    @property
    def mean_score(self) -> float | None:
        """The mean over samples of the mean value of a sample's scored trials."""
        return self.means.mean_score

    @property
    def mean_score_all(self) -> float | None:
        """The mean over samples of the mean value of a sample's finished trials: an error counts as 0."""
        return self.means.mean_score_all

    @property
    def mean_reward(self) -> float | None:
        """The mean over samples of the mean reward of scored trials; the mean score unless metrics have weights."""
        return self.means.mean_reward

    @property
    def mean_latency_ms(self) -> float | None:
        """The mean duration of the task, in milliseconds."""
        return self.totals.latency_sum / self.totals.timed if self.totals.timed else None

    @property
    def total_tokens(self) -> int:
        """Input and output tokens of the task's model calls."""
        return self.totals.input_tokens + self.totals.output_tokens

    @property
    def cost_usd(self) -> float | None:
        """The cost of the task's model calls; None if no price is known."""
        return self.totals.cost_usd

    @property
    def judge_cost_usd(self) -> float | None:
        """The cost of the judges' model calls; None if no price is known."""
        return self.totals.judge_cost_usd

    @property
    def cache_hits(self) -> int:
        """Model calls answered by the response cache."""
        return self.totals.cache_hits

    @property
    def unpriced_calls(self) -> int:
        """Model calls of tasks and judges without a known price: if there are any, costs are lower bounds."""
        return self.totals.unpriced_calls + self.totals.unpriced_judge_calls

    @property
    def cut_off_calls(self) -> int:
        """Answers to the task that were cut off by a token limit."""
        return self.totals.cut_off_calls

    @property
    def refused_calls(self) -> int:
        """Calls of the task that the model or a filter declined."""
        return self.totals.refused_calls

    @property
    def unknown_endings(self) -> Mapping[str, int]:
        """Answers to the task by the unknown reason with which they ended."""
        return self.totals.unknown_endings

    @property
    def summary(self) -> dict[str, Any]:
        """n, mean, std, min and max of the rewards, the mean score, the pass rates and the number of errors.

        `summarize` says what is in it, and gives the same figures for any results.
        """
        totals, count = self.totals, self.successful
        mean = totals.reward_sum / count if count else 0.0
        squares = totals.reward_squares - count * mean * mean
        if squares < totals.reward_squares * count * _ROUNDING:
            squares = 0.0  # All rewards are equal: the rest is rounding of two large sums.
        low = math.inf if totals.reward_min is None else totals.reward_min
        high = -math.inf if totals.reward_max is None else totals.reward_max
        return describe(count, self.total - count, self.means, squares, low, high)


class ExperimentAnalysis(TotalsAnalysis):
    """The figures of one experiment of a run. Undefined figures are None, never 0."""

    def __init__(self, store: RunStore, run: RunRecord, totals: Totals) -> None:
        self.source = ExperimentSource(store, run, totals.experiment)
        super().__init__(totals)

    @classmethod
    def read(cls, source: ExperimentSource) -> ExperimentAnalysis:
        """Read the sums of an experiment."""
        found = run_totals(source.store, source.run)
        return cls(source.store, source.run, next(one for one in found if one.experiment == source.name))

    @property
    def store(self) -> RunStore:
        """The store with the results."""
        return self.source.store

    @property
    def run(self) -> RunRecord:
        """The run's record."""
        return self.source.run

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.source.name

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
        # A sample may lack the metric in some of its trials, and some samples may not be in the figures.
        if self.run.repeats > 1 or self.run.noted.is_adaptive:
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


@dataclass(frozen=True, slots=True)
class RunAnalysis:
    """The subject of a report: a run, with all or some of its experiments."""

    store: RunStore
    run: RunRecord
    parts: tuple[ExperimentAnalysis, ...]
