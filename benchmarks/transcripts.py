"""Transcripts in rows of PostgreSQL, in a bucket and in a folder: time, CPU time, space, requests and reads.

    python benchmarks/transcripts.py [--trials 2000] [--bytes 20000] [--reads 200] [--rounds 1]

Runs the same suite on a new PostgreSQL three times, one place after the other, after a short run in each. A transcript
has random text that zstd packs into --bytes bytes. The bucket is an emulator in a process of its own, so its times say
what Fairtrial does and not what a provider takes. Figures are medians of the rounds; the ratio of CPU times is taken
within each round. Exits with 1 if a transcript is read that is not the one that was recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.viewer import Pages
from fairtrial import ChatMessage, Dataset, EvalSuite, Sample, TrialContext, exact_match, open_store
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
    all_cpu_us: float
    sent_mb: float
    puts: float
    database: float
    read_ms: float
    read_p95_ms: float
    reads: float
    page_ms: float
    page_p95_ms: float
    wrong: int


def text_of(question: str, size: int) -> str:
    """Return text that only its question determines, and that nothing packs into less than `size` bytes."""
    return random.Random(question).randbytes(size).hex()


def suite(trials: int, size: int) -> EvalSuite[Any, Any]:
    """A suite whose trials do nothing but record a transcript."""

    async def talk(question: str, ctx: TrialContext) -> str:
        ctx.session.record(ChatMessage("assistant", text_of(question, size)))
        return question

    samples = [Sample(question, question, question) for question in map("q{:07}".format, range(trials))]
    return EvalSuite("transcripts", Dataset(samples), talk, exact_match)


def cpu_seconds(server: PostgresServer) -> float:
    """Return the CPU time of a server, with that of its processes that have ended."""
    lines = (Path(f"/proc/{pid}/stat").read_text() for pid in server.pids())
    return sum(sum(map(int, line.rpartition(")")[2].split()[11:15])) for line in lines) / os.sysconf("SC_CLK_TCK")


def quantiles(taken: list[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    taken = sorted(taken)
    return taken[len(taken) // 2], taken[int(len(taken) * 0.95)]


def ask_viewer(url: str, experiment: str, ordinals: list[int], size: int) -> tuple[list[float], int]:
    """Return the milliseconds that pages of trials take in the viewer, and how many lack the transcript."""
    pages = Pages(url)
    try:
        pages.get("transcripts@1/trials")
        while "are being computed" in pages.get("transcripts@1")[1]:
            time.sleep(0.2)
        wrong, taken = 0, []
        for ordinal in ordinals:
            milliseconds, page = pages.get(f"transcripts@1/t/{experiment}/q{ordinal:07}")
            taken.append(milliseconds)
            wrong += text_of(f"q{ordinal:07}", size)[:500] not in page
        return taken[1:], wrong  # The first page loads what the others find loaded.
    finally:
        pages.stop()


def measure(server: PostgresServer, place: str | None, options: argparse.Namespace) -> Figures:
    """Run the suite with its transcripts in a place and read some of them."""
    url = server.new_database()
    kind = BucketObjects if place is not None and place.startswith("s3:") else FolderObjects
    store = open_store(url, transcripts=place)
    assert isinstance(store, SqlStore)
    with Counted(kind) as counted:
        began, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_seconds(server)
        report = suite(options.trials, options.bytes).run_sync(store=store)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        server_cpu = cpu_seconds(server) - server_cpu
        puts, sent = counted.requests, counted.sent
        taken, wrong = [], 0
        ordinals = random.Random(7).choices(range(options.trials), k=options.reads)
        for ordinal in ordinals:
            began = time.perf_counter()
            snapshot = store.snapshot(report.run_id, ordinal)
            session = restore_session(snapshot or b"")
            taken.append((time.perf_counter() - began) * 1000)
            wrong += session[ChatMessage].all()[0].text != text_of(f"q{ordinal:07}", options.bytes)
        reads = counted.requests - puts
    thousand = options.trials / 1000
    size = store.size()
    store.close()
    each = 1e6 / options.trials
    shown, missing = ask_viewer(url, report.run.experiments[0], ordinals, options.bytes)
    server.drop_database(url)
    return Figures(
        seconds / thousand, cpu * each, (cpu + server_cpu) * each,
        sent / thousand / 1e6, puts / thousand, size / thousand / 1e6,
        *quantiles(taken), reads / options.reads, *quantiles(shown), wrong + missing,
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
    ("with that of PostgreSQL, us", "all_cpu_us", "8.0f"),
    ("MB sent to the place per 1,000 trials", "sent_mb", "8.2f"),
    ("writing requests per 1,000 trials", "puts", "8.1f"),
    ("MB of the database per 1,000 trials", "database", "8.2f"),
    ("read of one transcript, median ms", "read_ms", "8.2f"),
    ("read of one transcript, p95 ms", "read_p95_ms", "8.2f"),
    ("requests for one transcript", "reads", "8.2f"),
    ("page of a trial in the viewer, median ms", "page_ms", "8.1f"),
    ("page of a trial in the viewer, p95 ms", "page_p95_ms", "8.1f"),
    ("wrong transcripts", "wrong", "8.0f"),
)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--bytes", type=int, default=20_000)
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    found: dict[str, list[Figures]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        places = {"rows": None, "bucket": stack.enter_context(bucket()), "folder": folder}
        for turn in range(options.rounds + 1):
            asked = options if turn else argparse.Namespace(trials=100, bytes=options.bytes, reads=10)
            for name, place in places.items():
                figures = measure(server, place and f"{place}/{turn}", asked)
                if turn:
                    found.setdefault(name, []).append(figures)
    print(f"{options.trials:,} trials with a transcript of {options.bytes:,} bytes, packed; {options.rounds} rounds\n")
    print(f"{'':42}" + "".join(f"{name:>10}" for name in found))
    for title, field, form in ROWS:
        medians = (statistics.median(getattr(figures, field) for figures in turns) for turns in found.values())
        print(f"{title:42}" + "".join(f"{median:{form}}".rjust(10) for median in medians))
    ratios = (
        statistics.median(one.cpu_us / rows.cpu_us for one, rows in zip(turns, found["rows"], strict=True))
        for turns in found.values()
    )
    title = "CPU time per trial, x that with rows"
    print(f"{title:42}" + "".join(f"{ratio:8.2f}".rjust(10) for ratio in ratios))
    sys.exit(any(figures.wrong for turns in found.values() for figures in turns))


if __name__ == "__main__":
    main()
