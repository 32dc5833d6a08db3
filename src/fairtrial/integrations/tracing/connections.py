"""Connections of applications to the trace receiver, which must send their requests in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from fairtrial.base.foreign import HEAD_SECONDS


class ReceiverServer(web.Server):
    """Closes connections on which no whole head of a request arrives in time.

    aiohttp limits the time after each answer (`keepalive_timeout`), and only its latest versions the time before the
    first one.
    """

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(self._begin, auto_decompress=False, access_log=None, keepalive_timeout=HEAD_SECONDS)
        self._answer = answer
        self._first_heads: dict[Any, asyncio.TimerHandle] = {}

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Begin to wait for the first head."""
        super().connection_made(handler, transport)
        self._first_heads[handler] = asyncio.get_running_loop().call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Stop to wait."""
        self._stop_waiting(handler)
        super().connection_lost(handler, exc)

    async def _begin(self, request: web.BaseRequest) -> web.StreamResponse:
        self._stop_waiting(request.protocol)
        return await self._answer(request)

    def _stop_waiting(self, handler: Any) -> None:
        timer = self._first_heads.pop(handler, None)
        if timer is not None:
            timer.cancel()
