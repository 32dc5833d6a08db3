"""Wakes receivers when messages arrive, by LISTEN on one connection of the process.

Notifications only save time: receivers look for messages by themselves every few seconds, and more often while there
is no listener. A lost notification or connection, or a PgBouncer in transaction mode, delays messages and loses none.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
from psycopg import sql

from fairtrial.base.backoff import longest_pause
from fairtrial.errors import FairtrialError

_log = logging.getLogger(__name__)
_PROBE_SECONDS = 2.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
# After a probe that did not arrive: the server may have been busy, or a PgBouncer loses all notifications.
_FIRST_PROBE_PAUSE = 60.0
_LONGEST_PROBE_PAUSE = 3600.0

type Connect = Callable[[], Awaitable[psycopg.AsyncConnection[Any]]]


class Listener:
    """Listens on the channels of mailboxes.

    Args:
        connect: Opens the connection.
        notify: Sends a notification by another connection, to test that notifications arrive.
    """

    def __init__(self, connect: Connect, notify: Callable[[str], Awaitable[Any]]) -> None:
        self._connect = connect
        self._notify = notify
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._listened: set[str] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._probe = f"fairtrial_probe_{secrets.token_hex(8)}"

    def listens(self, channel: str) -> bool:
        """Return whether notifications on this channel arrive."""
        return channel in self._listened

    def subscribe(self, channel: str) -> asyncio.Event:
        """Return an event that is set when a message arrives, and when listening begins or ends."""
        event = asyncio.Event()
        if channel not in self._waiting:
            self._waiting[channel] = set()
            self._changed.set()
        self._waiting[channel].add(event)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="fairtrial mailbox listener")
        return event

    def unsubscribe(self, channel: str, event: asyncio.Event) -> None:
        """Stop waiting; the channel stays open, because another receive usually follows."""
        self._waiting.get(channel, set()).discard(event)

    def forget(self, channel: str) -> None:
        """Stop listening on a channel that no mailbox of this process uses any more."""
        if not self._waiting.get(channel):
            self._waiting.pop(channel, None)
            self._changed.set()

    async def close(self) -> None:
        """End listening."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _wake(self, channel: str) -> None:
        for event in self._waiting.get(channel, ()):
            event.set()

    def _wake_all(self) -> None:
        for channel in list(self._waiting):
            self._wake(channel)

    async def _run(self) -> None:
        failures = lost_probes = 0
        while True:
            try:
                connection = await self._connect()
                try:
                    if await self._receives(connection):
                        failures = lost_probes = 0
                        await self._listen(connection)
                    else:
                        lost_probes += 1
                finally:
                    self._listened.clear()
                    self._wake_all()
                    await connection.close()
            except (psycopg.Error, OSError, FairtrialError) as error:
                _log.debug("listening for messages failed: %s", error)
            failures += 1
            pause = longest_pause(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
            if lost_probes:
                pause = longest_pause(lost_probes, first=_FIRST_PROBE_PAUSE, longest=_LONGEST_PROBE_PAUSE)
                _log.log(
                    logging.WARNING if lost_probes == 1 else logging.DEBUG,
                    "PostgreSQL's notifications do not arrive here within %g s, so mailboxes look for messages often; "
                    "notifications are tried again in %.0f s. Behind a PgBouncer in transaction mode, add "
                    "?pgbouncer=true to the address",
                    _PROBE_SECONDS,
                    pause,
                )
            await asyncio.sleep(pause)

    async def _receives(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """Return whether a notification that is sent by another connection arrives at this one."""
        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._probe)))
        await self._notify(self._probe)
        async for _ in connection.notifies(timeout=_PROBE_SECONDS, stop_after=1):
            return True
        return False

    async def _listen(self, connection: psycopg.AsyncConnection[Any]) -> None:
        loop = asyncio.get_running_loop()
        readable = self._changed
        connection.add_notify_handler(lambda notification: self._wake(notification.channel))
        while True:
            readable.clear()
            await self._change_channels(connection)
            self._read(connection)  # What came with the answer of a statement makes the socket readable no more.
            # psycopg registers the socket itself while a statement runs, and removes it afterwards.
            loop.add_reader(connection.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(connection.fileno())
            self._read(connection)

    def _read(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Wake the receivers of all notifications that have arrived; raises if the connection was closed."""
        connection.pgconn.consume_input()
        while (notification := connection.pgconn.notifies()) is not None:
            self._wake(notification.relname.decode())

    async def _change_channels(self, connection: psycopg.AsyncConnection[Any]) -> None:
        for channel in self._listened - self._waiting.keys():
            self._listened.discard(channel)
            await connection.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
        for channel in [*(self._waiting.keys() - self._listened)]:
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            self._listened.add(channel)
            self._wake(channel)  # What was sent before the channel was open is not notified.
