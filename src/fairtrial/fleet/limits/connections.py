"""Redis connections for objects that outlive event loops, such as the limiter of an adapter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.mailbox.redis import RedisConnection


class LoopConnections:
    """One connection per event loop, opened on first use, closed by `aclose` or when its loop ends.

    Args:
        source: The URL of a Redis server, or a connection, which belongs to its event loop and stays open.
        options: Options of the connections, as `RedisConnection` takes them.
    """

    def __init__(self, source: str | RedisConnection, **options: Any) -> None:
        self._given = None if isinstance(source, str) else source
        self._url = source if isinstance(source, str) else ""
        self._options = options
        self._lock = threading.Lock()
        self._made: dict[asyncio.AbstractEventLoop, tuple[RedisConnection, AsyncGenerator[None]]] = {}
        # An invalid URL is refused here instead of during the run.
        self._shown = repr(self._given or RedisConnection(self._url, **options))

    def __repr__(self) -> str:
        return self._shown

    async def get(self) -> RedisConnection:
        """Return the connection of the running event loop."""
        if self._given is not None:
            return self._given
        loop = running_loop()
        with self._lock:
            known = self._made.get(loop)
            if known is not None:
                return known[0]
            for gone in [other for other in self._made if other.is_closed()]:
                del self._made[gone]
            connection = RedisConnection(self._url, **self._options)
            keeper = self._keep(loop, connection)
            self._made[loop] = (connection, keeper)
        # An event loop closes its async generators when it ends, and so the connection.
        await anext(keeper)
        return connection

    async def aclose(self) -> None:
        """Close the connection of the running event loop; it is reopened on next use."""
        known = self._made.get(running_loop())
        if known is not None:
            await known[1].aclose()

    async def _keep(self, loop: asyncio.AbstractEventLoop, connection: RedisConnection) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._made.pop(loop, None)
            await connection.close()


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop.

    Raises:
        ConfigurationError: there is none, or it is not asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("limits and budgets shared through Redis require asyncio") from None
