"""Writing and reading the bodies of the fleet quickly, and believing nothing that was read.

A worker handles ten thousand bodies a second, so they are written by the C encoder in one go wherever their values
are plain JSON, and read field by field with a check of the exact type. What the codec would write is what is written:
a value that is not plain takes the codec's own way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from fairtrial.codec import dumps
from fairtrial.codec.encode import compact
from fairtrial.codec.escape import parse_json, restore
from fairtrial.errors import CodecError, NewerFormatError
from fairtrial.frozen import EMPTY, freeze
from fairtrial.session.events import TokenUsage
from fairtrial.trials.keys import TrialKey

VERSION: Final = 1
_MAX_INT: Final = (1 << 62) - 1
_SPECIAL = re.compile("\\\\u0000|[\ufdd0\ud800-\udfff]")
_MARK = "\ufdd0".encode()


def write(tree: dict[str, Any]) -> bytes:
    """A body as JSON: the same text as the codec's, without its walk where there is nothing to escape."""
    try:
        text = compact(tree)
    except (TypeError, ValueError, RecursionError):
        return dumps(tree).encode("utf-8")
    if text.isascii():
        if "\\u0000" not in text:
            return text.encode("ascii")
    elif _SPECIAL.search(text) is None:
        return text.encode("utf-8")
    return dumps(tree).encode("utf-8")


def read(data: bytes, what: str) -> dict[str, Any]:
    """The fields of a body.

    A body states the oldest format whose readers understand it, and fields that a reader does not know are ignored:
    clients and workers of two versions work together.

    Raises:
        NewerFormatError: only newer versions understand it. A mailbox leaves such a message to them.
        CodecError: it is no body.
    """
    tree: dict[str, Any] = parse_json(data)
    if type(tree) is not dict:
        raise CodecError(f"{what} is an object")
    # Escaped text is rare, and an escape may itself be written as one: only then is the whole body walked.
    if _MARK in data or b"\\u" in data:
        try:
            tree = restore(tree)
        except RecursionError:
            raise CodecError("nested too deeply") from None
    version = tree.pop("v", None)
    if type(version) is not int or version < 1:
        raise CodecError(f"the format of {what} must be a whole number from 1 (got {version!r})")
    if version > VERSION:
        raise NewerFormatError(f"{what} has format {version}, this version reads up to {VERSION}")
    return tree


def is_count(value: Any) -> bool:
    """Whether this is an int that a database can hold and nothing can be fewer than."""
    return type(value) is int and 0 <= value <= _MAX_INT


class Fields:
    """The fields of one body, taken out one by one.

    Raises `CodecError` for a field that is missing or of another type. What nobody takes out is ignored.
    """

    __slots__ = ("_tree", "_what")

    def __init__(self, tree: dict[str, Any], what: str) -> None:
        self._tree = tree
        self._what = what

    def any(self, name: str) -> Any:
        """Any JSON; None when it was left out."""
        return self._tree.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str:
        """Text."""
        value = self._tree.pop(name, default)
        if type(value) is not str:
            raise self._wrong(name, "text", value)
        return value

    def text_or_none(self, name: str) -> str | None:
        """Text, or nothing."""
        value = self._tree.pop(name, None)
        if value is not None and type(value) is not str:
            raise self._wrong(name, "text", value)
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """An int of at least `least`, small enough for a database."""
        value = self._tree.pop(name, default)
        if type(value) is not int or not least <= value <= _MAX_INT:
            raise self._wrong(name, f"a whole number of at least {least}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        return self._finite(name, self._tree.pop(name, default))

    def number_or_none(self, name: str) -> float | None:
        """A finite number that is not negative, or nothing."""
        value = self._tree.pop(name, None)
        return None if value is None else self._finite(name, value)

    def flag(self, name: str) -> bool:
        """True or False; False when it was left out."""
        value = self._tree.pop(name, False)
        if type(value) is not bool:
            raise self._wrong(name, "true or false", value)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, frozen; an empty one when it was left out."""
        value = self._tree.pop(name, None)
        if value is None:
            return EMPTY
        if type(value) is not dict:
            raise self._wrong(name, "an object", value)
        frozen: Mapping[str, Any] = freeze(value)
        return frozen

    def array(self, name: str, length: int | None = None) -> list[Any]:
        """An array, of a given length if one is given."""
        value = self._tree.pop(name, None)
        if type(value) is not list or (length is not None and len(value) != length):
            raise self._wrong(name, "an array" if length is None else f"an array of {length}", value)
        return value

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._tree.get(name) is not None

    def key(self, name: str) -> TrialKey:
        """The identity of a trial."""
        run_id, experiment, sample_id, repeat = value = self.array(name, 4)
        texts = type(run_id) is type(experiment) is type(sample_id) is str
        if texts and sample_id and type(repeat) is int and 0 <= repeat <= _MAX_INT:
            return TrialKey(run_id, experiment, sample_id, repeat)
        raise self._wrong(name, "run, experiment, sample and repeat", value)

    def usage(self, name: str, default: TokenUsage) -> TokenUsage:
        """What model calls used."""
        if not self.has(name):
            self._tree.pop(name, None)
            return default
        given, made, cached, cost = value = self.array(name, 4)
        if not all(type(count) is int and 0 <= count <= _MAX_INT for count in (given, made, cached)):
            raise self._wrong(name, "three counts and a cost", value)
        return TokenUsage(given, made, cached, None if cost is None else self._finite(name, cost))

    def calls(self, name: str, default: tuple[float | None, int, int, int]) -> tuple[float | None, int, int, int]:
        """What judges cost, and counts of calls: answered by the cache, unpriced ones of the task and of judges."""
        if not self.has(name):
            self._tree.pop(name, None)
            return default
        cost, hits, unpriced, unpriced_judges = value = self.array(name, 4)
        if not all(type(count) is int and 0 <= count <= _MAX_INT for count in (hits, unpriced, unpriced_judges)):
            raise self._wrong(name, "a cost and three counts", value)
        return None if cost is None else self._finite(name, cost), hits, unpriced, unpriced_judges

    def _finite(self, name: str, value: Any) -> float:
        if type(value) is not float and (type(value) is not int or value > _MAX_INT):
            raise self._wrong(name, "a number", value)
        if not (math.isfinite(value) and value >= 0):
            raise self._wrong(name, "a finite number that is not negative", value)
        return float(value)

    def _wrong(self, name: str, wanted: str, value: Any) -> CodecError:
        if value is None:
            return CodecError(f"{self._what} needs {name!r}, {wanted}")
        return CodecError(f"{wanted} was expected, not {repr(value)[:100]}").under(name)
