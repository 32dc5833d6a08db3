"""The rule for adaptive stopping."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fairtrial.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class StopWhen:
    """End a run once it has enough results, with figures that stay valid under repeated evaluation.

    Give one of `narrower_than` and `decides`. Samples are evaluated in plan order, never in the order in which they
    finish; the plan is shuffled, so that its order is unrelated to difficulty. Samples that share a cluster are
    refused. `decides` compares scores from 0 to 1, and the means of repeats; `narrower_than` is for single pass/fail
    outcomes and refuses repeats and graded scores.

    Attributes:
        narrower_than: Stop when the interval of every experiment's pass rate is at most this wide: .2 is 20 points, 10
            to each side.
        decides: Stop when these two experiments can be told apart by their mean scores: (baseline, candidate).
        level: The confidence of intervals and decisions.
        every: Evaluate after every this many samples.
        verdicts: Use the verdict of graded scores, passed or not, in place of the score.
        shuffle: Use an order drawn from `EvalConfig.seed`. False keeps the order of the dataset, for a dataset that is
            already in random order.
    """

    narrower_than: float | None = None
    _: KW_ONLY
    decides: tuple[str, str] | None = None
    level: float = 0.95
    every: int = 10
    verdicts: bool = False
    shuffle: bool = True

    def __post_init__(self) -> None:
        if (self.narrower_than is None) == (self.decides is None):
            raise ConfigurationError("StopWhen requires exactly one of narrower_than and decides")
        for name, value in (("narrower_than", self.narrower_than), ("level", self.level)):
            if value is not None and not _inside(value):
                raise ConfigurationError(f"StopWhen.{name} must be between 0 and 1 (got {value!r})")
        every: object = self.every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(f"StopWhen.every must be a whole number of at least 1 (got {self.every!r})")
        for name in ("verdicts", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"StopWhen.{name} must be True or False (got {getattr(self, name)!r})")
        if self.decides is not None:
            pair: Any = self.decides
            if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
                raise ConfigurationError(f"StopWhen.decides must name two experiments (got {pair!r})")
            if pair[0] == pair[1]:
                raise ConfigurationError(f"StopWhen.decides must name different experiments (got {pair[0]!r} twice)")
            object.__setattr__(self, "decides", tuple(pair))


def _inside(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 < value < 1  # type: ignore[arg-type,operator]  # a number by now
