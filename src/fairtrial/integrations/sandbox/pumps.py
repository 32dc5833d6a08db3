"""Pipes to and from a command, read and written without blocking the event loop."""

from __future__ import annotations

import os

import anyio
import anyio.lowlevel

_CHUNK = 256 * 1024


class CappedOutput:
    """What a command writes: the first bytes are kept, the rest is read and discarded."""

    __slots__ = ("data", "limit", "truncated")

    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        self.limit = limit
        self.truncated = False

    def add(self, chunk: bytes) -> None:
        """Keep a chunk as far as the limit allows."""
        room = self.limit - len(self.data)
        self.data += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room

    async def read_all(self, descriptor: int) -> None:
        """Read from a pipe until all its writers have ended."""
        os.set_blocking(descriptor, False)
        while True:
            try:
                chunk = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                await anyio.wait_readable(descriptor)
                continue
            if not chunk:
                return
            self.add(chunk)
            # A command that never stops writing must not keep other tasks from running.
            await anyio.lowlevel.checkpoint()


async def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe and close it; a reader that went away is no error."""
    os.set_blocking(descriptor, False)
    view = memoryview(data)
    try:
        while view:
            try:
                view = view[os.write(descriptor, view[:_CHUNK]) :]
            except BlockingIOError:
                await anyio.wait_writable(descriptor)
            except BrokenPipeError:
                return
    finally:
        os.close(descriptor)
