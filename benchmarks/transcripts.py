"""Transcripts in rows of PostgreSQL, in a bucket and in a folder: time, CPU time, space, requests and reads.

    python benchmarks/transcripts.py [--trials 2000] [--bytes 20000] [--reads 200]

Runs the same suite on a new PostgreSQL three times. A transcript has random text that zstd packs into --bytes bytes.
The bucket is an emulator in a process of its own, so its times say what Fairtrial does and not what a provider takes.
Exits with 1 if a transcript is read that is not the one that was recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairtrial import ChatMessage, Dataset, EvalSuite, TrialContext, exact_match, open_store
from fairtrial.data.session.session import restore_session
from fairtrial.store.objects import BucketObjects, FolderObjects
from fairtrial.store.sql import SqlStore
from tests.servers import PostgresServer
from tests.sqs_server import CREDENTIALS, REGION, SqsServer


class Counted:
    """Counts calls to a kind of objects, each of which is one request, and their bytes."""

    def __init__(self, kind: type[BucketObjects | FolderObjects]) -> None:
        self.requests = self.sent = self.received = 0
        put, read = kind.put, kind.read

        def counted_put(place: Any, name: str, data: bytes) -> None:
            self.requests, self.sent = self.requests + 1, self.sent + len(data)
            put(place, name, data)

        def counted_read(place: Any, name: str, start: int, length: int) -> bytes:
            data = read(place, name, start, length)
            self.requests, self.received = self.requests + 1, self.received + len(data)
            return data

        self._kind, self._methods = kind, {"put": put, "read": read}
        setattr(kind, "put", counted_put)  # noqa: B010 - a method, for the types
        setattr(kind, "read", counted_read)  # noqa: B010

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *error: object) -> None:
        for name, method in self._methods.items():
            setattr(self._kind, name, method)


class Figures(NamedTuple):
    """What one place took."""

    seconds: float
    cpu_us: float
    sent_mb: float
    puts: float
    database: float
    read_ms: float
    read_p95_ms: float
    reads: float
    wrong: int


def text_of(question: str, size: int) -> str:
    """Return text that only its question determines, and that nothing packs into less than `size` bytes."""
    return random.Random(question).randbytes(size).hex()


def suite(trials: int, size: int) -> EvalSuite[Any, Any]:
    """A suite whose trials do nothing but record a transcript."""

    async def talk(question: str, ctx: TrialContext) -> str:
        ctx.session.record(ChatMessage("assistant", text_of(question, size)))
        return question

    questions = {f"q{at:07}": f"q{at:07}" for at in range(trials)}
    return EvalSuite("transcripts", Dataset.of(questions), talk, exact_match)


def measure(url: str, place: str | None, options: argparse.Namespace) -> Figures:
    """Run the suite with its transcripts in a place and read some of them."""
    kind = BucketObjects if place is not None and place.startswith("s3:") else FolderObjects
    store = open_store(url, transcripts=place)
    assert isinstance(store, SqlStore)
    with Counted(kind) as counted:
        began, cpu = time.perf_counter(), time.process_time()
        report = suite(options.trials, options.bytes).run_sync(store=store)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        puts, sent = counted.requests, counted.sent
        taken, wrong = [], 0
        for ordinal in random.Random(7).choices(range(options.trials), k=options.reads):
            began = time.perf_counter()
            snapshot = store.snapshot(report.run_id, ordinal)
            session = restore_session(snapshot or b"")
            taken.append(time.perf_counter() - began)
            wrong += session[ChatMessage].all()[0].text != text_of(f"q{ordinal:07}", options.bytes)
        taken.sort()
        reads = counted.requests - puts
    thousand = options.trials / 1000
    size = store.size()
    store.close()
    return Figures(
        seconds / thousand, cpu / options.trials * 1e6, sent / thousand / 1e6, puts / thousand, size / thousand / 1e6,
        taken[len(taken) // 2] * 1000, taken[int(len(taken) * 0.95)] * 1000, reads / options.reads, wrong,
    )  # fmt: skip


@contextmanager
def bucket() -> Iterator[str]:
    """A bucket of an emulator."""
    with SqsServer() as server:
        client = server.client("s3")
        client.create_bucket(Bucket="evals", CreateBucketConfiguration={"LocationConstraint": REGION})
        client.close()
        os.environ.update({**CREDENTIALS, "AWS_REGION": REGION, "AWS_ENDPOINT_URL": server.endpoint})
        yield f"s3://evals/{hashlib.sha256(os.urandom(8)).hexdigest()[:8]}"


ROWS = (
    ("seconds per 1,000 trials", "seconds", "8.2f"),
    ("CPU time per trial of this process, us", "cpu_us", "8.0f"),
    ("MB sent to the place per 1,000 trials", "sent_mb", "8.2f"),
    ("writing requests per 1,000 trials", "puts", "8.1f"),
    ("MB of the database per 1,000 trials", "database", "8.2f"),
    ("read of one transcript, median ms", "read_ms", "8.2f"),
    ("read of one transcript, p95 ms", "read_p95_ms", "8.2f"),
    ("requests for one transcript", "reads", "8.2f"),
    ("wrong transcripts", "wrong", "8"),
)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--bytes", type=int, default=20_000)
    parser.add_argument("--reads", type=int, default=200)
    options = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        places = {"rows": None, "bucket": stack.enter_context(bucket()), "folder": folder}
        measure(server.new_database(), None, argparse.Namespace(trials=100, bytes=options.bytes, reads=10))
        found = {}
        for name, place in places.items():
            url = server.new_database()
            found[name] = measure(url, place, options)
            server.drop_database(url)
    print(f"{options.trials:,} trials with a transcript of {options.bytes:,} bytes, packed\n")
    print(f"{'':42}" + "".join(f"{name:>10}" for name in found))
    for title, field, form in ROWS:
        print(f"{title:42}" + "".join(f"{getattr(one, field):{form}}".rjust(10) for one in found.values()))
    ratios = "".join(f"{one.cpu_us / found['rows'].cpu_us:8.2f}".rjust(10) for one in found.values())
    print(f"{'CPU time per trial, x that with rows':42}{ratios}")
    sys.exit(any(one.wrong for one in found.values()))


if __name__ == "__main__":
    main()
