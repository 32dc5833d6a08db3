"""What idle workers cost the server of a queue: connections, memory, CPU.

    python benchmarks/idle_workers.py [--engine redis|postgres] [--workers 1000] [--seconds 30]

Each worker is a mailbox with connections of its own that waits for messages as a worker does. They share a few
processes: a thousand interpreters would need tens of gigabytes. A server is started for them; --mailbox names another
one, and --pid its main process. Connections, memory and CPU are those of the server's processes. Fails if a message is
not answered afterwards, or if idle workers take more than half a core of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import figure
from fairtrial.errors import MailboxConnectionError
from fairtrial.fleet import EvalLoopConfig
from fairtrial.fleet.queues import connect_broker
from fairtrial.mailbox.server import ANNOUNCEMENT_SECONDS
from tests.fleet.build import request
from tests.redis_server import RedisServer
from tests.servers import PostgresServer

SUITE = "idle"
PER_PROCESS = 250
MAX_CORES = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--engine", choices=["redis", "postgres"], default="redis")
    parser.add_argument("--mailbox")
    parser.add_argument("--pid", type=int, help="main process of the server of --mailbox")
    parser.add_argument("--wait", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wait:
        asyncio.run(wait_for_work(options.mailbox, options.wait))
        return 0
    if options.mailbox:
        return measure(options.mailbox, options.pid, options.workers, options.seconds)
    if options.engine == "postgres":
        with PostgresServer(options=[f"max_connections={4 * options.workers + 20}"]) as postgres:
            return measure(postgres.new_database(), postgres.pids()[0], options.workers, options.seconds)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), "--maxclients", "20000") as redis:
        return measure(redis.url, redis.pid, options.workers, options.seconds)


def measure(url: str, pid: int | None, workers: int, seconds: float) -> int:
    """Start idle workers, watch the server, then give each worker one message."""
    before = Server(pid)
    command = [sys.executable, __file__, "--mailbox", url, "--wait"]
    counts = [min(PER_PROCESS, workers - start) for start in range(0, workers, PER_PROCESS)]
    processes = [
        subprocess.Popen([*command, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for count in counts
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(5)  # Until all wait.
        first = Server(pid)
        time.sleep(seconds)
        last = Server(pid)
        asyncio.run(send(url, workers))
        answered, cpu = 0, 0.0
        for process in processes:
            said = json.loads(process.communicate("go\n", timeout=120)[0].splitlines()[-1])
            answered += said["answered"]
            cpu += said["cores"]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    cores = (last.cpu - first.cpu) / seconds
    print(f"{workers:,} idle workers, {seconds:g} s")
    if pid is not None:
        what = f"{workers:,} idle workers on {'PostgreSQL' if url.startswith('postgresql') else 'Redis'}"
        figure(f"{what}: CPU of the server", 100 * cores, "% of one core", at_most=100 * MAX_CORES)
        figure(f"{what}: connections", last.connections - before.connections)
        figure(f"{what}: memory of the server", (last.memory - before.memory) / 1e6, "MB")
    print(f"workers: {cpu / len(processes):.1%} of one core for each process of {PER_PROCESS}")
    print(f"answered afterwards: {answered:,} of {workers:,} messages")
    return 0 if answered == workers and cores <= MAX_CORES else 1


class Server:
    """Connections, memory and CPU time of a server's processes at one moment."""

    def __init__(self, pid: int | None) -> None:
        pids = [] if pid is None else [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        self.connections, self.memory, self.cpu = 0, 0, 0.0
        for each in pids:
            try:
                fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
                names = [os.readlink(link) for link in Path(f"/proc/{each}/fd").iterdir()]
                smaps = Path(f"/proc/{each}/smaps_rollup").read_text()
            except OSError:
                continue  # It has ended meanwhile.
            self.cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            self.connections += sum(name.startswith("socket:") for name in names)
            self.memory += 1024 * int(smaps.split("Pss:")[1].split()[0])


async def send(url: str, count: int) -> None:
    """Send the messages."""
    broker = connect_broker(url)
    requests: Any = await broker.requests(SUITE)
    await requests.send_all([request(number) for number in range(count)])
    await broker.close()


async def wait_for_work(url: str, count: int) -> None:
    """Act as `count` workers: wait until there is work, then take one message each."""
    brokers = [connect_broker(url) for _ in range(count)]
    boxes: list[Any] = [await broker.requests(SUITE) for broker in brokers]
    answered, done = 0, asyncio.Event()

    async def work(box: Any) -> None:
        nonlocal answered
        while not done.is_set():
            try:
                for message in await box.receive(1, 60, EvalLoopConfig().wait_seconds):
                    await message.acknowledge()
                    answered += 1
            except MailboxConnectionError:  # Many connect at once; a worker tries again too.
                await asyncio.sleep(1)

    async def announce(box: Any, number: int) -> None:
        while not done.is_set():
            try:
                await box.announce(f"{os.getpid()} idle-{number}", "", ANNOUNCEMENT_SECONDS)
            except MailboxConnectionError:
                await asyncio.sleep(1)
                continue
            if (number, box) in starting:
                starting.remove((number, box))
                tasks.append(asyncio.create_task(work(box)))
            await asyncio.sleep(ANNOUNCEMENT_SECONDS / 3)

    tasks: list[asyncio.Task[None]] = []
    starting = list(enumerate(boxes))
    announcing = []
    for number, box in list(starting):
        announcing.append(asyncio.create_task(announce(box, number)))
        await asyncio.sleep(0.02)  # Workers do not start in the same moment.
    while starting:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.1)
    began, used = time.monotonic(), time.process_time()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    cores = (time.process_time() - used) / (time.monotonic() - began)
    while await boxes[0].approximate_count():  # noqa: ASYNC110 - other processes take the rest
        await asyncio.sleep(0.2)
    done.set()
    for announcement in announcing:
        announcement.cancel()
    await asyncio.gather(*tasks)
    for broker in brokers:
        await broker.close()
    print(json.dumps({"answered": answered, "cores": cores}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
