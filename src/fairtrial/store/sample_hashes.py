"""Hashes of what samples ask and expect, by which two versions of a dataset are told apart."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from fairtrial.base.codec import canonical, decode

UNKNOWN = -(1 << 63)
"""Stands for the hash of what is not stored."""
_NOTHING = 0  # Stands for no expected value.
_EMPTY_INPUTS = frozenset(("null", '""', "[]", "{}"))  # Inputs without content.


def input_hash(value: Any, text: str) -> int | None:
    """Return a 64-bit hash of the canonical form of an input; None for an empty input."""
    return None if text in _EMPTY_INPUTS else _input_hash(value, text)


def _input_hash(value: Any, text: str) -> int:
    return _hash(text if "{" not in text else canonical(value))


def sample_hashes(stored: int | None, content: str | None, expected: str | None) -> tuple[int, int]:
    """Return the hashes of input and expected value; `UNKNOWN` for what is not stored. An input of None says nothing.

    `stored` is the stored hash of the input, `content` and `expected` are stored texts; that of the input is only
    needed where there is no hash: if it is empty, or was stored before inputs were hashed.
    """
    if stored is None:
        known = content is not None and content != "null"
        stored = _input_hash(decode(object, content), content) if known and content is not None else UNKNOWN
    if expected is None:
        return stored, UNKNOWN if stored == UNKNOWN else _NOTHING
    # Keys are sorted as in the canonical form, at a fraction of its cost: both sides are hashed here.
    return stored, _hash(expected if "{" not in expected else json.dumps(json.loads(expected), sort_keys=True))


def _hash(content: str | bytes) -> int:
    if isinstance(content, bytes):
        text = content
    else:
        text = content.encode() if content.isascii() else content.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big", signed=True)
