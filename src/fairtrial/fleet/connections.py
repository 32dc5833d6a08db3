"""Connections to Redis for things that outlive event loops, such as a limiter an adapter holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.mailbox.redis import RedisConnection


class LoopConnections:
    """One connection per event loop, made when it is first needed, closed by `aclose` or when its loop ends.

    Args:
        source: The address of a Redis, or a connection to use: that one belongs to its event loop and stays open.
        options: Options of the connections, as `RedisConnection` takes them.
    """

    def __init__(self, source: str | RedisConnection, **options: Any) -> None:
        self._given = None if isinstance(source, str) else source
        self._url = source if isinstance(source, str) else ""
        self._options = options
        self._lock = threading.Lock()
        self._made: dict[asyncio.AbstractEventLoop, tuple[RedisConnection, AsyncGenerator[None]]] = {}
        # An address that is none is refused here, not in mid-run.
        self._shown = repr(self._given or RedisConnection(self._url, **options))

    def __repr__(self) -> str:
        return self._shown

    async def get(self) -> RedisConnection:
        """The connection of this event loop."""
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
        # An event loop that ends closes the generators that were started in it: nobody has to remember to.
        await anext(keeper)
        return connection

    async def aclose(self) -> None:
        """Close this event loop's connection; it opens again when it is needed."""
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
    """The event loop that runs here.

    Raises:
        ConfigurationError: none does, or it is not asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("what a fleet shares through Redis works under asyncio only") from None
