"""Transcripts in a bucket or a folder: read back as they were, and never as something else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from fairtrial import Attachment, Dataset, EvalSuite, Sample, TrialContext, exact_match
from fairtrial.cli.app import invoke
from fairtrial.errors import ConfigurationError, SecretInDataError, StoreError, StoreUnavailableError, StoreVersionError
from fairtrial.store import open_store
from fairtrial.store.compress import REFERENCE
from fairtrial.store.objects import BucketObjects, FolderObjects, Objects, full_address, open_objects
from fairtrial.store.portable import copy_run
from fairtrial.store.redact import register_secret
from fairtrial.store.segments import SegmentPart, Segments, reference
from fairtrial.store.sql import SqlStore
from fairtrial.testing import FakeClock
from tests.sqs_server import CREDENTIALS, REGION, SqsServer
from tests.store.build import large_snapshot, result, run_record, samples

SENTENCES = 40


@dataclass(frozen=True)
class Line:
    turn: int
    text: str


async def talk(question: str, ctx: TrialContext) -> str:
    """Record a transcript that is worth a segment, and different for each sample."""
    for turn in range(SENTENCES):
        ctx.session.record(Line(turn, f"{question} {turn * 7919 % 1000}"))
    return question


def suite(samples: int = 12) -> EvalSuite[Any, Any]:
    return EvalSuite("talks", Dataset.of({f"q{at}": f"q{at}" for at in range(samples)}), talk, exact_match)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "transcripts"


@pytest.fixture
def store(tmp_path: Path, place: Path) -> Iterator[SqlStore]:
    opened = open_store(tmp_path / "runs.db", transcripts=place)
    assert isinstance(opened, SqlStore)
    yield opened
    opened.close()


def transcripts(store: SqlStore, run_id: str) -> list[bytes | None]:
    return [result.snapshot for result in store.results(run_id, snapshots=True)]


def columns(store: SqlStore) -> list[bytes]:
    with store._engine.connect() as connection:
        return [
            bytes(found)
            for found in connection.execute(sa.text("SELECT transcript FROM details ORDER BY ordinal")).scalars()
        ]


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*/*.segment"))


def test_rows_have_only_references_and_reports_the_whole_transcripts(store: SqlStore, place: Path) -> None:
    report = suite().run_sync(store=store)
    assert max(map(len, columns(store))) < 100
    assert files(place)
    for at, snapshot in enumerate(transcripts(store, report.run_id)):
        assert snapshot is not None
        assert f"q{at} 919".encode() in snapshot
        assert store.snapshot(report.run_id, at) == snapshot
    assert report.results[3].session[Line].all()[1] == Line(1, "q3 919")
    assert (place / report.run_id / "run.json").read_text() == (
        f'{{"format":"fairtrial.transcripts/1","run":"{report.run_id}","suite":"talks"}}'
    )


def test_a_store_opened_without_the_place_reads_what_the_run_names(store: SqlStore, tmp_path: Path) -> None:
    report = suite().run_sync(store=store)
    before = transcripts(store, report.run_id)
    again = open_store(tmp_path / "runs.db")
    assert isinstance(again, SqlStore)
    assert transcripts(again, report.run_id) == before
    later = suite().run_sync(store=again, resume="never")
    assert later.run.noted.transcripts is None
    assert sum(len(column) > 100 for column in columns(again)) == 12
    again.close()


def test_many_transcripts_are_read_with_few_requests(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    report = suite(100).run_sync(store=store)
    reads: list[int] = []
    read = FolderObjects.read

    def counted(self: FolderObjects, name: str, start: int, length: int) -> bytes:
        reads.append(length)
        return read(self, name, start, length)

    monkeypatch.setattr(FolderObjects, "read", counted)
    assert len(transcripts(store, report.run_id)) == 100
    written = len(list(store.segments(report.run).stored()))  # type: ignore[union-attr]
    assert len(reads) <= 2 * written + 1
    reads.clear()
    store.snapshot(report.run_id, 50)
    assert len(reads) == 1
    assert reads[0] < 5_000


@pytest.mark.parametrize("damage", ["missing", "cut off", "changed", "swapped"])
def test_a_damaged_segment_is_an_error_and_never_another_transcript(store: SqlStore, place: Path, damage: str) -> None:
    report = suite().run_sync(store=store)
    other = suite(11).run_sync(store=store, resume="never")
    mine, theirs = ((place / one.run_id) for one in (report, other))
    for segment in mine.glob("*.segment"):
        data = segment.read_bytes()
        if damage == "missing":
            segment.unlink()
        elif damage == "swapped":
            segment.write_bytes((next(theirs.glob("*.segment")).read_bytes() * 100)[: len(data)])
        else:
            segment.write_bytes(data[: len(data) // 2] if damage == "cut off" else data[:-40] + bytes(40))
    with pytest.raises(StoreError, match="is missing" if damage == "missing" else "is damaged"):
        transcripts(store, report.run_id)
    assert [result.passed for result in store.results(report.run_id)] == [True] * 12  # Figures need no transcript.
    assert len(transcripts(store, other.run_id)) == 11
    unreadable = {check.run.run_id: check.unreadable for check in store.check_segments()}
    assert bool(unreadable[report.run_id]) is (damage in ("missing", "cut off"))
    assert unreadable[other.run_id] == ()


def test_a_deleted_run_leaves_no_segments(store: SqlStore, place: Path) -> None:
    kept, deleted = (suite().run_sync(store=store, resume="never") for _ in range(2))
    store.delete_run(deleted.run_id)
    assert {path.parent.name for path in files(place)} == {kept.run_id}
    assert not (place / deleted.run_id).exists()


def test_only_old_segments_that_nothing_names_are_pruned(store: SqlStore, place: Path) -> None:
    report = suite().run_sync(store=store)
    named = files(place)
    names = (f"{'a' * 64}.segment", "tmp1.part", f"{'b' * 64}.segment", "tmp2.part")
    left, unfinished, young, writing = (place / report.run_id / name for name in names)
    for path in (left, unfinished, young, writing):
        path.write_bytes(b"of a process that was killed")
    for path in (left, unfinished, *named, place / report.run_id / "run.json"):
        os.utime(path, (time.time() - 90_000,) * 2)
    assert [check.unnamed for check in store.check_segments()] == [2]
    assert store.delete_unnamed_segments() == (2, 56)
    assert files(place) == sorted([*named, young])
    left_over = {path.name for path in place.glob("*/*")} - {path.name for path in named}
    assert left_over == {young.name, writing.name, "run.json", "columns-00000.parquet"}
    assert None not in transcripts(store, report.run_id)


def test_nobody_waits_while_transcripts_are_searched_for_attachments(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = suite().run_sync(store=store)
    unnamed = store.put_blob(b"unnamed" * 100)
    other = open_store(tmp_path / "runs.db")
    monkeypatch.setattr("fairtrial.store.engine._BUSY_SECONDS", 0.1)
    read, reads = FolderObjects.read, [0]

    def slow(self: FolderObjects, name: str, start: int, length: int) -> bytes:
        reads[0] += 1
        other.update_run(report.run_id, notes={"seen": True})
        return read(self, name, start, length)

    monkeypatch.setattr(FolderObjects, "read", slow)
    assert store.delete_unnamed_blobs()[0] == 1
    assert reads[0] >= 1
    with pytest.raises(StoreError):
        store.get_blob(unnamed)
    other.close()


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
@pytest.mark.parametrize("named_by", ["sample", "output"])
def test_an_attachment_that_is_named_while_others_are_searched_is_kept(
    engine: str,
    named_by: str,
    tmp_path: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = str(tmp_path / "busy.db") if engine == "sqlite" else str(request.getfixturevalue("pg_url"))
    store = open_store(url, transcripts=place)
    assert isinstance(store, SqlStore)
    searched, imported = (store.create_run(run_record(run_id, finished_at=1.0)) for run_id in ("r1", "r2"))
    store.commit("r1", [result(searched, 0, snapshot=large_snapshot())], samples([0]))
    for run_id in ("r1", "r2"):
        store.update_run(run_id, status="finished", finished_at=1.0)
    attached = store.put_blob(b"named late" * 100)
    read = FolderObjects.read

    def commit(self: FolderObjects, name: str, start: int, length: int) -> bytes:
        if named_by == "output":
            store.commit("r2", [result(imported, 0, output=Attachment(attached))], samples([0]))
        else:
            store.commit("r2", [], {1: Sample("s1", Attachment(attached))})
        return read(self, name, start, length)

    monkeypatch.setattr(FolderObjects, "read", commit)
    assert store.delete_unnamed_blobs() == (0, 0)
    assert "no attachment was deleted: results were stored" in caplog.text
    monkeypatch.undo()
    assert store.delete_unnamed_blobs() == (0, 0)
    assert store.get_blob(attached) == b"named late" * 100
    store.close()


def test_a_missing_segment_keeps_all_attachments_and_ends_no_pruning(
    store: SqlStore, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    suite().run_sync(store=store)
    attached = store.put_blob(b"perhaps named in what is missing" * 10)
    files(place)[0].unlink()
    assert store.delete_unnamed_blobs() == (0, 0)
    assert store.get_blob(attached)
    assert "no attachment was deleted: a transcript of run" in caplog.text


def test_transcripts_move_in_both_directions(tmp_path: Path, place: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    assert isinstance(store, SqlStore)
    report = suite().run_sync(store=store)
    before, inside = transcripts(store, report.run_id), columns(store)
    moved: list[int] = []
    store.move_transcripts(report.run_id, str(place), done=moved.append)
    assert sum(moved) == 12
    assert max(map(len, columns(store))) < 100
    assert transcripts(store, report.run_id) == before
    with pytest.raises(StoreError, match="to the database first"):
        store.move_transcripts(report.run_id, str(tmp_path / "elsewhere"))
    store.move_transcripts(report.run_id, None)
    assert columns(store) == inside
    assert files(place) == []
    assert store.get_run(report.run_id).noted.transcripts is None
    store.close()


def test_a_move_that_is_interrupted_is_completed(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.store.upkeep._MOVED_AT_ONCE", 5)
    store = open_store(tmp_path / "runs.db")
    assert isinstance(store, SqlStore)
    report = suite().run_sync(store=store)
    before = transcripts(store, report.run_id)

    class Killed(BaseException):
        pass

    def kill(_count: int) -> None:
        raise Killed

    for place_of, done in ((str(place), 5), (None, 7)):
        with pytest.raises(Killed):
            store.move_transcripts(report.run_id, place_of, done=kill)
        assert sum(len(column) < 100 for column in columns(store)) == done
        assert transcripts(store, report.run_id) == before
        store.move_transcripts(report.run_id, place_of)
        assert transcripts(store, report.run_id) == before
    store.close()


def test_a_process_with_an_older_plan_commits_to_where_the_transcripts_are_now(
    store: SqlStore, tmp_path: Path, place: Path
) -> None:
    run = store.create_run(run_record())
    snapshots = [large_snapshot() for _ in range(3)]
    for ordinal in (1, 2):
        store.commit(run.run_id, [result(run, ordinal, snapshot=snapshots[ordinal])], samples(range(3)))
    other = open_store(tmp_path / "runs.db")
    assert isinstance(other, SqlStore)

    def commit(_count: int) -> None:
        store.commit(run.run_id, [result(run, 0, snapshot=snapshots[0])], samples(range(3)))

    other.move_transcripts(run.run_id, None, done=commit)
    assert files(place) == []
    assert transcripts(store, run.run_id) == snapshots
    other.move_transcripts(run.run_id, str(place))
    assert transcripts(store, run.run_id) == snapshots
    other.close()


@pytest.mark.parametrize("back", [False, True])
def test_a_reader_that_began_before_a_move_goes_on(
    store: SqlStore, place: Path, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.store.reads._PAGE", 256 if back else 2)
    monkeypatch.setattr("fairtrial.store.reads._READ_TOGETHER", 2)
    report = suite().run_sync(store=store)
    before = transcripts(store, report.run_id)
    if not back:
        store.move_transcripts(report.run_id, None)
    reading = store.results(report.run_id, snapshots=True)
    first = next(reading).snapshot
    store.move_transcripts(report.run_id, None if back else str(place))
    assert [first, *(one.snapshot for one in reading)] == before


def test_nobody_waits_for_a_bucket_to_which_transcripts_are_moved(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (open_store(tmp_path / "runs.db") for _ in range(2))
    assert isinstance(store, SqlStore)
    report = suite().run_sync(store=store)
    monkeypatch.setattr("fairtrial.store.engine._BUSY_SECONDS", 0.1)
    put = FolderObjects.put

    def slow(self: FolderObjects, name: str, data: bytes) -> None:
        other.update_run(report.run_id, notes={"seen": True})
        put(self, name, data)

    monkeypatch.setattr(FolderObjects, "put", slow)
    store.move_transcripts(report.run_id, str(place))
    assert max(map(len, columns(store))) < 100
    for opened in (store, other):
        opened.close()


def test_what_is_written_while_it_is_pruned_is_kept(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(time.time() - 90_000)
    store = open_store(tmp_path / "runs.db", transcripts=place)
    assert isinstance(store, SqlStore)
    store._clock = clock
    run = store.create_run(run_record())
    trial = result(run, 0, snapshot=large_snapshot())

    def fail(*_given: object) -> None:
        raise StoreUnavailableError("killed before the commit")

    with monkeypatch.context() as killed:
        killed.setattr(store, "_commit", fail)
        with pytest.raises(StoreUnavailableError):
            store.commit(run.run_id, [trial], samples([0]))
    (left,) = files(place)
    os.utime(left, (clock.time(),) * 2)
    clock.advance(90_000)
    delete = FolderObjects.delete

    def commit(self: FolderObjects, names: Sequence[str]) -> None:
        store.commit(run.run_id, [trial], samples([0]))  # The same bytes as those that are about to be deleted.
        delete(self, names)

    monkeypatch.setattr(FolderObjects, "delete", commit)
    assert store.delete_unnamed_segments()[0] == 1
    assert not left.exists()
    assert transcripts(store, run.run_id) == [trial.snapshot]
    store.close()


@pytest.mark.parametrize("moved", [False, True])
def test_a_process_that_was_suspended_commits_no_reference_to_what_was_pruned(
    tmp_path: Path, place: Path, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(time.time() - 90_000)
    store = open_store(tmp_path / "runs.db", transcripts=None if moved else place)
    assert isinstance(store, SqlStore)
    store._clock = clock
    run = store.create_run(run_record())
    trial = result(run, 0, snapshot=large_snapshot())
    if moved:
        store.commit(run.run_id, [trial], samples([0]))
    put, suspensions = FolderObjects.put, iter([90_000])

    def suspend(self: FolderObjects, name: str, data: bytes) -> None:
        put(self, name, data)
        if name.endswith(".segment"):
            for seconds in suspensions:
                os.utime(place / name, (clock.time(),) * 2)
                clock.advance(seconds)
                assert store.delete_unnamed_segments()[0] == 1

    monkeypatch.setattr(FolderObjects, "put", suspend)
    if moved:
        with pytest.raises(StoreError, match="suspended; the same command"):
            store.move_transcripts(run.run_id, str(place))
        store.move_transcripts(run.run_id, str(place))
    else:
        store.commit(run.run_id, [trial], samples([0]))
    assert transcripts(store, run.run_id) == [trial.snapshot]
    assert len(files(place)) == 1
    store.close()


def test_a_segment_that_is_written_again_is_young(place: Path) -> None:
    segments = Segments(FolderObjects(place), "file:///x", "run-1")
    frame = os.urandom(1_000)
    segments.write([frame])
    os.utime(files(place)[0], (time.time() - 90_000,) * 2)
    segments.write([frame])
    assert segments.written_before(time.time() - 86_400) == []


def test_an_older_store_that_takes_no_run_leaves_nothing_behind(store: SqlStore, place: Path) -> None:
    store._version -= 1
    with pytest.raises(StoreVersionError):
        store.create_run(run_record())
    assert list(place.glob("*")) == []


def test_a_copied_run_has_its_transcripts_with_it(store: SqlStore, tmp_path: Path, place: Path) -> None:
    report = suite().run_sync(store=store)
    before = transcripts(store, report.run_id)
    report.save(tmp_path / "run.db")
    for path in files(place):
        path.unlink()
    copied = open_store(tmp_path / "run.db")
    assert isinstance(copied, SqlStore)
    assert copied.get_run(report.run_id).noted.transcripts is None
    assert transcripts(copied, report.run_id) == before
    copied.close()


def test_a_backup_deletes_no_transcript_of_its_original(store: SqlStore, tmp_path: Path, place: Path) -> None:
    report = suite().run_sync(store=store)
    before = transcripts(store, report.run_id)
    for at in range(2):
        store.backup(tmp_path / f"copy{at}.db")
    later = place / report.run_id / f"{'a' * 64}.segment"
    later.write_bytes(b"of a result that only the original has")
    copies = [open_store(tmp_path / f"copy{at}.db") for at in range(2)]
    for at, copied in enumerate(copies):
        assert isinstance(copied, SqlStore)
        assert transcripts(copied, report.run_id) == before
        assert copied.delete_unnamed_segments(older_than_seconds=-60) == (0, 0)
        if at:
            copied.move_transcripts(report.run_id, None)
            assert transcripts(copied, report.run_id) == before
            assert copied.get_run(report.run_id).notes.get("transcripts_shared") is None
        else:
            copied.delete_run(report.run_id)
        assert later.exists()
        assert transcripts(store, report.run_id) == before
        copied.close()


def test_a_backup_that_goes_on_writes_nothing_beside_the_segments_of_its_original(
    store: SqlStore, tmp_path: Path, place: Path
) -> None:
    report = suite().run_sync(store=store)
    before = files(place)
    store.backup(tmp_path / "copy.db")
    copied = open_store(tmp_path / "copy.db")
    assert isinstance(copied, SqlStore)
    again = replace(next(iter(store.results(report.run_id, snapshots=True))), attempt=2)
    copied.commit(report.run_id, [again])
    assert files(place) == before
    assert transcripts(copied, report.run_id) == transcripts(store, report.run_id)
    with pytest.raises(StoreError, match="move them to the database first"):
        copied.move_transcripts(report.run_id, str(place))
    copied.close()


def test_two_stores_do_not_share_the_folder_of_a_run(store: SqlStore, tmp_path: Path, place: Path) -> None:
    report = suite().run_sync(store=store)
    before = transcripts(store, report.run_id)
    other = open_store(tmp_path / "other.db", transcripts=place)
    with pytest.raises(StoreError, match="of a run with this id in another store"):
        copy_run(store, report.run, other)
    assert other.runs() == []
    other.close()
    inside = open_store(tmp_path / "inside.db")
    assert isinstance(inside, SqlStore)
    copy_run(store, report.run, inside)
    with pytest.raises(StoreError, match="of a run with this id in another store"):
        inside.move_transcripts(report.run_id, str(place))
    assert inside.get_run(report.run_id).noted.transcripts is None
    inside.move_transcripts(report.run_id, str(tmp_path / "elsewhere"))
    inside.delete_run(report.run_id)
    assert transcripts(store, report.run_id) == before
    inside.close()


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_writer_that_does_not_know_of_a_move_stores_its_transcripts(
    engine: str, store: SqlStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    report = suite().run_sync(store=store)
    results = list(store.results(report.run_id, snapshots=True))
    url = str(tmp_path / "moved.db") if engine == "sqlite" else str(request.getfixturevalue("pg_url"))
    writer, mover = open_store(url, transcripts=tmp_path / "elsewhere"), open_store(url)
    assert isinstance(mover, SqlStore)
    writer.create_run(report.run)
    writer.commit(report.run_id, results[:6], dict(store.samples(report.run_id)))
    mover.move_transcripts(report.run_id, None)
    assert writer.commit(report.run_id, results[6:]).new == 6
    assert transcripts(mover, report.run_id) == transcripts(store, report.run_id)
    assert {column[:4] for column in columns(mover)}.isdisjoint({REFERENCE})
    mover.close()
    writer.close()


def test_a_run_that_is_moved_between_segment_and_commit_has_its_transcripts(
    store: SqlStore, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.create_run(run_record())
    trials = [result(run, ordinal, snapshot=large_snapshot()) for ordinal in range(4)]
    store.commit(run.run_id, trials[:1], samples(range(3)))
    put = FolderObjects.put
    with closing(open_store(tmp_path / "runs.db")) as mover:
        assert isinstance(mover, SqlStore)

        def move(self: FolderObjects, name: str, data: bytes) -> None:
            put(self, name, data)
            mover.move_transcripts(run.run_id, None)

        monkeypatch.setattr(FolderObjects, "put", move)
        store.commit(run.run_id, trials[1:])
        assert transcripts(mover, run.run_id) == [one.snapshot for one in trials]
        assert files(place) == []


@pytest.mark.parametrize("killed", [False, True])
def test_a_writer_that_does_not_know_of_a_move_writes_nothing_where_the_run_was(
    killed: bool, store: SqlStore, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.create_run(run_record())
    trials = [result(run, ordinal, snapshot=large_snapshot()) for ordinal in range(4)]
    store.commit(run.run_id, trials[:1], samples(range(3)))
    with closing(open_store(tmp_path / "runs.db")) as mover:
        assert isinstance(mover, SqlStore)
        mover.move_transcripts(run.run_id, None)
        with monkeypatch.context() as patch:
            if killed:
                patch.setattr(store, "_commit", None)
            with suppress(TypeError):
                store.commit(run.run_id, trials[1:], samples(range(3)))
        assert files(place) == []  # It would stay for ever: the run does not name this place any more.
        mover.move_transcripts(run.run_id, str(place))
        stored = [one.snapshot for one in (trials[:1] if killed else trials)]
        assert transcripts(mover, run.run_id) == stored


def test_results_that_are_committed_during_a_move_are_moved_too(store: SqlStore, tmp_path: Path) -> None:
    report = suite().run_sync(store=store)
    results = list(store.results(report.run_id, snapshots=True))
    moved = open_store(tmp_path / "moved.db", transcripts=tmp_path / "elsewhere")
    assert isinstance(moved, SqlStore)
    moved.create_run(report.run)
    moved.commit(report.run_id, results[6:], dict(store.samples(report.run_id)))
    late = iter([results[:6]])

    def commit_late(_count: int) -> None:
        for some in late:
            moved.commit(report.run_id, some)

    moved.move_transcripts(report.run_id, None, done=commit_late)
    assert transcripts(moved, report.run_id) == transcripts(store, report.run_id)
    assert not list((tmp_path / "elsewhere").glob("*/*.segment"))
    moved.close()


def test_a_check_of_a_run_that_is_being_executed_finds_nothing_missing(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = suite().run_sync(store=store)
    results = list(store.results(report.run_id, snapshots=True))
    busy = open_store(tmp_path / "busy.db", transcripts=tmp_path / "elsewhere")
    assert isinstance(busy, SqlStore)
    busy.create_run(report.run)
    busy.commit(report.run_id, results[:6], dict(store.samples(report.run_id)))
    late = iter([results[6:]])
    listing = FolderObjects.list

    def listed(self: FolderObjects, folder: str) -> Iterator[Any]:
        found = list(listing(self, folder))
        for one in late:
            busy.commit(report.run_id, one)
        yield from found

    monkeypatch.setattr(FolderObjects, "list", listed)
    (check,) = busy.check_segments()
    assert check.unreadable == ()
    busy.close()


def test_a_deletion_that_is_interrupted_leaves_no_transcripts(
    store: SqlStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = suite().run_sync(store=store)

    class Killed(BaseException):
        pass

    def kill(*_given: object) -> None:
        raise Killed

    monkeypatch.setattr("fairtrial.store.sql.delete_rows", kill)
    with pytest.raises(Killed):
        store.delete_run(report.run_id)
    assert store.runs() == []
    assert files(place) == []


def test_a_name_with_a_secret_is_refused_before_it_is_written(store: SqlStore, place: Path) -> None:
    report = suite().run_sync(store=store)
    register_secret("plain-name-of-a-secret")
    with pytest.raises(SecretInDataError):
        store.create_run(replace(report.run, run_id="second", suite="plain-name-of-a-secret"))
    assert not (place / "second").exists()


def test_a_reference_without_its_place_is_no_transcript(store: SqlStore, tmp_path: Path) -> None:
    report = suite().run_sync(store=store)
    store.update_run(report.run_id, notes={"transcripts": None})
    with pytest.raises(StoreError, match="not in this store"):
        transcripts(store, report.run_id)


def test_a_place_that_is_away_is_waited_for(store: SqlStore, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, failed = FolderObjects.put, [0]

    def refuse(self: FolderObjects, name: str, data: bytes) -> None:
        if name.endswith(".segment") and failed[0] < 3:
            failed[0] += 1
            raise StoreUnavailableError("the bucket is away")
        put(self, name, data)

    monkeypatch.setattr(FolderObjects, "put", refuse)
    report = suite().run_sync(store=store)
    assert failed == [3]
    assert [result.passed for result in report.results] == [True] * 12
    assert None not in transcripts(store, report.run_id)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/evals/", "s3://bucket/evals"),
        ("gs://bucket/a/b", "gs://bucket/a/b"),
        ("az://account/container/evals", "az://account/container/evals"),
        ("file:///data/a%20folder", "file:///data/a%20folder"),
    ],
)
def test_addresses_of_places(given: str, stored: str) -> None:
    assert full_address(given) == stored


@pytest.mark.parametrize(
    "given", ["s3://key:secret@bucket", "s3://bucket?endpoint=x", "http://host/x", "s3://", "file://host/x"]
)
def test_other_addresses_are_refused_without_repeating_a_secret(given: str) -> None:
    with pytest.raises(ConfigurationError, match="must be s3://bucket/prefix") as caught:
        full_address(given)
    assert "secret" not in str(caught.value)


def test_the_id_of_an_imported_run_is_no_path(place: Path) -> None:
    segments = Segments(FolderObjects(place), "file:///x", "../../etc")
    assert segments.folder.startswith("run.")
    assert "/" not in segments.folder


def test_parts_that_are_far_apart_are_read_alone(place: Path) -> None:
    segments = Segments(FolderObjects(place), "file:///x", "run-1")
    frames = [os.urandom(size) for size in (1_000, 500_000, 1_000, 1_000)]
    written = segments.write([*frames, None, b"short"])
    assert written[4:] == [None, b"short"]
    assert segments.read(written) == [*frames, None, b"short"]
    assert segments.read([written[3], written[0]]) == [frames[3], frames[0]]
    assert all(len(one or b"") == len(SegmentPart(bytes(32), 0, 0, bytes(8)).pack()) for one in written[:4])


def test_parts_with_a_hash_of_the_first_segments_are_read(place: Path) -> None:
    segments = Segments(FolderObjects(place), "file:///x", "run-1")
    frames = [os.urandom(1_000) for _ in range(3)]
    written = [reference(column or b"") for column in segments.write(frames)]
    first = [hashlib.blake2b(frame, digest_size=8).digest() for frame in frames]
    columns = [part._replace(check=check).pack() for part, check in zip(written, first, strict=True) if part]
    assert segments.read(columns) == frames
    with pytest.raises(StoreError, match="is damaged"):
        segments.read([written[0]._replace(check=first[1]).pack()] if written[0] else [])


def test_equal_batches_of_one_hour_are_one_segment(place: Path) -> None:
    segments = Segments(FolderObjects(place), "file:///x", "run-1", clock=FakeClock(1e9))
    frames = [os.urandom(1_000) for _ in range(3)]
    assert segments.write(frames) == segments.write(frames)
    segments.write(frames[:2])
    segments.write([frames[0], frames[2], frames[1]])
    assert len(files(place)) == 3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a real server."""
    import obstore

    with SqsServer() as server:
        for name, value in {**CREDENTIALS, "AWS_REGION": REGION, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)
        _make_bucket(server.endpoint, "evals")
        assert obstore.__name__
        yield "s3://evals/transcripts"


def _make_bucket(endpoint: str, name: str) -> None:
    import botocore.session

    client = botocore.session.get_session().create_client("s3", region_name=REGION, endpoint_url=endpoint)
    client.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
    client.close()


@pytest.mark.sqs
def test_transcripts_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db", transcripts=bucket)
    assert isinstance(store, SqlStore)
    report = suite(30).run_sync(store=store)
    before = transcripts(store, report.run_id)
    assert None not in before
    objects: Objects = open_objects(bucket)
    assert isinstance(objects, BucketObjects)
    names = [found.name for found in objects.list(report.run_id)]
    assert {f"{report.run_id}/run.json", f"{report.run_id}/columns-00000.parquet"} <= set(names)
    assert [(check.segments, check.unreadable) for check in store.check_segments()] == [(len(names) - 2, ())]
    segment = next(name for name in names if name.endswith(".segment"))
    assert objects.read(segment, 10**6, 10) == b""  # Cut off: an error that no repetition changes.
    objects.delete([name for name in names if name.endswith(".segment")])
    with pytest.raises(StoreError, match="is missing: there is no s3://evals/transcripts/"):
        transcripts(store, report.run_id)
    store.delete_run(report.run_id)
    assert list(objects.list(report.run_id)) == []
    store.close()


@pytest.mark.sqs
def test_a_bucket_that_does_not_exist_is_said_before_the_first_trial(bucket: str, tmp_path: Path) -> None:
    assert bucket
    store = open_store(tmp_path / "runs.db", transcripts="s3://no-such-bucket/x")
    with pytest.raises(StoreError, match="no-such-bucket"):
        suite().run_sync(store=store)
    assert store.runs() == []
    store.close()
    with pytest.raises(StoreError, match="there is no bucket"):
        list(open_objects("s3://no-such-bucket/x").list("run"))


def test_a_folder_that_cannot_be_is_said_before_the_first_trial(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = open_store(tmp_path / "runs.db", transcripts=tmp_path / "file")
    with pytest.raises(StoreError, match="choose a folder") as caught:
        suite().run_sync(store=store)
    assert not isinstance(caught.value, StoreUnavailableError)  # It would be waited for.
    store.close()


def test_a_folder_without_permission_is_not_waited_for(tmp_path: Path) -> None:
    private = tmp_path / "private"
    objects = FolderObjects(private / "transcripts")
    objects.put("r1/a.segment", b"a")
    private.chmod(0o000)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)  # Nothing is denied to root.
    calls: Any = (
        lambda: objects.put("r1/b.segment", b"b"),
        lambda: objects.read("r1/a.segment", 0, 1),
        lambda: list(objects.list("r1")),
        lambda: objects.delete(["r1/a.segment"]),
    )
    try:
        for call in calls:
            with pytest.raises(StoreError, match=r"Permission denied\nchoose a folder") as caught:
                call()
            assert not isinstance(caught.value, StoreUnavailableError)
    finally:
        os.seteuid(user)
        private.chmod(0o700)
    assert [found.name for found in objects.list("r1")] == ["r1/a.segment"]


def test_a_file_system_that_is_read_only_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, unavailable in ((errno.EROFS, False), (errno.ENOSPC, True)):
        problem = OSError(number, os.strerror(number))

        def refuse(*_given: object, problem: OSError = problem, **_options: object) -> None:
            raise problem

        monkeypatch.setattr("tempfile.mkstemp", refuse)
        with pytest.raises(StoreError, match=os.strerror(number)) as caught:
            FolderObjects(tmp_path).put("r1/a.segment", b"a")
        assert isinstance(caught.value, StoreUnavailableError) is unavailable


class _Denying(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_given: object) -> None:
        pass


def test_a_list_that_is_denied_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Denying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for name, value in {**CREDENTIALS, "AWS_REGION": REGION, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match="was denied") as caught:
            list(open_objects("s3://evals/x").list("run"))
        server.shutdown()
    assert not isinstance(caught.value, StoreUnavailableError)


_KILLED = """
import os, sys
from fairtrial.store.objects import FolderObjects
from tests.store.test_segments import suite

put = FolderObjects.put

def die(self, name, data):
    put(self, name, data)
    if name.endswith(".segment"):
        os._exit(9)

FolderObjects.put = die
suite(60).run_sync(store={!r})
"""


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_process_killed_between_segment_and_commit_loses_nothing(
    engine: str, tmp_path: Path, place: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "runs.db") if engine == "sqlite" else str(request.getfixturevalue("pg_url"))
    environment = {**os.environ, "FAIRTRIAL_TRANSCRIPTS": str(place)}
    # One kill: from the second on, trials are executed in child processes, as in `test_bucket_faults`.
    assert subprocess.run([sys.executable, "-c", _KILLED.format(url)], env=environment, check=False).returncode == 9
    store = open_store(url, transcripts=place)
    assert isinstance(store, SqlStore)
    report = suite(60).run_sync(store=store)
    assert [f"q{at} 919".encode() in (one or b"") for at, one in enumerate(transcripts(store, report.run_id))] == [
        True
    ] * 60
    (check,) = store.check_segments()
    assert (check.unreadable, check.unnamed) == ((), 1)
    assert store.delete_unnamed_segments(older_than_seconds=-60)[0] == 1
    assert len(files(place)) == check.segments - check.unnamed
    assert None not in transcripts(store, report.run_id)
    store.close()


def test_the_commands_of_a_store_with_segments(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evals.py").write_text("from tests.store.test_segments import suite\n\ntalks = suite()\n")
    assert invoke(["run", "evals.py", "--transcripts", str(place), "--quiet"]) == 0
    assert invoke(["store", "check"]) == 0
    assert "of 1 run" in capsys.readouterr().err
    assert invoke(["store", "move", "talks", "--transcripts", "store"]) == 0
    assert capsys.readouterr().err.endswith("the transcripts of talks@1 are in the store (12 moved)\n")
    assert invoke(["store", "move", "talks", "--transcripts", str(place), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["moved"] == 12
    files(place)[0].unlink()
    assert invoke(["store", "check"]) == 1
    assert "cannot be read, the first of trial 0" in capsys.readouterr().err
    assert invoke(["store", "check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["runs"][0]["unreadable"]
    assert invoke(["store", "move", "talks", "--transcripts", "ftp://x"]) == 2


def test_a_store_that_cannot_keep_transcripts_apart_refuses_a_place_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"SQLite and PostgreSQL only \(got 'memory:'\)"):
        open_store("memory:", transcripts=tmp_path)
    monkeypatch.setenv("FAIRTRIAL_TRANSCRIPTS", str(tmp_path))
    open_store("memory:").close()  # A setting is for the stores that have one.
