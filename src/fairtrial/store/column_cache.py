"""The cache of column files: where they are, what their headers say, how they are listed and deleted.

A column file has the numbers of one run as arrays. It is disposable: it is rebuilt from the store when it is absent,
damaged or out of date. Does not import numpy, so that a report can be shown from a header alone.

    head:    MAGIC, offset and length of the header, CRC-32 of the header
    arrays:  aligned to 64 bytes, each with its CRC-32 in the header
    header:  JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from fairtrial.base.codec import digest
from fairtrial.data.index import cache_folder
from fairtrial.store.protocol import RunRecord, SampleMeans, Totals

FORMAT = f"fairtrial-columns-4-{sys.byteorder}"
MAGIC = b"FTCOLUMN"
HEAD = struct.Struct("<8sQQI")
FIRST_ARRAY = 64
WRITTEN_AT_THE_END = 50_000
"""Trials from which on a run gets its column file when it ends. For smaller runs, loading numpy would cost too much."""
_SUFFIX = ".columns"
_LONGEST_HEADER = 1 << 28
_DTYPES = {"i1": 1, "u1": 1, "u2": 2, "i4": 4, "u4": 4, "i8": 8, "f8": 8}


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """One array in the file: its type, its place and the CRC-32 of its bytes."""

    dtype: str
    offset: int
    count: int
    crc: int

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.count * _DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class ColumnHeader:
    """What a column file says about itself.

    `store`, `run_id`, `created_at`, `finished_at`, `revision`, `rows` and the format identify the state of the run
    that it has. `extent` is the length of its arrays by ordinal: the highest stored ordinal + 1. `blocks` are the
    states of the blocks of ordinals (`BlockState`), `samples` is that of the samples (`SampleState`). `totals` are
    the sums that the store computed. `metrics` lists for each experiment its metrics in the order of their first
    occurrence ([name, ordinal, place in the score]), `directions` what they declare ([name, higher is better, ordinal,
    place]), and `ranges` their declared bounds by name. `codes` has the distinct values, as JSON text, of each coded
    metadata key; `uncoded` keys have too many.
    """

    store: str
    run_id: str
    created_at: float
    finished_at: float | None
    revision: int | None  # None: it has changed while the file was written.
    fingerprint: str
    planned: int
    rows: int
    extent: int
    blocks: list[list[int]]
    samples: list[int]
    settled_samples: int
    totals: list[dict[str, Any]]
    metrics: list[list[list[Any]]]
    directions: list[list[list[Any]]]
    ranges: list[dict[str, list[float] | None]]
    codes: dict[str, list[str]]
    uncoded: list[str]
    arrays: dict[str, ArrayPlace] = field(default_factory=dict)
    format: str = FORMAT

    def is_of(self, store: str, run: RunRecord) -> bool:
        """True if the file belongs to this run of this store, and the run has got nothing but more results since."""
        return (
            self.store == store
            and self.run_id == run.run_id
            and self.revision == run.revision
            and self.created_at == run.created_at
            and self.fingerprint == run.dataset_fingerprint
            and self.planned == run.planned
            and len(self.metrics) == len(run.experiments)
        )

    def has_ended(self, run: RunRecord) -> bool:
        """True if the file has the final state of this run: nothing has to be read to know that it is current."""
        return (
            self.finished_at is not None
            and self.finished_at == run.finished_at
            and self.rows == self.planned
            and self.samples == [run.dataset_size] * 2
        )

    def sums(self) -> list[Totals]:
        """Return the totals of each experiment."""
        return [
            Totals(**{**one, "sample_means": None if (means := one["sample_means"]) is None else SampleMeans(*means)})
            for one in self.totals
        ]


def columns_folder() -> Path:
    """Return the folder of all column files."""
    return cache_folder() / "columns"


def column_path(store: str, run_id: str) -> Path:
    """Return the path of the column file of a run."""
    return columns_folder() / store_key(store) / f"{digest(run_id)}{_SUFFIX}"


def store_key(store: str) -> str:
    """Return the key of a store in paths and headers: a digest, so that the cache has no addresses."""
    return digest(store if "://" in store else str(Path(store).absolute()))


def read_header(file: BinaryIO) -> ColumnHeader | None:
    """Read the header of an open column file; None if it is not one, or damaged."""
    try:
        size = os.fstat(file.fileno()).st_size
        magic, offset, length, crc = HEAD.unpack(file.read(HEAD.size))
        if magic != MAGIC or length > _LONGEST_HEADER or offset + length != size:
            return None
        file.seek(offset)
        text = file.read(length)
        if len(text) != length or zlib.crc32(text) != crc:
            return None
        header = _header(json.loads(text))
        inside = all(
            place.offset >= FIRST_ARRAY and place.count >= 0 and place.offset + place.size <= offset
            for place in header.arrays.values()
        )
        return header if inside and header.format == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return None


def _header(tree: Any) -> ColumnHeader:
    arrays = {str(name): ArrayPlace(str(dtype), *map(int, rest)) for name, (dtype, *rest) in tree["arrays"].items()}
    known = {one.name for one in fields(ColumnHeader)}
    return ColumnHeader(**{**{name: tree[name] for name in known}, "arrays": arrays})


def header_bytes(header: ColumnHeader) -> bytes:
    """Return the JSON text of a header."""
    tree = {one.name: getattr(header, one.name) for one in fields(header)}
    tree["arrays"] = {
        name: [place.dtype, place.offset, place.count, place.crc] for name, place in header.arrays.items()
    }
    return json.dumps(tree).encode()


def totals_json(totals: Totals) -> dict[str, Any]:
    """Return totals as JSON values."""
    return {**asdict(totals), "outcomes": dict(totals.outcomes)}


def cached_totals(store: str, run: RunRecord) -> list[Totals] | None:
    """Return the totals of an ended run from its column file; None if there is none or it is out of date."""
    try:
        with column_path(store, run.run_id).open("rb") as file:
            header = read_header(file)
    except OSError:
        return None
    if header is None or not header.is_of(store_key(store), run) or not header.has_ended(run):
        return None
    try:
        return header.sums()
    except (TypeError, KeyError):
        return None


@dataclass(frozen=True, slots=True)
class CachedColumns:
    """A column file in the cache; `run_id` is None if it is damaged or of another version."""

    path: Path
    run_id: str | None
    size: int
    written_at: float


def cached_columns(store: str | None = None) -> list[CachedColumns]:
    """List the column files of one store, or of all stores."""
    wanted = None if store is None else store_key(store)
    found = []
    for path in _files():
        try:
            with path.open("rb") as file:
                header, state = read_header(file), os.fstat(file.fileno())
        except OSError:
            continue
        if wanted is None or (header is not None and header.store == wanted):
            run_id = None if header is None else header.run_id
            found.append(CachedColumns(path, run_id, state.st_size, state.st_mtime))
    return found


def _files() -> Iterator[Path]:
    try:
        yield from sorted(columns_folder().glob("*/*"))
    except OSError:
        return


def delete_columns(store: str, run_id: str) -> None:
    """Delete the column file of a run, if there is one."""
    with contextlib.suppress(OSError):
        column_path(store, run_id).unlink(missing_ok=True)


def clear_columns(store: str | None = None) -> tuple[int, int]:
    """Delete the column files of one store, or of all with what is left of unfinished ones: (number, bytes)."""
    count = size = 0
    for one in cached_columns(store):
        with contextlib.suppress(OSError):
            one.path.unlink()
            count, size = count + 1, size + one.size
    return count, size
