"""Kill a Redis server while messages are sent, and count the confirmed messages that it lost."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fairtrial.errors import MailboxConnectionError
from fairtrial.mailbox import RedisMailbox
from tests.redis_server import RedisServer


@dataclass(frozen=True)
class Outcome:
    """The messages whose sending was confirmed, those received afterwards, how many sends failed, and the speed."""

    confirmed: frozenset[int]
    received: frozenset[int]
    refused: int
    per_second: float  # Confirmed until the kill.

    @property
    def lost(self) -> int:
        return len(self.confirmed - self.received)


async def kill_under_load(server: RedisServer, url: str, *, sends: int = 16_000, senders: int = 8) -> Outcome:
    """Send from some tasks, kill the server after a fifth of the messages, start it again, receive everything."""
    each = sends // senders
    async with RedisMailbox("load", int, url, sweep_seconds=0.05) as mailbox:
        confirmed: set[int] = set()
        refused = 0
        under_load = asyncio.Event()

        async def send(start: int) -> None:
            nonlocal refused
            for number in range(start, start + each):
                try:
                    await mailbox.send(number)
                    confirmed.add(number)
                    if len(confirmed) == sends // 5:
                        under_load.set()
                except MailboxConnectionError:
                    refused += 1
                    await asyncio.sleep(0.01)

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for sender in range(senders):
                group.create_task(send(sender * each))
            await under_load.wait()
            per_second = len(confirmed) / (time.monotonic() - began)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        received: set[int] = set()
        while messages := await mailbox.receive(200, 60, 0):
            received.update(message.body for message in messages)
            await asyncio.gather(*(message.acknowledge() for message in messages))
    return Outcome(frozenset(confirmed), frozenset(received), refused, per_second)


@contextlib.contextmanager
def busy_disk(folder: Path) -> Iterator[None]:
    """A process that writes and flushes files in this folder until it is stopped, or this process ends."""
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(str(folder), os.getpid()), daemon=True)
    writer.start()
    try:
        yield
    finally:
        writer.kill()
        writer.join(20)


def _write(folder: str, parent: int) -> None:
    block = os.urandom(16 << 20)
    while os.getppid() == parent:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
