"""Text that came from a model, a dataset or a user, made safe to show."""

from __future__ import annotations

import re

# Control characters (escape sequences among them), the separators that break lines, and marks that reorder text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def plain(text: str, *, limit: int | None = None) -> str:
    """`text` without terminal escapes and control characters, on one line, cut to `limit`."""
    clean = _UNSAFE.sub("", _ESCAPES.sub("", text)).replace("\n", " ").replace("\t", " ")
    return clean if limit is None or len(clean) <= limit else clean[: max(limit - 1, 0)] + "…"
