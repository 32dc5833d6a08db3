"""Files of samples that are read line by line: where each line begins, and datasets over them."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO, overload

from fairtrial.base.codec import digest, parse_json
from fairtrial.base.foreign import lines_of
from fairtrial.base.system import replace_file
from fairtrial.data.fingerprint import Fingerprint, Identity, Order
from fairtrial.data.rows import Row, RowMapper, duplicate_id
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, DataError, DatasetError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FORMAT = f"fairtrial-index-3-{sys.byteorder}"


@dataclass(frozen=True, slots=True)
class Index:
    """The offsets of a file's rows, and the identity of their content."""

    offsets: Sequence[int]
    identity: Identity
    state: State


type State = tuple[int, int]
"""Size and time of a file: when they change, what we know about it is void."""


def state_of(path: Path) -> State:
    """Return the current state of a file."""
    with open_data(path) as file:
        found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def parse_line(line: bytes, *, unique_keys: bool = True) -> Row:
    """Parse a line of a JSONL file."""
    # Without its end, so that what is missing there is missing in this line and not at the start of the next.
    row: Row = parse_json(line.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r\n"), unique_keys=unique_keys)
    if type(row) is not dict:
        raise CodecError("a row must be a JSON object")
    return row


def is_blank(line: bytes) -> bool:
    """True for a line with nothing in it."""
    return line.isspace() or not line.removeprefix(_BYTE_ORDER_MARK).strip()


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number, byte offset, line) of every line that is not blank."""
    offset = 0
    with open_data(path) as file:
        for number, line in enumerate(lines_of(file, str(path)), 1):
            if not is_blank(line):
                yield number, offset, line
            offset += len(line)


def open_data(path: Path) -> BinaryIO:
    """Open a dataset file; raises `DatasetError` if that is not possible."""
    try:
        mode = path.stat().st_mode
        if not (S_ISREG(mode) or S_ISDIR(mode)):  # Opening a named pipe waits until somebody writes to it.
            raise DatasetError("a dataset must be a regular file", path=path)
        return path.open("rb")
    except FileNotFoundError:
        raise DatasetError(f"no such file (looked from {Path.cwd()})", path=path) from None
    except OSError as error:
        raise DatasetError(f"cannot be read: {error.strerror}", path=path) from None


def read_samples(path: Path, read: RowMapper) -> Iterator[tuple[int, int, Sample[Any, Any]]]:
    """(line number, byte offset, sample) of every row."""
    for number, offset, line in read_lines(path):
        try:
            sample = read(parse_line(line))
        except DataError as error:
            raise placed(error, path, number) from error.__cause__
        yield number, offset, sample


def placed(error: DataError, path: Path, line: int | None) -> DatasetError:
    """Return the error with its file and line."""
    return DatasetError(error.problem if isinstance(error, DatasetError) else str(error), path=path, line=line)


def line_index(path: Path) -> Index:
    """Index the lines without parsing them."""
    state = state_of(path)
    return Index(array("Q", (offset for _, offset, _ in read_lines(path))), Identity("", ""), state)


def build_index(path: Path, read: RowMapper) -> Index:
    """Read the whole file once."""
    state = state_of(path)
    offsets = array("Q")
    seen = DuplicateCheck()
    fingerprint, order = Fingerprint(), Order()
    for number, offset, sample in read_samples(path, read):
        offsets.append(offset)
        seen.add(sample.id)
        order.add(sample.id)
        try:
            fingerprint.add(sample)
        except DatasetError as error:
            raise placed(error, path, number) from None
    suspects = seen.suspects()
    if suspects:
        _refuse_duplicates(path, read, suspects)
    if state_of(path) != state:
        raise DatasetError("the file changed while it was being read; load it again", path=path)
    return Index(offsets, Identity(fingerprint.hexdigest(), order.hexdigest()), state)


class DuplicateCheck:
    """Finds repeated ids in eight bytes per id: hashes first, the ids themselves only where hashes meet."""

    def __init__(self) -> None:
        self._buckets = [array("q") for _ in range(256)]  # Looked through one by one: a small set at a time.

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
                raise placed(duplicate_id(sample, f"line {first_seen[sample.id]}"), path, number)
            first_seen[sample.id] = number


def cache_folder() -> Path:
    """The folder of index files: FAIRTRIAL_CACHE_DIR, or the user's cache folder on this platform."""
    if named := os.environ.get("FAIRTRIAL_CACHE_DIR"):
        return Path(named)
    import platformdirs

    return platformdirs.user_cache_path("fairtrial", appauthor=False)


def cached_index(path: Path, read: RowMapper, *, key: Any) -> Index:
    """Return the index of a file in its current state, from the cache if possible."""
    state = state_of(path)
    identity = digest([_FORMAT, str(path.resolve()), state, key])
    file = cache_folder() / "index" / f"{identity[:32]}.idx"
    found = _read_index(file, identity, state)
    if found is None:
        found = build_index(path, read)
        # The cache only saves time: a folder that cannot be written must not stop an evaluation.
        with contextlib.suppress(OSError):
            _write_index(file, identity, found)
            found = _read_index(file, identity, state) or found
    return found


def _write_index(file: Path, identity: str, index: Index) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = {"identity": identity, "rows": len(index.offsets), **index.identity._asdict()}
    header = json.dumps(facts).encode()
    header += b" " * (-(len(header) + 1) % 8) + b"\n"  # The offsets behind it stay aligned.
    handle, aside = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as target:
            target.write(header)
            target.write(array("Q", index.offsets))
        replace_file(aside, file)
    except OSError:
        os.unlink(aside)
        raise


def _read_index(file: Path, identity: str, state: State) -> Index | None:
    try:
        with file.open("rb") as source:
            header = json.loads(source.readline())
            start, rows = source.tell(), header["rows"]
            content = Identity(str(header["fingerprint"]), str(header["order"]))
            if header["identity"] != identity or os.fstat(source.fileno()).st_size != start + 8 * rows:
                return None
            if not rows:
                return Index((), content, state)
            mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Absent, cut short or written by something else: build it again.
    return Index(memoryview(mapped)[start:].cast("Q"), content, state)


class FileRows[T](Sequence[T]):
    """A JSONL file as a sequence; only the row being read is held."""

    def __init__(self, path: Path, read: Callable[[Row], T], index: Index) -> None:
        self._path = path
        self._read = read
        self._index = index

    def _check_unchanged(self) -> None:
        if state_of(self._path) != self._index.state:
            raise DatasetError("the file has changed since it was indexed; load the dataset again", path=self._path)

    def __len__(self) -> int:
        return len(self._index.offsets)

    def __iter__(self) -> Iterator[T]:
        self._check_unchanged()
        read = self._read
        with open_data(self._path) as file:
            for number, line in enumerate(file, 1):
                try:
                    item = read(parse_line(line, unique_keys=False))
                except DataError as error:
                    if is_blank(line):
                        continue
                    raise placed(error, self._path, number) from error.__cause__
                yield item

    def pick(self, positions: Iterable[int]) -> Iterator[T]:
        """The rows at these positions, in this order, from one opening of the file."""
        self._check_unchanged()
        with open_data(self._path) as file:
            for position in positions:
                offset = self._index.offsets[position]
                file.seek(offset)
                try:
                    item = self._read(parse_line(file.readline(), unique_keys=False))
                except DataError as error:
                    raise placed(error, self._path, self._line_at(offset)) from error.__cause__
                yield item

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return SelectedRows(self, range(len(self))[index])
        return next(self.pick((index,)))

    def _line_at(self, offset: int) -> int:
        number, passed = 0, 0
        with open_data(self._path) as file:
            while passed <= offset:
                passed += len(file.readline())
                number += 1
        return number


class SelectedRows[T](Sequence[T]):
    """Some rows of a file, by position, in any order."""

    def __init__(self, source: FileRows[T] | SelectedRows[T], positions: Sequence[int]) -> None:
        self._source = source
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[T]:
        return self._source.pick(self._positions)

    def pick(self, positions: Iterable[int]) -> Iterator[T]:
        """The rows at these positions of the selection."""
        return self._source.pick(self._positions[position] for position in positions)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return SelectedRows(self._source, self._positions[index])
        return self._source[self._positions[index]]
