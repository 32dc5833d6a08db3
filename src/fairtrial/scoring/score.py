"""What an evaluator says about one output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.codec import to_json
from fairtrial.frozen import EMPTY, FrozenDict, freeze
from fairtrial.types import JSON


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured number. Weight 0 means it is only tracked; a weight above 0 makes it part of the reward."""

    name: str
    value: float
    weight: float = 0.0
    metadata: Mapping[str, JSON] = EMPTY

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"a metric needs a name, not {self.name!r}")
        object.__setattr__(self, "value", _finite(self.value, f"metric {self.name!r}"))
        object.__setattr__(self, "weight", _finite(self.weight, f"the weight of metric {self.name!r}"))
        if self.weight < 0:
            raise ValueError(f"the weight of metric {self.name!r} is {self.weight}; a weight cannot be negative")
        if type(self.metadata) is not FrozenDict:
            object.__setattr__(self, "metadata", freeze(self._checked_metadata()))

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


@dataclass(frozen=True, slots=True, init=False)
class Score:
    """A value from 0 to 1, a verdict, why, and the metrics behind it.

    Args:
        value: From 0 to 1. Left out, it is the reward of the weighted metrics, clipped to that range.
        passed: The verdict. Left out, a value of at least 0.5 passes.
        reason: Why, for the person who reads the failure.
        metrics: Named numbers; those with a weight make up the reward.
        name: What was judged, where one evaluator judges several things.
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
    ) -> None:
        set_field = object.__setattr__
        kept = tuple(metrics) if metrics else ()
        if kept:
            _check_metrics(kept)
        if value is None:
            reward = _weighted_mean(kept)
            if reward is None:
                raise ValueError("a score needs a value, or metrics with a weight above 0 to compute one from")
            value = min(max(reward, 0.0), 1.0)
        else:
            value = _finite(value, "a score's value")
            if not 0.0 <= value <= 1.0:
                raise ValueError(
                    f"a score's value lies between 0 and 1, not at {value}; use a Metric for other numbers"
                )
        if passed is None:
            passed = value >= 0.5
        elif type(passed) is not bool:
            raise TypeError(f"a score's verdict is True or False, not {passed!r}")
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
        mean = _weighted_mean(self.metrics)
        return self.value if mean is None else mean

    def metric(self, name: str) -> float | None:
        """The value of a metric, or None if this score has no such metric."""
        return next((metric.value for metric in self.metrics if metric.name == name), None)


def merge(parts: Sequence[tuple[str, Score]], *, value: float, passed: bool, weights: Sequence[float] = ()) -> Score:
    """One score from several, each kept as a metric under its own name (a second one of that name gets `#2`)."""
    metrics: list[Metric] = []
    used: set[str] = set()
    for position, (name, part) in enumerate(parts):
        unique = _unused(name, used)
        metrics.append(Metric(unique, part.value, weights[position] if weights else 0.0))
        # A part's own metrics are kept for reading; only the parts themselves make up a reward.
        metrics.extend(Metric(_unused(f"{unique}.{m.name}", used), m.value, 0.0, m.metadata) for m in part.metrics)
    reason = "; ".join(part.reason for _, part in parts if part.reason)
    return Score(value, passed, reason, metrics)


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
            raise TypeError(f"{what} must be a number, not {value!r}")
        try:
            number = float(value)  # type: ignore[arg-type]  # whatever has no float is refused below
        except (TypeError, ValueError):
            raise TypeError(f"{what} must be a number, not {value!r}") from None
        except OverflowError:
            raise ValueError(f"{what} must be a finite number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, not {number}")
    return number


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"a score's {what} is text, not {value!r}")


def _check_metrics(metrics: tuple[Metric, ...]) -> None:
    names: set[str] = set()
    for metric in metrics:
        if not isinstance(metric, Metric):
            raise TypeError(f"a score's metrics are Metric objects, not {metric!r}")
        if metric.name in names:
            raise ValueError(f"two metrics are both named {metric.name!r}")
        names.add(metric.name)


def _weighted_mean(metrics: tuple[Metric, ...]) -> float | None:
    weighted = [metric for metric in metrics if metric.weight > 0]
    if not weighted:
        return None
    # Scaled by a power of two, which is exact, until all weights together are at most 1: huge ones must not overflow.
    _, exponent = math.frexp(max(metric.weight for metric in weighted))
    shift = -exponent - len(weighted).bit_length()
    weights = [math.ldexp(metric.weight, shift) for metric in weighted]
    total = math.fsum(metric.value * weight for metric, weight in zip(weighted, weights, strict=True))
    return total / math.fsum(weights)
