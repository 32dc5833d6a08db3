"""What the adapters over the providers' own SDKs share: clients, keys, errors, the wire form of content.

The SDKs' retries are off, so that our limiter sees every refusal; their aiohttp transport is used, which takes the
least processor time; and their answers are read by us, from the JSON as it came, so that an answer of the wrong shape
is an error here and not an attribute error somewhere else.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import binascii
import concurrent.futures
import importlib.util
import json
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Literal, Protocol, Self, TypedDict

import anyio

from fairtrial.codec import parse_json, to_json
from fairtrial.data.attachment import Attachment, BlobFolder
from fairtrial.errors import (
    BudgetExceededError,
    CodecError,
    ConfigurationError,
    InvalidCallError,
    MalformedReplyError,
    MissingExtraError,
    ModelAuthError,
    ModelError,
    ModelRefusedError,
    ModelUnavailableError,
    RateLimitedError,
)
from fairtrial.frozen import EMPTY
from fairtrial.models.base import BaseAdapter
from fairtrial.models.budget import Budget, SpendingLog
from fairtrial.models.cache import ResponseCache
from fairtrial.models.limiter import Limiter, shared_limiter
from fairtrial.models.pricing import Prices, is_known
from fairtrial.models.reply import ModelCall, ModelReply
from fairtrial.models.retry import RetryPolicy
from fairtrial.models.schema import OutputSchema
from fairtrial.models.tools import UNPARSED
from fairtrial.offload import on_trio
from fairtrial.session.trajectory import ToolCall
from fairtrial.store.redact import register_guess

type StructuredOutput = Literal["native", "prompt"]
"""How a form is asked for: through the provider's own option, or in words, for servers that lack it."""

_LONGEST_WAIT = 3600.0
_CLOSE_SECONDS = 2.0  # At the end of the process; a loop that is stuck must not keep it.


class Client(Protocol):
    """What an SDK's client can do for us."""

    async def post(self, path: str, **options: Any) -> Any:
        """Send a request."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class _OpenClient:
    """A client of one event loop, closed when it is told to, when its adapter is gone, or when its loop ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client) -> None:
        self.client = client
        self.closed = False
        self.loop = loop
        self._keeper = self._keep()

    async def _keep(self) -> AsyncGenerator[None]:
        _open_clients.add(self)  # Held here, so that it is closed before it is collected.
        try:
            yield
        finally:
            self.closed = True
            _open_clients.discard(self)
            await self.client.close()

    async def start(self) -> None:
        # An event loop that ends closes the generators that were started in it: nobody has to remember to.
        await anext(self._keeper)

    async def aclose(self) -> None:
        await self._keeper.aclose()

    def close_later(self) -> None:
        try:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.aclose()))
        except RuntimeError:
            pass  # The loop has ended, and closed the client with it.


_open_clients: set[_OpenClient] = set()


@atexit.register
def _close_at_exit() -> None:
    """Close the clients of event loops that still run, such as that of `run_sync`, which ends with the process."""
    running = [opened for opened in tuple(_open_clients) if opened.loop.is_running()]
    closing = [asyncio.run_coroutine_threadsafe(opened.aclose(), opened.loop) for opened in running]
    concurrent.futures.wait(closing, timeout=_CLOSE_SECONDS)


def _close_all(clients: dict[asyncio.AbstractEventLoop, _OpenClient]) -> None:
    for client in clients.values():
        client.close_later()


class SdkOptions(TypedDict, total=False):
    """What every adapter over an SDK takes beside the model; `OpenAIAdapter` says what each is."""

    base_url: str | None
    api_key: str | None
    params: Mapping[str, Any]
    timeout_seconds: float
    stream: bool
    structured_output: StructuredOutput
    blobs: BlobFolder | None
    headers: Mapping[str, str]
    prices_of: str | None
    retry: RetryPolicy | None
    limiter: Limiter | None
    cache: ResponseCache | None
    trial_budget: Budget | None
    run_budget: Budget | None
    spending: SpendingLog | None
    prices: Prices | None


class SdkAdapter(BaseAdapter):
    """An adapter over a provider's SDK. Clients are opened when they are needed, one per event loop.

    They are closed by `aclose()` or at the end of an `async with` block, and else when their event loop ends.
    """

    provider: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]
    path: ClassVar[str]
    key_variables: ClassVar[tuple[str, ...]]
    url_variable: ClassVar[str]
    default_url: ClassVar[str]

    wraps_outputs = True
    shares_cache = True

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        params: Mapping[str, Any] = EMPTY,
        timeout_seconds: float = 300.0,
        stream: bool = False,
        structured_output: StructuredOutput = "native",
        blobs: BlobFolder | None = None,
        headers: Mapping[str, str] = EMPTY,
        prices_of: str | None = None,
        retry: RetryPolicy | None = None,
        limiter: Limiter | None = None,
        cache: ResponseCache | None = None,
        trial_budget: Budget | None = None,
        run_budget: Budget | None = None,
        spending: SpendingLog | None = None,
        prices: Prices | None = None,
    ) -> None:
        name = type(self).__name__
        if not model:
            raise ConfigurationError(f"{name} needs the name of a model")
        if importlib.util.find_spec(self.package) is None or importlib.util.find_spec("aiohttp") is None:
            raise MissingExtraError(name, self.extra)
        if timeout_seconds <= 0:
            raise ConfigurationError(f"{name}'s timeout_seconds must be more than 0")
        found = base_url or os.environ.get(self.url_variable) or self.default_url
        url = found.rstrip("/")
        super().__init__(
            name=self.provider,
            model=model,
            base_url=url,
            params=params,
            retry=RetryPolicy() if retry is None else retry,
            limiter=shared_limiter(self.provider, url, model) if limiter is None else limiter,
            cache=cache,
            trial_budget=trial_budget,
            run_budget=run_budget,
            spending=spending,
            prices=prices,
        )
        self._key = api_key if api_key else next(filter(None, map(os.environ.get, self.key_variables)), None)
        if self._key is None:
            raise ModelAuthError(
                f"{name} has no key: set {self.key_variables[0]} or pass api_key=... "
                '(a server that wants none takes any, such as api_key="none")'
            )
        register_guess(self._key, "key", f"the key of the {name} adapter")
        self._timeout = timeout_seconds
        self._stream = stream
        self._structured = structured_output
        self._blobs = blobs
        self._headers = dict(headers)
        # Another address has another price list, if any.
        self._prices_of = prices_of or (self.provider if url == self.default_url else None)
        # Seconds of imports that would stop the event loop, and count against the first trials, are spent here.
        importlib.import_module(self.package)
        is_known(model, self._prices_of, url)
        self._lock = threading.Lock()
        self._clients: dict[asyncio.AbstractEventLoop, _OpenClient] = {}
        # Without a reference to the adapter: it must be able to go.
        weakref.finalize(self, _close_all, self._clients).atexit = False

    @property
    def has_price(self) -> bool:
        """Whether prices were given, or a price list has the model."""
        return bool(super().has_price) or is_known(self._model, self._prices_of, self._base_url)

    # What a provider's adapter says.

    def _make_client(self) -> Client:
        raise NotImplementedError

    def _body(self, call: ModelCall) -> dict[str, Any]:
        """The request in the provider's form."""
        raise NotImplementedError

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        """The answer from the provider's form; any `KeyError`, `TypeError` or the like means it is not one."""
        raise NotImplementedError

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        """The answer, put together from the events of a stream."""
        raise NotImplementedError

    # What they share.

    async def __aenter__(self) -> Self:
        await self._client()
        return self

    async def _client(self) -> Client:
        if on_trio():
            raise ConfigurationError(
                f"{type(self).__name__} works under asyncio: the SDK's aiohttp transport knows no other event loop; "
                "run the suite with asyncio, or give it an adapter of your own"
            )
        loop = asyncio.get_running_loop()
        with self._lock:
            known = self._clients.get(loop)
            if known is not None and not known.closed:
                return known.client
            for gone in [other for other in self._clients if other.is_closed()]:
                del self._clients[gone]
            known = self._clients[loop] = _OpenClient(loop, self._make_client())
        await known.start()
        return known.client

    async def aclose(self) -> None:
        """Close this event loop's connections; they open again when they are needed."""
        known = self._clients.pop(asyncio.get_running_loop(), None)
        if known is not None:
            await known.aclose()

    async def _send(self, call: ModelCall) -> ModelReply:
        client = await self._client()
        body = self._body(call)
        try:
            # In all, not between two bytes: an answer that trickles in is late too.
            with anyio.fail_after(self._timeout):
                tree = await (self._streamed(client, body) if self._stream else self._posted(client, body))
        except TimeoutError:
            raise ModelUnavailableError(f"{self._where()} did not answer within {self._timeout:g} s") from None
        except (ModelError, ConfigurationError):
            raise
        except Exception as error:
            found = self._classified(error)
            if found is None:
                raise
            raise found from error
        return self._shaped(tree)

    def _response_type(self) -> Any:
        """The class for responses of the HTTP library that the SDK is built on, whichever it is."""
        client: type = importlib.import_module(self.package).DefaultAsyncHttpxClient
        library = next(base.__module__ for base in client.__mro__ if base.__name__ == "AsyncClient").partition(".")[0]
        return importlib.import_module(library).Response

    async def _posted(self, client: Client, body: dict[str, Any]) -> Any:
        # The SDK's own door for what its typed methods do not cover: half their processor time.
        response = await client.post(self.path, cast_to=self._response_type(), body=body)
        try:
            return parse_json(response.content)
        except CodecError as error:
            raise MalformedReplyError(f"{self._where()} answered with something that is not JSON: {error}") from None

    async def _streamed(self, client: Client, body: dict[str, Any]) -> Any:
        module = importlib.import_module(self.package)
        options = {"cast_to": object, "stream": True, "stream_cls": module.AsyncStream[object]}
        stream = await client.post(self.path, body={**body, "stream": True}, **options)
        try:
            return await self._gather(stream)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise MalformedReplyError(f"{self._where()} sent a stream of the wrong shape: {error!r}") from None
        finally:
            with anyio.CancelScope(shield=True):
                await stream.close()

    def _shaped(self, tree: Any) -> ModelReply:
        if isinstance(tree, Mapping) and isinstance(problem := tree.get("error"), Mapping):
            raise MalformedReplyError(f"{self._where()} answered with an error and status 200: {problem}")
        try:
            return self._read(tree)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            shown = json.dumps(tree, default=str)[:200]
            raise MalformedReplyError(
                f"{self._where()} answered with JSON of the wrong shape ({type(error).__name__}: {error}): {shown}"
            ) from None

    def _where(self) -> str:
        return f"{self._name} model {self._model!r}"

    def _classified(self, error: Exception) -> ModelError | None:
        """What an exception of the SDK, or of what is below it, means; None if it is none of theirs."""
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            return self._by_status(error, status)
        said = _said(error)
        module = importlib.import_module(self.package)
        refused = _refusal(error)
        if refused is not None:
            return ModelUnavailableError(f"{self._where()} could not be reached at {self._base_url}: {refused}")
        if isinstance(error, module.APITimeoutError):
            return ModelUnavailableError(f"{self._where()} did not answer in time")
        if isinstance(error, module.APIConnectionError):
            cause = error.__cause__ or error
            return ModelUnavailableError(f"{self._where()} could not be reached: {type(cause).__name__}: {cause}")
        if isinstance(error, module.APIError):
            return ModelUnavailableError(f"{self._where()} failed while it was answering: {said}")
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            return MalformedReplyError(f"{self._where()} answered with something that is not JSON: {said}")
        # What the transports let through: half-sent bodies, connections that break.
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx2", "httpx", "aiohttp"):
            return ModelUnavailableError(f"{self._where()} broke off: {type(error).__name__}: {said}")
        return None

    def _by_status(self, error: Any, status: int) -> ModelError:
        said = f"{self._where()}: {_said(error)}"
        codes = _codes(getattr(error, "body", None))
        wait = retry_after(getattr(getattr(error, "response", None), "headers", EMPTY))
        if "content_filter" in codes:
            return ModelRefusedError(said)
        if codes & {"insufficient_quota", "billing_error", "billing_hard_limit_reached"}:
            return BudgetExceededError(said)
        if status == 429:
            return RateLimitedError(said, retry_after=wait)
        if status in (401, 403):
            return ModelAuthError(f"{said}; the key comes from api_key=... or {self.key_variables[0]}")
        # A 200 here is an error event in the middle of a stream.
        if status in (200, 408, 409, 425) or status >= 500:
            return ModelUnavailableError(said, retry_after=wait)
        return InvalidCallError(said)

    def _cache_salt(self) -> Any:
        return self._structured

    def _bytes(self, attachment: Attachment) -> bytes:
        if self._blobs is None:
            raise ConfigurationError(
                f"{type(self).__name__} was given an attachment ({attachment.name or attachment.media_type}) and no "
                "blobs=..., the BlobFolder that holds its bytes"
            )
        return self._blobs.get(attachment)

    def _kept(self, content: bytes, media_type: str) -> Attachment:
        """The reference to bytes a model sent, which are kept if there is a place to keep them."""
        if self._blobs is None:
            return Attachment.of(content, media_type=media_type)
        return self._blobs.put(content, media_type=media_type)

    def _from_data_url(self, url: str) -> str | Attachment:
        """An image a model sent; one that is only linked to stays a link."""
        parts = split_data_url(url)
        if parts is None:
            return url
        media_type, data = parts
        try:
            content = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"damaged data URL: {error}") from None
        return self._kept(content, media_type)


def split_data_url(url: str) -> tuple[str, str] | None:
    """(media type, base64 text) of a data URL; None for any other address."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    media_type = head.removeprefix("data:").partition(";")[0]
    return (media_type if "/" in media_type else "application/octet-stream"), data


def instruction(schema: OutputSchema) -> str:
    """The form of an answer in words, for servers that have no option for it."""
    return (
        "Answer with JSON only, with no text around it, that satisfies this JSON Schema:\n"
        f"{json.dumps(schema.schema, ensure_ascii=False)}"
    )


def tool_call(name: Any, arguments: Any, call_id: Any) -> ToolCall:
    """A call a model asked for. Arguments that are not a JSON object stay as they came, for the model to be told."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments or "{}")
        except CodecError:
            parsed = None
    if not isinstance(name, str):
        raise TypeError("a tool call without a name")
    if not isinstance(parsed, Mapping):
        parsed = {UNPARSED: arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return ToolCall(name, parsed, str(call_id or ""))


def arguments_text(call: ToolCall) -> str:
    """The arguments of a call as text; those that were no JSON go back as they came."""
    unparsed = call.arguments.get(UNPARSED)
    return unparsed if isinstance(unparsed, str) else json.dumps(call.arguments, default=to_json)


def sendable(text: str) -> str:
    """Text that UTF-8 can carry: half a surrogate pair, which models do send, must not end the conversation."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def text_of(value: Any) -> str:
    """A text, or the error that the answer has none where one must be."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text must be")
    return value


def count_of(value: Any) -> int:
    """A count of tokens; whatever is not a number is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def base64_text(content: bytes) -> str:
    """Bytes as base64."""
    return base64.b64encode(content).decode("ascii")


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """How many seconds a provider asked to wait: in milliseconds, seconds or as a date; None if it did not say."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - now()
            except (TypeError, ValueError):
                continue
        if seconds == seconds:  # Not NaN.
            return min(max(seconds, 0.0), _LONGEST_WAIT)
    return None


def _refusal(error: BaseException) -> str | None:
    """Why no connection came about. The SDKs' aiohttp transport takes a refused connection for a timeout."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, TimeoutError):
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause)
        cause = cause.__cause__
    return None


def _said(error: BaseException) -> str:
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping) else body
    message = inner.get("message") if isinstance(inner, Mapping) else None
    status = getattr(error, "status_code", None)
    text = str(message or error)
    return f"{text} (status {status})" if isinstance(status, int) else text


def _codes(body: Any) -> set[str]:
    inner = body.get("error") if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping) else body
    if not isinstance(inner, Mapping):
        return set()
    return {value for key in ("code", "type") if isinstance(value := inner.get(key), str)}
