"""A leaderboard, and what it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fairtrial.base.frozen import JSON, first_is
from fairtrial.reports.compare.comparison import Verdict
from fairtrial.reports.compare.pairing import ChangedSamples
from fairtrial.reports.render.renderable import Renderable

if TYPE_CHECKING:
    from fairtrial.reports.render.document import Document


@dataclass(frozen=True, slots=True)
class BaselineDifference:
    """The difference of a system from the baseline; the intervals are simultaneous."""

    difference: float
    low: float | None
    high: float | None
    adjusted_p: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LeaderboardEntry:
    """One system. Its true rank lies between `rank_low` and `rank_high`; this holds for all systems together.

    `low` and `high` are the interval of its mean alone. `best` is the share of resamples in which its mean is the best;
    None where clusters are too few to be resampled.
    `suite_means` are its means in the suites, in their order. `failures` are trials with a task error or a timeout,
    `missing` those that say nothing about the system. `against_baseline` is None without a baseline, and for it.
    """

    name: str
    rank: int
    rank_low: int
    rank_high: int
    mean: float
    low: float | None
    high: float | None
    best: float | None
    suite_means: tuple[float, ...]
    failures: int
    missing: int
    against_baseline: BaselineDifference | None = None


@dataclass(frozen=True, slots=True)
class RankedSuite:
    """One suite of a leaderboard: its weight, the samples used, and those left out.

    `left_out` are samples that not every system has, `missing` those without a score of every system, and `changed`
    those of `missing` that are not the same in all runs.
    """

    name: str
    weight: float
    n: int
    left_out: int
    missing: int
    changed: ChangedSamples | None = None


@dataclass(frozen=True, slots=True)
class SystemPair:
    """The difference `first` - `second`; the intervals of all pairs are simultaneous."""

    first: str
    second: str
    difference: float
    low: float | None
    high: float | None
    adjusted_p: float


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class Leaderboard(Renderable):
    """Systems in the order of one metric, the best first: `leaderboard["terse"].rank_low`, or print it."""

    json_format: ClassVar[str] = "fairtrial.leaderboard/1"

    metric: str
    lower_is_better: bool
    systems: tuple[LeaderboardEntry, ...]
    baseline: str | None
    alpha: float
    n: int
    clusters: int | None
    suites: tuple[RankedSuite, ...]
    pairs: tuple[SystemPair, ...]
    method: str
    sentence: str
    warnings: tuple[str, ...]

    def __getitem__(self, system: str) -> LeaderboardEntry:
        for one in self.systems:
            if one.name == system:
                return one
        raise KeyError(
            f"no system {system!r} on this leaderboard; it has {', '.join(one.name for one in self.systems)}"
        )

    @property
    def may_be_best(self) -> tuple[str, ...]:
        """The systems whose rank interval contains 1."""
        return tuple(one.name for one in self.systems if one.rank_low == 1)

    def document(self, cases: int) -> Document:
        """Return what is shown; a leaderboard has no single trials, whatever `cases` is."""
        from fairtrial.reports.leaderboard.document import leaderboard_document

        return leaderboard_document(self)

    def to_json(self) -> dict[str, JSON]:
        """Return all figures as JSON values; docs/reference/json.md describes them."""
        return {**Renderable.to_json(self), "may_be_best": list(self.may_be_best)}

    def __repr__(self) -> str:
        return f"<Leaderboard of {len(self.systems)} systems by {self.metric}>"
