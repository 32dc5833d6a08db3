"""Hashes of samples and datasets."""

from __future__ import annotations

import hashlib
import json
from hashlib import blake2b
from typing import Any, NamedTuple

from fairtrial.base.codec import canonical, decode, dumps
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, DatasetError

_MODULUS = 1 << 256
_PLAIN = frozenset({str, int})


class Identity(NamedTuple):
    """The hashes of a dataset's content and of its order."""

    fingerprint: str
    order: str


def sample_content(sample: Sample[Any, Any]) -> list[Any]:
    """Return what is hashed of a sample beside its id: an expected value of None differs from none at all."""
    content = [sample.input, sample.expected, sample.metadata]
    return [*content, True] if sample.expected is None and sample.has_expected else content


class Order:
    """A hash of ids in their order."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, sample_id: str) -> None:
        """Add the next id."""
        name = sample_id.encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:%b" % (len(name), name))

    def hexdigest(self) -> str:
        """Return 32 hex digits for the order so far."""
        return self._hash.hexdigest()


class Fingerprint:
    """A sum of one hash per sample, which does not depend on their order.

    A sum, not an exclusive or: equal samples must not cancel out.
    """

    __slots__ = ("_count", "_sum")

    def __init__(self) -> None:
        self._sum = 0
        self._count = 0

    def add(self, sample: Sample[Any, Any]) -> None:
        """Add a sample."""
        given, expected = sample.input, sample.expected
        try:
            if type(given) in _PLAIN and type(expected) in _PLAIN and not sample.metadata:  # The same, sooner.
                try:
                    content = f"[{dumps(sample.id)},{dumps(given)},{dumps(expected)},{{}}]".encode()
                except CodecError:  # The canonical form says in which part.
                    content = canonical([sample.id, *sample_content(sample)])
            else:
                content = canonical([sample.id, *sample_content(sample)])
        except CodecError as error:
            part = ("id", "input", "expected", "metadata")[error.path[0]] if error.path else "it"  # type: ignore[index]
            inner = CodecError(error.problem, error.path[1:])
            raise DatasetError(f"sample {sample.id!r}: {part} cannot be stored: {inner}") from None
        self._sum = (self._sum + int.from_bytes(hashlib.sha256(content).digest())) % _MODULUS
        self._count += 1

    def hexdigest(self) -> str:
        """Return 32 hex digits for the samples added so far."""
        return hashlib.sha256(b"%d:%x" % (self._count, self._sum)).hexdigest()[:32]


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
