"""Progress of runs as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

MAX_STREAMS = 20
INTERVAL_SECONDS = 1.0
_COMMENT_SECONDS = 15.0
_SHARE = 20  # Reading takes at most a twentieth of the time.


class LiveStreams:
    """Counts the open streams, and ends them when the server ends."""

    def __init__(self) -> None:
        self.open = 0
        self._closed = asyncio.Event()

    @property
    def full(self) -> bool:
        """True if no further stream may be opened."""
        return self.open >= MAX_STREAMS

    def close(self) -> None:
        """End all streams."""
        self._closed.set()

    async def follow(self, read: Callable[[], Awaitable[dict[str, Any] | None]]) -> AsyncIterator[bytes]:
        """Yield an event whenever what `read` returns has changed; ends after a status other than "running"."""
        self.open += 1
        last, quiet_since = "", time.monotonic()
        try:
            yield b"retry: 2000\n\n"
            while not self._closed.is_set():
                began = time.monotonic()
                state = await read()
                took = time.monotonic() - began
                if state is None:
                    yield b"event: gone\ndata: {}\n\n"
                    return
                text = json.dumps(state)
                if text != last:
                    last, quiet_since = text, time.monotonic()
                    yield f"event: progress\ndata: {text}\n\n".encode()
                elif time.monotonic() - quiet_since > _COMMENT_SECONDS:
                    quiet_since = time.monotonic()
                    yield b": still here\n\n"
                if state["status"] != "running":
                    yield b"event: ended\ndata: {}\n\n"
                    return
                try:
                    await asyncio.wait_for(self._closed.wait(), max(INTERVAL_SECONDS, _SHARE * took))
                except TimeoutError:
                    pass
        finally:
            self.open -= 1
