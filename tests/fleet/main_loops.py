"""Loops for tests of main loops and session stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fairtrial.fleet import EvalLoop, MainLoop
from tests.fleet.build import until


@asynccontextmanager
async def serving(*loops: MainLoop[Any, Any] | EvalLoop) -> AsyncIterator[None]:
    running = [asyncio.create_task(loop.run()) for loop in loops]
    try:
        await until(lambda: all(loop.ready for loop in loops))
        yield
    finally:
        for loop in loops:
            loop.stop()
        await asyncio.gather(*running)
