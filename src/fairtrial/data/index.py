"""Where each row of a JSONL file begins, remembered between processes.

Building the index is the one pass that reads everything: it checks every row, refuses duplicate ids and computes the
fingerprint. It holds 16 bytes per row while it runs; afterwards the offsets are a memory-mapped file.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fairtrial.codec import digest, parse_json, to_json
from fairtrial.codec.escape import MARK
from fairtrial.data.fingerprint import Fingerprint
from fairtrial.data.rows import Row, RowMapper
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, DataError, DatasetError

_MARK_BYTES = MARK.encode("utf-8")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FORMAT = f"fairtrial-index-1-{sys.byteorder}"


@dataclass(frozen=True, slots=True)
class Index:
    """The offsets of a file's rows, and the identity of their content."""

    offsets: Sequence[int]
    fingerprint: str


def parse_line(line: bytes) -> Row:
    """One JSONL line as a row."""
    row = parse_json(line.removeprefix(_BYTE_ORDER_MARK))
    if type(row) is not dict:
        raise CodecError("a row must be a JSON object")
    # A file that uses our escape character means that character, not an escape.
    return to_json(row) if _MARK_BYTES in line else row


def read_rows(path: Path) -> Iterator[tuple[int, int, Row]]:
    """(line number, byte offset, row) of every line that is not blank."""
    offset = 0
    with open_data(path) as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                try:
                    row = parse_line(line)
                except CodecError as error:
                    raise placed(error, path, number) from None
                yield number, offset, row
            offset += len(line)


def open_data(path: Path) -> BinaryIO:
    """Open a dataset file, or say in one sentence why not."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise DatasetError(f"no such file (looked from {Path.cwd()})", path=path) from None
    except OSError as error:
        raise DatasetError(f"cannot be read: {error.strerror}", path=path) from None


def read_samples(path: Path, read: RowMapper) -> Iterator[tuple[int, int, Sample[Any, Any]]]:
    """(line number, byte offset, sample) of every row."""
    for number, offset, row in read_rows(path):
        try:
            sample = read(row)
        except DataError as error:
            raise placed(error, path, number) from error.__cause__
        yield number, offset, sample


def placed(error: DataError, path: Path, line: int | None) -> DatasetError:
    """The same problem, with its file and line."""
    return DatasetError(error.problem if isinstance(error, DatasetError) else str(error), path=path, line=line)


def build_index(path: Path, read: RowMapper) -> Index:
    """Read the whole file once."""
    offsets = array("Q")
    seen = DuplicateCheck()
    fingerprint = Fingerprint()
    for number, offset, sample in read_samples(path, read):
        offsets.append(offset)
        seen.add(sample.id)
        try:
            fingerprint.add(sample)
        except DatasetError as error:
            raise placed(error, path, number) from None
    suspects = seen.suspects()
    if suspects:
        _refuse_duplicates(path, read, suspects)
    return Index(offsets, fingerprint.hexdigest())


class DuplicateCheck:
    """Finds repeated ids in eight bytes per id: hashes first, the ids themselves only where hashes meet."""

    _BUCKETS = 256

    def __init__(self) -> None:
        self._buckets = [array("q") for _ in range(self._BUCKETS)]

    def add(self, sample_id: str) -> None:
        """Note one id."""
        value = hash(sample_id)
        self._buckets[value & 255].append(value)

    def suspects(self) -> frozenset[int]:
        """Hashes that occurred more than once."""
        found: set[int] = set()
        for bucket in self._buckets:
            if len(set(bucket)) != len(bucket):
                once: set[int] = set()
                for value in bucket:
                    (found if value in once else once).add(value)
        return frozenset(found)


def _refuse_duplicates(path: Path, read: RowMapper, suspects: frozenset[int]) -> None:
    first_seen: dict[str, int] = {}
    for number, _, sample in read_samples(path, read):
        if hash(sample.id) in suspects:
            if sample.id in first_seen:
                raise DatasetError(
                    f"duplicate id {sample.id!r}; it was used before on line {first_seen[sample.id]}",
                    path=path,
                    line=number,
                )
            first_seen[sample.id] = number


def cache_folder() -> Path:
    """Where indexes rest: FAIRTRIAL_CACHE_DIR, or the user's cache folder."""
    named = os.environ.get("FAIRTRIAL_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairtrial"


def cached_index(path: Path, read: RowMapper, *, key: Any) -> Index:
    """The index of this file in this state, from the cache where it is there."""
    state = path.stat() if path.exists() else None
    if key is None or state is None:
        return build_index(path, read)
    identity = digest([_FORMAT, str(path.resolve()), state.st_size, state.st_mtime_ns, key])
    file = cache_folder() / "index" / f"{identity[:32]}.idx"
    found = _read_index(file, identity)
    if found is not None:
        return found
    index = build_index(path, read)
    # The cache only saves time: a folder that cannot be written must not stop an evaluation.
    with contextlib.suppress(OSError):
        _write_index(file, identity, index)
    return _read_index(file, identity) or index


def _write_index(file: Path, identity: str, index: Index) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    header = json.dumps({"identity": identity, "fingerprint": index.fingerprint, "rows": len(index.offsets)}).encode()
    header += b" " * (-(len(header) + 1) % 8) + b"\n"  # The offsets behind it stay aligned.
    handle, aside = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "wb") as target:
        target.write(header)
        array("Q", index.offsets).tofile(target)
    os.replace(aside, file)


def _read_index(file: Path, identity: str) -> Index | None:
    try:
        with file.open("rb") as source:
            header = json.loads(source.readline())
            start, rows = source.tell(), header["rows"]
            if header["identity"] != identity or file.stat().st_size != start + 8 * rows:
                return None
            if not rows:
                return Index((), header["fingerprint"])
            mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Absent, cut short or written by something else: build it again.
    return Index(memoryview(mapped)[start:].cast("Q"), header["fingerprint"])
