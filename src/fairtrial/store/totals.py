"""Sums over results, computed by the database or in Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.store.protocol import METRIC_CODES, MetricTotals, RunRecord, SampleMeans, Totals, split_facts
from fairtrial.store.rows import EXTRA_USAGE, MAX_TRIALS, OUTCOME_NAMES, RESULT_COLUMNS, read_endings
from fairtrial.trials.result import Outcome

_SHIFT = 32
_WANTED = tuple(
    RESULT_COLUMNS.index(name)
    for name in (
        "ordinal", "outcome", "timed", "passed", "value", "reward", "latency_ms", "input_tokens", "output_tokens",
        "cost_usd", "judge_cost_usd",
    )
)  # fmt: skip
_EXTRA_USAGE = tuple(RESULT_COLUMNS.index(name) for name in EXTRA_USAGE)
_ENDINGS = RESULT_COLUMNS.index("unknown_endings")


def pack(latency_ms: int, ordinal: int) -> int:
    """Combine latency and ordinal into one number, whose maximum identifies the slowest trial."""
    return (latency_ms << _SHIFT) + MAX_TRIALS - ordinal


class _Sums:
    """Sum, smallest, largest and sum of squares of some numbers."""

    __slots__ = ("high", "low", "squares", "total")

    def __init__(self) -> None:
        self.total = self.squares = 0.0
        self.low: float | None = None
        self.high: float | None = None

    def add(self, total: float | None, low: float | None, high: float | None, squares: float | None) -> None:
        """Add the sums of further numbers; all None if there are none."""
        if low is None or high is None:
            return
        self.total += total or 0.0
        self.squares += squares or 0.0
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)


class SampleSums:
    """Adds up the trials of each sample, for the means over samples."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: dict[Hashable, list[float]] = {}

    def add(self, sample: Hashable, passed: int | None, value: float | None, reward: float | None) -> None:
        """Add a finished trial; its values are None if it was not scored."""
        sums = self._samples.setdefault(sample, [0, 0, 0, 0, 0])
        sums[4] += 1
        if passed is not None and value is not None and reward is not None:
            for place, number in enumerate((1, passed, value, reward)):
                sums[place] += number

    def shares(self) -> tuple[float, ...]:
        """Return what `sample_means` takes."""
        found = [0.0] * 7
        for scored, passed, value, reward, finished in self._samples.values():
            own = (1, passed / scored, value / scored, reward / scored) if scored else (0, 0, 0, 0)
            for place, number in enumerate((*own, 1, passed / finished, value / finished)):
                found[place] += number
        return tuple(found)


def sample_means(sums: Sequence[float]) -> SampleMeans:
    """Return the means over samples.

    The sums are the number of samples with a scored trial and the sums of their means (passed, value, reward), then
    the number of samples with a finished trial and the sums of theirs (passed, value).
    """
    scored, *own, finished, passed, value = sums
    means = [one / scored if scored else None for one in own]
    return SampleMeans(*means, *(one / finished if finished else None for one in (passed, value)))


def analysed_samples(run: RunRecord) -> int:
    """Return how many samples, from the start of the plan, are in the means of a run.

    A run that decided by its results when to stop is described by the samples on which it decided: results beyond
    them are stored and counted, but they are not in its rates and means.
    """
    note = run.noted.adaptive
    return run.dataset_size if note is None else note.samples


def unequal(run: RunRecord, tallies: Iterable[TotalsBuilder]) -> bool:
    """Return whether means need a sum for each sample: their numbers of scored trials differ, or not all are in them.

    Of a run of which not all samples are in the means, every group starts with none.
    """
    found = list(tallies)
    if run.noted.adaptive is not None:
        for tally in found:
            tally.add_samples(*[0.0] * 7)
        return True
    return run.repeats > 1 and sum(tally.scored for tally in found) < run.planned


class TotalsBuilder:
    """Adds up the results of one experiment, or of one group in it."""

    __slots__ = ("_cost", "_endings", "_extra", "_judge_cost", "_latency", "_outcomes", "_passed", "_rewards",
                 "_samples", "_slowest", "_timed", "_tokens", "_values", "own_rewards")  # fmt: skip

    def __init__(self) -> None:
        self._outcomes: dict[Outcome, int] = {}
        self._timed = self._passed = self._latency = 0
        self._values = _Sums()
        self._rewards = _Sums()
        self.own_rewards = 0  # Results whose reward differs from their value; if there are none, no reward is added.
        self._tokens = [0, 0]
        self._cost: float | None = None
        self._judge_cost: float | None = None
        self._extra = dict.fromkeys(EXTRA_USAGE, 0)
        self._endings: dict[str, int] = {}
        self._slowest: int | None = None
        self._samples: list[float] | None = None

    @property
    def scored(self) -> int:
        """The number of scored trials."""
        return self._outcomes.get("scored", 0)

    def add_group(
        self,
        counts: Sequence[int],
        timed: int,
        passed: int | None,
        value_sum: float | None,
        value_min: float | None,
        value_max: float | None,
        squares: float | None,
        own_rewards: int,
        latency: int | None,
        slowest: int | None,
        input_tokens: int | None,
        output_tokens: int | None,
        cost: float | None,
        judge_cost: float | None,
    ) -> None:
        """Add sums from a database; `counts` are by outcome, in the order of `OUTCOME_NAMES`.

        Empty sums are None, as in SQL.
        """
        for name, count in zip(OUTCOME_NAMES.values(), counts, strict=True):
            if count:
                self._outcomes[name] = self._outcomes.get(name, 0) + count
        self._passed += int(passed or 0)
        self._values.add(value_sum, value_min, value_max, squares)
        self.own_rewards += own_rewards
        self._timed += timed
        if latency is not None and slowest is not None:
            self._latency += int(latency)
            self._slowest = int(slowest) if self._slowest is None else max(self._slowest, int(slowest))
        for place, tokens in enumerate((input_tokens, output_tokens)):
            self._tokens[place] += int(tokens or 0)
        if cost is not None:
            self._cost = (self._cost or 0.0) + cost
        if judge_cost is not None:
            self._judge_cost = (self._judge_cost or 0.0) + judge_cost

    def add_rewards(self, total: float | None, low: float | None, high: float | None, squares: float | None) -> None:
        """Add the sums of rewards, including those that equal the value."""
        self._rewards.add(total, low, high, squares)

    def add_samples(self, *sums: float | None) -> None:
        """Add the sums of further samples (see `sample_means`); empty ones are None, as in SQL."""
        known = self._samples or [0.0] * len(sums)
        self._samples = [one + float(more or 0) for one, more in zip(known, sums, strict=True)]

    def add_extra_usage(self, *sums: int | None) -> None:
        """Add the sums of rare usage columns, in the order of `EXTRA_USAGE`."""
        for name, number in zip(EXTRA_USAGE, sums, strict=True):
            self._extra[name] += int(number or 0)

    def add_endings(self, text: str | None, trials: int = 1) -> None:
        """Add the unknown endings of this many trials that have the same."""
        for name, count in read_endings(text).items() if text is not None else ():
            self._endings[name] = self._endings.get(name, 0) + count * trials

    def add_row(self, row: tuple[Any, ...]) -> None:
        """Add one result row."""
        ordinal, outcome, timed, passed, value, reward, latency, *spent = [row[place] for place in _WANTED]
        counts = [int(code == outcome) for code in OUTCOME_NAMES]
        squared = None if value is None else value * value
        duration, slowest = (latency, pack(latency, ordinal)) if timed else (None, None)
        own = int(reward is not None)
        self.add_group(counts, timed, passed, value, value, value, squared, own, duration, slowest, *spent)
        self.add_extra_usage(*(row[place] for place in _EXTRA_USAGE))
        self.add_endings(row[_ENDINGS])
        if value is not None:
            number = reward if own else value
            self.add_rewards(number, number, number, number * number)

    def totals(self, experiment: str, sample_id: Callable[[int], str]) -> Totals:
        """Return the sums; `sample_id` returns the sample id for the ordinal of a trial."""
        slowest, values = self._slowest, self._values
        rewards = self._rewards if self.own_rewards else values
        return Totals(
            experiment=experiment,
            outcomes=self._outcomes,
            passed=self._passed,
            value_sum=values.total,
            value_min=values.low,
            value_max=values.high,
            value_squares=values.squares,
            reward_sum=rewards.total,
            reward_min=rewards.low,
            reward_max=rewards.high,
            reward_squares=rewards.squares,
            latency_sum=self._latency,
            latency_max=0 if slowest is None else slowest >> _SHIFT,
            slowest=None if slowest is None else sample_id(MAX_TRIALS - (slowest & MAX_TRIALS)),
            timed=self._timed,
            input_tokens=self._tokens[0],
            output_tokens=self._tokens[1],
            cost_usd=self._cost,
            judge_cost_usd=self._judge_cost,
            unknown_endings=dict(sorted(self._endings.items())) or EMPTY,
            sample_means=None if self._samples is None else sample_means(self._samples),
            **self._extra,
        )


class MetricSums:
    """Adds up metrics, one result at a time."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, list[float]]] = {}

    def add(self, experiment: str, metrics: Mapping[str, float], verdicts: str | None) -> None:
        """Add the metrics of one scored trial, with the verdict of each."""
        sums = self._sums.setdefault(experiment, {})
        for name, value in metrics.items():
            found = sums.setdefault(name, [0, 0.0, 0, 0])
            found[0] += 1
            found[1] += value
        if verdicts is not None:
            for name, code in zip(metrics, split_facts(verdicts)[0], strict=True):
                passed, _ = METRIC_CODES[code]
                if passed is not None:
                    found = sums[name]
                    found[2] += 1
                    found[3] += passed

    def totals(self) -> dict[str, dict[str, MetricTotals]]:
        """Return experiment -> metric -> its totals."""
        return {
            experiment: {
                name: MetricTotals(int(count), total / count, int(judged), int(passed))
                for name, (count, total, judged, passed) in sums.items()
            }
            for experiment, sums in self._sums.items()
        }
