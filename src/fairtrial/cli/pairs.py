"""Parse `key=value` options."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from fairtrial.cli.user_errors import UserError

_EXAMPLES = {
    "--floor": "value=0.7",
    "--ceiling": "latency_ms=2000",
    "--tag": "branch=main",
    "--set": "style=terse",
    "--weight": "questions=2",
    "--bounds": "f1=0:1",
}


def parse_pairs(option: str, pairs: Iterable[str], *, as_text: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each pair; values are parsed as JSON if possible, else kept as text."""
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise UserError(
                f"{option} must be KEY=VALUE (got {pair!r})", f"as in: {option} {_EXAMPLES.get(option, 'level=hard')}"
            )
        yield key.strip(), value if as_text else parse_value(value)


def parse_ranges(option: str, pairs: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Return the range (low, high) of each metric in pairs such as `f1=0:1`."""
    ranges = {}
    for name, text in parse_pairs(option, pairs, as_text=True):
        try:
            low, high = map(float, text.split(":"))
        except ValueError:
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise UserError(
                f"{option} must be METRIC=LOW:HIGH (got {name}={text})", f"as in: {option} {_EXAMPLES[option]}"
            )
        ranges[name] = (low, high)
    return ranges


def parse_value(text: str) -> Any:
    """Parse JSON (`3`, `true`, `[1, 2]`); anything else is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
