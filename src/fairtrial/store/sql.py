"""A store in SQLite or PostgreSQL, with the same tables and statements."""

from __future__ import annotations

import hashlib
import logging
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import decode, dumps
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.frozen import JSON
from fairtrial.data.sample import Sample
from fairtrial.errors import StoreError, StoreUnavailableError, StoreVersionError, UnknownRunError
from fairtrial.store import engine as engines
from fairtrial.store import records
from fairtrial.store.attachments import store_attachments
from fairtrial.store.column_cache import delete_columns
from fairtrial.store.commit import (
    Batch,
    BatchWriter,
    CommitCompanion,
    OrderConflictError,
    RunState,
    TranscriptsMovedError,
)
from fairtrial.store.compress import compress, decompress
from fairtrial.store.export import export_beside_segments
from fairtrial.store.looks import add_looks
from fairtrial.store.notes import RunNotes, write_notes
from fairtrial.store.objects import full_address
from fairtrial.store.protocol import NO_SAMPLES, Committed, Label, RunOwner, RunRecord, RunStatus
from fairtrial.store.reads import SqlReads
from fairtrial.store.redact import current, refuse_secret
from fairtrial.store.rows import NOT_RUN
from fairtrial.store.schema import VERSION, blobs, datasets, details, labels, results, runs, samples, session_snapshots
from fairtrial.store.segments import COMMIT_SECONDS, PRUNED_SECONDS
from fairtrial.store.spool import SqlSpool
from fairtrial.store.sql_batches import SqlBatches
from fairtrial.store.upkeep import (
    SegmentCheck,
    backup_sqlite,
    check_segments,
    delete_remains,
    delete_rows,
    delete_unnamed_blobs,
    move_transcripts,
    postgres_size,
    segments_named,
    sqlite_size,
    vacuum,
)
from fairtrial.trials.result import EvalResult

log = logging.getLogger("fairtrial.store")

# Built once: building a statement takes longer than executing this one.
_RUN_STATE = (
    sa.select(runs.c.dataset, datasets.c.owner, runs.c.epoch, runs.c.finished_at)
    .join_from(runs, datasets, datasets.c.id == runs.c.dataset)
    .where(runs.c.id == sa.bindparam("number"))
)
_SHARED = _RUN_STATE.with_for_update(read=True, key_share=True, of=runs)
_OWNED = _RUN_STATE.with_for_update(read=True, of=runs)


class SqlStore(SqlReads):
    """A store in a database. Open one with `open_store`."""

    def __init__(self, engine: Any, address: str, *, version: int = VERSION, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(engine, address, clock)
        self._version = version
        self._writing = engine.execution_options(**{engines.WRITE: True, engines.SHORT_WRITE: True})
        self._writer = writer = BatchWriter(engine.dialect.name)
        sa.event.listen(engine, "connect", lambda *_connection: writer.forget())
        self.transcripts: str | None = None  # Where those of new runs are stored; the database if None.
        self._file: tuple[Path, tuple[int, int] | None] | None = None
        self._plans: dict[str, tuple[int, RunRecord]] = {}
        # Reports refer to their store; when both are garbage-collected, files and connections are closed.
        weakref.finalize(self, engine.dispose)
        self._datasets: dict[str, int] = {}  # Run -> its dataset when last seen; checked in each transaction.

    @property
    def batches(self) -> SqlBatches:
        """The batches of model calls, in an object that the store does not hold: a cycle would keep it open."""
        self._check_version()  # An older store has no tables for them.
        return SqlBatches(self._read, self._write, self._plan, self._writing.dialect.name)

    @property
    def spool(self) -> SqlSpool:
        """The spool of received spans."""
        self._check_version()
        return SqlSpool(self._read, self._write)

    @classmethod
    def sqlite(cls, path: Path | str, *, read_only: bool = False) -> SqlStore:
        """Open the store in an SQLite file; creates it unless opened read-only."""
        engine = engines.sqlite_engine(Path(path), read_only=read_only)
        store = cls._opened(engine, str(path), read_only)
        store._file = Path(path).absolute(), engines.file_identity(path)
        return store

    @classmethod
    def postgres(cls, url: str) -> SqlStore:
        """Open the store in a PostgreSQL database."""
        engine = engines.postgres_engine(url)
        return cls._opened(engine, engine.url.set(drivername="postgresql").render_as_string(hide_password=True), False)

    @classmethod
    def beside_queue(cls, connect: Callable[[], Any], address: str) -> SqlStore:
        """Open the store that shares the PostgreSQL database of a queue; raises `StoreError` if there is none.

        Args:
            connect: Opens a connection of psycopg to the database.
            address: The address of the database, for messages.
        """
        return cls._opened(engines.postgres_engine_from(connect), address, True)

    @classmethod
    def _opened(cls, engine: Any, address: str, read_only: bool) -> SqlStore:
        try:
            version = engines.prepare(engine, address, create=not read_only)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, address, version=version)

    def close(self) -> None:
        """Close files and connections; a closed store raises `StoreError` when it is used."""
        self._closed = True
        self._engine.dispose()

    def _check_version(self) -> None:
        if self._version != VERSION:
            raise StoreVersionError(
                f"{self._address} has schema {self._version} and can only be read; this Fairtrial writes schema "
                f"{VERSION}. Upgrade it once with: fairtrial store migrate --store {self._address}"
            )

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        if self._closed:
            raise StoreError(f"the store {self._address} is closed")
        self._check_version()
        self._check_file()
        with engines.translated(), self._writing.begin() as connection:
            yield connection

    def _check_file(self) -> None:
        """Raise if the database's file was deleted or replaced: SQLite would continue to write to the deleted file."""
        if self._file is not None and engines.file_identity(self._file[0]) != self._file[1]:
            raise StoreError(
                f"the database file {self._file[0]} was deleted or replaced while it was in use: what was stored in it "
                "is lost unless you put it back. The same command then executes what is missing"
            )

    def size(self) -> int:
        """Return the size of the store on disk in bytes."""
        if self._file is not None:
            return sqlite_size(self._file[0])
        with self._read() as connection:
            return postgres_size(connection)

    def result_counts(self) -> dict[str, int]:
        """Return the number of stored results by run id; runs without results are left out."""
        query = (
            sa.select(runs.c.run_id, sa.func.count()).join(results, results.c.run == runs.c.id).group_by(runs.c.run_id)
        )
        with self._read() as connection:
            return {str(row[0]): int(row[1]) for row in connection.execute(query)}

    def vacuum(self, *, full: bool = False) -> None:
        """Reclaim the space of deleted rows. Others can use the store meanwhile, but SQLite's writers wait.

        Args:
            full: Shrink the files of PostgreSQL, too. Others wait until each table is copied.
        """
        delete_remains(self._write)
        vacuum(self._engine, full=full)

    def backup(self, path: Path | str) -> None:
        """Copy a snapshot of the store into a new SQLite file, also while runs are being written."""
        if self._file is None:
            raise StoreError("use pg_dump to back up a store in PostgreSQL")
        backup_sqlite(self._file[0], Path(path))

    def delete_unnamed_blobs(self) -> tuple[int, int]:
        """Delete unreferenced attachments; returns (their number, their bytes). Not while a run is being executed."""
        places = {number: self.segments(run) for number, run in self._segmented()}

        def read(number: int, transcripts: Sequence[bytes | None]) -> Sequence[bytes | None]:
            segments = places.get(number)
            return transcripts if segments is None else segments.read(transcripts)

        try:
            return delete_unnamed_blobs(self._read, self._write, read)
        except StoreUnavailableError:
            raise
        except StoreError as error:  # A transcript that cannot be read may name any of them.
            log.warning("no attachment was deleted: %s", error)
            return 0, 0

    def _segmented(self) -> list[tuple[int, RunRecord]]:
        """Return the runs whose transcripts are not in the database, with their numbers."""
        return [self._run(run.run_id) for run in self.runs() if run.noted.transcripts is not None]

    def delete_unnamed_segments(self, *, older_than_seconds: float = PRUNED_SECONDS) -> tuple[int, int]:
        """Delete segments of transcripts that no result refers to, and unfinished ones; returns (number, bytes).

        Those that are younger stay: their results may be about to be committed.
        """
        number = size = 0
        for place, run in self._segmented():
            if (segments := self.segments(run)) is not None and not segments.shared:
                # Listed first: what is committed meanwhile is named then.
                old = segments.written_before(self._clock.time() - older_than_seconds)
                with self._read() as connection:
                    named = segments_named(connection, place)
                unnamed = [found for segment, found in old if segment not in named]
                segments.objects.delete([found.name for found in unnamed])
                number, size = number + len(unnamed), size + sum(found.size for found in unnamed)
        return number, size

    def check_segments(self) -> list[SegmentCheck]:
        """Compare results with the segments of transcripts that they refer to, by names and sizes."""
        checked: list[SegmentCheck] = []
        for number, run in self._segmented():
            if (segments := self.segments(run)) is not None:
                with self._read() as connection:
                    checked.append(check_segments(connection, number, run, segments))
        return checked

    def move_transcripts(
        self, run_id: str, address: str | None, *, done: Callable[[int], None] = lambda _count: None
    ) -> None:
        """Move the transcripts of a run, which nothing may execute meanwhile, to another place.

        If it is interrupted, the run can be read, and the same call completes it.

        Args:
            run_id: The run.
            address: A bucket or a folder; None is the database.
            done: Called with the number of transcripts of each step.
        """
        number, run = self._run(run_id)
        now, wanted = run.noted.transcripts, None if address is None else full_address(address)
        if now is not None and wanted is not None and (now != wanted or run.noted.transcripts_shared):
            raise StoreError(f"the transcripts of run {run_id} are in {now}: move them to the database first")
        if wanted is not None:
            if now is None:
                notes = {**run.notes, **write_notes(transcripts=wanted)}
                if (segments := self.segments(replace(run, notes=notes))) is not None:
                    segments.begin(run.suite)
            self.update_run(run_id, notes=write_notes(transcripts=wanted, transcripts_returning=False))
        elif now is not None:  # From here on, no process commits a reference.
            self.update_run(run_id, notes=write_notes(transcripts_returning=True))
        segments = self.segments(self.get_run(run_id))
        if segments is None:
            return
        convert = segments.read if wanted is None else segments.write
        move_transcripts(self._read, self._write, number, convert, done, self._clock)
        if wanted is not None and run.finished_at is not None:
            export_beside_segments(self, self.get_run(run_id))
        if wanted is None:
            segments.delete()
            notes = write_notes(transcripts=None, transcripts_shared=None, transcripts_returning=False)
            self.update_run(run_id, notes=notes)

    def create_run(self, run: RunRecord, *, latest: int | None = None) -> RunRecord:
        """Store a new run and assign its number. A run_id that exists already is an error."""
        records.check_plan(run)
        self._check_version()
        # Not what another store has noted: its run may have been copied from there, with its transcripts.
        notes = {name: note for name, note in run.notes.items() if not name.startswith("transcripts")}
        if self.transcripts is not None:
            notes |= write_notes(transcripts=self.transcripts)
        run = replace(run, created_at=run.created_at or self._clock.time(), notes=notes)
        values = records.run_values(run, current())  # First: it refuses secrets.
        if (segments := self.segments(run)) is not None:
            segments.begin(run.suite)
        with self._write() as connection:
            if connection.dialect.name == "postgresql":
                # Serializes the assignment of numbers; SQLite's writers are serialized anyway.
                connection.execute(sa.text("LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE"))
            if connection.execute(sa.select(runs.c.id).where(runs.c.run_id == values["run_id"])).first():
                raise StoreError(f"the store {self._address} already has a run {run.run_id}")
            last = connection.execute(
                sa.select(sa.func.max(runs.c.number)).where(runs.c.suite == values["suite"])
            ).scalar()
            records.check_latest(run, last or 0, latest)
            number = max((last or 0) + 1, run.number)
            dataset = self._shared_dataset(connection, values)
            connection.execute(
                sa.insert(runs).values(**(values | {"number": number, "dataset": dataset, "extra_usage": 0}))
            )
        return replace(run, number=number)

    def _shared_dataset(self, connection: sa.Connection, values: Mapping[str, Any]) -> int:
        fingerprint = values["dataset_fingerprint"]
        query = sa.select(datasets.c.id).where(datasets.c.fingerprint == fingerprint, datasets.c.owner == 0)
        found = connection.execute(query).scalar()
        return self._new_dataset(connection, values, owner=0) if found is None else int(found)

    def _new_dataset(self, connection: sa.Connection, values: Mapping[str, Any], owner: int) -> int:
        made = connection.execute(
            sa.insert(datasets)
            .values(
                fingerprint=values["dataset_fingerprint"],
                owner=owner,
                name=values["dataset_name"],
                version=values["dataset_version"],
                size=values["dataset_size"],
            )
            .returning(datasets.c.id)
        )
        return int(made.scalar_one())

    def update_run(
        self,
        run_id: str,
        *,
        status: RunStatus | None = None,
        finished_at: float | None = None,
        notes: Mapping[str, JSON] | None = None,
        identity: Mapping[str, JSON] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Update the status, end time, notes (merged) and code versions of a run."""
        values: dict[str, Any] = {}
        if status is not None:
            values["status"] = status
            if status == "running":
                values |= {"finished_at": None, "revision": records.new_revision()}
        if finished_at is not None:
            values["finished_at"] = finished_at
        with self._write() as connection:
            found = connection.execute(
                sa.select(runs.c.id, runs.c.notes, runs.c.epoch)
                .where(runs.c.run_id == escape_text(run_id))
                .with_for_update()
            ).first()
            if found is None:
                raise UnknownRunError(f"the store {self._address} has no run {run_id!r}")
            records.check_epoch(run_id, found.epoch, epoch)
            if notes is not None:
                values["notes"] = records.mapping_json(decode(dict[str, Any], found.notes) | dict(notes), current())
            if identity is not None:
                values["identity"] = dumps(identity)
            if values:
                connection.execute(sa.update(runs).where(runs.c.id == found.id).values(**values))

    def extend_run(self, run_id: str, size: int, *, epoch: int | None = None) -> None:
        """Raise the number of samples in the plan of a run whose samples arrive while it is executed."""
        with self._write() as connection:
            query = sa.select(runs.c.id, runs.c.dataset, runs.c.epoch).where(runs.c.run_id == escape_text(run_id))
            found = connection.execute(query.with_for_update()).first()
            if found is None:
                raise UnknownRunError(f"the store {self._address} has no run {run_id!r}")
            records.check_epoch(run_id, found.epoch, epoch)
            larger = sa.and_(runs.c.id == found.id, runs.c.dataset_size < size)
            connection.execute(sa.update(runs).where(larger).values(dataset_size=size))
            larger = sa.and_(datasets.c.id == found.dataset, datasets.c.size < size)
            connection.execute(sa.update(datasets).where(larger).values(size=size))
        self._plans.pop(run_id, None)

    @property
    def _now(self) -> sa.ColumnElement[float]:
        """Return the SQL for the database's clock; in SQLite that is the clock of this process."""
        if self._engine.dialect.name == "postgresql":
            return sa.literal_column("extract(epoch from clock_timestamp())::double precision", sa.Double)
        return sa.literal_column("(julianday('now') - 2440587.5) * 86400.0", sa.Double)

    def run_owner(self, run_id: str) -> RunOwner:
        """Return the process that executes a run."""
        query = sa.select(runs.c.owner, runs.c.epoch, runs.c.heartbeat_at, self._now - runs.c.heartbeat_at)
        with self._read() as connection:
            found = connection.execute(query.where(runs.c.run_id == escape_text(run_id))).first()
        if found is None:
            raise UnknownRunError(f"the store {self._address} has no run {run_id!r}")
        owner = RunOwner(*found)
        return owner if self._engine.dialect.name == "postgresql" else owner._replace(age_seconds=None)

    def acquire_run(self, run_id: str, owner: str, seen: RunOwner) -> int | None:
        """Make `owner` the owner of a run, if nothing has changed since `seen` was read (compare-and-swap)."""
        unchanged = sa.and_(runs.c.epoch == seen.epoch, runs.c.heartbeat_at.is_not_distinct_from(seen.heartbeat_at))
        with self._write() as connection:
            swapped = connection.execute(
                sa.update(runs)
                .where(runs.c.run_id == escape_text(run_id), unchanged)
                .values(owner=owner, epoch=seen.epoch + 1, heartbeat_at=self._now)
            )
        return seen.epoch + 1 if swapped.rowcount == 1 else None

    def renew_run(self, run_id: str, epoch: int) -> None:
        """Record a heartbeat. Raises `RunBusyError` if the run has been taken over since `epoch`."""
        if self._set_owner(run_id, epoch, heartbeat_at=self._now) == 0:
            records.check_epoch(run_id, self.run_owner(run_id).epoch, epoch)

    def release_run(self, run_id: str, epoch: int) -> None:
        """Release ownership; does nothing if the run has been taken over since `epoch`."""
        self._set_owner(run_id, epoch, owner=None, heartbeat_at=None)

    def _set_owner(self, run_id: str, epoch: int, **values: Any) -> int:
        ours = sa.and_(runs.c.run_id == escape_text(run_id), runs.c.epoch == epoch)
        with self._write() as connection:
            return connection.execute(sa.update(runs).where(ours).values(**values)).rowcount

    def delete_run(self, run_id: str) -> None:
        """Delete a run with its results, transcripts and labels, and samples that no other run uses.

        The run is gone at once, its rows follow in short transactions: one for all of them would lock out writers and
        exceed time limits. If that is interrupted, `vacuum` completes it.
        """
        segments = self.segments(self.get_run(run_id))
        if segments is not None:
            # First, because a process may be killed before the end: the run can then be deleted again.
            with suppress(StoreError):
                segments.delete()
        with self._write() as connection:
            found = connection.execute(
                sa.select(runs.c.id, runs.c.dataset).where(runs.c.run_id == escape_text(run_id)).with_for_update()
            ).first()
            if found is None:
                raise UnknownRunError(f"the store {self._address} has no run {run_id!r}")
            connection.execute(sa.delete(labels).where(labels.c.run == found.id))
            connection.execute(sa.delete(runs).where(runs.c.id == found.id))
            used = connection.execute(sa.select(runs.c.id).where(runs.c.dataset == found.dataset).limit(1)).first()
            if not used:
                connection.execute(sa.delete(datasets).where(datasets.c.id == found.dataset))
            self.batches.delete(connection, found.id)
        self._plans.pop(run_id, None)
        self._datasets.pop(run_id, None)
        delete_columns(self.identity, run_id)
        for table in (details, results):
            delete_rows(self._write, table, found.id)
        if not used:
            delete_rows(self._write, samples, found.dataset)
        if segments is not None:
            try:
                segments.delete()
            except StoreError as error:
                raise StoreError(
                    f"run {run_id} is deleted, but not its transcripts: delete {segments.address}/{segments.folder} "
                    f"({error})"
                ) from None

    def commit(
        self,
        run_id: str,
        results: Sequence[EvalResult],
        samples: Mapping[int, Sample[Any, Any]] = NO_SAMPLES,
        *,
        epoch: int | None = None,
    ) -> Committed:
        """Store results durably in one transaction, with their samples."""
        return self._commit_all(run_id, results, samples, epoch, None)

    def commit_with(
        self,
        run_id: str,
        results: Sequence[EvalResult],
        samples: Mapping[int, Sample[Any, Any]],
        companion: CommitCompanion,
    ) -> Committed:
        """Store results as `commit` does, together with other changes in the same database, or nothing of both."""
        return self._commit_all(run_id, results, samples, None, companion)

    def _commit_all(
        self,
        run_id: str,
        results: Sequence[EvalResult],
        samples: Mapping[int, Sample[Any, Any]],
        epoch: int | None,
        companion: CommitCompanion | None,
    ) -> Committed:
        store_attachments(self, results, samples)
        # Rows are encoded before the transaction, which holds locks.
        batch = self._encoded(run_id, results, samples)
        number, run = batch.number, batch.run
        noted = run.noted  # What another store names is not for this one to write beside: its pruning would delete it.
        if (
            not (noted.transcripts_returning or noted.transcripts_shared)
            and (segments := self.segments(run)) is not None
        ):
            batch.move_transcripts(segments)
        self._writer.encode_samples(batch, self._datasets.get(run_id, 0))
        try:
            committed = self._commit(run_id, batch, epoch, companion)
        except TranscriptsMovedError:
            self._plans.pop(run_id, None)
            return self._commit_all(run_id, results, samples, epoch, companion)
        except OrderConflictError:
            self._own_dataset(number)
            committed = self._commit(run_id, batch, epoch, companion)
        if batch.late:  # Nothing kept its attachments from being pruned until it was committed.
            store_attachments(self, results, samples)
        return committed

    def _encoded(self, run_id: str, results: Sequence[EvalResult], samples: Mapping[int, Sample[Any, Any]]) -> Batch:
        number, run = self._plan(run_id)
        if run.noted.transcripts is not None:  # It may have been moved: a segment where it was would stay there.
            number, run = self._plans[run_id] = self._run(run_id)
        batch = Batch(run, number, results, samples, current(), compress)
        if batch.refused:
            number, now = self._plans[run_id] = self._run(run_id)
            if now.planned > run.planned:  # It was extended since its plan was read.
                return Batch(now, number, results, samples, current(), compress)
        return batch

    def _commit(self, run_id: str, batch: Batch, epoch: int | None, companion: CommitCompanion | None) -> Committed:
        with self._write() as connection:
            dataset, own, batch.late = self._locked_dataset(connection, run_id, batch.number, epoch)
            if batch.segmented_at is not None:
                self._check_place(connection, batch, batch.segmented_at)
            if companion is not None:
                companion.begin(connection)
            committed = self._writer.write(connection, batch, dataset, own=own)
            if batch.completed_samples:
                self._revise(connection, runs.c.dataset == dataset)
            elif batch.replaced or (batch.late and (committed.new or batch.new_samples)):
                self._revise(connection, runs.c.id == batch.number)
            if companion is not None:
                companion.check(connection, committed, self._shared_run(connection, batch.number))
        self._writer.remember(batch)
        self._datasets[run_id] = dataset
        return committed

    def _revise(self, connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
        """Give runs a new revision: caches of their figures are out of date when the transaction ends."""
        connection.execute(sa.update(runs).where(which).values(revision=records.new_revision()))

    def _shared_run(self, connection: sa.Connection, number: int) -> RunState:
        """Return the state of a run, locked against changes until the transaction ends.

        It is locked last, and so only for a moment: heartbeats of the run's owner wait for this lock.
        """
        query = sa.select(runs.c.status, runs.c.owner, runs.c.notes).where(runs.c.id == number)
        status, owner, notes = connection.execute(query.with_for_update(read=True)).one()
        return RunState(status, owner, RunNotes(decode(dict[str, Any], notes)))

    def _plan(self, run_id: str) -> tuple[int, RunRecord]:
        # Only `extend_run` changes the plan of a run, so it is read once; a deleted run is detected later.
        known = self._plans.get(run_id)
        if known is None:
            known = self._plans[run_id] = self._run(run_id)
        return known

    def _locked_dataset(
        self, connection: sa.Connection, run_id: str, number: int, epoch: int | None
    ) -> tuple[int, bool, bool]:
        """Return (the run's dataset, whether only this run uses it, whether the run has ended).

        The run can be neither deleted nor ended until the transaction ends (`update_run` locks it for update).

        With an epoch, the run is locked against a takeover too: the next owner then reads what is committed here.
        """
        found = connection.execute(_SHARED if epoch is None else _OWNED, {"number": number}).first()
        if found is None:
            self._plans.pop(run_id, None)
            raise UnknownRunError(f"run {run_id!r} was deleted from the store {self._address}")
        records.check_epoch(run_id, found.epoch, epoch)
        return found.dataset, found.owner == number, found.finished_at is not None

    def _check_place(self, connection: sa.Connection, batch: Batch, written_at: float) -> None:
        """Raise if the transcripts of a run, whose row is locked, were moved since its plan was read, or are old."""
        if self._clock.time() - written_at > COMMIT_SECONDS:  # The process was suspended.
            raise TranscriptsMovedError
        stored = connection.execute(sa.select(runs.c.notes).where(runs.c.id == batch.number)).scalar_one()
        notes = RunNotes(decode(dict[str, Any], stored))
        if notes.transcripts_returning or notes.transcripts != batch.run.noted.transcripts:
            raise TranscriptsMovedError

    def _own_dataset(self, number: int) -> None:
        """Create a separate dataset for a run whose samples have another order, with the samples it has used."""
        with self._write() as connection:
            run = connection.execute(sa.select(runs).where(runs.c.id == number).with_for_update()).mappings().one()
            owner = connection.execute(sa.select(datasets.c.owner).where(datasets.c.id == run["dataset"])).scalar_one()
            if owner == number:
                return  # Another process has done it.
            own = self._new_dataset(connection, dict(run), owner=number)
            used = sa.select(results.c.sample).where(results.c.run == number).distinct()
            copied = sa.select(
                sa.literal(own), *(column for column in samples.c if column is not samples.c.dataset)
            ).where(samples.c.dataset == run["dataset"], samples.c.ordinal.in_(used))
            connection.execute(sa.insert(samples).from_select(samples.c.keys(), copied))
            connection.execute(sa.update(runs).where(runs.c.id == number).values(dataset=own))

    def stored_among(self, run_id: str, ordinals: Sequence[int]) -> list[int]:
        """Return which of these trials have a stored result, in plan order; at a cost that the run does not add to."""
        number, _run = self._plan(run_id)
        if not ordinals:
            return []
        with self._read() as connection:
            query = sa.select(results.c.ordinal).where(
                results.c.run == number,
                results.c.outcome != NOT_RUN,
                results.c.ordinal == sa.any_(sa.bindparam("wanted", list(ordinals), sa.ARRAY(sa.BigInteger))),
            )
            return sorted(connection.execute(query).scalars())

    def is_database_of(self, look: Callable[[int], tuple[bool, int | None]]) -> bool:
        """Return whether another connection reaches this store: the same tables in the same PostgreSQL database.

        Equal addresses prove little: names have aliases, and a backup has the same runs. A lock is seen only within
        its database.

        Args:
            look: Returns, for the key of an advisory lock, whether the other connection finds it locked, and the
                object id of its table `runs`.
        """
        if self._engine.dialect.name != "postgresql":
            return False
        key = secrets.randbits(62)
        with self._read() as connection:
            query = sa.text("SELECT to_regclass('runs')::oid::bigint, pg_advisory_xact_lock(:key)")
            table = connection.execute(query, {"key": key}).one()[0]
            return look(key) == (True, table)

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their SHA-256 (hex), once. Raises `SecretInDataError` if they contain a known secret."""
        refuse_secret(current(), "an attachment", data)
        name = hashlib.sha256(data).hexdigest()
        with self._read() as connection:
            if connection.execute(sa.select(blobs.c.sha256).where(blobs.c.sha256 == name)).first():
                return name
        with self._write() as connection:
            # A concurrent writer may have stored the same bytes.
            connection.execute(
                sa.text("INSERT INTO blobs (sha256, size, data) VALUES (:name, :size, :data) ON CONFLICT DO NOTHING"),
                {"name": name, "size": len(data), "data": compress(data)},
            )
        return name

    def save_session(self, session_id: str, snapshot: bytes, *, delete_before: float | None = None) -> None:
        """Save the snapshot of a session, replacing one with the same id; deletes those saved before a time."""
        data = compress(current().data(snapshot))
        with self._write() as connection:
            if delete_before is not None:
                connection.execute(sa.delete(session_snapshots).where(session_snapshots.c.saved_at < delete_before))
            connection.execute(
                sa.text(
                    "INSERT INTO session_snapshots (id, saved_at, data) VALUES (:id, :saved_at, :data) "
                    "ON CONFLICT (id) DO UPDATE SET saved_at = excluded.saved_at, data = excluded.data"
                ),
                {"id": session_id, "saved_at": self._clock.time(), "data": data},
            )

    def load_session(self, session_id: str) -> bytes | None:
        """Return the snapshot with this id, if there is one."""
        with self._read() as connection:
            query = sa.select(session_snapshots.c.data).where(session_snapshots.c.id == session_id)
            data = connection.execute(query).scalar()
        return None if data is None else decompress(bytes(data))

    def delete_session(self, session_id: str) -> None:
        """Delete the snapshot with this id, if there is one."""
        with self._write() as connection:
            connection.execute(sa.delete(session_snapshots).where(session_snapshots.c.id == session_id))

    def record_looks(self, split: str, pairs: Sequence[str]) -> list[str]:
        """Record that pairs are compared on a test split; returns all pairs as `looks` does."""
        with self._write() as connection:
            return add_looks(connection, split, pairs)

    def label(self, label: Label) -> None:
        """Add a label of a trial; without a time, it gets the current one."""
        with self._write() as connection:
            number, run = self._find(connection, label.key.run_id)
            records.experiment_index(run, label.key.experiment)
            self._locked_dataset(connection, run.run_id, number, None)
            values = records.label_values(label, self._clock.time(), current())
            connection.execute(sa.insert(labels).values(run=number, **values))
