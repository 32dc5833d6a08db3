"""Parse `key=value` options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from fairtrial.cli.user_errors import UserError

_EXAMPLES = {
    "--floor": "value=0.7",
    "--ceiling": "latency_ms=2000",
    "--tag": "branch=main",
    "--set": "style=terse",
    "--weight": "questions=2",
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


def parse_value(text: str) -> Any:
    """Parse JSON (`3`, `true`, `[1, 2]`); anything else is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
