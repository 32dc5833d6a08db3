"""Scores and metrics: the results of evaluators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fairtrial.base.codec import to_json
from fairtrial.base.frozen import EMPTY, JSON, FrozenDict, freeze

SHARE = (0.0, 1.0)
"""The bounds of a metric that is a share or a score."""

type Rating = Literal["excellent", "good", "fair", "poor", "wrong"]
"""What a judge or a person may say of an output."""

RATING_VALUES: Mapping[Rating, float] = {"excellent": 1.0, "good": 0.75, "fair": 0.5, "poor": 0.25, "wrong": 0.0}
"""The value of the score for each rating."""
PASSING_RATINGS: frozenset[Rating] = frozenset({"excellent", "good"})
"""The ratings with which an output passes."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured number. Weight 0 means it is only tracked; a weight above 0 makes it part of the reward.

    A metric with a verdict is a criterion: `passed` says whether the output met it, and `reason` why. Without one
    (None), it is a number that nothing was required of. `higher_is_better` declares which way is better; comparisons
    call nothing better or worse in a metric without a declared direction. `bounds` declares the range in which it lies
    by nature, such as (0, 1) for a share: it makes intervals of few samples possible, and failures count as its worst
    end. No range is ever guessed from values.
    """

    name: str
    value: float
    weight: float = 0.0
    metadata: Mapping[str, JSON] = EMPTY
    passed: bool | None = None
    reason: str = ""
    higher_is_better: bool | None = None
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"the name of a metric must be text that is not empty (got {self.name!r})")
        object.__setattr__(self, "value", _finite(self.value, f"metric {self.name!r}"))
        object.__setattr__(self, "weight", _finite(self.weight, f"the weight of metric {self.name!r}"))
        if self.weight < 0:
            raise ValueError(f"the weight of metric {self.name!r} must be at least 0 (got {self.weight})")
        if type(self.metadata) is not FrozenDict:
            object.__setattr__(self, "metadata", freeze(self._checked_metadata()))
        if self.passed is not None and type(self.passed) is not bool:
            raise TypeError(f"passed of metric {self.name!r} must be True, False or None (got {self.passed!r})")
        if self.higher_is_better is not None and type(self.higher_is_better) is not bool:
            raise TypeError(
                f"higher_is_better of metric {self.name!r} must be True, False or None (got {self.higher_is_better!r})"
            )
        if not isinstance(self.reason, str):
            raise TypeError(f"reason of metric {self.name!r} must be text (got {self.reason!r})")
        if self.bounds is not None:
            object.__setattr__(self, "bounds", self._checked_bounds(self.bounds))

    def _checked_bounds(self, bounds: object) -> tuple[float, float]:
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            raise TypeError(f"bounds of metric {self.name!r} must be a range such as (0, 1) (got {bounds!r})")
        low, high = (_finite(end, f"an end of the bounds of metric {self.name!r}") for end in bounds)
        if not low < high:
            raise ValueError(f"bounds of metric {self.name!r} must ascend, as in (0, 1) (got {bounds!r})")
        if not low <= self.value <= high:
            raise ValueError(f"metric {self.name!r} is {self.value}, outside of its bounds {low:g} to {high:g}")
        return low, high

    def _checked_metadata(self) -> dict[str, Any]:
        try:
            metadata = dict(self.metadata)
            to_json(metadata)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the metadata of metric {self.name!r} must be a mapping of JSON values (got one that cannot be "
                f"stored: {error})"
            ) from None
        return metadata


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an output: a value from 0 to 1, a verdict, a reason and metrics.

    Args:
        value: From 0 to 1. Left out, it is the reward of the weighted metrics, clipped to that range; 0 if no metric
            has a weight.
        passed: The verdict. Left out, a value of at least 0.5 passes.
        reason: An explanation for the person who reads the result.
        metrics: Named numbers; those with a weight make up the reward, those with a verdict are the criteria.
        name: The name of the criterion, if one evaluator scores several.
        criterion: An alias of `name`.
        rationale: An alias of `reason`.
    """

    value: float
    passed: bool
    reason: str
    metrics: tuple[Metric, ...]
    name: str

    def __init__(
        self,
        value: float | None = None,
        passed: bool | None = None,
        reason: str = "",
        metrics: Iterable[Metric] = (),
        *,
        name: str = "",
        criterion: str = "",
        rationale: str = "",
    ) -> None:
        set_field = object.__setattr__
        if criterion or rationale:
            if (criterion and name) or (rationale and reason):
                raise ValueError("criterion is an alias of name, and rationale of reason: pass one of each pair")
            name, reason = name or criterion, reason or rationale
        kept = tuple(metrics) if metrics else ()
        if kept:
            _check_metrics(kept)
        if value is None:
            reward = _reward(kept)
            if reward is None:
                if not kept:
                    raise ValueError("a score needs a value, or metrics to compute one from")
                reward = 0.0  # Metrics without a weight do not count.
            value = min(max(reward, 0.0), 1.0)
        else:
            value = _finite(value, "the value of a score")
            if not 0.0 <= value <= 1.0:
                raise ValueError(
                    f"the value of a score must be from 0 to 1 (got {value}); use a Metric for other numbers"
                )
        if passed is None:
            passed = value >= 0.5
        elif type(passed) is not bool:
            raise TypeError(f"passed of a score must be True or False (got {passed!r})")
        _check_text("reason", reason)
        _check_text("name", name)
        set_field(self, "value", value)
        set_field(self, "passed", passed)
        set_field(self, "reason", reason)
        set_field(self, "metrics", kept)
        set_field(self, "name", name)

    @property
    def reward(self) -> float:
        """The weighted mean of the metrics that have a weight; the value if none has."""
        mean = _reward(self.metrics)
        return self.value if mean is None else mean

    @property
    def reward_bounds(self) -> tuple[float, float] | None:
        """The range of the reward, by the bounds of the metrics that have a weight; None if one declares none."""
        weighted = [metric for metric in self.metrics if metric.weight > 0]
        if not weighted:
            return SHARE
        if any(metric.bounds is None for metric in weighted):
            return None
        low, high = (
            weighted_mean((metric.bounds[end], metric.weight) for metric in weighted if metric.bounds is not None)
            for end in (0, 1)
        )
        return None if low is None or high is None else (low, high)

    @property
    def criterion(self) -> str:
        """The same text as `name`."""
        return self.name

    @property
    def rationale(self) -> str:
        """The same text as `reason`."""
        return self.reason

    @property
    def criteria(self) -> tuple[Metric, ...]:
        """The metrics that have a verdict, such as the members of `all_of`; none if the score judges one thing."""
        return tuple(metric for metric in self.metrics if metric.passed is not None)

    @property
    def failed_criteria(self) -> tuple[Metric, ...]:
        """The criteria that failed; of a criterion with criteria of its own, those in place of it.

        What failed inside a criterion that passed, such as one member of `any_of`, is left out.
        """
        verdicts = {metric.name: metric.passed for metric in self.criteria}
        failed = [name for name, passed in verdicts.items() if not passed]
        inner = [name for name in failed if not any(verdicts.get(outer) for outer in outer_names(name))]
        return tuple(
            metric
            for metric in self.criteria
            if metric.name in inner and not any(metric.name in outer_names(name) for name in inner)
        )

    def explain(self) -> str:
        """Explain the score in one line: its reason or, without one, the criteria that failed."""
        if self.reason or self.passed:
            return self.reason
        return "; ".join(f"{m.name}: {m.reason or f'failed with {m.value:g}'}" for m in self.failed_criteria)

    def metric(self, name: str) -> float | None:
        """The value of a metric, or None if this score has no such metric."""
        return next((metric.value for metric in self.metrics if metric.name == name), None)


def merge(
    parts: Sequence[tuple[str, Score]],
    *,
    value: float,
    passed: bool,
    weights: Sequence[float] = (),
    reason: str | None = None,
) -> Score:
    """Merge several scores into one. Each part is kept as a criterion under its own name (a second one gets `#2`).

    Unless a reason is given, it names the parts that decided: those that failed if the score failed, else those that
    passed. A part alone keeps its reason as it is.
    """
    metrics: list[Metric] = []
    used: set[str] = set()
    decisive: list[str] = []
    for position, (name, part) in enumerate(parts):
        unique = _unused(name, used)
        # The metric of a judge that has the judge's name is the criterion itself and is not added twice.
        own = next((m for m in part.metrics if m.name in (name, part.name) and m.value == part.value), None)
        details = EMPTY if own is None else own.metadata
        weight = weights[position] if weights else 0.0
        whole = Metric(unique, part.value, weight, details, part.passed, part.reason)
        metrics.append(replace(whole, higher_is_better=True, bounds=SHARE))
        # The metrics of a part are kept without a weight; only the parts themselves count towards the reward.
        metrics.extend(
            replace(m, name=_unused(f"{unique}.{m.name}", used), weight=0.0) for m in part.metrics if m is not own
        )
        if part.passed is passed and (part.reason or not passed):
            decisive.append(f"{unique}: {part.reason or f'failed with {part.value:g}'}")
    if reason is None:
        reason = parts[0][1].reason if len(parts) == 1 else "; ".join(decisive)
    return Score(value, passed, reason, metrics)


def outer_names(name: str) -> list[str]:
    """Return the names of the criteria that may contain a nested one: "a" and "a.b" for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def mean_value(parts: Sequence[tuple[str, Score]]) -> float:
    """The mean of the parts' values; exact summation, so their order cannot matter."""
    return math.fsum(part.value for _, part in parts) / len(parts)


def _unused(name: str, used: set[str]) -> str:
    candidate, count = name, 1
    while candidate in used:
        count += 1
        candidate = f"{name}#{count}"
    used.add(candidate)
    return candidate


def _finite(value: object, what: str) -> float:
    if type(value) is float:
        number = value
    else:
        if isinstance(value, str | bytes):
            raise TypeError(f"{what} must be a number (got {value!r})")
        try:
            number = float(value)  # type: ignore[arg-type]  # whatever has no float is refused below
        except (TypeError, ValueError):
            raise TypeError(f"{what} must be a number (got {value!r})") from None
        except OverflowError:
            raise ValueError(f"{what} must be a finite number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number (got {number})")
    return number


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"the {what} of a score must be text (got {value!r})")


def _check_metrics(metrics: tuple[Metric, ...]) -> None:
    names: set[str] = set()
    for metric in metrics:
        if not isinstance(metric, Metric):
            raise TypeError(f"the metrics of a score must be Metric objects (got {metric!r})")
        if metric.name in names:
            raise ValueError(f"the names of metrics must be unique (got {metric.name!r} twice)")
        names.add(metric.name)


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float | None:
    """The mean of (value, weight) pairs; None if no weight is above 0."""
    weighted = [(value, weight) for value, weight in pairs if weight > 0]
    if not weighted:
        return None
    # Weights are scaled by a power of two, which is exact, so that large ones do not overflow.
    _, exponent = math.frexp(max(weight for _, weight in weighted))
    shift = -exponent - len(weighted).bit_length()
    weights = [math.ldexp(weight, shift) for _, weight in weighted]
    total = math.fsum(value * weight for (value, _), weight in zip(weighted, weights, strict=True))
    return total / math.fsum(weights)


def _reward(metrics: tuple[Metric, ...]) -> float | None:
    return weighted_mean((metric.value, metric.weight) for metric in metrics) if metrics else None


PASSED = Score(1.0)
"""The score of what passes: one object for all trials, because it cannot be changed."""
FAILED = Score(0.0)
"""The score of what fails without a reason."""


def as_score(result: Any, name: str) -> Score:
    """Convert the return value of an evaluator to a score."""
    if isinstance(result, Score):
        return result
    if isinstance(result, bool):
        return PASSED if result else FAILED
    if isinstance(result, int | float):
        return Score(result)
    if isinstance(result, Mapping):
        parts = [(str(key), as_score(item, str(key))) for key, item in result.items()]
    elif isinstance(result, Sequence) and not isinstance(result, str | bytes):
        if not all(isinstance(item, Score) for item in result):
            raise TypeError(f"a sequence that evaluator {name!r} returns must contain only Score objects")
        parts = [(item.name or name, item) for item in result]
    elif hasattr(result, "item"):  # A number from numpy.
        return as_score(result.item(), name)
    else:
        raise TypeError(
            f"evaluator {name!r} returned {'None' if result is None else type(result).__name__}; "
            "return a Score, a bool, a number from 0 to 1, a mapping of those, or a sequence of Scores"
        )
    if not parts:
        raise TypeError(f"evaluator {name!r} returned no score at all")
    return merge(parts, value=mean_value(parts), passed=all(part.passed for _, part in parts))
