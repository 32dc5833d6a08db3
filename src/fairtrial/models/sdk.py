"""The common part of adapters that use the SDK of a provider: clients, keys, errors and the encoding of content.

The retries of the SDKs are turned off, so that our limiter sees every refusal. Their aiohttp transport is used, which
needs the least CPU time. Answers are parsed here from the raw JSON, so that an answer of the wrong shape raises a
`MalformedReplyError` instead of an attribute error elsewhere.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import binascii
import concurrent.futures
import errno
import importlib.util
import inspect
import json
import os
import re
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Literal, Protocol, Self, TypedDict

import anyio
import anyio.to_thread

from fairtrial.codec import parse_json, to_json
from fairtrial.data.attachment import Attachment, BlobFolder
from fairtrial.errors import (
    BudgetExceededError,
    CodecError,
    ConfigurationError,
    ContextLengthError,
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
from fairtrial.models.adapter import AnswerT
from fairtrial.models.base import BaseAdapter
from fairtrial.models.budget import Budget, SpendingLog
from fairtrial.models.cache import ResponseCache
from fairtrial.models.families import family
from fairtrial.models.limiter import Limiter, shared_limiter
from fairtrial.models.pricing import NO_EXTRAS, Prices, UsageExtras, is_known
from fairtrial.models.reply import ModelCall, ModelReply
from fairtrial.models.retry import RetryPolicy
from fairtrial.models.schema import OutputSchema
from fairtrial.models.tools import UNPARSED
from fairtrial.offload import on_trio
from fairtrial.session.endings import ending_of
from fairtrial.session.events import TokenUsage
from fairtrial.session.trajectory import ChatMessage, Echo, ToolCall
from fairtrial.store.redact import register_guess

type StructuredOutput = Literal["native", "prompt"]
"""How typed outputs are requested: with the provider's option, or with an instruction for servers without one."""

type ApiKey = str | Callable[[], str | Awaitable[str]]
"""A key, or a function that returns the present one, for keys that are renewed; it is called before each request."""

_LONGEST_WAIT = 3600.0
# Errors of connections that were open: the request may have been received.
_BROKEN = frozenset({errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})
_CONTEXT_FULL = re.compile(r"context[ _](length|window|size|limit)|(prompt|input) is too long|input token count", re.I)
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")
# The headers of providers with the remaining quota and the time until it is reset.
_RESETS = (
    ("x-ratelimit-remaining-{}", "x-ratelimit-reset-{}", ("requests", "tokens")),
    ("anthropic-ratelimit-{}-remaining", "anthropic-ratelimit-{}-reset", ("requests", "input-tokens", "output-tokens")),
)
_SECRET_HEADERS = re.compile(r"authorization|api-?key|token|cookie|secret", re.I)
_MERGED = ("tools", "include")  # Lists that parameters add to instead of replacing them.
_RENEWED = "renewed-before-each-request"  # The key that a client is made with if a function returns it.
_CLOSE_SECONDS = 2.0  # The time limit at the end of the process, which a blocked event loop must not delay.


class Client(Protocol):
    """The methods of an SDK's client that are used."""

    async def post(self, path: str, **options: Any) -> Any:
        """Send a request."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class _OpenClient:
    """A client of one event loop. It is closed by `aclose`, or when its adapter is deleted or its event loop ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client) -> None:
        self.client = client
        self.closed = False
        self.loop = loop
        self._keeper = self._keep()

    async def _keep(self) -> AsyncGenerator[None]:
        _open_clients.add(self)  # A reference, so that it is closed before it is garbage collected.
        try:
            yield
        finally:
            self.closed = True
            _open_clients.discard(self)
            await self.client.close()

    async def start(self) -> None:
        # An event loop that ends closes the async generators that were started in it, and so this client.
        await anext(self._keeper)

    async def aclose(self) -> None:
        await self._keeper.aclose()

    def close_later(self) -> None:
        try:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.aclose()))
        except RuntimeError:
            pass  # The loop has ended and has closed the client.


_open_clients: set[_OpenClient] = set()
own_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""The clients of adapters, which record their calls themselves."""


@atexit.register
def _close_at_exit() -> None:
    """Close the clients of running event loops, such as that of `run_sync`, which runs until the process ends."""
    running = [opened for opened in tuple(_open_clients) if opened.loop.is_running()]
    closing = [asyncio.run_coroutine_threadsafe(opened.aclose(), opened.loop) for opened in running]
    concurrent.futures.wait(closing, timeout=_CLOSE_SECONDS)


def _close_all(clients: dict[asyncio.AbstractEventLoop, _OpenClient]) -> None:
    for client in clients.values():
        client.close_later()


class SdkOptions(TypedDict, total=False):
    """The options of all adapters with an SDK; `OpenAIAdapter` documents them."""

    base_url: str | None
    api_key: ApiKey | None
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


class SdkAdapter(BaseAdapter[AnswerT]):
    """The base class of adapters that use the SDK of a provider. Clients are opened on first use, one per event loop.

    They are closed by `aclose()`, at the end of an `async with` block, or when their event loop ends.
    """

    provider: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]
    path: str
    embedding_path = ""
    key_variables: ClassVar[tuple[str, ...]]
    url_variable: ClassVar[str]
    default_url: ClassVar[str]
    default_key: ClassVar[str | None] = None  # The key if none is set, for servers without keys.
    price_list: ClassVar[str | None] = None  # The price list for `default_url`; by default the provider's.

    asyncio_only: ClassVar[bool] = True
    wraps_outputs = True
    shares_cache = True

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: ApiKey | None = None,
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
            raise ConfigurationError(f"the model of {name} must be a name that is not empty (got {model!r})")
        if importlib.util.find_spec(self.package) is None or importlib.util.find_spec("aiohttp") is None:
            raise MissingExtraError(name, self.extra)
        if timeout_seconds <= 0:
            raise ConfigurationError(f"the timeout_seconds of {name} must be more than 0 (got {timeout_seconds})")
        url = (base_url or self._url_from_environment() or self.default_url).rstrip("/")
        if not url:
            raise ConfigurationError(f"{name} needs an address: set {self.url_variable} or pass base_url=...")
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
        found_keys = filter(None, map(os.environ.get, self.key_variables))
        self._renewed_key = api_key if callable(api_key) else None
        given = self._renewed_key and _RENEWED
        self._key = given or (None if callable(api_key) else api_key) or next(found_keys, self.default_key)
        if self._key is None:
            raise ModelAuthError(
                f"{name} has no key: set {self.key_variables[0]} or pass api_key=... "
                '(for a server without keys, pass any text, such as api_key="none")'
            )
        if self._key not in (self.default_key, _RENEWED):
            register_guess(self._key, "key", f"the key of the {name} adapter")
        self._timeout = timeout_seconds
        self._stream = stream
        self._structured = structured_output
        self._blobs = blobs
        self._headers = dict(headers)
        # The provider's price list does not apply to other addresses.
        own = url == self.default_url
        self._prices_of = prices_of or ((self.price_list or self.provider) if own else None)
        self._family = family(model)
        self._echo_provider = self.provider if own else f"{self.provider} {url}"
        # Imported here, because the import takes seconds, which would block the event loop during the first trials.
        importlib.import_module(self.package)
        is_known(model, self._prices_of, url)
        self._lock = threading.Lock()
        self._clients: dict[asyncio.AbstractEventLoop, _OpenClient] = {}
        # Without a reference to the adapter, so that it can be garbage collected.
        weakref.finalize(self, _close_all, self._clients).atexit = False

    @property
    def has_price(self) -> bool:
        """Whether prices were given, or a price list has the model."""
        return bool(super().has_price) or is_known(self._model, self._prices_of, self._base_url)

    @classmethod
    def _url_from_environment(cls) -> str | None:
        return os.environ.get(cls.url_variable)

    # Methods that the adapter of each provider implements.

    def _make_client(self) -> Client:
        raise NotImplementedError

    def _body(self, call: ModelCall) -> dict[str, Any]:
        """Return the body of the request."""
        raise NotImplementedError

    def _read(self, tree: Mapping[str, Any]) -> ModelReply:
        """Parse an answer; a `KeyError`, `TypeError` or similar error means that its shape is wrong."""
        raise NotImplementedError

    def _read_vectors(self, tree: Mapping[str, Any]) -> ModelReply:
        """Parse an answer with embeddings; the text of the reply is the vectors as JSON."""
        raise NotImplementedError

    def _extras(self, tree: Mapping[str, Any]) -> UsageExtras:
        """Return the parts of an answer's usage that have prices of their own."""
        return NO_EXTRAS

    def _usage(self, usage: Any, model: str, extras: UsageExtras = NO_EXTRAS) -> TokenUsage | None:
        """Return the usage of an answer, with its cost if known; None if the provider did not report it."""
        raise NotImplementedError

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        """Assemble the answer from the events of a stream."""
        raise NotImplementedError

    # Shared methods.

    async def __aenter__(self) -> Self:
        await self._client()
        return self

    async def _client(self) -> Client:
        if on_trio():
            raise ConfigurationError(
                f"{type(self).__name__} needs asyncio, because the SDK's aiohttp transport supports no other event "
                "loop; run the suite with asyncio, or use an adapter of your own"
            )
        loop = asyncio.get_running_loop()
        with self._lock:
            known = self._clients.get(loop)
            if known is not None and not known.closed:
                return known.client
            for gone in [other for other in self._clients if other.is_closed()]:
                del self._clients[gone]
            client = self._make_client()
            own_clients.add(client)
            known = self._clients[loop] = _OpenClient(loop, client)
        await known.start()
        return known.client

    async def aclose(self) -> None:
        """Close the connections of this event loop; they are reopened on next use."""
        known = self._clients.pop(asyncio.get_running_loop(), None)
        if known is not None:
            await known.aclose()

    async def _send(self, call: ModelCall) -> ModelReply:
        client = await self._client()
        body = self._body(call)
        try:
            # The time limit applies to the whole answer, unlike that of the SDK, which applies between two reads.
            with anyio.fail_after(self._timeout):
                if self._stream and not call.embeds:
                    tree = await self._streamed(client, body)
                else:
                    tree = await self._posted(client, body, self.embedding_path if call.embeds else self.path)
        except TimeoutError:
            raise ModelUnavailableError(
                f"{self._where()} did not answer within {self._timeout:g} s", timed_out=True
            ) from None
        except (ModelError, ConfigurationError):
            raise
        except Exception as error:
            found = self._classified(error)
            if found is None:
                raise
            raise found from error
        reply = self._shaped(tree, self._read_vectors if call.embeds else self._read)
        return reply if reply.message.content != () else self._without_content(call, reply)

    def _without_content(self, call: ModelCall, reply: ModelReply) -> ModelReply:
        """Refuse an answer without content, unless its ending says why it has none."""
        # After the results of tools, it means that the model has nothing to add.
        after_tools = bool(call.messages) and call.messages[-1].role == "tool"
        if not after_tools and ending_of(reply.finish_reason) in ("complete", "unknown"):
            raise MalformedReplyError(f"{self._where()} answered without content")
        return replace(reply, message=replace(reply.message, content=""))

    async def _current_key(self) -> str:
        """Return the key; from the function that renews it, if it is one."""
        if self._renewed_key is None:
            return self._key or ""
        # In a thread, because functions that renew a key, such as those of azure-identity, may send requests.
        waits = inspect.iscoroutinefunction(self._renewed_key)
        found: Any = self._renewed_key() if waits else await anyio.to_thread.run_sync(self._renewed_key)
        key = await found if inspect.isawaitable(found) else found
        if not isinstance(key, str) or not key:
            raise ModelAuthError(f"api_key of {self._where()} must return a key (got {type(key).__name__})")
        register_guess(key, "key", f"the key of the {type(self).__name__} adapter")
        return key

    def _key_headers(self, key: str) -> dict[str, str]:
        """Return the header with a renewed key."""
        return {"Authorization": f"Bearer {key}"}

    async def _request_options(self) -> dict[str, Any]:
        """Return the options of a request of the SDK: the present key, if it is renewed."""
        if self._renewed_key is None:
            return {}
        return {"options": {"headers": self._key_headers(await self._current_key())}}

    def _response_type(self) -> Any:
        """Return the response class of the HTTP library that the SDK uses."""
        client: type = importlib.import_module(self.package).DefaultAsyncHttpxClient
        library = next(base.__module__ for base in client.__mro__ if base.__name__ == "AsyncClient").partition(".")[0]
        return importlib.import_module(library).Response

    async def _posted(self, client: Client, body: dict[str, Any], path: str) -> Any:
        # The SDK's generic method, which takes half the CPU time of its typed methods.
        options = await self._request_options()
        response = await client.post(path, cast_to=self._response_type(), body=body, **options)
        try:
            return parse_json(response.content)
        except CodecError as error:
            raise MalformedReplyError(f"{self._where()} sent an answer that is not JSON: {error}") from None

    async def _streamed(self, client: Client, body: dict[str, Any]) -> Any:
        module = importlib.import_module(self.package)
        options: dict[str, Any] = {"cast_to": object, "stream": True, "stream_cls": module.AsyncStream[object]}
        options |= await self._request_options()
        stream = await client.post(self.path, body={**body, "stream": True}, **options)
        try:
            return await self._gather(stream)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise MalformedReplyError(f"{self._where()} sent a stream of the wrong shape: {error!r}") from None
        finally:
            with anyio.CancelScope(shield=True):
                await stream.close()

    def _shaped(self, tree: Any, read: Callable[[Mapping[str, Any]], ModelReply]) -> ModelReply:
        if isinstance(tree, Mapping) and isinstance(problem := tree.get("error"), Mapping):
            raise self._by_code(problem) or MalformedReplyError(
                f"{self._where()} answered with an error and status 200: {problem}"
            )
        try:
            return read(tree)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            shown = json.dumps(tree, default=str)[:200]
            raise MalformedReplyError(
                f"{self._where()} answered with JSON of the wrong shape ({type(error).__name__}: {error}): {shown}"
            ) from None

    def _where(self) -> str:
        return f"{self._name} model {self._model!r}"

    def _classified(self, error: Exception) -> ModelError | None:
        """Return the `ModelError` for an exception of the SDK or its libraries; None for any other exception."""
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            return self._by_status(error, status)
        said = _said(error)
        module = importlib.import_module(self.package)
        if (unreachable := self._unreachable(error)) is not None:
            return unreachable
        if isinstance(error, module.APITimeoutError):
            return ModelUnavailableError(f"{self._where()} did not answer in time", timed_out=True)
        if isinstance(error, module.APIConnectionError):
            cause = error.__cause__ or error
            return ModelUnavailableError(
                f"{self._where()} could not be reached: {type(cause).__name__}: {cause}", sent=True
            )
        if isinstance(error, module.APIError):
            found = self._by_code(getattr(error, "body", None))
            return found or ModelUnavailableError(f"{self._where()} failed while it was answering: {said}", sent=True)
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            return MalformedReplyError(f"{self._where()} sent an answer that is not JSON: {said}")
        # Errors that the SDKs do not convert: incomplete bodies and broken connections.
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx2", "httpx", "aiohttp"):
            return ModelUnavailableError(
                f"the connection to {self._where()} failed: {type(error).__name__}: {said}", sent=True
            )
        return None

    def _unreachable(self, error: BaseException) -> ModelUnavailableError | None:
        """Return the error for a connection that failed; None if it did not.

        The SDKs' aiohttp transport reports that as a timeout.
        """
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, TimeoutError):
                said = os.strerror(cause.errno) if cause.errno > 0 else str(cause)
                return ModelUnavailableError(
                    f"{self._where()} could not be reached at {self._base_url}: {said}", sent=cause.errno in _BROKEN
                )
            cause = cause.__cause__
        return None

    def _by_code(self, problem: Any) -> ModelError | None:
        """Return the error for an error object in an answer with status 200; None if its code says nothing."""
        code = problem.get("code") if isinstance(problem, Mapping) else None
        said = f"{self._where()} failed while it was answering: {_said_in(problem)}"
        if isinstance(code, int):  # OpenRouter's are HTTP statuses.
            code = {429: "rate_limit_exceeded", 402: "insufficient_quota", 400: "invalid_request"}.get(code, "failed")
        if not isinstance(code, str):
            return None
        if code == "context_length_exceeded" or _CONTEXT_FULL.search(said):
            return ContextLengthError(said)
        if code == "rate_limit_exceeded":
            return RateLimitedError(said)
        if code in _QUOTA:
            return BudgetExceededError(said)
        if code == "content_filter" or (code == "invalid_prompt" and re.search(r"usage polic|flagged", said)):
            return ModelRefusedError(said)
        if code.startswith(("invalid_", "image_", "unsupported_")):
            return InvalidCallError(said)
        return ModelUnavailableError(said, sent=True)

    def _by_status(self, error: Any, status: int) -> ModelError:
        said = f"{self._where()}: {_said(error)}"
        codes = _codes(getattr(error, "body", None))
        wait = retry_after(getattr(getattr(error, "response", None), "headers", EMPTY))
        if wait is None:
            wait = _delay_in(getattr(error, "body", None))
        if "content_filter" in codes:
            return ModelRefusedError(said)
        if codes & _QUOTA:
            return BudgetExceededError(said)
        if status == 429:
            return RateLimitedError(said, retry_after=wait)
        if status in (401, 403):
            return ModelAuthError(f"{said}; the key comes from api_key=... or {self.key_variables[0]}")
        # Status 200 means an error event in a stream.
        if status in (200, 408, 409, 425) or status >= 500:
            found = self._by_code(getattr(error, "body", None)) if status == 200 else None
            return found or ModelUnavailableError(said, retry_after=wait, sent=status == 200)
        if "context_length_exceeded" in codes or (status in (400, 422) and _CONTEXT_FULL.search(said)):
            return ContextLengthError(said)
        return InvalidCallError(said + _remedy(said))

    def _cache_salt(self) -> Any:
        return [self._structured, self._sent_headers()]

    def _sent_headers(self) -> dict[str, str]:
        """Return the given headers that can change an answer."""
        named = {name.lower(): str(value) for name, value in self._headers.items()}
        return {name: named[name] for name in sorted(named) if not _SECRET_HEADERS.search(name)}

    def _echo(self, data: Any) -> Echo:
        """Wrap data that must be sent back to the provider with a message or a tool call."""
        return Echo(self._echo_provider, self._family, sendable(json.dumps(data, ensure_ascii=False)))

    def _echoed(self, echo: Echo | None) -> Any:
        """Return the data to send back; None if there is none, or if it came from another provider or model family."""
        if echo is None or (echo.provider, echo.family) != (self._echo_provider, self._family):
            return None
        return json.loads(echo.data)

    def _bytes(self, attachment: Attachment) -> bytes:
        if self._blobs is None:
            raise ConfigurationError(
                f"{type(self).__name__} must have blobs=..., the BlobFolder with the bytes of attachments (got the "
                f"attachment {attachment.name or attachment.media_type})"
            )
        return self._blobs.get(attachment)

    def _kept(self, content: bytes, media_type: str) -> Attachment:
        """Return a reference to bytes from a model, which are stored if there is a blob folder."""
        if self._blobs is None:
            return Attachment.of(content, media_type=media_type)
        return self._blobs.put(content, media_type=media_type)

    def _from_data_url(self, url: str) -> str | Attachment:
        """Return an image from a model; a link to an image stays text."""
        parts = split_data_url(url)
        if parts is None:
            return url
        media_type, data = parts
        try:
            content = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"damaged data URL: {error}") from None
        return self._kept(content, media_type)


def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with its parameters: lists of tools and of what to include are joined."""
    check_one_answer(params)
    merged = {**body, **params}
    for name in _MERGED:
        own, given = body.get(name), params.get(name)
        if isinstance(own, list) and isinstance(given, list | tuple):
            merged[name] = [*own, *(item for item in given if item not in own)]
    return merged


def check_one_answer(params: Mapping[str, Any]) -> None:
    """Refuse parameters that ask for several answers, of which all but one would be paid for and lost."""
    for name in ("n", "candidateCount"):
        if params.get(name) not in (None, 1):
            raise InvalidCallError(
                f"{name} must be 1 (got {params[name]!r}): a call has one answer\n"
                "ask for several answers with EvalConfig(repeats=...): each is a trial of its own"
            )


def split_data_url(url: str) -> tuple[str, str] | None:
    """Return the media type and base64 text of a data URL; None for any other URL."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    media_type = head.removeprefix("data:").partition(";")[0]
    return (media_type if "/" in media_type else "application/octet-stream"), data


def instruction(schema: OutputSchema) -> str:
    """Return the schema of an answer as an instruction, for servers without structured outputs."""
    return (
        "Answer with JSON only, with no text around it, that satisfies this JSON Schema:\n"
        f"{json.dumps(schema.schema, ensure_ascii=False)}"
    )


def content_of(message: ChatMessage) -> tuple[str | Attachment, ...]:
    """Return the parts of a message; the APIs refuse empty texts."""
    content = message.content
    return tuple(part for part in ((content,) if isinstance(content, str) else content) if part != "")


def tool_call(name: Any, arguments: Any, call_id: Any, echo: Echo | None = None) -> ToolCall:
    """Create a tool call. Arguments that are not a JSON object are kept as text, so that the model can be told."""
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
    return ToolCall(name, parsed, str(call_id or ""), echo)


def arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text; invalid JSON is returned unchanged."""
    unparsed = call.arguments.get(UNPARSED)
    return unparsed if isinstance(unparsed, str) else json.dumps(call.arguments, default=to_json)


def sendable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: models sometimes send half of a surrogate pair."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def text_of(value: Any) -> str:
    """Return a value that must be text; raises TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"expected text (got {type(value).__name__})")
    return value


def count_of(value: Any) -> int:
    """Return a token count; 0 if the value is not a number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def amount_of(value: Any) -> float | None:
    """Return an amount of dollars; None if the value is not a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return None
    return float(value)


def base64_text(content: bytes) -> str:
    """Encode bytes as base64."""
    return base64.b64encode(content).decode("ascii")


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Return how many seconds a provider asked to wait, from milliseconds, seconds or a date; None without a header."""
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
    resets = [
        _until(headers.get(reset.format(quota)), now())
        for left, reset, quotas in _RESETS
        for quota in quotas
        if headers.get(left.format(quota)) == "0"
    ]
    return max((seconds for seconds in resets if seconds is not None), default=None)


def _until(text: str | None, now: float) -> float | None:
    """Return the seconds until a quota is reset, from a duration such as "6m0s" or "120ms", or from a date."""
    if not text:
        return None
    try:
        seconds = datetime.fromisoformat(text).timestamp() - now if "-" in text else _seconds(text)
    except ValueError:
        return None
    return None if seconds is None else min(max(seconds, 0.0), _LONGEST_WAIT)


def _seconds(text: str) -> float | None:
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        return None
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def _delay_in(body: Any) -> float | None:
    """Return the pause that Google asks for in the body of an error; its endpoint also sends a list with the error."""
    outer = body[0] if isinstance(body, list) and body else body
    inner = outer.get("error", outer) if isinstance(outer, Mapping) else None
    details = inner.get("details") if isinstance(inner, Mapping) else None
    for detail in details if isinstance(details, list) else ():
        delay = detail.get("retryDelay") if isinstance(detail, Mapping) else None
        seconds = _seconds(delay) if isinstance(delay, str) else None
        if seconds is not None:
            return min(seconds, _LONGEST_WAIT)
    return None


_QUOTA = frozenset({"insufficient_quota", "billing_error", "billing_hard_limit_reached"})


def _said_in(body: Any) -> str | None:
    inner = body.get("error") if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping) else body
    message = inner.get("message") if isinstance(inner, Mapping) else None
    return str(message) if message else None


def _said(error: BaseException) -> str:
    status = getattr(error, "status_code", None)
    text = _said_in(getattr(error, "body", None)) or str(error)
    return f"{text} (status {status})" if isinstance(status, int) else text


def _remedy(said: str) -> str:
    """Return a remedy for known refusals of requests, else an empty text."""
    if "/v1/responses" in said:
        return '\nUse OpenAIAdapter(..., api="responses").'
    if "temperature" in said or "top_p" in said:
        return "\nReasoning models do not support sampling parameters: remove them from params."
    return ""


def _codes(body: Any) -> set[str]:
    inner = body.get("error") if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping) else body
    if not isinstance(inner, Mapping):
        return set()
    return {value for key in ("code", "type") if isinstance(value := inner.get(key), str)}
