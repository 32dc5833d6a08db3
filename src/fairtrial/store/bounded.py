"""Connections to PostgreSQL that give up a server without an answer. Needs psycopg, unlike `bulk`."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

ANSWER_MARGIN_SECONDS = 10.0
"""How much longer than the server may take for a statement its answer is waited for."""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed when the server is silent for `answer_seconds` while an answer is expected."""

    answer_seconds = math.inf

    @contextmanager
    def answering_within(self, seconds: float) -> Iterator[None]:
        """Use another limit for a while."""
        before, self.answer_seconds = self.answer_seconds, seconds
        try:
            yield
        finally:
            self.answer_seconds = before

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """See `psycopg.Connection`; everything that waits for the server does so here."""
        return super().wait(_bounded(gen, self), *args, **options)


class BoundedAsyncConnection(psycopg.AsyncConnection[Any]):
    """`BoundedConnection` for asyncio."""

    answer_seconds = math.inf

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """See `psycopg.AsyncConnection`."""
        return await super().wait(_bounded(gen, self), *args, **options)


def _bounded(
    generator: Generator[Any, Any, Any], connection: BoundedConnection | BoundedAsyncConnection
) -> Generator[Any, Any, Any]:
    """Yield what a generator of psycopg waits for. It is resumed every 0.1 s, also if nothing has arrived."""
    seconds = connection.answer_seconds
    end = time.monotonic() + seconds
    try:
        state = next(generator)
        while True:
            ready = yield state
            if ready:
                end = time.monotonic() + seconds
            elif time.monotonic() > end:
                connection.pgconn.finish()
                raise psycopg.OperationalError(f"the server has not answered for {seconds:g} s")
            state = generator.send(ready)
    except StopIteration as stop:
        return stop.value
