"""Results by group: by metadata, by a metric, by anything that can be computed from a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from fairtrial.trials.result import EvalResult


def group_by[K: Hashable](results: Iterable[EvalResult], key: Callable[[EvalResult], K]) -> dict[K, list[EvalResult]]:
    """Results by what `key` says of each, in the order they come."""
    groups: dict[K, list[EvalResult]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def summarize(results: Iterable[EvalResult]) -> dict[str, Any]:
    """n, mean, std, min and max of the rewards, the pass rates, and what was not scored, in one pass.

    Only scored results have a reward; `n` counts them, `errors` the others. What is undefined is None.
    """
    count = errors = passed = 0
    mean = squares = 0.0
    low, high = math.inf, -math.inf
    for result in results:
        if result.score is None:
            errors += 1
            continue
        reward = result.score.reward
        count += 1
        passed += result.score.passed
        step = reward - mean
        mean += step / count
        squares += step * (reward - mean)
        low, high = min(low, reward), max(high, reward)
    return describe(count, errors, passed, mean, squares, low, high)


def describe(
    count: int, errors: int, passed: int, mean: float, squares: float, low: float, high: float
) -> dict[str, Any]:
    """The summary of numbers whose mean and sum of squared deviations are known."""
    return {
        "n": count,
        "mean": mean if count else None,
        "std": math.sqrt(max(squares, 0.0) / (count - 1)) if count > 1 else None,
        "min": low if count else None,
        "max": high if count else None,
        "pass_rate": passed / count if count else None,
        "pass_rate_all": passed / (count + errors) if count + errors else None,
        "errors": errors,
    }
