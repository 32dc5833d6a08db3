"""Connections for objects that outlive event loops, such as the limiter of an adapter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fairtrial.errors import ConfigurationError, MissingExtraError
from fairtrial.fleet.limits.servers import LimitServer

if TYPE_CHECKING:
    from fairtrial.mailbox import PostgresConnection, RedisConnection

type LimitSource = str | RedisConnection | PostgresConnection
"""A URL or a connection."""


class LoopConnections:
    """One connection per event loop, opened on first use, closed by `aclose` or when its loop ends.

    Args:
        source: The URL of a server, or a connection, which belongs to its event loop and stays open.
        options: Options of the connections, as `RedisConnection` or `PostgresConnection` takes them.

    Attributes:
        server: The server's name in messages.
    """

    def __init__(self, source: LimitSource, **options: Any) -> None:
        first = limit_server(source, **options)  # An invalid URL is refused here instead of during the run.
        self._given = None if isinstance(source, str) else first
        self._source = source
        self._options = options
        self._lock = threading.Lock()
        self._made: dict[asyncio.AbstractEventLoop, tuple[LimitServer, AsyncGenerator[None]]] = {}
        self._shown = repr(first)
        self.server = first.server

    def __repr__(self) -> str:
        return self._shown

    async def get(self) -> LimitServer:
        """Return the server as the running event loop reaches it."""
        if self._given is not None:
            return self._given
        loop = running_loop()
        with self._lock:
            known = self._made.get(loop)
            if known is not None:
                return known[0]
            for gone in [other for other in self._made if other.is_closed()]:
                del self._made[gone]
            server = limit_server(self._source, **self._options)
            keeper = self._keep(loop, server)
            self._made[loop] = (server, keeper)
        # An event loop closes its async generators when it ends, and so the connection.
        await anext(keeper)
        return server

    async def aclose(self) -> None:
        """Close the connection of the running event loop; it is reopened on next use."""
        known = self._made.get(running_loop())
        if known is not None:
            await known[1].aclose()

    async def _keep(self, loop: asyncio.AbstractEventLoop, server: LimitServer) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._made.pop(loop, None)
            await server.close()


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop.

    Raises:
        ConfigurationError: there is none, or it is not asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("limits and budgets that a fleet shares require asyncio") from None


def limit_server(source: LimitSource, **options: Any) -> LimitServer:
    """Return the server at an address, or that of a connection, without connecting to it.

    Raises:
        ConfigurationError: the address or an option is invalid.
    """
    # As for mailboxes. The address is not repeated: it may contain a password.
    named = source.partition(":")[0].partition("+")[0] if isinstance(source, str) else getattr(source, "server", "")
    engine = named.lower()
    if engine not in ("redis", "rediss", "unix", "postgresql", "postgres"):
        raise ConfigurationError(
            "the address of shared limits must start with redis://, rediss://, unix:// or postgresql://"
        )
    # Each is imported only if it is used: its client may not be installed.
    if engine.startswith("postgres"):
        from fairtrial.fleet.limits.postgres import PostgresLimits

        return PostgresLimits.of(source, **options)
    try:
        from fairtrial.fleet.limits.redis import RedisLimits
    except ImportError:
        raise MissingExtraError("shared limits on Redis", "redis") from None
    return RedisLimits.of(source, **options)
