"""Commands sent together, and from threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
import redis.backoff
import redis.retry
from redis.exceptions import MovedError, NoScriptError, RedisError

from fairtrial.errors import MailboxClosedError, MailboxConnectionError, MailboxError
from fairtrial.mailbox.redis.scripts import SEND, LuaScript
from fairtrial.mailbox.redis.topology import (
    DISCOVERY_SECONDS,
    MAX_REDIRECTS,
    Node,
    ThreadNodes,
    Topology,
    lost_connections,
    translated,
)

MAX_OPERATIONS = 200
MAX_BYTES = 4 * 1024 * 1024


class Call:
    """One call of one script, with the operations that it combines."""

    __slots__ = ("args", "futures", "keys", "script", "size")

    def __init__(self, script: LuaScript, keys: tuple[str, ...], args: list[Any]) -> None:
        self.script = script
        self.keys = keys
        self.args = args
        self.futures: list[asyncio.Future[Any]] = []
        self.size = 0

    def command(self) -> tuple[Any, ...]:
        """Return the command to send."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)


class Coalescer:
    """Collects operations and sends them together.

    Args:
        run: Runs calls in one round trip and returns an answer or an error for each.
    """

    def __init__(self, run: Callable[[Sequence[Call]], Awaitable[list[Any]]]) -> None:
        self._run = run
        self._open: dict[tuple[Any, ...], Call] = {}
        self._full: list[Call] = []
        self._sender: asyncio.Task[None] | None = None
        self._closed = False

    def submit(
        self, script: LuaScript, keys: tuple[str, ...], head: tuple[Any, ...], args: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        """Add one operation to the next pipeline; the future gets its answer, or the error of its call."""
        if self._closed:
            raise MailboxClosedError("the connection to Redis is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        slot = (script.sha, keys, head)
        call = self._open.get(slot)
        if call is None:
            call = self._open[slot] = Call(script, keys, list(head))
        call.args.extend(args)
        call.futures.append(future)
        if script is SEND:
            call.size += len(args[1])
        if len(call.futures) >= MAX_OPERATIONS or call.size >= MAX_BYTES:
            self._full.append(self._open.pop(slot))
        if self._sender is None:
            # The task starts in the next iteration of the event loop, after all operations of this one were added.
            self._sender = loop.create_task(self._send(), name="fairtrial mailbox operations")
        return future

    async def _send(self) -> None:
        calls: list[Call] = []
        try:
            while self._full or self._open:
                calls = [*self._full, *self._open.values()]
                self._full, self._open = [], {}
                for call, answer in zip(calls, await self._run(calls), strict=True):
                    _deliver(call, answer)
        except BaseException as error:  # Waiting callers must receive any error.
            # A cancelled sender means that the connection is being closed; other errors may be retried.
            kind = MailboxConnectionError if isinstance(error, Exception) else MailboxClosedError
            told = error if isinstance(error, MailboxError) else kind(f"the operation was not run: {error!r}")
            for call in [*calls, *self._full, *self._open.values()]:
                _deliver(call, told)
            self._full, self._open = [], {}
            if not isinstance(error, Exception):
                raise
        finally:
            self._sender = None

    async def close(self) -> None:
        """Send the pending operations, then refuse more."""
        self._closed = True
        while self._sender is not None:
            await asyncio.wait([self._sender])


def _deliver(call: Call, answer: Any) -> None:
    if isinstance(answer, BaseException):
        for future in call.futures:
            if not future.done():
                future.set_exception(answer)
                future.exception()  # Mark as retrieved: a cancelled caller will not do so.
        return
    for future, own in zip(call.futures, answer, strict=True):
        if not future.done():
            future.set_result(own)


class ThreadConnection:
    """Connections for threads, opened on first use."""

    def __init__(self, topology: Topology, options: dict[str, Any]) -> None:
        self._topology = topology
        self._options = options
        self._lock = threading.Lock()
        self._closed = False
        self._nodes = ThreadNodes(topology, self._connect, self._connect_briefly)

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip to each server.

        Raises:
            MailboxError: they could not be run.
        """
        with self._lock:
            if self._closed:
                raise MailboxClosedError("the connection to Redis is closed")
            answers: list[Any] = [None] * len(calls)
            left: Sequence[int] = range(len(calls))
            try:
                for _ in range(1 + MAX_REDIRECTS):
                    self._run_on_each(calls, left, answers)
                    left = [at for at in left if isinstance(answers[at], MovedError)]  # They had no effect.
                    if not left:
                        break
            except (RedisError, OSError) as error:
                raise translated(error, "renewing leases") from None
        return answers

    def _run_on_each(self, calls: Sequence[Call], wanted: Sequence[int], answers: list[Any]) -> None:
        groups: dict[Node, list[int]] = {}
        for at in wanted:
            groups.setdefault(self._nodes.node_of(calls[at].keys[0]), []).append(at)
        for node, group in groups.items():
            try:
                found = self._run_at(node, [calls[at] for at in group])
            except (RedisError, OSError) as error:
                self._topology.note(error, node)
                raise
            for at, answer in zip(group, found, strict=True):
                answers[at] = answer
                if isinstance(answer, BaseException):
                    self._topology.note(answer, node)

    def _run_at(self, node: Node, calls: Sequence[Call]) -> list[Any]:
        client = self._nodes.client(node)
        answers = _pipelined(client, calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            for script in {call.script for call in calls}:
                with lost_connections():
                    client.script_load(script.text)
            answers = _pipelined(client, calls)
        return answers

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._closed = True
            self._nodes.close()

    def _connect(self, url: str) -> Any:
        return redis.Redis.from_url(url, **self._options, retry=_no_retry())

    def _connect_briefly(self, url: str) -> Any:
        seconds = min(self._options["socket_timeout"], DISCOVERY_SECONDS)
        options = {**self._options, "socket_connect_timeout": seconds, "socket_timeout": seconds}
        return redis.Redis.from_url(url, **options, retry=_no_retry())


def _pipelined(client: Any, calls: Sequence[Call]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*call.command())
    with lost_connections():
        return list(pipeline.execute(raise_on_error=False))


def _no_retry() -> redis.retry.Retry:
    return redis.retry.Retry(redis.backoff.NoBackoff(), 0)
