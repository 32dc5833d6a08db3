"""Connections to SQS: addresses, clients, batches of ten, errors."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import exceptions as theirs
from botocore.config import Config
from botocore.loaders import Loader, create_loader
from botocore.session import get_session as get_blocking_session

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.frozen import first_is
from fairtrial.errors import (
    ConfigurationError,
    LeaseLostError,
    MailboxAccessError,
    MailboxClosedError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
    MessageTooLargeError,
)
from fairtrial.mailbox.batcher import fail
from fairtrial.mailbox.server import ServerConnection

_GONE: Final = ("NonExistentQueue", "QueueDoesNotExist")
_LOST: Final = (
    "ReceiptHandleIsInvalid",
    "MessageNotInflight",
    "InvalidParameterValue",
    "InvalidParameterValueException",
)
_TOO_LARGE: Final = ("BatchRequestTooLong", "MessageTooLong")
_ACCESS: Final = (
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)
_PASSING: Final = (
    "InternalError",
    "InternalFailure",
    "PriorRequestNotComplete",
    "RequestThrottled",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
)
_CREDENTIALS: Final = (
    theirs.NoCredentialsError,
    theirs.PartialCredentialsError,
    theirs.CredentialRetrievalError,
    theirs.NoAuthTokenError,
    theirs.TokenRetrievalError,
)
FAILURES: Final = (theirs.ClientError, theirs.BotoCoreError, OSError)
"""What a call of a client may raise."""


def code_of(error: BaseException) -> str:
    """Return the error code of the server, without its namespace; empty if the error is not the server's."""
    if not isinstance(error, theirs.ClientError):
        return ""
    return _plain(str(error.response.get("Error", {}).get("Code", "")))


def is_gone(error: BaseException) -> bool:
    """Return whether the error means that the queue does not exist."""
    return code_of(error) in _GONE


def translated(error: BaseException, doing: str) -> MailboxError:
    """Return an error of a call as a `MailboxError`. The texts of botocore contain no secret."""
    if isinstance(error, MailboxError):
        return error
    if isinstance(error, _CREDENTIALS):
        return MailboxAccessError(f"{doing}: {error}; configure credentials as for any AWS client")
    if not isinstance(error, theirs.ClientError):
        if isinstance(error, theirs.ParamValidationError):
            return MailboxError(f"{doing}: {error}")
        return MailboxConnectionError(f"{doing}: {str(error) or type(error).__name__}")
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    details = error.response.get("Error", {})
    return _by_code(code_of(error), str(details.get("Message", "")), doing, passing=status >= 500 or status == 429)


def entry_error(entry: Mapping[str, Any], doing: str) -> MailboxError:
    """Return the error of one entry of a batch, whose other entries may have succeeded."""
    code, text = _plain(str(entry.get("Code", ""))), str(entry.get("Message", ""))
    return _by_code(code, text, doing, passing=not entry.get("SenderFault", False))


def is_lost_lease(entry: Mapping[str, Any]) -> bool:
    """Return whether the error of an entry means that its receipt is no longer valid."""
    return _plain(str(entry.get("Code", ""))) in _LOST


def _by_code(code: str, text: str, doing: str, *, passing: bool) -> MailboxError:
    message = f"{doing}: {code}: {text}" if text else f"{doing}: {code}"
    if code in _ACCESS:
        return MailboxAccessError(message)
    if code == "OverLimit":
        return MailboxFullError(f"{message}\nspread the requests over more queues: shards=... in the address")
    if code in _TOO_LARGE:
        return MessageTooLargeError(message)
    if code in _LOST[:2]:
        return LeaseLostError(message)
    return (MailboxConnectionError if passing or code in _PASSING else MailboxError)(message)


def _plain(code: str) -> str:
    return code.rpartition(".")[2].rpartition("#")[2]


MAX_POLL_SECONDS: Final = 20
MAX_SHARDS: Final = 64
_MAX_LINGER: Final = 5
_FORM: Final = "sqs://region/prefix[?endpoint=URL&bucket=NAME&shards=NUMBER&poll=SECONDS&linger=SECONDS&lag=SECONDS]"
_REGION: Final = re.compile(r"[a-z]{2,}(-[a-z0-9]+)+")
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,19}")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@first_is(str)
@dataclass(frozen=True, slots=True)
class SqsAddress:
    """Where the queues of a fleet are. Credentials are not part of it: they come from the AWS credential chain.

    Attributes:
        region: The AWS region, such as `eu-central-1`.
        prefix: The names of all queues begin with this, so that permissions can be limited to them.
        endpoint: The URL of another server, such as an emulator or a VPC endpoint.
        bucket: The S3 bucket for large bodies; without one, they are refused.
        shards: The number of queues that requests are spread over; one queue has at most 120,000 messages in flight.
        poll_seconds: The longest single long poll: shorter ones cost more, longer ones delay the end of a worker.
        linger_seconds: How long a request that is not full waits for more messages: SQS bills requests, and up to ten
            messages share one.
        lag_seconds: How late the counts of SQS may be: for this long, an empty queue does not mean that requests were
            lost.
    """

    region: str
    prefix: str = "fairtrial"
    endpoint: str | None = None
    bucket: str | None = None
    shards: int = 1
    poll_seconds: int = 10
    linger_seconds: float = 0.2
    lag_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not _REGION.fullmatch(self.region):
            raise ConfigurationError(f"the region of an SQS address must be like eu-central-1 (got {self.region!r})")
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigurationError(
                f"the prefix of an SQS address must have 1 to 20 letters, digits, _ or - (got {self.prefix!r})"
            )
        if self.bucket is not None and not _BUCKET.fullmatch(self.bucket):
            raise ConfigurationError(f"invalid name of an S3 bucket: {self.bucket!r}")
        if not 1 <= self.shards <= MAX_SHARDS:
            raise ConfigurationError(f"shards must be from 1 to {MAX_SHARDS} (got {self.shards})")
        if not 1 <= self.poll_seconds <= MAX_POLL_SECONDS:
            raise ConfigurationError(f"poll must be from 1 to {MAX_POLL_SECONDS} seconds (got {self.poll_seconds})")
        if not 0 <= self.linger_seconds <= _MAX_LINGER:
            raise ConfigurationError(f"linger must be from 0 to {_MAX_LINGER} seconds (got {self.linger_seconds})")
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the parts of a URL.

        Raises:
            ConfigurationError: the URL is invalid.
        """
        parts = urlsplit(url)
        if parts.scheme != "sqs" or "@" in parts.netloc:
            # The URL is not repeated: someone may have put credentials into it.
            raise ConfigurationError(
                f"invalid SQS address: write {_FORM}, without credentials: they come from the AWS credential chain"
            )
        try:
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError:
            raise ConfigurationError(f"invalid SQS address: write {_FORM}") from None
        endpoint, bucket = options.pop("endpoint", None), options.pop("bucket", None)
        shards, poll = int(_number(options, "shards", "1")), int(_number(options, "poll", "10"))
        linger = float(_number(options, "linger", "0.2", form=r"[0-9]{1,2}(\.[0-9]{1,3})?"))
        lag = float(_number(options, "lag", "60"))
        if options:
            raise ConfigurationError(f"unknown option of an SQS address: {sorted(options)[0]!r}; write {_FORM}")
        prefix = parts.path.strip("/") or "fairtrial"
        return cls(parts.netloc, prefix, endpoint or None, bucket or None, shards, poll, linger, lag)

    def __str__(self) -> str:
        return f"sqs://{self.region}/{self.prefix}"


def _number(options: dict[str, str], name: str, default: str, form: str = r"[0-9]{1,4}") -> str:
    text = options.pop(name, default)
    if not re.fullmatch(form, text):
        raise ConfigurationError(f"{name} of an SQS address must be a number (got {text!r})")
    return text


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise ConfigurationError("endpoint of an SQS address must be like http://127.0.0.1:4566, without credentials")


MAX_ENTRIES: Final = 10
MAX_BYTES: Final = 1024 * 1024
_PARALLEL: Final = 16
_DOING: Final = {
    "send_message_batch": "sending",
    "delete_message_batch": "acknowledging",
    "change_message_visibility_batch": "renewing leases",
}

type Run = Callable[[str, str, list[dict[str, Any]], int], Awaitable[Any]]


@dataclass(slots=True)
class _Entry:
    content: dict[str, Any]
    size: int
    future: asyncio.Future[dict[str, Any] | None]


@dataclass(slots=True)
class _Lane:
    """The operations of one kind on one queue."""

    waiting: deque[_Entry] = field(default_factory=deque)
    under_way: int = 0
    timer: asyncio.Handle | None = None
    due: bool = False

    def take(self) -> list[_Entry]:
        """Return the entries of the next request, or nothing if it should wait for more entries."""
        count = size = 0
        for entry in self.waiting:
            if count == MAX_ENTRIES or (count and size + entry.size > MAX_BYTES):
                break
            count += 1
            size += entry.size
        full = count == MAX_ENTRIES or count < len(self.waiting)
        if not count or self.under_way >= _PARALLEL or (not full and (self.under_way or not self.due)):
            return []
        self.due = self.due and full  # The entries that stay were added later, or leave with the next request.
        return [self.waiting.popleft() for _ in range(count)]


class RequestBatcher:
    """Collects operations and sends them in batches.

    Args:
        run: Sends one batch: operation, queue, entries and their total size.
        linger_seconds: How long a request that is not full waits for more entries.
    """

    def __init__(self, run: Run, linger_seconds: float) -> None:
        self._run = run
        self._linger = linger_seconds
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def submit(
        self, operation: str, url: str, content: dict[str, Any], size: int = 0
    ) -> asyncio.Future[dict[str, Any] | None]:
        """Add one operation to the next batch.

        The future gets None, or the failure that SQS reports for this entry alone, or the error of the whole request.
        """
        if self._closed:
            raise MailboxClosedError("the connection to SQS is closed")
        loop = asyncio.get_running_loop()
        entry = _Entry(content, size, loop.create_future())
        lane = self._lanes.setdefault((operation, url), _Lane())
        lane.waiting.append(entry)
        if lane.timer is None:
            # Without lingering: after all operations of this iteration of the event loop were added.
            lane.timer = loop.call_later(self._linger, self._end_linger, operation, url, lane)
        if len(lane.waiting) >= MAX_ENTRIES:
            self._flush(operation, url, lane)
        return entry.future

    async def close(self) -> None:
        """Send the pending operations, then refuse more."""
        self._closed = True
        for (operation, url), lane in list(self._lanes.items()):
            self._end_linger(operation, url, lane)
        while self._tasks or any(lane.waiting for lane in self._lanes.values()):
            await asyncio.sleep(0)
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _end_linger(self, operation: str, url: str, lane: _Lane) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
        lane.timer = None
        lane.due = True
        self._flush(operation, url, lane)

    def _flush(self, operation: str, url: str, lane: _Lane) -> None:
        while entries := lane.take():
            lane.under_way += 1
            task = asyncio.ensure_future(self._send(operation, url, lane, entries))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not lane.under_way and not lane.waiting and lane.timer is None:
            self._lanes.pop((operation, url), None)

    async def _send(self, operation: str, url: str, lane: _Lane, entries: list[_Entry]) -> None:
        contents = [{"Id": str(at), **entry.content} for at, entry in enumerate(entries)]
        try:
            answer = await self._run(operation, url, contents, sum(entry.size for entry in entries))
            self._deliver(operation, entries, answer)
        except BaseException as error:  # Waiting callers must receive any error.
            failure = error
            if isinstance(error, asyncio.CancelledError):
                failure = MailboxClosedError("the connection to SQS is being closed")
            elif not isinstance(error, FAILURES):
                failure = translated(error, _DOING[operation])
            for entry in entries:
                fail(entry.future, failure)
            if not isinstance(error, Exception):
                raise
        finally:
            lane.under_way -= 1
            self._flush(operation, url, lane)

    def _deliver(self, operation: str, entries: list[_Entry], answer: Any) -> None:
        failed = {str(failure["Id"]): failure for failure in answer.get("Failed") or ()}
        succeeded = {str(success["Id"]) for success in answer.get("Successful") or ()}
        for at, entry in enumerate(entries):
            if entry.future.done():
                continue
            if str(at) in succeeded or str(at) in failed:
                entry.future.set_result(failed.get(str(at)))
            else:
                fail(entry.future, MailboxConnectionError(f"{_DOING[operation]}: SQS did not confirm an entry"))


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
    required = "an SQS mailbox requires a connection, or an address: sqs://region/prefix"

    def __init__(
        self, address: SqsAddress | str, *, timeout_seconds: float = 10.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(address)
        self.address = SqsAddress.parse(address) if isinstance(address, str) else address
        self.clock = clock
        self.requests: Counter[str] = Counter()
        self.billed: Counter[str] = Counter()
        self.batcher = RequestBatcher(self._batch, self.address.linger_seconds)
        self._timeout = timeout_seconds
        self._session = _with_loader(get_session())
        self._stack = AsyncExitStack()
        self._clients: dict[str, asyncio.Task[Any]] = {}
        self._lock = threading.Lock()
        self._blocking: Any = None

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
