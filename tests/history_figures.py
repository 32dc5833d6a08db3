"""Figures of results by plain loops, which screens are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fairtrial import EvalResult, Score

FAILURES = ("task_error", "timeout")


def figures_of(results: list[EvalResult]) -> dict[str, Any]:
    """Return the figures of some results by a plain loop."""
    scored = [one.score for one in results if one.score is not None]
    costs = [one.usage.cost_usd for one in results if one.usage.cost_usd is not None]
    return {
        "trials": len(results), "scored": len(scored), "passed": sum(score.passed for score in scored),
        "errors": dict(Counter(one.outcome for one in results if one.score is None)),
        "pass_rate": mean_over_samples(results, lambda score: score.passed),
        "pass_rate_all": mean_over_samples(results, lambda score: score.passed, error=0.0),
        "mean_score": mean_over_samples(results, lambda score: score.value),
        "mean_reward": mean_over_samples(results, lambda score: score.reward),
        "mean_latency_ms": sum(one.latency_ms for one in results) / len(results) if results else None,
        "tokens": {
            "input": sum(one.usage.input_tokens for one in results),
            "output": sum(one.usage.output_tokens for one in results), "cached": 0, "cache_write": 0, "reasoning": 0,
        },
        "cost_usd": sum(costs) if costs else None,
    }  # fmt: skip


def mean_over_samples(
    results: list[EvalResult], number: Callable[[Score], float], error: float | None = None
) -> float | None:
    """Return the mean over samples of the mean over the trials of each; `error` is what an error counts as."""
    samples: dict[str, list[float]] = {}
    for one in results:
        found = error if one.score is None else number(one.score)
        if found is not None:
            samples.setdefault(one.sample_id, []).append(found)
    means = [sum(found) / len(found) for found in samples.values()]
    return sum(means) / len(means) if means else None


def flips_of(baseline: list[EvalResult], candidate: list[EvalResult]) -> tuple[set[str], set[str], int]:
    """Return the ids of the samples with a higher and a lower share of passes, and how many both sides have."""
    sides = [shares_of(results) for results in (baseline, candidate)]
    both = sides[0].keys() & sides[1].keys()
    change = {name: sides[1][name] - sides[0][name] for name in both}
    return {n for n in both if change[n] > 1e-12}, {n for n in both if change[n] < -1e-12}, len(both)


def shares_of(results: list[EvalResult]) -> dict[str, float]:
    """Return the share of passes of each sample; a failure of the system is none, other errors say nothing."""
    samples: dict[str, list[bool]] = {}
    for one in results:
        if one.score is not None or one.outcome in FAILURES:
            samples.setdefault(one.sample_id, []).append(one.score is not None and one.score.passed)
    return {name: sum(passed) / len(passed) for name, passed in samples.items()}
