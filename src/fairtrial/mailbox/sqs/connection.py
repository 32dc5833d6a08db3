"""The clients of one process for SQS: for commands, long polls, S3, and renewals from a thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Final

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.config import Config
from botocore.loaders import Loader, create_loader
from botocore.session import get_session as get_blocking_session

from fairtrial.base.clock import SYSTEM_CLOCK, Clock
from fairtrial.errors import MailboxClosedError
from fairtrial.mailbox.server import ServerConnection
from fairtrial.mailbox.sqs.address import MAX_POLL_SECONDS, SqsAddress
from fairtrial.mailbox.sqs.batches import RequestBatcher
from fairtrial.mailbox.sqs.errors import FAILURES, translated

_CONNECTIONS: Final = 64
UNIT: Final = 64 * 1024
"""SQS bills every 64 KB of a request as one request."""

_BILLED_BY_SIZE: Final = ("receive_message", "send_message_batch")

type SqsSource = SqsConnection | SqsAddress | str
"""A connection, or the address to connect to."""


@functools.cache
def _loader() -> Loader:
    """Return the reader of the service descriptions, which keeps them: reading them takes a client most of its time."""
    return create_loader()


def _with_loader(session: Any) -> Any:
    session.register_component("data_loader", _loader())
    return session


class SqsConnection(ServerConnection):
    """The clients of one process for the queues at one address, shared by all its mailboxes there.

    Credentials come from the AWS credential chain: the environment, the files of the AWS command line, web identity,
    the container or the instance. Long polls have connections of their own. Nothing is retried implicitly: a send
    that raised may have arrived, and only the caller knows whether sending twice is harmless.

    Args:
        address: `sqs://region/prefix?endpoint=...`.
        timeout_seconds: Time limit for connecting and for each answer.
        clock: The clock that decides which leases are lost.

    Attributes:
        requests: The number of requests by operation.
        billed: The same, in units of 64 KB as SQS bills them.
    """

    server = "SQS"

    def __init__(
        self, address: SqsAddress | str, *, timeout_seconds: float = 10.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.address = SqsAddress.parse(address) if isinstance(address, str) else address
        self.clock = clock
        self.requests: Counter[str] = Counter()
        self.billed: Counter[str] = Counter()
        self.batcher = RequestBatcher(self._batch, self.address.linger_seconds)
        self._timeout = timeout_seconds
        self._session = _with_loader(get_session())
        self._stack = AsyncExitStack()
        self._clients: dict[str, asyncio.Task[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._blocking: Any = None

    @classmethod
    def of(cls, source: SqsSource) -> SqsConnection:
        """Return the connection, or a new one to an address."""
        return source if isinstance(source, SqsConnection) else cls(source)

    def __repr__(self) -> str:
        return f"SqsConnection({self.address})"

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Call SQS, such as `get_queue_url`.

        Raises:
            ClientError, BotoCoreError, OSError: not yet translated.
        """
        return await self._call("commands", operation, arguments)

    async def receive(self, **arguments: Any) -> list[dict[str, Any]]:
        """Receive messages; may wait for `WaitTimeSeconds`."""
        answer = await self._call("polls", "receive_message", arguments)
        messages: list[dict[str, Any]] = answer.get("Messages") or []
        self._bill("receive_message", sum(len(message["Body"]) for message in messages))
        return messages

    async def call_s3(self, operation: str, **arguments: Any) -> Any:
        """Call S3, such as `put_object`."""
        return await self._call("s3", operation, arguments)

    def call_blocking(self, operation: str, **arguments: Any) -> Any:
        """Call SQS from any thread.

        Raises:
            MailboxError: the call failed.
        """
        with self._lock:
            if self._closed:
                raise MailboxClosedError("the connection to SQS is closed")
            try:
                if self._blocking is None:
                    session = _with_loader(get_blocking_session())
                    self._blocking = session.create_client("sqs", **self._options(Config, self._timeout))
                self.requests[operation] += 1
                self.billed[operation] += 1
                return getattr(self._blocking, operation)(**arguments)
            except FAILURES as error:
                raise translated(error, "renewing leases") from None

    async def close(self) -> None:
        """Send pending operations, then close all connections."""
        if self._closed:
            return
        await self.batcher.close()
        self._closed = True
        await asyncio.gather(*self._clients.values(), return_exceptions=True)
        await self._stack.aclose()
        with self._lock:
            if self._blocking is not None:
                self._blocking.close()
                self._blocking = None

    async def _call(self, client: str, operation: str, arguments: dict[str, Any]) -> Any:
        self.check_loop()
        opened = await self._client(client)
        self.requests[operation] += 1
        if operation not in _BILLED_BY_SIZE:
            self.billed[operation] += 1
        return await getattr(opened, operation)(**arguments)

    async def _batch(self, operation: str, url: str, entries: list[dict[str, Any]], size: int) -> Any:
        if operation in _BILLED_BY_SIZE:
            self._bill(operation, size)
        return await self.call(operation, QueueUrl=url, Entries=entries)

    def _bill(self, operation: str, size: int) -> None:
        self.billed[operation] += max(1, -(-size // UNIT))

    async def _client(self, purpose: str) -> Any:
        if purpose not in self._clients:
            self._clients[purpose] = asyncio.ensure_future(self._open(purpose))
        try:
            return await asyncio.shield(self._clients[purpose])
        except FAILURES:
            self._clients.pop(purpose, None)  # Such as a missing region of S3: the next call tries again.
            raise

    async def _open(self, purpose: str) -> Any:
        timeout = self._timeout + (MAX_POLL_SECONDS if purpose == "polls" else 0)
        options = self._options(AioConfig, timeout)
        service = "s3" if purpose == "s3" else "sqs"
        return await self._stack.enter_async_context(self._session.create_client(service, **options))

    def _options(self, kind: Any, timeout: float) -> dict[str, Any]:
        config = kind(
            connect_timeout=self._timeout,
            read_timeout=timeout,
            max_pool_connections=_CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            s3={"addressing_style": "path"} if self.address.endpoint else None,
        )
        options = {"region_name": self.address.region, "endpoint_url": self.address.endpoint, "config": config}
        if (self.address.endpoint or "").startswith("http://"):
            options["verify"] = False  # Without TLS there is nothing to verify, and loading certificates takes 0.2 s.
        return options
