"""What a report says: every rate and mean with its interval, n and the errors beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from fairtrial.report.render import plots, words
from fairtrial.report.render.document import (
    Bar,
    Block,
    Case,
    Cases,
    Cell,
    Column,
    Content,
    Document,
    Plot,
    Remarks,
    Section,
    Table,
    Tone,
)
from fairtrial.report.render.junit import shown
from fairtrial.stats import Interval, MeanEstimate
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.report.report import EvalReport, ExperimentReport

CASES = 200
"""How many failures a page shows."""

_CUT = 2_000


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate or a mean of one experiment. `percent` is for shares; `bounds` is the range of the values, if known."""

    name: str
    estimate: MeanEstimate
    percent: bool
    bounds: tuple[float, float] | None = (0.0, 1.0)

    @property
    def interval(self) -> Interval | None:
        """The interval of the mean."""
        return self.estimate.interval

    def value(self, value: float | None) -> str:
        """A value of this figure in words."""
        return words.rate(value) if self.percent else words.number(value)

    @property
    def mean(self) -> str:
        """The mean in words."""
        return self.value(self.estimate.mean)

    @property
    def range(self) -> str:
        """The interval in words."""
        found = self.interval
        return words.UNDEFINED if found is None else f"{self.value(found.low)} to {self.value(found.high)}"

    def bar(self) -> Bar | None:
        """The interval to draw; None where it is undefined or the scale is unknown."""
        found, mean = self.interval, self.estimate.mean
        if found is None or mean is None or self.bounds is None:
            return None
        return Bar(found.low, mean, found.high, *self.bounds)
