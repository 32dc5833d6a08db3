"""Group results and summarize them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from fairtrial.store.protocol import SampleMeans
from fairtrial.store.totals import SampleSums, sample_means
from fairtrial.trials.result import EvalResult


def group_by[K: Hashable](results: Iterable[EvalResult], key: Callable[[EvalResult], K]) -> dict[K, list[EvalResult]]:
    """Group results by `key`, in order of appearance."""
    groups: dict[K, list[EvalResult]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def summarize(results: Iterable[EvalResult]) -> dict[str, Any]:
    """Summarize results in one pass: the same figures as `report.summary` and `report.group_by`.

    `mean`, `std`, `min` and `max` are those of the rewards of scored results, which may be below 0 and above 1.
    `mean_score` is the mean of the values, which lie between 0 and 1. The two differ only where metrics have weights.
    Means and pass rates are over samples: the repeats of a sample in an experiment of a run count together as one. `n`
    counts scored results and `errors` those that ended in an error; trials that were not run are left out. What is
    undefined is None.
    """
    count = errors = 0
    mean = squares = 0.0
    samples = SampleSums()
    low, high = math.inf, -math.inf
    for result in results:
        sample = (result.key.run_id, result.experiment, result.sample_id)
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
    found = sample_means(samples.shares())
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
