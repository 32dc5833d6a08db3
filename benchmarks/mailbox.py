"""How fast a mailbox is, beside a bare loop of its client that does the same work, in one run.

python benchmarks/mailbox.py [--mailbox redis|postgres] [--messages 20000] [--rounds 3] [--floor 0.35]

Starts its own redis-server (AOF everysec) or PostgreSQL (fsync off) on the loopback. Prints one JSON line per figure.
With --floor it fails when receive-and-acknowledge falls under that share of the bare loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bare_postgres
from benchmarks.figures import ENGINES, figure
from fairtrial.mailbox import (
    Mailbox,
    Message,
    PostgresConnection,
    PostgresMailbox,
    RedisConnection,
    RedisMailbox,
)

BATCH = 100


@dataclass(frozen=True, slots=True)
class Job:
    number: int
    text: str


def body(number: int) -> Job:
    return Job(number, "x" * 960)  # About 1 KB on the wire.


@contextmanager
def server() -> Iterator[str]:
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "yes", "--dir", folder]
        process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
        try:
            for _ in range(500):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.01)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


async def bare_send(client: Any, count: int) -> float:
    began = time.perf_counter()
    for start in range(0, count, BATCH):
        pipeline = client.pipeline(transaction=False)
        for number in range(start, start + BATCH):
            job = body(number)
            text = json.dumps({"number": job.number, "text": job.text})
            pipeline.execute_command("XADD", "bare", "*", "b", text)
        await pipeline.execute()
    return count / (time.perf_counter() - began)


async def bare_work(client: Any, count: int, *, together: bool = False) -> float:
    """Read a hundred, parse each, acknowledge and delete each: what any worker must do, and nothing else.

    `together`: all of them in one XACK and one XDEL, as a loop can that knows neither fences nor single jobs.
    """
    began = time.perf_counter()
    done = 0
    while done < count:
        command = ("XREADGROUP", "GROUP", "g", "c", "COUNT", BATCH, "BLOCK", 1000, "STREAMS", "bare", ">")
        entries = (await client.execute_command(*command))[0][1]
        pipeline = client.pipeline(transaction=False)
        for entry, fields in entries:
            tree = json.loads(fields[b"b"])
            Job(tree["number"], tree["text"])
            if not together:
                pipeline.execute_command("XACK", "bare", "g", entry)
                pipeline.execute_command("XDEL", "bare", entry)
        if together:
            ids = [entry for entry, _ in entries]
            pipeline.execute_command("XACK", "bare", "g", *ids)
            pipeline.execute_command("XDEL", "bare", *ids)
        await pipeline.execute()
        done += len(entries)
    return count / (time.perf_counter() - began)


async def our_send(mailbox: Mailbox[Job], count: int) -> float:
    began = time.perf_counter()
    for start in range(0, count, BATCH):
        await asyncio.gather(*(mailbox.send(body(number)) for number in range(start, start + BATCH)))
    return count / (time.perf_counter() - began)


async def our_work(mailbox: Mailbox[Job], count: int) -> float:
    async def job(message: Message[Job]) -> None:
        await message.acknowledge()

    began = time.perf_counter()
    done = 0
    while done < count:
        messages = await mailbox.receive(BATCH, 60, 1)
        async with asyncio.TaskGroup() as group:
            for message in messages:
                group.create_task(job(message))
        done += len(messages)
    return count / (time.perf_counter() - began)


async def round_trips(connection: RedisConnection | PostgresConnection, count: int) -> Sequence[float]:
    """Request to reply, one outstanding, in milliseconds."""
    kind: Any = RedisMailbox if isinstance(connection, RedisConnection) else PostgresMailbox
    async with (
        kind("requests", Job, connection) as requests,
        kind("replies", Job, connection, ttl_seconds=60) as replies,
    ):

        async def serve() -> None:
            while True:
                for message in await requests.receive(1, 60, 20):
                    await message.reply(message.body)
                    await message.acknowledge()

        serving = asyncio.create_task(serve())
        took = []
        for number in range(count):
            began = time.perf_counter()
            await requests.send(body(number), reply_to=replies)
            (reply,) = await replies.receive(1, 60, 20)
            took.append((time.perf_counter() - began) * 1000)
            await reply.acknowledge()
        serving.cancel()
        await asyncio.wait([serving])
        return took


async def measure(url: str, count: int, rounds: int) -> dict[str, float]:
    names = ("bare_send", "our_send", "bare_work", "bare_together", "our_work")
    figures: dict[str, list[float]] = {name: [] for name in names}
    client: Any = redis.asyncio.Redis.from_url(url, protocol=2)
    async with RedisConnection(url) as connection, RedisMailbox("jobs", Job, connection) as mailbox:
        await client.xgroup_create("bare", "g", "0", mkstream=True)
        for _ in range(rounds):  # Turn by turn, so that a busy neighbour troubles both.
            figures["bare_send"].append(await bare_send(client, count))
            figures["our_send"].append(await our_send(mailbox, count))
            figures["bare_work"].append(await bare_work(client, count))
            figures["our_work"].append(await our_work(mailbox, count))
            await bare_send(client, count)
            figures["bare_together"].append(await bare_work(client, count, together=True))
        took = await round_trips(connection, 500)
    await client.aclose()
    return {**_summary(figures, took), "work_ratio_to_bare_together": _ratio(figures, "our_work", "bare_together")}


async def measure_postgres(url: str, count: int, rounds: int) -> dict[str, float]:
    """The same on PostgreSQL; a bare loop has one transaction for each batch of a hundred anyway."""
    figures: dict[str, list[float]] = {name: [] for name in ("bare_send", "our_send", "bare_work", "our_work")}
    bare_postgres.create(url, "bare")
    client = await bare_postgres.connect(url)
    async with PostgresConnection(url) as connection, PostgresMailbox("jobs", Job, connection) as mailbox:
        for _ in range(rounds):
            figures["bare_send"].append(await bare_rows_sent(client, count))
            figures["our_send"].append(await our_send(mailbox, count))
            figures["bare_work"].append(await bare_rows_worked(client, count))
            figures["our_work"].append(await our_work(mailbox, count))
        took = await round_trips(connection, 300)
    await client.close()
    return _summary(figures, took)


async def bare_rows_sent(client: Any, count: int) -> float:
    began = time.perf_counter()
    for start in range(0, count, BATCH):
        jobs = [body(number) for number in range(start, start + BATCH)]
        texts = [json.dumps({"number": job.number, "text": job.text}).encode() for job in jobs]
        await bare_postgres.send(client, "bare", texts)
    return count / (time.perf_counter() - began)


async def bare_rows_worked(client: Any, count: int) -> float:
    began = time.perf_counter()
    done = 0
    while done < count:
        rows = await bare_postgres.claim(client, "bare", BATCH)
        for _, data in rows:
            tree = json.loads(data)
            Job(tree["number"], tree["text"])
        await bare_postgres.delete(client, "bare", [id for id, _ in rows])
        done += len(rows)
    return count / (time.perf_counter() - began)


def _ratio(figures: dict[str, list[float]], ours: str, bare: str) -> float:
    return round(statistics.median(map(float.__truediv__, figures[ours], figures[bare])), 3)


def _summary(figures: dict[str, list[float]], took: Sequence[float]) -> dict[str, float]:
    took = sorted(took)
    return {
        **{f"{name}_per_s": round(max(values)) for name, values in figures.items()},
        "send_ratio": _ratio(figures, "our_send", "bare_send"),
        "work_ratio": _ratio(figures, "our_work", "bare_work"),
        "reply_p50_ms": round(took[len(took) // 2], 2),
        "reply_p99_ms": round(took[int(len(took) * 0.99)], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--mailbox", choices=["redis", "postgres"], default="redis")
    options = parser.parse_args()
    count = options.messages // BATCH * BATCH
    if options.mailbox == "redis":
        with server() as url:
            figures = asyncio.run(measure(url, count, options.rounds))
    else:
        with bare_postgres.server() as postgres:
            figures = asyncio.run(measure_postgres(postgres.new_database(), count, options.rounds))
    for name, value in figures.items():
        print(json.dumps({"figure": name, "value": value}))
    engine = ENGINES[options.mailbox]
    what = f"messages on {engine}, one process, batches of {BATCH}"
    figure(f"{what}: received and acknowledged, against the bare client", figures["work_ratio"], "x the throughput")
    figure(f"{what}: sent, against the bare client", figures["send_ratio"], "x the throughput")
    figure(f"{what}: received and acknowledged", figures["our_work_per_s"], "per second")
    figure(f"message and reply on {engine}, p50", figures["reply_p50_ms"], "ms")
    if figures["work_ratio"] < options.floor:
        raise SystemExit(f"{figures['work_ratio']} of the bare loop is under {options.floor}")


if __name__ == "__main__":
    main()
