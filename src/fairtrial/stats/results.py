"""Results of statistics: intervals, and values that the data do not determine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A range for an unknown quantity, with its nominal level and the name of the method."""

    low: float
    high: float
    level: float
    method: str

    @property
    def width(self) -> float:
        """`high - low`."""
        return self.high - self.low

    def contains(self, value: float) -> bool:
        """Whether `value` lies in the interval; both ends belong to it."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Undefined:
    """The data do not determine the quantity that was asked for.

    It is returned instead of a number; arithmetic with it fails.
    """

    reason: str
