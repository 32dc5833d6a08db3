"""Clients of adapters: one per event loop, which closes them at its end."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import weakref
from collections.abc import AsyncGenerator
from typing import Any, Protocol

_CLOSE_SECONDS = 2.0  # The time limit at the end of the process, which a blocked event loop must not delay.


class Client(Protocol):
    """The methods of an SDK's client that are used."""

    async def post(self, path: str, **options: Any) -> Any:
        """Send a request."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class OpenClient:
    """A client of one event loop. It is closed by `aclose`, or when its adapter is deleted or its event loop ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client) -> None:
        self.client = client
        self.closed = False
        self.loop = loop
        self._keeper = self._keep()

    async def _keep(self) -> AsyncGenerator[None]:
        _open_clients.add(self)  # A reference, so that it is closed before it is garbage collected.
        try:
            yield
        finally:
            self.closed = True
            _open_clients.discard(self)
            await self.client.close()

    async def start(self) -> None:
        """Open it, in its event loop."""
        # An event loop that ends closes the async generators that were started in it, and so this client.
        await anext(self._keeper)

    async def aclose(self) -> None:
        """Close it."""
        await self._keeper.aclose()

    def close_later(self) -> None:
        """Close it from another thread, without waiting."""
        try:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.aclose()))
        except RuntimeError:
            pass  # The loop has ended and has closed the client.


_open_clients: set[OpenClient] = set()
own_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""The clients of adapters, which record their calls themselves."""


@atexit.register
def _close_at_exit() -> None:
    """Close the clients of running event loops, such as that of `run_sync`, which runs until the process ends."""
    running = [opened for opened in tuple(_open_clients) if opened.loop.is_running()]
    closing = [asyncio.run_coroutine_threadsafe(opened.aclose(), opened.loop) for opened in running]
    concurrent.futures.wait(closing, timeout=_CLOSE_SECONDS)


def close_all(clients: dict[asyncio.AbstractEventLoop, OpenClient]) -> None:
    """Close the clients of an adapter that is gone."""
    for client in clients.values():
        client.close_later()
