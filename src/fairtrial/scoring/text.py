"""Evaluators of text: equality, containment, patterns, edit distance."""

from __future__ import annotations

import functools
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable
from re import _constants as codes  # type: ignore[attr-defined]  # where `re` keeps the names of its own operations
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, overload

from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError, MissingExtraError
from fairtrial.scoring.combine import composite
from fairtrial.scoring.evaluator import EvalContext, Evaluator, evaluator, isolate_if
from fairtrial.scoring.score import Score

_MOST_STEPS = 3e7
"""The number of steps that take about a second."""


def may_take_long(pattern: str, flags: int, text: str) -> bool:
    """Return whether a search may take long; False only if it ends quickly for every text of this length.

    Without a repeat inside a repeat, a search tries at every character, for each repeat, every length it may have.
    """
    repeats, ways = _structure(pattern, flags)
    length = len(text) + 1
    return math.log(length) * (repeats + 1) + math.log(ways) > math.log(_MOST_STEPS)


@functools.lru_cache(1024)
def _structure(pattern: str, flags: int) -> tuple[float, float]:
    """Return the number of unbounded repeats (infinite if nested) and of other alternatives."""
    try:
        return _count(parser.parse(pattern, flags))
    except (re.error, RecursionError, OverflowError):
        return math.inf, 1.0


def _count(items: Any) -> tuple[float, float]:
    repeats, ways = 0.0, 1.0
    for code, value in items:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            least, most, inner = value
            inner_repeats, inner_ways = _count(inner)
            if (inner_repeats or inner_ways > 1) and most > 1:
                return math.inf, 1.0
            repeats += inner_repeats
            ways *= inner_ways
            if most is codes.MAXREPEAT:
                repeats += 1
            else:
                ways *= most - least + 1
        elif code is codes.BRANCH:
            for branch in value[1]:
                inner_repeats, inner_ways = _count(branch)
                repeats += inner_repeats
                ways *= inner_ways
            ways *= len(value[1])
        elif code is codes.GROUPREF:
            repeats += 1  # A back-reference compares the whole text of its group.
        else:
            for inner in _inside(code, value):
                inner_repeats, inner_ways = _count(inner)
                repeats += inner_repeats
                ways *= inner_ways
    return repeats, ways


def _inside(code: Any, value: Any) -> list[Any]:
    if code is codes.SUBPATTERN:
        return [value[3]]
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [value[1]]
    if code is codes.ATOMIC_GROUP:
        return [value]
    if code is codes.GROUPREF_EXISTS:
        return [part for part in value[1:] if part is not None]
    return []


_LONGEST_FUZZY = 50_000
_SHOWN = 60  # Characters of a value in a reason.
_COMPARED = 10_000  # Characters that are searched for the first difference of two texts.
_REPR = reprlib.Repr(maxlevel=3, maxdict=6, maxlist=8, maxtuple=8, maxset=8, maxstring=_SHOWN, maxother=_SHOWN)


def _short(value: Any, start: int = 0) -> str:
    """Format a value for a reason, from a given character on if it is text."""
    if isinstance(value, str):
        end = start + _SHOWN
        return f"{'...' if start else ''}{value[start:end]!r}{'...' if len(value) > end else ''}"
    return _REPR.repr(value)


def output_text(output: Any, name: str) -> str:
    """Return an output as text. None is not: its text, "None", would be compared like an answer."""
    if output is None:
        raise TypeError(f"{name} needs an output (the task returned None): return the answer in the task")
    return str(output)


def reference_text(expected: Any, name: str) -> str:
    """Return the one text or number that is expected, as text."""
    if expected is None or (isinstance(expected, Collection) and not isinstance(expected, str)):
        raise TypeError(f"the expected value of {name} must be a text or a number (got {_short(expected)})")
    return str(expected)


def _difference(output: Any, expected: Any) -> str:
    start = 0
    if isinstance(output, str) and isinstance(expected, str) and min(len(output), len(expected)) > _SHOWN // 2:
        # Long texts often have the same beginning: show them from shortly before the first difference.
        limit = min(len(output), len(expected), _COMPARED)
        pairs = zip(output[:limit], expected[:limit], strict=True)
        same = next((place for place, (one, other) in enumerate(pairs) if one != other), limit)
        start = max(same - _SHOWN // 3, 0)
    return f"expected {_short(expected, start)}, got {_short(output, start)}"


def _call_with_context(fn: Evaluator, sample: Any, output: Any, context: EvalContext) -> tuple[Score, ...]:
    """Call an evaluator in the context form, which returns a tuple with one named score."""
    if not isinstance(sample, Sample):
        raise TypeError(f"with a context, the first argument must be a Sample (got {_short(sample)})")
    scores: tuple[Score, ...] = composite(fn)(sample, output, context=context)
    return scores


@overload
def exact_match(output: object, expected: object) -> Score: ...
@overload
def exact_match(sample: Sample[Any, Any], output: object, /, *, context: EvalContext) -> tuple[Score, ...]: ...
@evaluator(inline=True, form="plain", needs_expected=True)
def exact_match(output: Any, expected: Any, *, context: EvalContext | None = None) -> Score | tuple[Score, ...]:
    """Passes if output and expected are equal. Called as (sample, output, *, context), returns a tuple of one score."""
    if context is not None:
        return _call_with_context(exact_match, output, expected, context)
    passed = bool(output == expected)
    return Score(1.0) if passed else Score(0.0, False, _difference(output, expected))


@overload
def contains(output: object, expected: object) -> Score: ...
@overload
def contains(sample: Sample[Any, Any], output: object, /, *, context: EvalContext) -> tuple[Score, ...]: ...
@evaluator(inline=True, form="plain", needs_expected=True)
def contains(output: Any, expected: Any, *, context: EvalContext | None = None) -> Score | tuple[Score, ...]:
    """Passes if the output contains expected. Called as (sample, output, *, context), returns a tuple of one score."""
    if context is not None:
        return _call_with_context(contains, output, expected, context)
    if isinstance(output, str) and (not isinstance(expected, str) or not expected):
        raise TypeError(f"the expected value of contains must be text to search for (got {_short(expected)})")
    if output is None:
        raise TypeError("contains needs an output to search in (the task returned None): return the answer in the task")
    if not hasattr(output, "__contains__") and not isinstance(output, Iterable):
        raise TypeError(f"contains needs text or a collection to search in (the task returned {_short(output)})")
    return Score(1.0) if expected in output else Score(0.0, False, f"expected {_short(expected)} in {_short(output)}")


@evaluator(inline=True, needs_expected=True)
def one_of(output: object, expected: Collection[object]) -> Score:
    """Passes if the output is one of several accepted answers."""
    if isinstance(expected, str) or not isinstance(expected, Collection):
        raise TypeError(
            f"the expected value of one_of must be a list of accepted answers (got {type(expected).__name__})"
        )
    if not expected:
        raise ValueError("the expected value of one_of must have at least one accepted answer (got none)")
    passed = any(output == answer for answer in expected)
    if passed:
        return Score(1.0)
    return Score(0.0, False, f"{_short(output)} is not one of {len(expected)} accepted answers")


def matches(pattern: str | None = None, *, flags: int = 0, isolate: bool = False) -> Callable[[object, object], Score]:
    """Passes if a regular expression is found in the output; without a pattern, `expected` is the expression.

    Args:
        pattern: The expression.
        flags: Flags of the `re` module.
        isolate: Always search in a child process, which a timeout can kill. By default this is only done if the search
            may take long, judging by the expression and the length of the output.
    """
    try:
        compiled = None if pattern is None else re.compile(pattern, flags)
    except re.error as error:
        raise ConfigurationError(f"matches(): invalid regular expression /{pattern}/: {error}") from None
    shown = "" if pattern is None else f"({pattern})"

    @evaluator(name=f"matches{shown}", inline=not isolate, isolate=isolate, needs_expected=compiled is None)
    def found(output: Any, expected: Any) -> Score:
        if compiled is None and (not isinstance(expected, str) or not expected):
            raise TypeError(f"the expected value of matches must be a regular expression (got {_short(expected)})")
        wanted = re.compile(expected, flags) if compiled is None else compiled
        passed = wanted.search(output_text(output, "matches")) is not None
        return Score(1.0) if passed else Score(0.0, False, f"no match for /{wanted.pattern}/ in {_short(output)}")

    def takes_long(output: Any, expected: Any) -> bool:
        return may_take_long(str(expected) if pattern is None else pattern, flags, str(output))

    return found if isolate else isolate_if(found, takes_long)


def fuzzy_match(minimum: float = 0.8) -> Callable[[object, object], Score]:
    """The similarity of two texts from 0 to 1 (normalised edit distance); passes from `minimum` on."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtraError("fuzzy_match", "text") from None

    if not 0.0 <= minimum <= 1.0:
        raise ConfigurationError(f"the minimum similarity of fuzzy_match must be from 0 to 1 (got {minimum})")

    @evaluator(inline=True, name="fuzzy_match", needs_expected=True)
    def similar(output: Any, expected: Any) -> Score:
        left, right = output_text(output, "fuzzy_match"), reference_text(expected, "fuzzy_match")
        longer = max(len(left), len(right))
        if longer > _LONGEST_FUZZY:
            # Edit distance is quadratic and keeps the interpreter lock: a megabyte blocks the process for a minute.
            raise ValueError(f"fuzzy_match compares texts of up to {_LONGEST_FUZZY:,} characters (got {longer:,})")
        value = Levenshtein.normalized_similarity(left, right)
        return Score(value, value >= minimum, f"similarity {value:.2f}, needed {minimum:.2f}")

    return similar
