"""Evaluators of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import Score

_ROUNDING = 4  # Steps between neighbouring floating-point numbers.


def within_tolerance(tolerance: float, *, relative: bool = False) -> Callable[[object, object], Score]:
    """Passes if the output is within `tolerance` of expected; the value falls from 1 to 0 over that distance.

    Args:
        tolerance: The largest accepted difference.
        relative: Take it as a share of the expected value.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigurationError(f"a tolerance must be a finite number of at least 0 (got {tolerance})")

    @evaluator(inline=True, name="within_tolerance", needs_expected=True)
    def close(output: Any, expected: Any) -> Score:
        # Models answer in text: an answer that is not a number is wrong, but no error of the evaluator.
        wanted, number = _number(expected), _number(output)
        if wanted is None:
            raise TypeError(f"the expected value of within_tolerance must be a finite number (got {expected!r})")
        if number is None:
            return Score(0.0, False, f"not a number: {str(output)[:80]!r}")
        allowed = tolerance * abs(wanted) if relative else tolerance
        difference = abs(number - wanted)
        passed = is_within(number, wanted, allowed)
        # The difference of two finite numbers may overflow to infinity.
        value = max(0.0, 1.0 - difference / allowed) if 0 < allowed < math.inf else float(passed)
        return Score(value, passed, f"difference {difference:g}, allowed {allowed:g}")

    return close


def is_within(number: float, wanted: float, allowed: float) -> bool:
    """Return whether two numbers differ by at most `allowed`; rounding errors do not count: 0.8 is 0.1 above 0.7."""
    if not allowed:
        return number == wanted
    try:
        return abs(number - wanted) <= allowed + _ROUNDING * math.ulp(max(abs(float(number)), abs(float(wanted))))
    except OverflowError:  # An integer that no float holds.
        return number == wanted


def _number(output: Any) -> float | None:
    if isinstance(output, bool):
        return None
    try:
        number = float(output)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
