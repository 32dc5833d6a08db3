"""Loops for tests of groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fairtrial.fleet.ops.group import LoopGroup
from tests.fleet.build import until


class Steady:
    """A loop that works until it is told to stop."""

    def __init__(self, name: str = "steady") -> None:
        self.name = name
        self.runs = 0
        self.cancelled = False
        self.counters: Mapping[str, Any] = {"trials": 3, "odd name!": 1.5, "words": "no number"}
        self.gauges = lambda: {"in_flight": 2}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        self.runs += 1
        try:
            await self._stopping.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def stop(self) -> None:
        self._stopping.set()


@asynccontextmanager
async def running(group: LoopGroup) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(group.run())
    try:
        await until(lambda: group.state != "new" or task.done())
        yield task
    finally:
        group.hurry()
        await asyncio.wait([task])


async def ask(group: LoopGroup, path: str) -> tuple[int, str]:
    assert group.health_address is not None
    return await request(group.health_address, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def request(address: tuple[str, int], data: bytes) -> tuple[int, str]:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(data)
        answer = (await reader.read()).decode()
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body
