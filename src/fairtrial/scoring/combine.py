"""Combinations of evaluators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio

from fairtrial.data.sample import Sample
from fairtrial.data.session.views import SessionView
from fairtrial.errors import ConfigurationError
from fairtrial.scoring.evaluator import (
    Case,
    EvalContext,
    Evaluator,
    NeedsIsolationError,
    Scorer,
    call_directly,
    isolate_if,
    isolation_of,
    marks_of,
    resolve,
)
from fairtrial.scoring.evaluator import evaluator as mark_evaluator
from fairtrial.scoring.score import Score, mean_value, merge, weighted_mean

type _Parts = Sequence[tuple[str, Score]]


class Combined(Scorer):
    """A combination of evaluators with the rule that merges their scores. You can call it like any evaluator."""

    __slots__ = ("_names", "_rule", "members")

    def __init__(
        self,
        name: str,
        members: Sequence[Evaluator | Scorer],
        rule: Callable[[_Parts], Score],
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        if not members:
            raise ConfigurationError(f"{name}() must have at least one evaluator (got none)")
        self.members = tuple(resolve(member) for member in members)
        guards = [member.name for member in self.members if member.is_guard]
        if guards and name not in ("all_of", "composite"):
            raise ConfigurationError(
                f"{name}() cannot combine {guards[0]!r}, which has no score of its own\n"
                f"write all_of({guards[0]}(...), {name}(...))"
            )
        self._names = [member.name for member in self.members] if names is None else names
        self._rule = rule
        self.name = name
        self.needs_session = any(member.needs_session for member in self.members)
        self.is_async = any(member.is_async for member in self.members)
        self.quick = all(member.quick for member in self.members)

    @property
    def needs_adapter(self) -> bool:
        """Whether a member needs the suite's adapter."""
        return any(member.needs_adapter for member in self.members)

    @property
    def needs_expected(self) -> bool:
        """Whether a member cannot score a sample without an expected value."""
        return any(member.needs_expected for member in self.members)

    @property
    def is_guard(self) -> bool:
        """Whether all members are."""
        return all(member.is_guard for member in self.members)

    def score_now(self, case: Case) -> Score:
        """Score without an event loop."""
        return self._rule(self.parts_now(case))

    async def score(self, case: Case) -> Score:
        """Score a case; members that wait (judges, threads) run concurrently."""
        if self.quick:
            try:
                return self.score_now(case)
            except NeedsIsolationError:
                pass
        return self._rule(await self.parts(case))

    def parts_now(self, case: Case) -> list[tuple[str, Score]]:
        """Return the score of each member, in order, without an event loop."""
        parts: list[tuple[str, Score]] = []
        for name, member in zip(self._names, self.members, strict=True):
            try:
                parts.append((name, member.score_now(case)))
            except Exception as error:
                error.add_note(f"raised by evaluator {member.name!r}")
                raise
        return parts  # No guard is quick.

    async def parts(self, case: Case) -> list[tuple[str, Score]]:
        """Return the score of each member, in order. All members finish before the first error is raised.

        Guards are left out, and their errors come first.
        """
        found = list(zip(self.members, await self.outcomes(case), strict=True))
        for _member, (_name, score) in sorted(found, key=lambda one: not one[0].is_guard):
            if isinstance(score, Exception):
                raise score
        scored = [part for member, part in found if not member.is_guard]
        return [(name, score) for name, score in scored or [part for _, part in found] if isinstance(score, Score)]

    async def outcomes(self, case: Case) -> list[tuple[str, Score | Exception]]:
        """Return the score or the error of each member, in order."""
        scores: dict[int, Score | Exception] = {}

        async def fill(position: int, member: Scorer) -> None:
            try:
                scores[position] = await member.score(case)
            except Exception as error:
                scores[position] = error

        async with anyio.create_task_group() as group:
            for position, member in enumerate(self.members):
                group.start_soon(fill, position, member)
        for position, member in enumerate(self.members):
            if isinstance(error := scores[position], Exception):
                error.add_note(f"raised by evaluator {member.name!r}")
        return [(name, scores[position]) for position, name in enumerate(self._names)]

    def __call__(self, output: Any, expected: Any, session: SessionView | None = None) -> Any:
        """Call the combination; returns a Score or, in async code with an async member, an awaitable of one."""
        if session is None and self.needs_session:
            raise TypeError(
                f"{self.name}(...) has a member that reads the session: call it with (output, expected, session)"
            )
        case = Case(Sample("by-hand", None, expected), output, session)
        return call_directly(lambda: self.score(case)) if self.is_async else self.score_now(case)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(member.name for member in self.members)})"


class Composite(Combined):
    """A combination that returns the score of every member when you call it."""

    __slots__ = ()

    def __call__(self, sample: Sample[Any, Any], output: Any, *, context: EvalContext) -> Any:  # type: ignore[override]
        """Call it as (sample, output, *, context); returns a tuple of named scores.

        In async code it is an awaitable of one, if a member is async.
        """
        case = Case(
            sample,
            output,
            context.session,
            adapter=context.adapter,
            run_id=context.run_id,
            environment=context.environment,
        )
        return call_directly(lambda: self._named_later(case)) if self.is_async else _named(self.parts_now(case))

    async def _named_later(self, case: Case) -> tuple[Score, ...]:
        return _named(await self.parts(case))


def _named(parts: _Parts) -> tuple[Score, ...]:
    return tuple(score if score.name else replace(score, name=name) for name, score in parts)


def _all(parts: _Parts) -> Score:
    return merge(parts, value=mean_value(parts), passed=all(part.passed for _, part in parts))


def _any(parts: _Parts) -> Score:
    return merge(parts, value=max(part.value for _, part in parts), passed=any(part.passed for _, part in parts))


def _with_reason(score: Score, reason: str) -> Score:
    return replace(score, reason=f"{reason}; {score.reason}" if score.reason else reason)


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigurationError(f"{name} must be from 0 to 1 (got {value})")


def all_of(*evaluators: Evaluator | Scorer) -> Combined:
    """Passes if all pass; the value is their mean."""
    return Combined("all_of", evaluators, _all)


def any_of(*evaluators: Evaluator | Scorer) -> Combined:
    """Passes if one passes; the value is the largest."""
    return Combined("any_of", evaluators, _any)


def composite(*evaluators: Evaluator | Scorer) -> Composite:
    """Report several criteria; passes if all pass, the value is their mean."""
    return Composite("composite", evaluators, _all)


def weighted(*members: tuple[Evaluator | Scorer, float], pass_at: float = 0.5) -> Combined:
    """A weighted mean of values: `weighted((correct, 3), (polite, 1))`. The weights make it a reward."""
    weights = [float(weight) for _, weight in members]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or (members and not any(weights)):
        raise ConfigurationError(f"the weights of weighted() must be finite, at least 0, and not all 0 (got {weights})")
    _check_share("pass_at", pass_at)

    def rule(parts: _Parts) -> Score:
        reward = weighted_mean(zip((part.value for _, part in parts), weights, strict=True)) or 0.0
        merged = merge(parts, value=reward, passed=reward >= pass_at, weights=weights)
        return merged if merged.passed else _with_reason(merged, f"weighted mean {reward:.3g} is below {pass_at:g}")

    return Combined("weighted", [member for member, _ in members], rule)


def negate(member: Evaluator | Scorer) -> Combined:
    """Passes if the evaluator does not."""

    def rule(parts: _Parts) -> Score:
        (name, part), *_ = parts
        reason = f"{name} {'passed' if part.passed else 'failed'}{f': {part.reason}' if part.reason else ''}"
        return merge(parts, value=1.0 - part.value, passed=not part.passed, reason=reason)

    return Combined("negate", [member], rule)


def threshold(member: Evaluator | Scorer, at: float) -> Combined:
    """Passes if the value of the evaluator is at least `at`."""
    _check_share("at", at)

    def rule(parts: _Parts) -> Score:
        (name, part), *_ = parts
        passed = part.value >= at
        why = "" if passed else f"{name}: {part.value:.3g} is below {at:g}"
        return merge(parts, value=part.value, passed=passed, reason="; ".join(filter(None, (why, part.reason))))

    return Combined("threshold", [member], rule)


def adapt(evaluator: Evaluator) -> Callable[[Any, Any, SessionView], Any]:
    """Return an evaluator with a session parameter, which it ignores, from one with two parameters."""
    scorer = resolve(evaluator)
    mark = mark_evaluator(
        form="session",
        inline=scorer.quick,
        isolate=marks_of(evaluator).isolate,
        name=scorer.name,
        needs_expected=scorer.needs_expected,
    )

    def adapted(output: Any, expected: Any, session: SessionView) -> Score:
        return scorer.score_now(Case(Sample("by-hand", None, expected), output, session))

    async def adapted_later(output: Any, expected: Any, session: SessionView) -> Score:
        return await scorer.score(Case(Sample("by-hand", None, expected), output, session))

    made: Callable[[Any, Any, SessionView], Any] = mark(adapted_later if scorer.is_async else adapted)
    return isolate_if(made, isolation_of(evaluator))
