"""Group results and summarize them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from fairtrial.trials.result import EvalResult


def group_by[K: Hashable](results: Iterable[EvalResult], key: Callable[[EvalResult], K]) -> dict[K, list[EvalResult]]:
    """Group results by `key`, in order of appearance."""
    groups: dict[K, list[EvalResult]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def summarize(results: Iterable[EvalResult]) -> dict[str, Any]:
    """Summarize results in one pass: the same figures as `report.summary` and `report.group_by`.

    `mean`, `std`, `min` and `max` are those of the rewards, which may be below 0 and above 1; `mean_score` is the mean
    of the values, which lie between 0 and 1. The two differ only where metrics have weights. `n` counts scored
    results and `errors` those that ended in an error; trials that were not run are left out. What is undefined is
    None.
    """
    count = errors = passed = 0
    mean = squares = values = 0.0
    low, high = math.inf, -math.inf
    for result in results:
        if result.score is None:
            errors += result.outcome != "not_run"
            continue
        reward = result.score.reward
        count += 1
        passed += result.score.passed
        values += result.score.value
        step = reward - mean
        mean += step / count
        squares += step * (reward - mean)
        low, high = min(low, reward), max(high, reward)
    return describe(count, errors, passed, values, mean, squares, low, high)


def describe(
    count: int, errors: int, passed: int, values: float, mean: float, squares: float, low: float, high: float
) -> dict[str, Any]:
    """Build the summary of results: `values` is the sum of their values, the rest is about rewards."""
    return {
        "n": count,
        "mean": mean if count else None,
        "std": math.sqrt(max(squares, 0.0) / (count - 1)) if count > 1 else None,
        "min": low if count else None,
        "max": high if count else None,
        "mean_score": values / count if count else None,
        "pass_rate": passed / count if count else None,
        "pass_rate_all": passed / (count + errors) if count + errors else None,
        "errors": errors,
    }
