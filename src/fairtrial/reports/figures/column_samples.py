"""The samples of a column file: ids, inputs by hash, metadata."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from fairtrial.base.codec import canonical
from fairtrial.base.codec.escape import MARK, parse_long_json
from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.store.column_cache import ColumnHeader
from fairtrial.store.numbers import NumberStore, SampleState, SampleTexts
from fairtrial.store.protocol import RunRecord
from fairtrial.store.rows import read_metadata, restored_text


class StoredIds(Sequence[str]):
    """Sample ids in UTF-8: id i is `text[starts[i]:ends[i]]`. They become strings only where somebody needs them."""

    def __init__(self, text: memoryview, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._text, self._starts, self._ends = text, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> StoredIds: ...
    def __getitem__(self, index: int | slice) -> str | StoredIds:
        if isinstance(index, slice):
            return StoredIds(self._text, self._starts[index], self._ends[index])
        return _decoded(self._text[self._starts[index] : self._ends[index]])

    def __iter__(self) -> Iterator[str]:
        text = self._text
        for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            yield _decoded(text[start:end])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StoredIds):
            return self.same_as(other)
        return list(self) == list(other) if isinstance(other, Sequence) and not isinstance(other, str) else False

    __hash__ = None  # type: ignore[assignment]  # As of a list.

    def take(self, places: NDArray[Any]) -> StoredIds:
        """Return the ids at these positions."""
        return StoredIds(self._text, self._starts[places], self._ends[places])

    def same_as(self, other: StoredIds) -> bool:
        """True if both have the same ids in the same order."""
        if len(self) != len(other):
            return False
        if self._text is other._text and self._starts is other._starts:
            return True
        if self._is_whole and other._is_whole:
            return bool(np.array_equal(self._ends, other._ends)) and self._text == other._text
        return list(self) == list(other)

    @cached_property
    def _is_whole(self) -> bool:
        """True if these are all ids of the text, in its order."""
        starts, ends = self._starts, self._ends
        if not len(starts):
            return not len(self._text)
        return bool(starts[0] == 0 and ends[-1] == len(self._text) and np.array_equal(starts[1:], ends[:-1]))

    @cached_property
    def are_unique(self) -> bool:
        """True if no id occurs twice."""
        hashes = np.fromiter(map(hash, self), dtype=np.int64, count=len(self))
        hashes.sort()
        return not bool(np.any(hashes[1:] == hashes[:-1])) or len(set(self)) == len(self)


def _decoded(text: memoryview) -> str:
    return str(text, "utf-8", "surrogatepass")


MOST_VALUES = (1 << 16) - 2
"""The number of distinct values of a metadata key that are coded in two bytes; 0 stands for no value."""
_CHUNK = 1 << 13  # Samples in memory at a time.
_MOST_KEYS = 256
_PARTS = 16


class OldColumns(Protocol):
    """The column file of an earlier state of the run."""

    header: ColumnHeader

    def array(self, name: str) -> NDArray[Any]:
        """Return an array."""
        ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(slots=True)
class SampleArrays:
    """The facts of the known samples.

    `settled` counts the leading samples that are complete, which never change. `codes` has the distinct values of each
    coded key as JSON text.
    """

    state: SampleState
    settled: int
    arrays: dict[str, NDArray[Any]]
    codes: dict[str, list[str]]
    uncoded: set[str]


def read_samples(
    store: NumberStore, run: RunRecord, old: OldColumns | None, add_ids: Callable[[bytes], None]
) -> SampleArrays:
    """Read the samples of a run, those that are settled from an earlier file; `add_ids` gets the text of their ids."""
    if old is not None and old.header.samples == [run.dataset_size] * 2:
        return _copy(old, add_ids)
    collected = _Samples(run.dataset_size)
    if old is not None:
        collected.take_over(old, add_ids)
    end = min(run.dataset_size, store.highest_sample(run.run_id) + 1)
    as_texts = True  # If that is not all there is to the samples of one part, it rarely is in the next.
    for first in range(collected.settled, end, _CHUNK):
        last = min(first + _CHUNK, end)
        if as_texts:
            texts = store.sample_texts(run.run_id, first, last)
            if texts is None:
                continue
            as_texts = collected.add_texts(texts, add_ids)
        if not as_texts:
            collected.add(store.sample_rows(run.run_id, first, last), add_ids)
    return collected.finished()


def _copy(old: OldColumns, add_ids: Callable[[bytes], None]) -> SampleArrays:
    """Return the samples of an earlier file that had them all."""
    header = old.header
    add_ids(_ids(old, header.arrays["id_lengths"].count))
    arrays = {
        name: old.array(name)
        for name in header.arrays
        if name in ("id_lengths", "repeated") or name.startswith("meta:")
    }
    return SampleArrays(SampleState(*header.samples), header.settled_samples, arrays, header.codes, set(header.uncoded))


def _ids(old: OldColumns, count: int) -> bytes:
    return old.array("id_text")[: int(old.array("id_lengths")[:count].sum(dtype=np.int64))].tobytes()


@dataclass(slots=True)
class _Key:
    codes: array[int]
    seen: dict[Any, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)


class _Samples:
    def __init__(self, size: int) -> None:
        self._size = size
        self._known = 0
        self._ordinals: array[int] | None = None  # Only if some are missing.
        self._lengths = array("I")
        self._hashes = array("q")
        self._keys: dict[str, _Key] = {}
        self._uncoded: set[str] = set()
        self._with_input = 0
        self.settled = 0

    def take_over(self, old: OldColumns, add_ids: Callable[[bytes], None]) -> None:
        """Take the settled samples of an earlier file."""
        count = old.header.settled_samples
        add_ids(_ids(old, count))
        self._lengths.frombytes(old.array("id_lengths")[:count].tobytes())
        self._known = count
        self._hashes.frombytes(old.array("input_hash")[:count].tobytes())
        self._uncoded.update(old.header.uncoded)
        for name, texts in old.header.codes.items():
            key = self._keys[name] = _Key(array("H"), texts=list(texts))
            key.codes.frombytes(old.array(f"meta:{name}")[:count].tobytes())
            key.seen = {("json", text): place for place, text in enumerate(texts, 1)}
        self._with_input = self.settled = count

    def add_texts(self, texts: SampleTexts, add_ids: Callable[[bytes], None]) -> bool:
        """Add samples from their texts if that is all there is to them; returns whether it was done."""
        if texts.with_metadata or texts.with_input != texts.known or not texts.ids.isascii():
            return False
        ordinals = np.fromstring(texts.ordinals, dtype=np.int64, sep=",")
        if (np.diff(ordinals) < 1).any():
            return False  # A database may add up rows in any order.
        self._add_ordinals(ordinals, np.ones(ordinals.size, dtype=np.bool_))
        self._lengths.frombytes(np.fromstring(texts.lengths, dtype=np.int64, sep=",").astype("u4").tobytes())
        self._hashes.frombytes(np.fromstring(texts.hashes, dtype=np.int64, sep=",").tobytes())
        self._with_input += texts.known
        add_ids(texts.ids.encode())
        for key in self._keys.values():
            key.codes.extend([0] * (self._known - len(key.codes)))
        return True

    def _add_ordinals(self, ordinals: NDArray[np.int64], whole: NDArray[np.bool_]) -> None:
        start = self._known
        right = ordinals == np.arange(start, start + ordinals.size)
        if self.settled == start:
            wrong = np.flatnonzero(~(right & whole))
            self.settled = start + (int(wrong[0]) if wrong.size else ordinals.size)
        if self._ordinals is None and not right.all():
            self._ordinals = array("q", range(start))
        if self._ordinals is not None:
            self._ordinals.frombytes(ordinals.tobytes())
        self._known += ordinals.size

    def add(self, page: Sequence[tuple[Any, ...]], add_ids: Callable[[bytes], None]) -> None:
        """Add a page of samples."""
        rows = [row for row in page if row[0] < self._size]
        if not rows:
            return
        ordinals, ids, metadata, hashes, known = zip(*rows, strict=True)
        start, whole = self._known, np.array(known, dtype=np.bool_)
        self._add_ordinals(np.array(ordinals, dtype=np.int64), whole)
        self._add_ids(ids, add_ids)
        self._hashes.extend(
            [UNKNOWN if content is None else content for content in hashes] if None in hashes else hashes
        )
        self._with_input += int(np.count_nonzero(whole))
        if metadata.count(None) + metadata.count("{}") != len(metadata):
            self._add_metadata(metadata, start)
        for key in self._keys.values():
            key.codes.extend([0] * (self._known - len(key.codes)))

    def _add_ids(self, ids: Sequence[str], add_ids: Callable[[bytes], None]) -> None:
        whole = "".join(ids)
        if whole.isascii():
            self._lengths.extend(map(len, ids))
            add_ids(whole.encode())
            return
        encoded = [restored_text(name).encode("utf-8", "surrogatepass") for name in ids]
        self._lengths.extend(map(len, encoded))
        add_ids(b"".join(encoded))

    def _add_metadata(self, texts: Sequence[str | None], start: int) -> None:
        """Add the metadata of samples; each different text is read once."""
        numbers: dict[str | None, int] = {}
        places = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.intp)
        found: dict[str, list[int]] = {}
        for number, facts in enumerate(_parsed(list(numbers))):
            for name, value in facts.items():
                if value is None or name in self._uncoded:
                    continue
                key = self._keys.get(name)
                if key is None:
                    if len(self._keys) == _MOST_KEYS:
                        self._uncoded.add(name)
                        continue
                    key = self._keys[name] = _Key(array("H"))
                code = self._code(key, value)
                if code > MOST_VALUES:
                    del self._keys[name]
                    found.pop(name, None)
                    self._uncoded.add(name)
                    continue
                if name not in found:
                    found[name] = [0] * len(numbers)
                found[name][number] = code
        for name, codes in found.items():
            key = self._keys[name]
            key.codes.extend([0] * (start - len(key.codes)))
            key.codes.frombytes(np.array(codes, dtype="u2")[places].tobytes())

    def _code(self, key: _Key, value: Any) -> int:
        # 1, 1.0 and True are equal in Python and three values in JSON; so are 0.0 and -0.0, of one type.
        quick = (type(value), value) if isinstance(value, str | int) or (isinstance(value, float) and value) else None
        code = None if quick is None else key.seen.get(quick)
        if code is None:
            text = canonical(value).decode("utf-8", "surrogatepass")
            code = key.seen.get(("json", text))
            if code is None:
                key.texts.append(text)
                code = key.seen["json", text] = len(key.texts)
            if quick is not None:
                key.seen[quick] = code
        return code

    def finished(self) -> SampleArrays:
        """Return the arrays."""
        state = SampleState(self._known, self._with_input)
        arrays: dict[str, NDArray[Any]] = {"id_lengths": np.frombuffer(self._lengths, dtype="u4")}
        if self._ordinals is not None:
            arrays["sample_ordinals"] = np.frombuffer(self._ordinals, dtype="i8")
        for name, key in self._keys.items():
            arrays[f"meta:{name}"] = np.frombuffer(key.codes, dtype="u2")
        hashes = np.frombuffer(self._hashes, dtype="i8")
        if state != (self._size, self._size):
            arrays["input_hash"] = hashes  # To be compared with those of samples to come.
        repeated = _repeated(hashes)
        if repeated.size:
            ordinals = arrays["sample_ordinals"][repeated] if "sample_ordinals" in arrays else repeated
            arrays["repeated"] = np.stack((ordinals, hashes[repeated])).reshape(-1)
        return SampleArrays(
            state, self.settled, arrays, {name: key.texts for name, key in self._keys.items()}, self._uncoded
        )


def _repeated(hashes: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the places of the hashes that are not unique, ascending."""
    found = []
    parts = hashes.view(np.uint8)[:: hashes.itemsize] % _PARTS  # In parts: a sorted copy of all takes memory.
    for part in range(_PARTS):
        ordered = np.sort(hashes[parts == part])
        found.append(ordered[1:][ordered[1:] == ordered[:-1]])
    twice = np.concatenate(found)
    twice = twice[twice != UNKNOWN]
    if not twice.size:
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(np.isin(hashes, twice))


def _parsed(texts: Sequence[str | None]) -> Sequence[Any]:
    """Parse metadata, many at once if that gives the same."""
    whole = "[" + ",".join("{}" if text is None else text for text in texts) + "]"
    if MARK not in whole:
        found: list[Any] = parse_long_json(whole)
        if all(type(facts) is dict for facts in found):
            return found
    return [read_metadata(text) for text in texts]
