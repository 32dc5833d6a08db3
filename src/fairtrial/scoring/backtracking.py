"""How long a regular expression may take: an upper bound from its structure and the length of the text."""

from __future__ import annotations

import functools
import math
import re
from re import _constants as codes  # type: ignore[attr-defined]  # where `re` keeps the names of its own operations
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

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
