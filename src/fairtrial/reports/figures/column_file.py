"""Columns of a run in a file: written once, read in parts."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.base.codec import decode
from fairtrial.base.frozen import JSON, LruCache
from fairtrial.base.system import replace_file
from fairtrial.reports.figures.column_samples import SampleArrays, StoredIds, read_samples
from fairtrial.reports.figures.metrics import REWARD, Range, widen
from fairtrial.store import column_cache
from fairtrial.store.numbers import DETAILS, BlockState, NumberStore, NumberTexts
from fairtrial.store.protocol import METRIC_CODES, REWARD_PLACE, RunRecord, RunStore, split_facts
from fairtrial.store.rows import SCORED, all_metrics
from fairtrial.trials.result import AMOUNTS, COUNTS

BLOCK = 1 << 16
"""Ordinals in a block, the unit in which a column file is compared with its store and updated."""
RESULT_ARRAYS = {
    "outcome": "u1", "passed": "i1", "score": "f8", **dict.fromkeys(COUNTS, "i4"), "attempt": "i4", "started_at": "f8",
    **dict.fromkeys(AMOUNTS, "f8"), "reward": "f8",
}  # fmt: skip
"""Arrays with a number for each trial. No value: NaN or -1, outcome 0. Those after the time may be absent."""
OPTIONAL_ARRAYS = (*AMOUNTS, "reward")
_CHUNK = 1 << 13  # Rows in memory at a time.
_VERDICT = {code: -1 if passed is None else int(passed) for code, (passed, _) in METRIC_CODES.items()}

type _Arrays = dict[str, NDArray[Any]]
type Occurrence = tuple[int, int]
"""Where a metric was first seen: the ordinal of the trial and the place in its score."""


def _numbers(text: str) -> NDArray[np.int64]:
    return np.fromstring(text, dtype=np.int64, sep=",")


class BlockReader:
    """Reads blocks; collects where each metric and each declared direction first occurred, by experiment."""

    def __init__(self, run: RunRecord, old: column_cache.ColumnHeader | None) -> None:
        self._experiments, self._repeats = len(run.experiments), run.repeats
        self.metrics: list[dict[str, Occurrence]] = [{} for _ in run.experiments]
        self.directions: list[dict[str, tuple[Occurrence, bool]]] = [{} for _ in run.experiments]
        self.ranges: list[dict[str, Range | None]] = [{} for _ in run.experiments]
        self._shapes: dict[tuple[int, tuple[str, ...], str | None], int] = {}
        if old is not None:
            # A scored result is final, so what occurred once stays.
            for names, found in zip(self.metrics, old.metrics, strict=True):
                names.update((name, (ordinal, place)) for name, ordinal, place in found)
            for declared, stored in zip(self.directions, old.directions, strict=True):
                declared.update((name, ((ordinal, place), higher)) for name, higher, ordinal, place in stored)
            for ranges, known in zip(self.ranges, old.ranges, strict=True):
                ranges.update((name, None if ends is None else (ends[0], ends[1])) for name, ends in known.items())

    def read(self, store: NumberStore, run_id: str, start: int, end: int) -> tuple[_Arrays, BlockState]:
        """Return the arrays of the ordinals from `start` to `end`, and the state of what was read."""
        arrays: _Arrays = {
            name: np.full(end - start, 0 if name == "outcome" else np.nan if dtype == "f8" else -1, dtype=dtype)
            for name, dtype in RESULT_ARRAYS.items()
            if name not in OPTIONAL_ARRAYS
        }
        for first in range(start, end, _CHUNK):
            last = min(first + _CHUNK, end)
            texts = store.result_numbers(run_id, first, last)
            if texts is not None:
                self._add(arrays, texts, start)
                if texts.detailed:
                    self._add_details(arrays, store.result_details(run_id, first, last), start, end - start)
        stored = arrays["outcome"] > 0
        return arrays, BlockState(
            int(np.count_nonzero(stored)),
            int(np.count_nonzero(arrays["outcome"] == SCORED)),
            int(arrays["attempt"].sum(where=stored, dtype=np.int64)),
        )

    def _add(self, arrays: _Arrays, texts: NumberTexts, start: int) -> None:
        columns = texts.columns
        where: Any = _numbers(columns["ordinal"]) - start
        low, high = int(where.min()), int(where.max())
        if where[0] == low and where.size == high - low + 1 and bool((np.diff(where) == 1).all()):
            where = slice(low, high + 1)  # In order and without gaps: a copy instead of a scatter.
        for name in ("outcome", "passed", *COUNTS, "attempt"):
            arrays[name][where] = _numbers(columns[name])
        arrays["started_at"][where] = _numbers(columns["started_at"]) / 1000
        values = _numbers(columns["value"]).astype(np.float64)
        arrays["score"][where] = np.where(values < 0, np.nan, values)

    def _add_details(self, arrays: _Arrays, rows: Sequence[tuple[Any, ...]], start: int, size: int) -> None:
        columns = dict(zip(DETAILS, zip(*rows, strict=True), strict=True))
        ordinals, values, metrics = columns["ordinal"], columns["value"], columns["metrics"]
        where = np.array(ordinals, dtype=np.intp) - start
        arrays["score"][where] = np.array(values, dtype=np.float64)  # None becomes NaN.
        for name in OPTIONAL_ARRAYS:
            numbers = columns[name]
            if numbers.count(None) != len(numbers):
                self._array(arrays, name, "f8", size)[where] = np.array(numbers, dtype=np.float64)
        if metrics.count(None) != len(metrics):
            self._add_metrics(arrays, ordinals, values, metrics, columns["verdicts"], start, size)

    def _array(self, arrays: _Arrays, name: str, dtype: str, size: int) -> NDArray[Any]:
        if name not in arrays:
            arrays[name] = np.full(size, np.nan if dtype == "f8" else -1, dtype=dtype)
        return arrays[name]

    def _add_metrics(
        self,
        arrays: _Arrays,
        ordinals: Sequence[int],
        values: Sequence[float | None],
        texts: Sequence[str | None],
        verdicts: Sequence[str | None],
        start: int,
        size: int,
    ) -> None:
        """Add metrics, the scores with the same metrics and verdicts together: most runs have few kinds of scores."""
        found = all_metrics(texts)
        groups: dict[tuple[tuple[str, ...], str | None], list[int]] = {}
        for place, (value, scores, codes) in enumerate(zip(values, found, verdicts, strict=True)):
            if value is not None and scores:
                groups.setdefault((tuple(scores), codes), []).append(place)
        for (names, codes), places in groups.items():
            here = [ordinals[place] for place in places]
            self._note(names, codes, here)
            where = np.array(here, dtype=np.intp) - start
            numbers = chain.from_iterable([found[place].values() for place in places])
            table = np.fromiter(numbers, dtype=np.float64, count=len(places) * len(names)).reshape(len(places), -1)
            for index, name in enumerate(names):
                self._array(arrays, f"metric:{name}", "f8", size)[where] = table[:, index]
                if codes and (verdict := _VERDICT[codes[index]]) >= 0:
                    self._array(arrays, f"verdict:{name}", "i1", size)[where] = verdict

    def _note(self, names: tuple[str, ...], codes: str | None, ordinals: Sequence[int]) -> None:
        """Note first occurrences; the ordinals ascend, so the first of each experiment is enough."""
        seen: set[int] = set()
        for ordinal in ordinals:
            experiment = ordinal // self._repeats % self._experiments
            if experiment in seen:
                continue
            seen.add(experiment)
            shape = (experiment, names, codes)
            if self._shapes.get(shape, ordinal + 1) > ordinal:
                self._shapes[shape] = ordinal
                self._note_first(experiment, names, codes, ordinal)
            if len(seen) == self._experiments:
                return

    def _note_first(self, experiment: int, names: tuple[str, ...], codes: str | None, ordinal: int) -> None:
        known, declared, ranges = self.metrics[experiment], self.directions[experiment], self.ranges[experiment]
        for place, bounds in split_facts(codes)[1].items() if codes else ():
            widen(ranges, REWARD if place == REWARD_PLACE else names[place], bounds)
        for place, name in enumerate(names):
            if name not in known or known[name] > (ordinal, place):
                known[name] = (ordinal, place)
            higher = METRIC_CODES[codes[place]][1] if codes else None
            if higher is not None and (name not in declared or declared[name][0] > (ordinal, place)):
                declared[name] = ((ordinal, place), higher)

    def metrics_json(self) -> list[list[list[Any]]]:
        """Return the metrics of each experiment in the order in which they first occurred."""
        return [
            [[name, *first] for name, first in sorted(names.items(), key=lambda item: item[1])]
            for names in self.metrics
        ]

    def directions_json(self) -> list[list[list[Any]]]:
        """Return the declared directions of each experiment in the order in which they first occurred."""
        return [
            [[name, higher, *first] for name, (first, higher) in sorted(names.items(), key=lambda item: item[1][0])]
            for names in self.directions
        ]


type Progress = Callable[[int, int], None]

_ALIGNED = 64
_CHECKED_AT_ONCE = 1 << 20
_OPEN_FILES = 8
_REMEMBERED = 6
_lock = threading.Lock()


class ColumnFile:
    """The arrays of one run in one state. Read-only; safe to use from several threads."""

    def __init__(self, header: column_cache.ColumnHeader, data: mmap.mmap | bytearray | bytes) -> None:
        self.header = header
        self._data = data
        self._computed: LruCache[Hashable, Any] = LruCache(_REMEMBERED)  # From this state of the run.

    def __contains__(self, name: str) -> bool:
        return name in self.header.arrays

    def array(self, name: str) -> NDArray[Any]:
        """Return an array; raises KeyError if the file has none of this name."""
        place = self.header.arrays[name]
        if not place.count:
            return np.empty(0, dtype=place.dtype)
        found: NDArray[Any] = np.frombuffer(self._data, dtype=place.dtype, count=place.count, offset=place.offset)
        found.flags.writeable = False
        return found

    @cached_property
    def sample_ordinals(self) -> NDArray[np.intp]:
        """The ordinals of the known samples, ascending."""
        if "sample_ordinals" in self:
            return self.array("sample_ordinals").astype(np.intp)
        return np.arange(self.header.arrays["id_lengths"].count, dtype=np.intp)

    @cached_property
    def ids(self) -> StoredIds:
        """The ids of the known samples."""
        ends = np.cumsum(self.array("id_lengths"), dtype=np.int64)
        return StoredIds(memoryview(self.array("id_text")), ends - self.array("id_lengths"), ends)

    def metadata_values(self, key: str) -> list[JSON]:
        """Return the distinct values of a coded metadata key: that of code 1 first."""
        known = self.remembered(("values", key))
        if known is None:
            known = [decode(object, text, frozen=True) for text in self.header.codes[key]]
            self.remember(("values", key), known)
        return list(known)

    def remembered(self, key: Hashable) -> Any:
        """Return what was computed under this key in this process; None if it is no longer known."""
        with _lock:
            return self._computed.get(key)

    def remember(self, key: Hashable, value: Any) -> None:
        """Store a result and evict the least recently used one."""
        with _lock:
            self._computed.put(key, value)


_open: LruCache[Path, tuple[tuple[int, ...], ColumnFile]] = LruCache(_OPEN_FILES)
_in_memory: LruCache[Path, ColumnFile] = LruCache(_OPEN_FILES // 4)  # Those that could not be written.


def open_columns(
    store: RunStore, run: RunRecord, *, build: bool = True, progress: Progress | None = None
) -> ColumnFile | None:
    """Return the columns of a run in its present state; None if its store is not a database.

    Args:
        store: The store of the run.
        run: The run.
        build: Whether to build the file if it is absent or out of date; else None is returned then.
        progress: Called with the numbers of trials read and planned while it is built.
    """
    if not isinstance(store, NumberStore):
        return None
    run = store.get_run(run.run_id)  # It may have been continued since the caller read it.
    path, key = column_cache.column_path(store.identity, run.run_id), column_cache.store_key(store.identity)
    old = _load(path)
    if old is None:
        with _lock:
            old = _in_memory.get(path)
    if old is not None and not old.header.is_of(key, run):
        old = None
    if old is not None and old.header.has_ended(run):
        return old
    if old is None and not build:
        return None
    try:
        return _refresh(store, run, path, key, old, build=build, progress=progress)
    except (KeyError, IndexError, TypeError, ValueError):
        if old is None:
            raise
        # The old file is not what its header says: it is as if there were none.
        return _refresh(store, run, path, key, None, build=True, progress=progress) if build else None


def write_columns(store: RunStore, run: RunRecord) -> bool:
    """Write the column file of a run that has ended; returns whether there is one now. Never raises."""
    try:
        return isinstance(store, NumberStore) and open_columns(store, run) is not None
    except Exception:  # A cache: whatever goes wrong will be seen, or not, when the run is read.
        return False


def forget() -> None:
    """Close the files that this process has open; they are checked again when they are next opened."""
    with _lock:
        _open.clear()
        _in_memory.clear()


def _load(path: Path) -> ColumnFile | None:
    """Map a file; None if it is absent or damaged. Its bytes are checked once in each process."""
    try:
        with path.open("rb", buffering=0) as file:
            state = os.fstat(file.fileno())
            identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
            with _lock:
                known = _open.get(path)
            if known is not None and known[0] == identity:
                return known[1]
            header = column_cache.read_header(file)
            if header is None or not _intact(file, header):
                return None
            found = ColumnFile(header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return None
    with _lock:
        _open.put(path, (identity, found))
    return found


def _intact(file: io.FileIO, header: column_cache.ColumnHeader) -> bool:
    """Compare the bytes of all arrays with their CRCs. Read, not mapped: mapped pages count as memory."""
    buffer = bytearray(_CHECKED_AT_ONCE)
    view = memoryview(buffer)
    for place in header.arrays.values():
        crc, left = 0, place.size
        file.seek(place.offset)
        while left:
            count = file.readinto(view[:left])
            if not count:
                return False
            crc = zlib.crc32(view[:count], crc)
            left -= count
        if crc != place.crc:
            return False
    return True


def _refresh(
    store: NumberStore,
    run: RunRecord,
    path: Path,
    key: str,
    old: ColumnFile | None,
    *,
    build: bool,
    progress: Progress | None,
) -> ColumnFile | None:
    states: dict[int, BlockState] = {}
    if old is None:
        highest = store.highest_ordinal(run.run_id)
    else:
        final = _final_blocks(old.header)
        states, highest = store.block_states(run.run_id, BLOCK, final)
        states = {place: BlockState(*state) for place, state in enumerate(old.header.blocks[:final])} | states
        highest = max(highest, final * BLOCK - 1)
        unchanged = [list(states.get(place, (0, 0, 0))) for place in range(-(-(highest + 1) // BLOCK))]
        same_samples = list(store.sample_state(run.run_id)) == old.header.samples
        if unchanged == old.header.blocks and same_samples and old.header.finished_at == run.finished_at:
            return old
    if not build:
        return None
    builder = _FileBuilder(store, run, key, states, highest + 1, old, progress)
    handle, aside = _create(path)
    if handle is not None:
        try:
            with os.fdopen(handle, "r+b", buffering=0) as file:
                builder.write(_FileTarget(file))
            replace_file(aside, path)
            made = _load(path)
            if made is not None and made.header.run_id == run.run_id:
                return made
        except OSError:  # A full disk.
            pass
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)
    target = _MemoryTarget()
    made = ColumnFile(builder.write(target), target.data)
    with _lock:
        _in_memory.put(path, made)
    return made


def _final_blocks(header: column_cache.ColumnHeader) -> int:
    """Return the number of leading blocks in which every trial is scored: they never change."""
    for place, (_stored, scored, _attempts) in enumerate(header.blocks):
        if scored != BLOCK:
            return place
    return len(header.blocks)


def _create(path: Path) -> tuple[int | None, str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tempfile.mkstemp(dir=path.parent)  # Mode 0600.
    except OSError:
        return None, ""


class _FileTarget:
    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    def write(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._file.seek(offset)
        while view:
            view = view[self._file.write(view) :]

    def crc(self, offset: int, size: int) -> int:
        crc = 0
        self._file.seek(offset)
        while size:
            data = self._file.read(min(size, _CHECKED_AT_ONCE))
            crc, size = zlib.crc32(data, crc), size - len(data)
        return crc


class _MemoryTarget:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        if len(self.data) < offset + len(view):
            self.data.extend(bytes(offset + len(view) - len(self.data)))
        self.data[offset : offset + len(view)] = view

    def crc(self, offset: int, size: int) -> int:
        return zlib.crc32(memoryview(self.data)[offset : offset + size])


class _FileBuilder:
    """Builds the file of one run: samples first, then the results, block by block."""

    def __init__(
        self,
        store: NumberStore,
        run: RunRecord,
        key: str,
        states: dict[int, BlockState],
        extent: int,
        old: ColumnFile | None,
        progress: Progress | None,
    ) -> None:
        self._store, self._run, self._key = store, run, key
        self._states, self._extent, self._old = states, extent, old
        self._progress = progress

    def write(self, target: _FileTarget | _MemoryTarget) -> column_cache.ColumnHeader:
        run, store = self._run, self._store
        places: dict[str, tuple[str, int, int]] = {}
        self._end = column_cache.FIRST_ARRAY
        samples = self._samples(target, places)
        reader = BlockReader(run, None if self._old is None else self._old.header)
        blocks, rows = self._results(target, places, reader)
        totals = [column_cache.totals_json(one) for one in store.totals(run.run_id)]
        now = store.get_run(run.run_id)
        counted = sum(sum(one["outcomes"].values()) for one in totals)
        # What was written meanwhile belongs to another state: the next reader compares the blocks.
        unrevised = now.revision == run.revision
        settled = now.finished_at is not None and now.finished_at == run.finished_at and counted == rows
        header = column_cache.ColumnHeader(
            store=self._key,
            run_id=run.run_id,
            created_at=run.created_at,
            finished_at=run.finished_at if settled else None,
            revision=run.revision if unrevised else None,
            fingerprint=run.dataset_fingerprint,
            planned=run.planned,
            rows=rows,
            extent=self._extent,
            blocks=blocks,
            samples=list(samples.state),
            settled_samples=samples.settled,
            totals=totals,
            metrics=reader.metrics_json(),
            directions=reader.directions_json(),
            ranges=[{name: ends and list(ends) for name, ends in known.items()} for known in reader.ranges],
            codes=samples.codes,
            uncoded=sorted(samples.uncoded),
            arrays={
                name: column_cache.ArrayPlace(
                    dtype, offset, count, target.crc(offset, count * np.dtype(dtype).itemsize)
                )
                for name, (dtype, offset, count) in places.items()
            },
        )
        text = column_cache.header_bytes(header)
        target.write(self._end, text)
        target.write(0, column_cache.HEAD.pack(column_cache.MAGIC, self._end, len(text), zlib.crc32(text)))
        return header

    def _samples(self, target: _FileTarget | _MemoryTarget, places: dict[str, tuple[str, int, int]]) -> SampleArrays:
        start = self._end

        def add_ids(data: bytes) -> None:
            if data:
                target.write(self._end, data)
                self._end += len(data)

        samples = read_samples(self._store, self._run, self._old, add_ids)
        places["id_text"] = ("u1", start, self._end - start)
        for name, array in samples.arrays.items():
            self._place(target, places, name, array.dtype.str[1:], array.size)
            if array.size:
                target.write(places[name][1], array)
        return samples

    def _place(
        self,
        target: _FileTarget | _MemoryTarget,
        places: dict[str, tuple[str, int, int]],
        name: str,
        dtype: str,
        count: int,
    ) -> None:
        offset = -(-self._end // _ALIGNED) * _ALIGNED
        places[name] = (dtype, offset, count)
        self._end = offset + count * np.dtype(dtype).itemsize
        if self._end > offset:
            target.write(self._end - 1, b"\0")  # The file has its size, also where nothing is written.

    def _results(
        self,
        target: _FileTarget | _MemoryTarget,
        places: dict[str, tuple[str, int, int]],
        reader: BlockReader,
    ) -> tuple[list[list[int]], int]:
        old = self._old
        blocks: list[list[int]] = []
        rows = 0
        for name, dtype in RESULT_ARRAYS.items():
            if name not in OPTIONAL_ARRAYS:
                self._place(target, places, name, dtype, self._extent)
        for number, start in enumerate(range(0, self._extent, BLOCK)):
            end = min(start + BLOCK, self._extent)
            state = self._states.get(number, BlockState(0, 0, 0))
            if old is not None and _has_block(old.header, number, state, end):
                arrays = {name: old.array(name)[start:end] for name in old.header.arrays if is_by_ordinal(name)}
            else:
                arrays, state = reader.read(self._store, self._run.run_id, start, end)
            for name, array in arrays.items():
                if name not in places:
                    self._place(target, places, name, array.dtype.str[1:], self._extent)
                    self._fill(target, places[name], 0, start)
                target.write(places[name][1] + start * array.dtype.itemsize, np.ascontiguousarray(array))
            for name, place in places.items():
                if is_by_ordinal(name) and name not in arrays:
                    self._fill(target, place, start, end)
            blocks.append(list(state))
            rows += state.stored
            if self._progress is not None:
                self._progress(end, self._run.planned)
        return blocks, rows

    def _fill(self, target: _FileTarget | _MemoryTarget, place: tuple[str, int, int], start: int, end: int) -> None:
        """Write that trials have no value."""
        dtype, offset, _count = place
        for first in range(start, end, BLOCK):
            size = min(first + BLOCK, end) - first
            empty = np.full(size, np.nan if dtype == "f8" else -1, dtype=dtype)
            target.write(offset + first * empty.dtype.itemsize, empty)


def _has_block(header: column_cache.ColumnHeader, number: int, state: BlockState, end: int) -> bool:
    return number < len(header.blocks) and header.blocks[number] == list(state) and end <= header.extent


def is_by_ordinal(name: str) -> bool:
    """True if an array has one number for each trial."""
    return name in RESULT_ARRAYS or name.startswith(("metric:", "verdict:"))
