"""Sums over results, whether the database or Python does the adding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairtrial.store.protocol import Totals
from fairtrial.store.rows import MAX_TRIALS, OUTCOME_NAMES, RESULT_COLUMNS
from fairtrial.trials.result import Outcome

_SHIFT = 32
_WANTED = tuple(
    RESULT_COLUMNS.index(name)
    for name in (
        "ordinal", "outcome", "timed", "passed", "value", "latency_ms", "input_tokens", "output_tokens",
        "cached_tokens", "cost_usd", "judge_cost_usd", "cache_hits", "unpriced_calls", "unpriced_judge_calls",
    )
)  # fmt: skip


def pack(latency_ms: int, ordinal: int) -> int:
    """One number that orders trials by latency, the earliest of equals first: its maximum names the slowest."""
    return (latency_ms << _SHIFT) + MAX_TRIALS - ordinal


class Tally:
    """Adds up the results of one experiment, or of one group in it."""

    __slots__ = ("_calls", "_cost", "_judge_cost", "_latency", "_max", "_min", "_outcomes", "_passed", "_slowest",
                 "_squares", "_sum", "_timed", "_tokens")  # fmt: skip

    def __init__(self) -> None:
        self._outcomes: dict[Outcome, int] = {}
        self._timed = self._passed = self._latency = 0
        self._sum = self._squares = 0.0
        self._min: float | None = None
        self._max: float | None = None
        self._tokens = [0, 0, 0]
        self._cost: float | None = None
        self._judge_cost: float | None = None
        self._calls = [0, 0, 0]  # Answered by the cache; unpriced ones of the task and of judges.
        self._slowest: int | None = None

    def add_group(
        self,
        counts: Sequence[int],
        timed: int,
        passed: int | None,
        value_sum: float | None,
        value_min: float | None,
        value_max: float | None,
        squares: float | None,
        latency: int | None,
        slowest: int | None,
        input_tokens: int | None,
        output_tokens: int | None,
        cached_tokens: int | None,
        cost: float | None,
        judge_cost: float | None,
        *calls: int | None,
    ) -> None:
        """Add what a database summed up; `counts` are by outcome, in the order of `OUTCOME_NAMES`.

        Sums over nothing are None, as SQL has it.
        """
        for name, count in zip(OUTCOME_NAMES.values(), counts, strict=True):
            if count:
                self._outcomes[name] = self._outcomes.get(name, 0) + count
        if value_min is not None and value_max is not None:
            self._passed += int(passed or 0)
            self._sum += value_sum or 0.0
            self._squares += squares or 0.0
            self._min = value_min if self._min is None else min(self._min, value_min)
            self._max = value_max if self._max is None else max(self._max, value_max)
        self._timed += timed
        if latency is not None and slowest is not None:
            self._latency += int(latency)
            self._slowest = int(slowest) if self._slowest is None else max(self._slowest, int(slowest))
        for place, tokens in enumerate((input_tokens, output_tokens, cached_tokens)):
            self._tokens[place] += int(tokens or 0)
        if cost is not None:
            self._cost = (self._cost or 0.0) + cost
        if judge_cost is not None:
            self._judge_cost = (self._judge_cost or 0.0) + judge_cost
        for place, number in enumerate(calls):
            self._calls[place] += int(number or 0)

    def add_row(self, row: tuple[Any, ...]) -> None:
        """Add one result row."""
        ordinal, outcome, timed, passed, value, latency, *spent = [row[place] for place in _WANTED]
        counts = [int(code == outcome) for code in OUTCOME_NAMES]
        squared = None if value is None else value * value
        duration, slowest = (latency, pack(latency, ordinal)) if timed else (None, None)
        self.add_group(counts, timed, passed, value, value, value, squared, duration, slowest, *spent)

    def totals(self, experiment: str, sample_id: Callable[[int], str]) -> Totals:
        """The sums; `sample_id` tells the sample of a trial by its ordinal."""
        slowest = self._slowest
        return Totals(
            experiment=experiment,
            outcomes=self._outcomes,
            passed=self._passed,
            value_sum=self._sum,
            value_min=self._min,
            value_max=self._max,
            value_squares=self._squares,
            latency_sum=self._latency,
            latency_max=0 if slowest is None else slowest >> _SHIFT,
            slowest=None if slowest is None else sample_id(MAX_TRIALS - (slowest & MAX_TRIALS)),
            timed=self._timed,
            input_tokens=self._tokens[0],
            output_tokens=self._tokens[1],
            cached_tokens=self._tokens[2],
            cost_usd=self._cost,
            judge_cost_usd=self._judge_cost,
            cache_hits=self._calls[0],
            unpriced_calls=self._calls[1],
            unpriced_judge_calls=self._calls[2],
        )


class MetricMeans:
    """Adds up metrics, one result at a time."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, list[float]]] = {}

    def add(self, experiment: str, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one scored trial."""
        sums = self._sums.setdefault(experiment, {})
        for name, value in metrics.items():
            found = sums.get(name)
            if found is None:
                sums[name] = [1, value]
            else:
                found[0] += 1
                found[1] += value

    def means(self) -> dict[str, dict[str, tuple[int, float]]]:
        """Experiment -> metric -> (count, mean)."""
        return {
            experiment: {name: (int(count), total / count) for name, (count, total) in sums.items()}
            for experiment, sums in self._sums.items()
        }
