"""How often the simulated users of conversations broke their rules, and what that may hide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot

from fairtrial.base.formatting import count, rate
from fairtrial.base.rates import Z_95, rate_bounds, wilson_bounds
from fairtrial.errors import ConfigurationError, UnknownRunError
from fairtrial.reports.figures.metrics import ExperimentSource
from fairtrial.store.notes import UserNote
from fairtrial.store.protocol import Totals

MANY_BROKEN = 0.05
"""Above this share of trials with a broken user, a report warns: they may not be like the others."""


@dataclass(frozen=True, slots=True)
class BrokenUsers:
    """The trials of an experiment whose simulated user was at fault.

    Attributes:
        broken: Their number.
        trials: Number of trials that were scored, or would have been with another user.
        passed: Number of trials that passed.
    """

    broken: int
    trials: int
    passed: int

    @classmethod
    def of(cls, totals: Totals) -> BrokenUsers:
        """Return the figures of an experiment."""
        broken = totals.outcomes.get("user_error", 0)
        return cls(broken, totals.outcomes.get("scored", 0) + broken, totals.passed)

    @property
    def share(self) -> float:
        """The share of broken users."""
        return self.broken / self.trials if self.trials else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of that share."""
        return rate_bounds(self.broken, self.trials) if self.trials else (0.0, 1.0)

    @property
    def bounds(self) -> tuple[float, float]:
        """The pass rate if all trials with a broken user had failed, and if all had passed."""
        return (self.passed / self.trials, (self.passed + self.broken) / self.trials) if self.trials else (0.0, 1.0)

    def remark(self) -> tuple[bool, str] | None:
        """Return what a report says about them, with whether it warns; None if there are none."""
        if not self.broken:
            return None
        many = self.share > MANY_BROKEN
        low, high = self.bounds
        more = f", more than {rate(MANY_BROKEN)}" if many else ""
        others = self.trials - self.broken
        passed = f"The other {count(others, 'trial')} passed at {rate(self.passed / others)}. " if others else ""
        return many, (
            f"{count(self.broken, 'trial')} of {self.trials:,} had a broken user: {_with_interval(self)}{more}. "
            f"{passed}If all of them had failed, the pass rate would be {rate(low)}; if all had passed, {rate(high)}."
        )


def _with_interval(users: BrokenUsers) -> str:
    low, high = users.interval
    return f"{rate(users.share)} ({rate(low)} to {rate(high)})"


def check_same_users(sources: Sequence[ExperimentSource]) -> None:
    """Raise if experiments of several runs talked to different users, whose difference theirs may be.

    Raises:
        ConfigurationError: they did.
    """
    if len({source.run.run_id for source in sources}) > 1 and (names := _different_users(sources)):
        raise ConfigurationError(
            f"the sides talked to different users ({names}): a difference may be theirs and not the agents'\n"
            "run both with the same user, or compare them all the same: other_users=True (--other-users)"
        )


def about_users(sources: Sequence[ExperimentSource]) -> Iterator[str]:
    """Yield caveats of a comparison about its users: other users, many broken ones, or more on one side."""
    if names := _different_users(sources):
        yield f"The sides talked to different users ({names}): they may cause the difference."
    if not any(source.run.noted.users for source in sources):
        return
    sides = [(source, BrokenUsers.of(totals)) for source in sources if (totals := _totals(source)) is not None]
    if not any(users.broken for _, users in sides):
        return
    many = any(users.share > MANY_BROKEN for _, users in sides)
    first = sides[0][1]
    apart = any(_differ(first, users) for _, users in sides[1:])
    if many or apart:
        told = "; ".join(f"{_side(source, sources)} {_with_interval(users)}" for source, users in sides)
        why = "differ between the sides" if apart else f"are more than {rate(MANY_BROKEN)} of the trials of a side"
        yield f"Broken users {why} and are left out, which may bias the difference: {told}."


def _differ(one: BrokenUsers, other: BrokenUsers) -> bool:
    """Return whether the 95% interval of the difference of two shares leaves out 0. Newcombe (1998), method 10."""
    if not one.trials or not other.trials:
        return False
    difference = other.share - one.share
    (low, high), (other_low, other_high) = (wilson_bounds(each.share, each.trials, Z_95) for each in (one, other))
    below = difference - hypot(other.share - other_low, high - one.share)
    above = difference + hypot(other_high - other.share, one.share - low)
    return not below <= 0.0 <= above


def _totals(source: ExperimentSource) -> Totals | None:
    found = source.store.totals(source.run.run_id)
    return next((totals for totals in found if totals.experiment == source.name), None)


def _different_users(sources: Sequence[ExperimentSource]) -> str:
    """Return the users of the sides if they differ, else an empty text."""
    notes = [(source, note) for source in sources if (note := _user(source)) is not None]
    if len({note.digest for _, note in notes}) < 2:
        return ""
    models = [note.model or "no model" for _, note in notes]
    what = [f"{model}, {note.digest[:8]}" for model, (_, note) in zip(models, notes, strict=True)]
    return "; ".join(f"{_side(source, sources)}: {text}" for (source, _), text in zip(notes, what, strict=True))


def _user(source: ExperimentSource) -> UserNote | None:
    """Return the user of an experiment; a rescored run has the users of the run whose outputs it scores."""
    run = source.run
    if not run.noted.users and run.parent_run is not None:
        with contextlib.suppress(UnknownRunError):  # It may have been deleted.
            run = source.store.get_run(run.parent_run)
    return run.noted.users.get(source.name)


def _side(source: ExperimentSource, sources: Sequence[ExperimentSource]) -> str:
    runs = {one.run.run_id for one in sources}
    return source.name if len(runs) == 1 else f"{source.run.name}:{source.name}"
