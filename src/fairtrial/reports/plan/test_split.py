"""What a test split can show, said before it is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.base.formatting import count, level, size_text
from fairtrial.reports.compare.looks import ordinal, spent_alpha
from fairtrial.reports.figures.analysis_plan import plan_of
from fairtrial.reports.figures.metrics import ExperimentSource, is_ratio, is_verdict
from fairtrial.reports.search.search import search_of


@dataclass(frozen=True, slots=True)
class TestSplit:
    """The test split of the dataset that earlier runs are on a split of.

    Attributes:
        samples: Number of samples in it.
        look: The number of its next look.
        spends: Whether the newest run spends alpha over looks: by its plan, or as a search for a better prompt.
    """

    __test__ = False  # Not a test class of pytest.

    samples: int
    look: int
    spends: bool

    def alpha(self, total: float) -> float:
        """Return the level of the next look."""
        return spent_alpha(total, self.look) if self.spends else total

    def gain(self, metric: str, total: float, power: float, repeats: int, detectable: float | None) -> TestGain:
        """Return what the next look can show."""
        alpha = self.alpha(total)
        start = f"The test split has {count(self.samples, 'sample')}. Its {ordinal(self.look)} look"
        start += f", at a level of {level(alpha)}," if self.spends else ""
        often = "four times in five" if abs(power - 0.8) < 1e-9 else f"in {level(power)} of runs"
        if detectable is None:
            sentence = f"{start} might miss even the largest gain."
        else:
            size = size_text(detectable, percent=is_verdict(metric), relative=is_ratio(metric))
            sentence = f"{start} shows a gain of {size} or more {often}, with {count(repeats, 'repeat')}."
        return TestGain(self.samples, self.look, alpha, detectable, sentence)


@dataclass(frozen=True, slots=True)
class TestGain:
    """The gain that the next look at a test split detects with the power asked for; None if none can be promised."""

    __test__ = False

    samples: int
    look: int
    alpha: float
    detectable: float | None
    sentence: str


def next_test(sources: Sequence[ExperimentSource]) -> TestSplit | None:
    """Return the test split that belongs to the newest run, from whichever split its samples are."""
    split = sources[0].run.noted.split if sources else None
    if split is None or not split.test_size:
        return None
    planned = plan_of(sources[0].run)
    plan = None if planned is None else planned.in_use
    look = len(sources[0].store.looks(split.test)) + 1
    spends = search_of(sources[0].run) is not None if plan is None else plan.looks  # Searches always do.
    return TestSplit(split.test_size, look, spends)
