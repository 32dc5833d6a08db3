"""Commits a batch of results exactly once, also with concurrent writers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError

from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, SecretInDataError, StoreUnavailableError
from fairtrial.store.bulk import BulkInsert
from fairtrial.store.notes import RunNotes
from fairtrial.store.protocol import Committed, RunRecord, RunStatus
from fairtrial.store.redact import Redactor
from fairtrial.store.rows import (
    DETAIL_COLUMNS,
    EXECUTION,
    RESULT_COLUMNS,
    SAMPLE_COLUMNS,
    Encoder,
    Entry,
    RefusedEntryError,
    replaces,
    sample_row,
    state,
    stored_id,
)
from fairtrial.store.schema import details, results, runs, samples
from fairtrial.store.segments import Segments
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult

_TRANSCRIPT = len(DETAIL_COLUMNS) - 1
_KNOWN = 5_000  # Samples remembered as stored; trials of one sample come close together.
_KNOWN_DATASETS = 8
_RACES = 100


class RunState(NamedTuple):
    """What decides whether a run still takes results: its status, its owner if any, and its notes."""

    status: RunStatus
    owner: str | None
    notes: RunNotes


class CommitCompanion(Protocol):
    """Changes that are made in the transaction of a commit. What either method raises undoes the whole."""

    def begin(self, connection: Connection) -> None:
        """Make the changes, before the results are written."""
        ...

    def check(self, connection: Connection, committed: Committed, run: RunState) -> None:
        """Check what was written, and the state of the run, which cannot change until the transaction ends."""
        ...


class OrderConflictError(Exception):
    """The samples of the dataset are stored in another order than this run's."""


class TranscriptsMovedError(Exception):
    """The transcripts of the run are stored elsewhere than when its plan was read, or may have been deleted."""


class _OverlapError(Exception):
    """Some trials already have a result, so each must be checked."""


class Batch:
    """Results encoded as rows, sorted by ordinal, before any transaction."""

    def __init__(
        self,
        run: RunRecord,
        number: int,
        given: Sequence[EvalResult],
        with_samples: Mapping[int, Sample[Any, Any]],
        redactor: Redactor,
        compress: Callable[[bytes], bytes],
    ) -> None:
        self.run = run
        self.number = number
        self.redactor = redactor
        self.refused: list[tuple[TrialKey, str]] = []
        self.given = given
        self.dataset = 0
        self.segmented_at: float | None = None  # When the segment was written that rows refer to.
        self.late = False  # Whether the run has ended.
        self.connections = -1  # The writer's count of connections when `sample_rows` was made.
        self.sample_rows: list[tuple[Any, ...]] = []
        self.unfit: dict[int, str] = {}  # Sample ordinals whose results cannot be stored at all, with the reason.
        self.bare: dict[int, str] = {}  # Sample ordinals of which only the id could be stored, with the reason.
        self.replaced = False  # Whether the transaction has replaced stored results.
        self.new_samples = False  # Whether the transaction has stored samples.
        self.completed_samples = False  # Whether it has completed samples of which only the id was stored.
        self.samples = {place: sample for place, sample in with_samples.items() if 0 <= place < run.dataset_size}
        # Sample ordinal -> id, for every sample a result or the caller names.
        self.ids = {place: sample.id for place, sample in self.samples.items()}
        self._encoder = Encoder(run, number, redactor, compress)
        self._encoder.search_batch(given)
        encode = self._encoder.entry
        entries: list[Entry] = []
        name_of = self.ids.setdefault
        for result in given:
            try:
                entry = encode(result)
            except RefusedEntryError as problem:
                self.refused.append((result.key, str(problem)))
                continue
            place, key = entry.sample, entry.key
            if name_of(place, key[2]) == key[2]:
                entries.append(entry)
            else:
                self.refused.append((key, f"sample {place} is {self.ids[place]!r}"))
        # Always in the same order, so that two writers of the same trials cannot deadlock.
        entries.sort(key=itemgetter(0))
        self.entries = entries

    def move_transcripts(self, segments: Segments) -> None:
        """Write the transcripts as a segment, which the rows refer to from then on."""
        self.segmented_at = segments.clock.time()
        detailed = [at for at, entry in enumerate(self.entries) if entry.detail is not None]
        details = [self.entries[at].detail or () for at in detailed]
        written = segments.write([detail[_TRANSCRIPT] for detail in details])
        for at, detail, transcript in zip(detailed, details, written, strict=True):
            self.entries[at] = self.entries[at]._replace(detail=(*detail[:_TRANSCRIPT], transcript))

    @property
    def has_extra_usage(self) -> bool:
        """Whether a result has one of `EXTRA_USAGE` or an unknown ending."""
        return self._encoder.extra_usage

    def error_entry(self, entry: Entry, problem: str) -> Entry:
        """Return the error entry that replaces a result that cannot be stored."""
        of_trial = [found for found in self.given if found.key == entry.key]
        executed = (found for found in of_trial if found.execution == entry.row[EXECUTION])
        return self._encoder.error_entry(next(executed, of_trial[0]), problem)


class BatchWriter:
    """Writes batches. One per store; caches which samples are stored."""

    def __init__(self, dialect: str) -> None:
        self._insert_results = BulkInsert(dialect, results, RESULT_COLUMNS, "ON CONFLICT DO NOTHING")
        self._insert_samples = BulkInsert(dialect, samples, SAMPLE_COLUMNS, "ON CONFLICT DO NOTHING", lead="dataset")
        changes = ", ".join(f"{name} = excluded.{name}" for name in DETAIL_COLUMNS[3:])
        # An execution that is scored again has new details.
        self._insert_details = BulkInsert(
            dialect, details, DETAIL_COLUMNS, f"ON CONFLICT (run, ordinal, execution) DO UPDATE SET {changes}"
        )
        self._known: dict[int, dict[int, str]] = {}  # Dataset -> sample ordinal -> id.
        self._connections = 0
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Clear the cache of stored samples: a new connection may lead to a standby that lacks them."""
        with self._lock:
            self._connections += 1
            self._known = {}

    def write(self, connection: Connection, batch: Batch, dataset: int, *, own: bool) -> Committed:
        """Write a batch inside a transaction. Raises `OrderConflictError`, unless the dataset is the run's own."""
        if batch.dataset != dataset or batch.connections != self._connections:
            self.encode_samples(batch, dataset)
        batch.replaced = batch.new_samples = batch.completed_samples = False
        if batch.sample_rows:
            self._put_samples(connection, batch, own)
        refused, entries, unfit, bare = list(batch.refused), batch.entries, batch.unfit, batch.bare
        if unfit or bare:
            refused.extend((entry.key, unfit[entry.sample]) for entry in entries if entry.sample in unfit)
            entries = [
                batch.error_entry(entry, bare[entry.sample]) if entry.sample in bare else entry
                for entry in entries
                if entry.sample not in unfit
            ]
        if batch.has_extra_usage:
            flag = update(runs).where(runs.c.id == batch.number, runs.c.extra_usage == 0).values(extra_usage=1)
            connection.execute(flag)
        unstorable = [(entry.key, entry.problem) for entry in entries if entry.problem is not None]
        new = duplicate = 0

        def put(on: Connection, wave: Sequence[Entry]) -> int:
            return self._put_results(on, wave, batch)

        for wave in _waves(entries):
            taken, bad = _halving(connection, wave, self._insert_all, put)
            if bad:
                errors = [batch.error_entry(entry, why) for entry, why in bad]
                more, lost = _halving(connection, errors, self._insert_all, put)
                refused.extend((entry.key, why) for entry, why in lost)
                never = {entry.key for entry, _why in lost}
                unstorable += [(entry.key, why) for entry, why in bad if entry.key not in never]
                taken += more
                duplicate -= len(lost)
            new += taken
            duplicate += len(wave) - taken
        return Committed(new, duplicate, tuple(refused), tuple(unstorable))

    def encode_samples(self, batch: Batch, dataset: int) -> None:
        """Encode the samples that are not known to be stored; called before the transaction."""
        batch.dataset = dataset
        batch.sample_rows = rows = []
        batch.unfit, batch.bare = {}, {}
        with self._lock:
            batch.connections = self._connections
            known = self._known.get(dataset, {})
        for place, sample_id in sorted(batch.ids.items()):
            if known.get(place) == sample_id:
                continue
            sample = batch.samples.get(place)
            try:
                rows.append(
                    _bare_row(place, sample_id) if sample is None else sample_row(place, sample, batch.redactor)
                )
            except (CodecError, UnicodeError, SecretInDataError) as error:
                bare = _bare_row(place, sample_id)
                if batch.redactor.find(bare[1]) is None:
                    rows.append(bare)
                batch.bare[place] = f"its sample cannot be stored: {error}"

    def remember(self, batch: Batch) -> None:
        """Record which samples are stored; called after a successful transaction."""
        partly = batch.unfit.keys() | batch.bare.keys()
        stored = {place: sample.id for place, sample in batch.samples.items() if place not in partly}
        with self._lock:
            if batch.connections != self._connections:
                return
            # Replaced as a whole, never modified: other threads may be reading it.
            others = [item for item in self._known.items() if item[0] != batch.dataset]
            known = self._known.get(batch.dataset, {})
            fresh = known | stored if len(known) < _KNOWN else stored
            self._known = dict([*others[-_KNOWN_DATASETS + 1 :], (batch.dataset, fresh)])

    def _put_samples(self, connection: Connection, batch: Batch, own: bool) -> None:
        def put(on: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
            return self._put_sample_rows(on, rows, batch, own)

        _count, bad = _halving(connection, batch.sample_rows, put)
        if bad:
            batch.bare.update((row[0], f"its sample cannot be stored: {why}") for row, why in bad)
            _count, lost = _halving(connection, [(*row[:2], None, None, None, None) for row, _why in bad], put)
            batch.unfit.update((row[0], f"its sample cannot be stored: {why}") for row, why in lost)

    def _put_sample_rows(self, connection: Connection, rows: Sequence[tuple[Any, ...]], batch: Batch, own: bool) -> int:
        inserted = self._insert_samples.run(connection, rows, batch.dataset)
        batch.new_samples |= inserted > 0
        if inserted == len(rows):
            return len(rows)
        query = select(samples.c.ordinal, samples.c.id, samples.c.input.is_(None)).where(
            samples.c.dataset == batch.dataset, samples.c.ordinal.in_([row[0] for row in rows])
        )
        stored = {place: (sample_id, bool(bare)) for place, sample_id, bare in connection.execute(query)}
        for place, sample_id, content, expected, facts, input_hash in rows:
            found, bare = stored[place]
            if found != sample_id:
                if not own:
                    raise OrderConflictError
                batch.unfit[place] = f"the run's sample {place} was {found!r} before; its dataset has changed"
            elif bare and content is not None:
                connection.execute(
                    update(samples)
                    .where(samples.c.dataset == batch.dataset, samples.c.ordinal == place)
                    .values(input=content, expected=expected, metadata=facts, input_hash=input_hash)
                )
                batch.completed_samples = True
        return len(rows)

    def _put_results(self, connection: Connection, entries: Sequence[Entry], batch: Batch) -> int:
        """Write results of different trials, some of which have one; returns how many changed the store."""
        for _race in range(_RACES):
            stored = self._stored(connection, entries)
            absent = [entry for entry in entries if entry.ordinal not in stored]
            better = [
                entry
                for entry in entries
                if entry.ordinal in stored and replaces(*state(entry.row), *stored[entry.ordinal])
            ]
            try:
                with connection.begin_nested():
                    if better:
                        gone = [entry.ordinal for entry in better]
                        for table in (results, details):
                            connection.execute(
                                delete(table).where(table.c.run == entries[0].row[0], table.c.ordinal.in_(gone))
                            )
                    if absent or better:
                        self._insert_all(connection, [*absent, *better])
                batch.replaced |= bool(better)
                return len(absent) + len(better)
            except _OverlapError:
                continue  # Another writer has committed one of them since it was read; now it is visible.
        raise StoreUnavailableError("other writers keep changing the same trials")

    def _insert_all(self, connection: Connection, entries: Sequence[Entry]) -> int:
        """Write results of trials that have none; returns their number. Raises `_OverlapError` in the middle of it."""
        if self._insert_results.run(connection, [entry.row for entry in entries]) != len(entries):
            raise _OverlapError
        rows = [entry.detail for entry in entries if entry.detail is not None]
        if rows:
            self._insert_details.run(connection, rows)
        return len(entries)

    def _stored(self, connection: Connection, entries: Sequence[Entry]) -> dict[int, tuple[int, int]]:
        """Return the stored (outcome, attempt) of these trials, locked against other writers."""
        query = (
            select(results.c.ordinal, results.c.outcome, results.c.attempt)
            .where(results.c.run == entries[0].row[0], results.c.ordinal.in_([entry.ordinal for entry in entries]))
            .order_by(results.c.ordinal)
            .with_for_update()
        )
        return {ordinal: (outcome, attempt) for ordinal, outcome, attempt in connection.execute(query)}


def _bare_row(place: int, sample_id: str) -> tuple[Any, ...]:
    """Return the row of a sample of which only the id is stored."""
    return (place, stored_id(sample_id), None, None, None, None)


def _waves(entries: list[Entry]) -> Iterable[list[Entry]]:
    """Split a batch into parts in which every trial occurs once, so that several results of one trial are in order."""
    if len({entry.ordinal for entry in entries}) == len(entries):
        return [entries] if entries else []
    waves: list[list[Entry]] = []
    place = 0
    for at, entry in enumerate(entries):
        place = place + 1 if at and entries[at - 1].ordinal == entry.ordinal else 0
        if place == len(waves):
            waves.append([])
        waves[place].append(entry)
    return waves


def _is_data_error(error: DBAPIError) -> bool:
    """Return whether a database refused the rows themselves: SQLSTATE classes 22 and 23, or an unsupported type."""
    if error.connection_invalidated:
        return False
    if isinstance(error, DataError | IntegrityError):
        return True
    # Drivers reject values of unsupported types before anything is sent.
    return isinstance(error, ProgrammingError) and str(error.orig).startswith(("Error binding", "cannot adapt"))


type _Write[R] = Callable[[Connection, Sequence[R]], int]


def _halving[R](
    connection: Connection, rows: Sequence[R], write: _Write[R], careful: _Write[R] | None = None
) -> tuple[int, list[tuple[R, str]]]:
    """Write rows; bisect a batch that the database refuses. Returns the number written and the refused rows.

    Rows that overlap with stored ones are written by `careful`.
    """
    try:
        with connection.begin_nested():
            return write(connection, rows), []
    except _OverlapError:
        if careful is None:
            raise
        return _halving(connection, rows, careful)
    except DBAPIError as error:
        if not _is_data_error(error):
            raise  # The rows are not the cause.
        problem = str(error.orig).strip().partition("\n")[0]
    except (OverflowError, UnicodeError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if len(rows) == 1:
        return 0, [(rows[0], f"the database refuses it: {problem}")]
    middle = len(rows) // 2
    first, first_bad = _halving(connection, rows[:middle], write, careful)
    second, second_bad = _halving(connection, rows[middle:], write, careful)
    return first + second, first_bad + second_bad
