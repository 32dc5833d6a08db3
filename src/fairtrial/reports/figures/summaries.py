"""Group results and summarize them, or their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.metrics import ERRORS
from fairtrial.store.protocol import SampleMeans, Totals
from fairtrial.store.records import weight_of
from fairtrial.store.totals import SampleSums, sample_means
from fairtrial.trials.result import EvalResult


def group_by[K: Hashable](results: Iterable[EvalResult], key: Callable[[EvalResult], K]) -> dict[K, list[EvalResult]]:
    """Group results by `key`, in order of appearance."""
    groups: dict[K, list[EvalResult]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def unequal_weights_error(name: str, what: str) -> ConfigurationError:
    """Return the error of a figure that does not allow for samples that were drawn with different chances."""
    return ConfigurationError(
        f"{name} has live traces that were sampled at several rates, for which {what} has no weights\n"
        "`fairtrial show` and `fairtrial watch alarm` allow for them"
    )


def equally_weighted(results: Iterable[EvalResult], what: str) -> Iterator[EvalResult]:
    """Yield results; raises if some stand for more traces than others."""
    first: float | None = None
    for result in results:
        weight = weight_of(result) or 1.0
        first = weight if first is None else first
        if not math.isclose(weight, first, rel_tol=1e-9):
            raise unequal_weights_error(f"run {result.key.run_id}", what)
        yield result


def summarize(results: Iterable[EvalResult]) -> dict[str, Any]:
    """Summarize results in one pass: the same figures as `report.summary` and `report.group_by`.

    `mean`, `std`, `min` and `max` are those of the rewards of scored results, which may be below 0 and above 1.
    `mean_score` is the mean of the values, which lie between 0 and 1. The two differ only where metrics have weights.
    Means and pass rates are over samples: the repeats of a sample in an experiment of a run count together as one. `n`
    counts scored results and `errors` those that ended in an error; trials that were not run are left out. What is
    undefined is None. Stored results of live traces count as often as their weights say.
    """
    count = errors = 0
    mean = squares = 0.0
    samples, weights = SampleSums(), dict[Hashable, float]()
    low, high = math.inf, -math.inf
    for result in results:
        sample = (result.key.run_id, result.experiment, result.sample_id)
        if (weight := weight_of(result)) is not None:
            weights[sample] = weight
        if result.score is None:
            if result.outcome != "not_run":
                errors += 1
                samples.add(sample, None, None, None)
            continue
        reward = result.score.reward
        count += 1
        samples.add(sample, result.score.passed, result.score.value, reward)
        step = reward - mean
        mean += step / count
        squares += step * (reward - mean)
        low, high = min(low, reward), max(high, reward)
    found = sample_means(samples.shares((lambda sample: weights.get(sample, 1.0)) if weights else None))
    return describe(count, errors, found, squares, low, high)


def describe(
    count: int,
    errors: int,
    means: SampleMeans,
    squares: float,
    low: float,
    high: float,
) -> dict[str, Any]:
    """Build the summary of results: `squares`, `low` and `high` are about their rewards."""
    if means.reward_variance is not None:
        squares = means.reward_variance * count
    return {
        "n": count,
        "mean": means.mean_reward,
        "std": math.sqrt(max(squares, 0.0) / (count - 1)) if count > 1 else None,
        "min": low if count else None,
        "max": high if count else None,
        "mean_score": means.mean_score,
        "pass_rate": means.pass_rate,
        "pass_rate_all": means.pass_rate_all,
        "errors": errors,
    }


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
        if (means := self.totals.sample_means) is not None and means.mean_latency_ms is not None:
            return means.mean_latency_ms
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
