"""Looks at a test split: each new pair of baseline and candidate is one, and a part of alpha belongs to it.

The parts alpha/(k(k + 1)) of all looks sum to alpha, however many there will be. The number of a look is kept in the
store before anything is shown, so that a crash or a second process neither loses a look nor counts it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from fairtrial.base.codec import digest
from fairtrial.base.formatting import level, samples_text
from fairtrial.data.splits import TEST, SplitOrigin
from fairtrial.errors import StoreError
from fairtrial.reports.figures.analysis_plan import plan_of_sides
from fairtrial.reports.figures.metrics import ExperimentSource

MANY_LOOKS = 10
"""From this look on, fresh samples are recommended."""

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True, slots=True)
class TestLooks:
    """The looks at a test split that a comparison is.

    Attributes:
        split: The fingerprint of the test split.
        samples: Number of samples in it.
        numbers: The number of the look of each candidate, or of each pair of a leaderboard, from 1; 0 for one that is
            not on the split.
        alpha: The accepted chance of a false alarm over all looks at the split.
        spends: Whether the plan spends alpha over looks.
        fresh: From the tenth look on, how many new samples would detect the smallest difference that matters.
        unrecorded: Why the look could not be recorded; empty if it was.
    """

    __test__ = False  # Not a test class of pytest.

    split: str
    samples: int
    numbers: tuple[int, ...]
    alpha: float
    spends: bool
    fresh: int | None = None
    unrecorded: str = ""

    @property
    def spent(self) -> float:
        """The level of the comparison.

        With several pairs, the level of the last look times their number. Holm's method then rejects no more often
        than the parts of the looks allow, also if these pairs are shown alone before or after.
        """
        looks = [number for number in self.numbers if number]
        return len(looks) * spent_alpha(self.alpha, max(looks)) if self.spends else self.alpha

    @property
    def fresh_alpha(self) -> float:
        """The level of the first look at a new test split."""
        return spent_alpha(self.alpha, 1) if self.spends else self.alpha

    @property
    def sentences(self) -> list[str]:
        """What a reader of the comparison has to know."""
        looks = [number for number in self.numbers if number]
        first, last = min(looks), max(looks)
        if last > first:
            text = f"Looks {first} to {last} at this test split ({self.samples:,} samples)"
        else:
            text = f"{ordinal(last).capitalize()} look at this test split ({self.samples:,} samples)"
        if self.spends:
            text += f": its level is {level(self.spent)}, so that all looks together stay within {level(self.alpha)}."
        elif last > 1:
            text += (
                ". Each further look makes it more likely that a gain is chance: looks = true in the analysis plan "
                "allows for that."
            )
        else:
            text += "."
        lines = [text]
        if last >= MANY_LOOKS:
            size = f"as many as now ({self.samples:,})" if self.fresh is None else f"about {samples_text(self.fresh)}"
            lines.append(
                f"After {last} looks, test on fresh samples: {size}"
                f"{'' if self.fresh is None else ' detect the smallest difference that matters at the first look'}."
            )
        if self.unrecorded:
            lines.append(f"The look could not be recorded and may be counted again: {self.unrecorded}")
        return lines


def spent_alpha(alpha: float, attempt: int) -> float:
    """Return the part of alpha for the k-th attempt or look, alpha/(k(k + 1)); all parts sum to alpha."""
    return alpha / (attempt * (attempt + 1))


def ordinal(number: int) -> str:
    """Return an ordinal number: "third", "21st"."""
    if number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def look_at(sources: Sequence[ExperimentSource], alpha: float, *, spends: bool) -> TestLooks | None:
    """Record that candidates are compared with a baseline, the first source; None if that is not on a test split."""
    baseline, *candidates = sources
    return _record([(baseline, one) for one in candidates], alpha, spends=spends)


def look_at_all(sources: Sequence[ExperimentSource], alpha: float) -> list[TestLooks]:
    """Record that all pairs of systems are compared: for each test split that two of them are on, their looks.

    As in a comparison, the plan of these systems says whether alpha is spent over looks; it then is the plan's at most.
    """
    splits: dict[SplitOrigin, list[ExperimentSource]] = {}
    for one in sources:
        if one.run.noted.split is not None:
            splits.setdefault(one.run.noted.split, []).append(one)
    found = []
    for group in splits.values():
        planned = plan_of_sides(group)
        plan = None if planned is None else planned.in_use
        spends = plan is not None and plan.looks
        total = min(alpha, plan.alpha) if plan is not None and spends else alpha
        found.append(_record(list(combinations(group, 2)), total, spends=spends))
    return [looks for looks in found if looks is not None]


def _record(
    compared: Sequence[tuple[ExperimentSource, ExperimentSource]], alpha: float, *, spends: bool
) -> TestLooks | None:
    """Record pairs on the test split of the first side; None if it is on none, or no other side is on it."""
    split = compared[0][0].run.noted.split if compared else None
    if split is None or split.name != TEST:
        return None
    pairs = [_pair(first, second) if second.run.noted.split == split else None for first, second in compared]
    wanted = [pair for pair in pairs if pair is not None]
    if not wanted:
        return None
    store, unrecorded = compared[0][0].store, ""
    known = list(store.looks(split.fingerprint))
    if not set(wanted) <= set(known):
        try:
            known = list(store.record_looks(split.fingerprint, wanted))
        except StoreError as error:
            known += [pair for pair in dict.fromkeys(wanted) if pair not in known]
            unrecorded = str(error)
    numbers = tuple(0 if pair is None else known.index(pair) + 1 for pair in pairs)
    return TestLooks(split.fingerprint, split.size, numbers, alpha, spends, unrecorded=unrecorded)


def _pair(baseline: ExperimentSource, candidate: ExperimentSource) -> str | None:
    """Return the key of a pair, whichever side is called the baseline; None for a side with itself."""
    sides = {(one.run.run_id, one.name) for one in (baseline, candidate)}
    return digest(sorted(sides))[:32] if len(sides) == 2 else None
