"""Evaluators made of evaluators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.scoring.evaluator import Case, EvalContext, Evaluator, Scorer, evaluator, resolve
from fairtrial.scoring.score import Score, mean_value, merge
from fairtrial.session.views import SessionView

type _Parts = Sequence[tuple[str, Score]]


class Combined(Scorer):
    """Several evaluators and the rule that makes one score of theirs. It can be called by hand like any evaluator."""

    __slots__ = ("_rule", "members")

    def __init__(self, name: str, members: Sequence[Evaluator | Scorer], rule: Callable[[_Parts], Score]) -> None:
        if not members:
            raise ConfigurationError(f"{name}() needs at least one evaluator")
        self.members = tuple(resolve(member) for member in members)
        self._rule = rule
        self.name = name
        self.needs_session = any(member.needs_session for member in self.members)
        self.is_async = any(member.is_async for member in self.members)
        self.quick = all(member.quick for member in self.members)

    def score_now(self, case: Case) -> Score:
        """Score without an event loop."""
        return self._rule([(member.name, member.score_now(case)) for member in self.members])

    async def score(self, case: Case) -> Score:
        """Score a case; members that wait (judges, threads) wait together."""
        return self.score_now(case) if self.quick else self._rule(await self.score_parts(case))

    async def score_parts(self, case: Case) -> list[tuple[str, Score]]:
        """Every member's own score, in order."""
        scores: list[Score | Exception | None] = [None] * len(self.members)

        async def fill(position: int, member: Scorer) -> None:
            try:
                scores[position] = await member.score(case)
            except Exception as error:
                scores[position] = error

        waiting = [(position, member) for position, member in enumerate(self.members) if not member.quick]
        async with anyio.create_task_group() as group:
            for position, member in waiting[1:]:
                group.start_soon(fill, position, member)
            for position, member in enumerate(self.members):
                if member.quick or (position, member) == waiting[0]:
                    await fill(position, member)
        parts: list[tuple[str, Score]] = []
        for member, score in zip(self.members, scores, strict=True):
            if isinstance(score, Exception):
                score.add_note(f"raised by evaluator {member.name!r}")
                raise score
            assert score is not None  # noqa: S101 - every position was filled above
            parts.append((member.name, score))
        return parts

    def __call__(self, output: Any, expected: Any, session: SessionView | None = None) -> Any:
        """Call it by hand: a Score, or an awaitable of one if a member is async."""
        if session is None and self.needs_session:
            raise TypeError(
                f"{self.name}(...) has a member that reads the session: call it with (output, expected, session)"
            )
        case = Case(Sample("by-hand", None, expected), output, session)
        return self.score(case) if self.is_async else self.score_now(case)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(member.name for member in self.members)})"


class Composite(Combined):
    """Members kept apart: called by hand it gives every member's score."""

    __slots__ = ()

    def __call__(self, sample: Sample[Any, Any], output: Any, *, context: EvalContext) -> Any:  # type: ignore[override]
        """Call it by hand as (sample, output, *, context): a tuple of named scores, or an awaitable of one."""
        case = Case(sample, output, context.session, adapter=context.adapter, run_id=context.run_id)
        if self.is_async:
            return self._named(case)
        return tuple(_renamed(member.name, member.score_now(case)) for member in self.members)

    async def _named(self, case: Case) -> tuple[Score, ...]:
        return tuple(_renamed(name, score) for name, score in await self.score_parts(case))


def _renamed(name: str, score: Score) -> Score:
    return score if score.name else Score(score.value, score.passed, score.reason, score.metrics, name=name)


def _all(parts: _Parts) -> Score:
    return merge(parts, value=mean_value(parts), passed=all(part.passed for _, part in parts))


def _any(parts: _Parts) -> Score:
    return merge(parts, value=max(part.value for _, part in parts), passed=any(part.passed for _, part in parts))


def all_of(*evaluators: Evaluator | Scorer) -> Combined:
    """Passes if all pass; the value is their mean."""
    return Combined("all_of", evaluators, _all)


def any_of(*evaluators: Evaluator | Scorer) -> Combined:
    """Passes if one passes; the value is the largest."""
    return Combined("any_of", evaluators, _any)


def composite(*evaluators: Evaluator | Scorer) -> Composite:
    """Several criteria side by side; passes if all pass, the value is their mean, and each is reported."""
    return Composite("composite", evaluators, _all)


def weighted(*members: tuple[Evaluator | Scorer, float], pass_at: float = 0.5) -> Combined:
    """A weighted mean of values: `weighted((correct, 3), (polite, 1))`. The weights make it a reward."""
    weights = [float(weight) for _, weight in members]
    if members and not any(weight > 0 for weight in weights):
        raise ConfigurationError("weighted() needs at least one weight above 0")

    def rule(parts: _Parts) -> Score:
        reward = merge(parts, value=0.0, passed=False, weights=weights)
        value = min(max(reward.reward, 0.0), 1.0)
        return Score(value, value >= pass_at, reward.reason, reward.metrics)

    return Combined("weighted", [member for member, _ in members], rule)


def negate(member: Evaluator | Scorer) -> Combined:
    """Passes where the other does not."""

    def rule(parts: _Parts) -> Score:
        (_, part), *_ = parts
        merged = merge(parts, value=1.0 - part.value, passed=not part.passed)
        reason = f"not: {part.reason}" if part.reason else ""
        return Score(merged.value, merged.passed, reason, merged.metrics)

    return Combined("negate", [member], rule)


def threshold(member: Evaluator | Scorer, at: float) -> Combined:
    """Passes where the other's value reaches `at`."""
    if not 0.0 <= at <= 1.0:
        raise ConfigurationError(f"a threshold lies between 0 and 1, not at {at}")

    def rule(parts: _Parts) -> Score:
        (_, part), *_ = parts
        return merge(parts, value=part.value, passed=part.value >= at)

    return Combined("threshold", [member], rule)


def adapt(member: Evaluator) -> Callable[[Any, Any, SessionView], Any]:
    """A plain evaluator with the parameters of a session-aware one."""
    scorer = resolve(member)

    @evaluator(form="session", inline=scorer.quick, name=scorer.name)
    def adapted(output: Any, expected: Any, session: SessionView) -> Any:
        case = Case(Sample("by-hand", None, expected), output, session)
        return scorer.score(case) if scorer.is_async else scorer.score_now(case)

    return adapted
