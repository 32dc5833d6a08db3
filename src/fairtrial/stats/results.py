"""What the statistics hand back when the answer is an interval, or when there is no answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A range for an unknown quantity, with its nominal level and, in words, how it was made."""

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

    It stands where a number would stand and cannot be mistaken for one: arithmetic with it fails.
    """

    reason: str
