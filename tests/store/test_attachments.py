"""What runs refer to is stored with them, once, if this process knows its folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from fairtrial import Attachment, ChatMessage, Dataset, EvalSuite, Sample, TrialContext, exact_match
from fairtrial.data.sample import BlobFolder
from fairtrial.errors import StoreError
from fairtrial.store import RunStore, attachments, open_store, redact
from fairtrial.store.memory import MemoryStore
from fairtrial.store.sql import SqlStore
from tests.store.build import result, run_record, samples

PICTURE = b"\x89PNG the picture of an invoice"


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunStore]:
    made: RunStore = open_store(tmp_path / "runs.db") if request.param == "sqlite" else MemoryStore()
    yield made
    made.close()


def run(store: RunStore, folder: BlobFolder, *, given: Attachment | None = None) -> None:
    """Run a task that takes the same screenshot in each of its trials."""

    async def look(question: Any, ctx: TrialContext) -> str:
        ctx.session.record(ChatMessage("tool", ("screen", folder.put(PICTURE, media_type="image/png"))))
        return "seen"

    samples: list[Sample[Any, str]] = [
        Sample(f"q{at}", {"text": "?", "file": given} if given else "?", "seen") for at in range(5)
    ]
    EvalSuite("pictures", Dataset(samples, name="pictures"), look, exact_match).run_sync(store=store)


def test_a_screenshot_of_many_trials_is_stored_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    folder = BlobFolder(tmp_path / "files")
    given = folder.put(b"a picture of the sample", media_type="image/png")
    run(store, folder, given=given)
    with store._engine.connect() as connection:  # type: ignore[attr-defined]
        held = connection.execute(sa.text("SELECT sha256 FROM blobs")).scalars().all()
    assert sorted(held) == sorted([given.sha256, Attachment.of(PICTURE).sha256])
    store.close()


def test_the_bytes_outlive_their_folder(store: RunStore, tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path / "files")
    run(store, folder)
    folder.path(Attachment.of(PICTURE).sha256).unlink()
    assert store.get_blob(Attachment.of(PICTURE).sha256) == PICTURE


@pytest.mark.parametrize("fault", ["missing", "changed", "too large", "secret"])
def test_what_cannot_be_stored_costs_no_result(
    store: RunStore, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = BlobFolder(tmp_path / "files")
    content = f"it contains s3cret-of-the-house-9431 {tmp_path}".encode()  # In no folder of another test.
    given = folder.put(content, media_type="image/png")
    if fault == "missing":
        folder.path(given.sha256).unlink()
    elif fault == "changed":
        folder.path(given.sha256).write_bytes(b"something else")
    elif fault == "too large":
        monkeypatch.setattr(attachments, "MAX_BYTES", len(content) - 1)
    else:
        monkeypatch.setattr(redact, "_registered", {})
        redact.register_secret("s3cret-of-the-house-9431")
    with caplog.at_level(logging.WARNING, "fairtrial.store"):
        run(store, folder, given=given)
    [stored] = store.runs()
    assert sum(sum(part.outcomes.values()) for part in store.totals(stored.run_id)) == 5
    with pytest.raises(StoreError):
        store.get_blob(given.sha256)
    assert ("an attachment is not stored" in caplog.text) == (fault == "secret")
    assert "s3cret" not in caplog.text


def test_what_is_pruned_before_a_late_result_is_committed_is_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "runs.db")
    assert isinstance(store, SqlStore)
    ended = store.create_run(run_record())
    store.update_run(ended.run_id, status="finished", finished_at=1.0)
    attachment = BlobFolder(tmp_path / "files").put(PICTURE, media_type="image/png")
    pruned, commit = [], store._commit

    def prune_first(*given: Any) -> Any:
        pruned.append(store.delete_unnamed_blobs()[0])
        return commit(*given)

    monkeypatch.setattr(store, "_commit", prune_first)
    store.commit(ended.run_id, [result(ended, 0, output=attachment)], samples([0]))
    assert pruned == [1]
    assert store.get_blob(attachment.sha256) == PICTURE
    assert store.delete_unnamed_blobs() == (0, 0)
    store.close()


def test_folders_that_were_not_used_for_long_are_forgotten(tmp_path: Path) -> None:
    folders = [BlobFolder(tmp_path / str(at)) for at in range(30)]
    known = BlobFolder.known()
    assert known == folders[:13:-1]
