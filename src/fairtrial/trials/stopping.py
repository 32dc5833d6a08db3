"""When a run has seen enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fairtrial.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class StopWhen:
    """End a run once its answer is known well enough, with figures that stay valid however often one looks.

    Give one of `narrower_than` and `decides`. Looks are taken at the samples in the order of the plan, never in the
    order in which they finish; the order itself must have nothing to do with how hard the samples are, so shuffle a
    dataset that is sorted. It is for single pass/fail outcomes of independent samples: repeats, clusters and graded
    scores are refused.

    Attributes:
        narrower_than: Stop when the pass rate of every experiment has a confidence sequence at most this wide.
        decides: Stop when the e-process tells these two experiments apart: (baseline, candidate).
        level: The confidence of intervals and decisions.
        every: Look after every so many samples.
        verdicts: Take graded scores by their verdict, passed or not, in place of refusing them.
    """

    narrower_than: float | None = None
    decides: tuple[str, str] | None = None
    level: float = 0.95
    every: int = 10
    verdicts: bool = False

    def __post_init__(self) -> None:
        if (self.narrower_than is None) == (self.decides is None):
            raise ConfigurationError("StopWhen needs one rule: narrower_than or decides")
        for name, value in (("narrower_than", self.narrower_than), ("level", self.level)):
            if value is not None and not _inside(value):
                raise ConfigurationError(f"StopWhen.{name} lies between 0 and 1, not at {value!r}")
        every: object = self.every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(f"StopWhen.every is a whole number of at least 1, not {self.every!r}")
        if not isinstance(self.verdicts, bool):
            raise ConfigurationError(f"StopWhen.verdicts is True or False, not {self.verdicts!r}")
        if self.decides is not None:
            pair: Any = self.decides
            if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
                raise ConfigurationError(f"StopWhen.decides names two experiments, not {pair!r}")
            if pair[0] == pair[1]:
                raise ConfigurationError(f"StopWhen.decides names experiment {pair[0]!r} twice")
            object.__setattr__(self, "decides", tuple(pair))


def _inside(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 < value < 1  # type: ignore[arg-type,operator]  # a number by now
