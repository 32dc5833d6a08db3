"""Runs scripts from a thread: leases are renewed even while user code blocks the event loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import redis
import redis.backoff
import redis.retry
from redis.exceptions import MovedError, NoScriptError, RedisError

from fairtrial.errors import MailboxClosedError
from fairtrial.mailbox.redis.address import Node
from fairtrial.mailbox.redis.coalesce import Call
from fairtrial.mailbox.redis.errors import lost_connections, translated
from fairtrial.mailbox.redis.topology import DISCOVERY_SECONDS, MAX_REDIRECTS, ThreadNodes, Topology


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
