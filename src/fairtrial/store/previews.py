"""Previews of stored trials: their numbers and the beginnings of their texts, for tables on screens."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fairtrial.base.codec.escape import restore_text
from fairtrial.trials.result import Outcome

MAX_METADATA = 4_000
"""Metadata with more characters is left out of a preview."""
_LONGEST_ESCAPE = 12  # Two \uXXXX, a pair of surrogates.


class TrialPreview(NamedTuple):
    """One stored trial, with texts that are cut.

    `input`, `expected` and `output` are text, or JSON where the value is something else. `note` is the error of a
    failed trial and the reason of a scored one. `metadata` is None where it is too long to be shown.
    """

    ordinal: int
    sample_id: str
    outcome: Outcome
    passed: bool | None
    value: float | None
    latency_ms: int
    tokens: int
    cost_usd: float | None
    attempt: int
    input: str
    expected: str
    output: str
    note: str
    metadata: dict[str, Any] | None


def preview_text(stored: str | None, size: int) -> str:
    """Return the beginning of a stored JSON value: the text of a string, the JSON of anything else."""
    if stored is None:
        return ""
    if not stored.startswith('"'):
        return stored[:size]
    text = _string(stored)
    restored = restore_text(text)
    return (restored if isinstance(restored, str) else text)[:size]


def _string(stored: str) -> str:
    """Decode a JSON string whose end may be cut off, even within an escape."""
    for end in range(len(stored), max(len(stored) - _LONGEST_ESCAPE, 0), -1):
        for closing in ("", '"'):
            try:
                decoded = json.loads(stored[:end] + closing)
            except ValueError:
                continue
            if isinstance(decoded, str):
                half = closing and "\ud800" <= decoded[-1:] <= "\udbff"  # The cut went through a pair of surrogates.
                return decoded[:-1] if half else decoded
    return stored[1:]


def preview_metadata(stored: str | None) -> dict[str, Any] | None:
    """Return the metadata of a sample; None if it was left out or is no object."""
    if stored is None:
        return {}
    if len(stored) > MAX_METADATA:
        return None
    try:
        found = json.loads(stored)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
