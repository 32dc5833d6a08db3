"""A bucket that fails: nothing is lost, and a transcript is the right one or an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fairtrial import Dataset, EvalSuite, TrialContext, exact_match
from fairtrial.errors import StoreError, StoreUnavailableError
from fairtrial.store import RunRecord, objects, open_store, upkeep
from fairtrial.store.objects import BucketObjects, open_objects
from fairtrial.store.segments import reference
from fairtrial.store.sql import SqlStore
from tests.bucket_proxy import DENIED, SLOW_DOWN, BucketProxy
from tests.servers import free_port
from tests.sqs_server import CREDENTIALS, REGION
from tests.store.build import large_snapshot, result, run_record, samples
from tests.store.test_segments import columns, suite, talk, transcripts
from tests.store.transcript_histories import emulated_bucket, play

pytestmark = pytest.mark.sqs
EXPIRED = (400, "ExpiredToken", "The provided token has expired.")


@pytest.fixture(scope="module")
def emulator() -> Iterator[BucketProxy]:
    with emulated_bucket() as proxy:
        yield proxy


@pytest.fixture
def proxy(emulator: BucketProxy) -> Iterator[BucketProxy]:
    yield emulator
    emulator.calm()


@pytest.fixture
def address() -> str:
    return f"s3://evals/{uuid4().hex}"


@pytest.fixture
def store(proxy: BucketProxy, tmp_path: Path, address: str) -> Iterator[SqlStore]:
    assert proxy.endpoint
    with closing(open_store(tmp_path / "runs.db", transcripts=address)) as opened:
        assert isinstance(opened, SqlStore)
        yield opened


def of_segments(method: str, path: str) -> bool:
    return method == "PUT" and path.endswith(".segment")


def complete(store: SqlStore, run_id: str, count: int) -> bool:
    return [f"q{at} 919".encode() in (one or b"") for at, one in enumerate(transcripts(store, run_id))] == [
        True
    ] * count


def test_a_process_killed_after_its_segment_was_written_loses_nothing(
    proxy: BucketProxy, address: str, tmp_path: Path
) -> None:
    code = f"from tests.store.test_segments import suite\nsuite(2).run_sync(store={str(tmp_path / 'runs.db')!r})"
    for _kill in range(2):
        child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "FAIRTRIAL_TRANSCRIPTS": address})

        def kill(method: str, path: str, child: subprocess.Popen[bytes] = child) -> None:
            if of_segments(method, path):
                child.send_signal(signal.SIGKILL)
                child.wait()

        proxy.after = kill
        assert child.wait(timeout=120) == -signal.SIGKILL
    proxy.calm()
    with closing(open_store(tmp_path / "runs.db", transcripts=address)) as store:
        assert isinstance(store, SqlStore)
        (killed,) = store.runs()
        assert [(check.segments, check.unnamed) for check in store.check_segments()] == [(2, 2)]
        report = suite(2).run_sync(store=store)
        assert report.run_id == killed.run_id
        assert complete(store, report.run_id, 2)
        assert store.delete_unnamed_segments() == (0, 0)
        assert store.delete_unnamed_segments(older_than_seconds=-60)[0] == 2
        assert complete(store, report.run_id, 2)


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("away", 2.0),
        ("slow down", 2.0),
        ("unanswered", 2.0),
        pytest.param("away", 240.0, marks=[pytest.mark.soak, pytest.mark.timeout(400)]),
    ],
)
def test_a_run_waits_for_a_bucket_that_fails(proxy: BucketProxy, store: SqlStore, fault: str, seconds: float) -> None:
    executed: list[str] = []

    async def counted(question: str, ctx: TrialContext) -> str:
        executed.append(question)
        return await talk(question, ctx)

    proxy.chooses = of_segments
    proxy.away, proxy.unanswered = fault == "away", fault == "unanswered"
    proxy.refusal = SLOW_DOWN if fault == "slow down" else None
    threading.Timer(seconds, proxy.calm).start()
    began = time.monotonic()
    questions = Dataset.of({f"q{at}": f"q{at}" for at in range(20)})
    report = EvalSuite("talks", questions, counted, exact_match).run_sync(store=store)
    assert time.monotonic() - began >= seconds
    assert len(executed) == 20
    assert complete(store, report.run_id, 20)


def test_a_slow_bucket_is_waited_for(proxy: BucketProxy, store: SqlStore) -> None:
    proxy.delay = 0.5
    report = suite().run_sync(store=store)
    assert complete(store, report.run_id, 12)


def test_what_is_sent_is_not_hashed_once_more_for_its_signature(proxy: BucketProxy, store: SqlStore) -> None:
    proxy.signed.clear()
    report = suite().run_sync(store=store)
    assert complete(store, report.run_id, 12)
    assert proxy.signed == {"UNSIGNED-PAYLOAD"}


def test_wrong_keys_are_said_before_the_first_trial(proxy: BucketProxy, store: SqlStore) -> None:
    executed: list[str] = []
    proxy.refusal = DENIED
    with pytest.raises(StoreError, match=r"was denied: InvalidAccessKeyId: The AWS Access Key Id .*\ncheck the keys"):
        EvalSuite("talks", Dataset.of({"q": "q"}), executed.append, exact_match).run_sync(store=store)
    assert executed == []
    assert store.runs() == []


@pytest.mark.parametrize("refusal", [DENIED, EXPIRED], ids=["denied", "expired"])
def test_a_run_whose_keys_become_invalid_ends_and_is_resumed_with_others(
    proxy: BucketProxy, store: SqlStore, refusal: tuple[int, str, str]
) -> None:
    proxy.refusal, proxy.chooses = refusal, of_segments
    with pytest.raises(StoreError, match=f"was denied: {refusal[1]}") as caught:
        suite().run_sync(store=store)
    assert not isinstance(caught.value, StoreUnavailableError)
    proxy.calm()
    report = suite().run_sync(store=store)
    assert [run.run_id for run in store.runs()] == [report.run_id]
    assert complete(store, report.run_id, 12)


@pytest.mark.parametrize("refusal", [DENIED, SLOW_DOWN], ids=["denied", "throttled"])
def test_every_request_says_what_the_bucket_answered(
    proxy: BucketProxy, address: str, refusal: tuple[int, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 0)
    bucket = open_objects(address)
    proxy.refusal = refusal
    calls: Any = (
        lambda: bucket.put("r1/a.segment", b"a"),
        lambda: bucket.read("r1/a416.segment", 0, 1),  # No status, in whatever text.
        lambda: list(bucket.list("r1")),
        lambda: bucket.delete(["r1/a.segment"]),
    )
    for call in calls:
        with pytest.raises(StoreError, match=refusal[1]) as caught:
            call()
        assert isinstance(caught.value, StoreUnavailableError) is (refusal is SLOW_DOWN)


@pytest.mark.parametrize(
    "refusal",
    [
        (301, "PermanentRedirect", "The bucket must be addressed using the specified endpoint."),
        (400, "AuthorizationHeaderMalformed", "The region 'eu-west-1' is wrong; expecting 'us-east-2'"),
        (400, "RequestTimeout", "Your socket connection to the server was not read from within the timeout period."),
        (501, "NotImplemented", "A header you provided implies functionality that is not implemented."),
    ],
    ids=lambda refusal: refusal[1],
)
def test_a_wrong_region_is_said_and_not_waited_for(
    proxy: BucketProxy, address: str, refusal: tuple[int, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 0)
    bucket = open_objects(address)
    proxy.refusal = refusal
    calls: Any = (
        lambda: bucket.put("r1/a.segment", b"a"),
        lambda: bucket.read("r1/a.segment", 0, 1),
        lambda: list(bucket.list("r1")),
        lambda: bucket.delete(["r1/a.segment"]),
    )
    for call in calls:
        with pytest.raises(StoreError, match="region" if refusal[0] == 301 else refusal[1]) as caught:
            call()
        waited = isinstance(caught.value, StoreUnavailableError)
        assert waited is (refusal[1] == "RequestTimeout")
        assert waited or "check the address, the region of the bucket (AWS_REGION)" in str(caught.value)


def test_missing_keys_are_said_and_not_waited_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 0)
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    closed = f"http://127.0.0.1:{free_port()}"  # Where keys of the machine are looked for.
    for name, value in {"AWS_METADATA_ENDPOINT": closed, "AWS_REGION": REGION, "AWS_ENDPOINT_URL": closed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"there are no keys .*\nset them in the environment, such as AWS_") as caught:
        open_objects(address).put("r1/a.segment", b"a")
    assert not isinstance(caught.value, StoreUnavailableError)


def test_folders_with_the_same_beginning_are_different(proxy: BucketProxy, address: str) -> None:
    assert proxy.endpoint
    bucket = open_objects(address)
    for name in ("r1/a", "r10/b", "r1"):
        bucket.put(name, b"1")
    assert [found.name for found in bucket.list("r1")] == ["r1/a"]


def committed(store: SqlStore) -> tuple[RunRecord, dict[int, bytes]]:
    """Return a run with two segments of six transcripts each."""
    run = store.create_run(run_record(size=3))
    kept: dict[int, bytes] = {}
    for half in (range(6), range(6, 12)):
        for ordinal in half:
            kept[ordinal] = large_snapshot()
        batch = [result(run, ordinal, snapshot=kept[ordinal]) for ordinal in half]
        store.commit(run.run_id, batch, samples(range(3)))
    return run, kept


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut off", "last byte", "swapped"])
def test_damaged_objects_are_errors_of_their_trials_only(store: SqlStore, address: str, damage: str) -> None:
    run, kept = committed(store)
    bucket = open_objects(address)
    assert isinstance(bucket, BucketObjects)
    first, second = (found for found in bucket.list(run.run_id) if found.name.endswith(".segment"))
    ours = [at for at, part in enumerate(map(reference, columns(store))) if part and part.segment.hex() in first.name]
    old, other = (bucket.read(found.name, 0, found.size) for found in (first, second))
    bucket.delete([first.name])
    new = {
        "deleted": None,
        "emptied": b"",
        "cut off": old[:100],
        "last byte": old[:-1],
        "swapped": (2 * other)[: len(old)],
    }[damage]
    if new is not None:
        bucket.put(first.name, new)
    broken = []
    for ordinal, snapshot in kept.items():
        try:
            assert store.snapshot(run.run_id, ordinal) == snapshot
        except StoreUnavailableError:
            pytest.fail("a damaged object is not one to wait for")
        except StoreError as error:
            broken.append(ordinal)
            assert f"{address}/{first.name}" in str(error)  # noqa: PT017 - of many
    assert broken == (ours[-1:] if damage == "last byte" else ours)
    (check,) = store.check_segments()
    assert list(check.unreadable) == ([] if damage == "swapped" else broken)


@pytest.mark.long
@pytest.mark.parametrize(("engine", "seeds"), [("sqlite", range(20)), ("postgresql", range(500, 505))])
def test_random_histories_never_give_another_transcript(
    engine: str,
    seeds: range,
    proxy: BucketProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 0)
    monkeypatch.setattr(upkeep, "_MOVED_AT_ONCE", 3)
    server = request.getfixturevalue("pg_server") if engine == "postgresql" else None
    for seed in seeds:
        url = str(tmp_path / f"{seed}.db") if server is None else server.new_database()
        assert play(url, f"s3://evals/{engine}-{seed}", proxy, seed, tmp_path)["results"]
        if server is not None:
            server.drop_database(url)
