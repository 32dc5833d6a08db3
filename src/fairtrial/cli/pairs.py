"""`key=value` on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from fairtrial.cli.faults import Mistake

_EXAMPLES = {"--floor": "value=0.7", "--ceiling": "latency_ms=2000", "--tag": "branch=main", "--set": "style=terse"}


def parse_pairs(option: str, pairs: Iterable[str], *, as_text: bool = False) -> Iterator[tuple[str, Any]]:
    """(key, value) of each; values are read as JSON where they are JSON, else as text."""
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise Mistake(
                f"{option} takes KEY=VALUE, not {pair!r}", f"as in: {option} {_EXAMPLES.get(option, 'level=hard')}"
            )
        yield key.strip(), value if as_text else parse_value(value)


def parse_value(text: str) -> Any:
    """`3` is a number, `true` a truth, `[1, 2]` a list, and everything that is no JSON is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
