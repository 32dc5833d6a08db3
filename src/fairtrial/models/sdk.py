"""The common part of adapters that use the SDK of a provider: clients, keys, errors and the encoding of content.

The retries of the SDKs are turned off, so that our limiter sees every refusal. Their aiohttp transport is used, which
needs the least CPU time. Answers are parsed here from the raw JSON, so that an answer of the wrong shape raises a
`MalformedReplyError` instead of an attribute error elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import functools
import importlib.util
import inspect
import json
import os
import re
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack

import anyio
import anyio.to_thread

from fairtrial.base.codec import parse_json
from fairtrial.base.frozen import EMPTY
from fairtrial.base.offload import on_trio
from fairtrial.data.sample import Attachment, BlobFolder
from fairtrial.data.session.events import TokenUsage, ending_of
from fairtrial.data.session.trajectory import Echo
from fairtrial.errors import (
    CodecError,
    ConfigurationError,
    MalformedReplyError,
    MissingExtraError,
    ModelAuthError,
    ModelError,
    ModelUnavailableError,
)
from fairtrial.models.adapter import AdapterOptions, AnswerT, ModelCall, ModelReply
from fairtrial.models.base import BaseAdapter, BatchSend
from fairtrial.models.batches.batching import Batching, allow_batches, shared_batching
from fairtrial.models.batches.calls import BatchCalls, count_cached, send_in_batch
from fairtrial.models.clients import (
    OpenClient,
    close_all,
    error_by_code,
    error_by_status,
    family,
    own_clients,
    provider_message,
    remember_addresses,
)
from fairtrial.models.limiter import RetryPolicy, shared_limiter
from fairtrial.models.pricing import NO_EXTRAS, UsageExtras, is_known, priced
from fairtrial.models.tools import sendable, split_data_url
from fairtrial.store.redact import register_guess
from fairtrial.trials.context import TrialContext

if TYPE_CHECKING:
    from fairtrial.models.batches.wire import BatchWire

type StructuredOutput = Literal["native", "prompt"]
"""How typed outputs are requested: with the provider's option, or with an instruction for servers without one."""

type ApiKey = str | Callable[[], str | Awaitable[str]]
"""A key, or a function that returns the present one, for keys that are renewed; it is called before each request."""

# Errors of connections that were open: the request may have been received.
_BROKEN = frozenset({errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})
_SECRET_HEADERS = re.compile(r"authorization|api-?key|token|cookie|secret", re.I)
_RENEWED = "renewed-before-each-request"  # The key that a client is made with if a function returns it.


class SdkOptions(AdapterOptions, total=False):
    """The options of all adapters with an SDK; `OpenAIAdapter` documents them."""

    base_url: str | None
    api_key: ApiKey | None
    timeout_seconds: float
    stream: bool
    structured_output: StructuredOutput
    blobs: BlobFolder | None
    headers: Mapping[str, str]
    prices_of: str | None
    batch: Batching | None


class SdkAdapter(BaseAdapter[AnswerT]):
    """The base class of adapters that use the SDK of a provider. Clients are opened on first use, one per event loop.

    They are closed by `aclose()`, at the end of an `async with` block, or when their event loop ends.
    """

    provider: ClassVar[str]
    package: ClassVar[str]
    client_class: ClassVar[str]
    path: str
    embedding_path = ""
    key_variables: ClassVar[tuple[str, ...]]
    url_variable: ClassVar[str]
    default_url: ClassVar[str] = ""
    default_key: ClassVar[str | None] = None  # The key if none is set, for servers without keys.
    batch_wire: ClassVar[BatchWire | None] = None  # The batches of the provider.
    price_list: ClassVar[str | None] = None  # The price list for `default_url`; by default the provider's.

    sends: ClassVar[bool] = True  # False: it reads answers that a client of the application got, and opens none.

    asyncio_only: ClassVar[bool] = True
    wraps_outputs = True
    shares_cache = True

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: ApiKey | None = None,
        timeout_seconds: float = 300.0,
        stream: bool = False,
        structured_output: StructuredOutput = "native",
        blobs: BlobFolder | None = None,
        headers: Mapping[str, str] = EMPTY,
        prices_of: str | None = None,
        batch: Batching | None = None,
        **options: Unpack[AdapterOptions],
    ) -> None:
        name = type(self).__name__
        if not model:
            raise ConfigurationError(f"the model of {name} must be a name that is not empty (got {model!r})")
        needed = (self.package, "aiohttp") if self.sends else (self.package,)
        if any(importlib.util.find_spec(package) is None for package in needed):
            raise MissingExtraError(name, "models")
        if timeout_seconds <= 0:
            raise ConfigurationError(f"the timeout_seconds of {name} must be more than 0 (got {timeout_seconds})")
        url = (base_url or self._url_from_environment() or self.default_url).rstrip("/")
        if not url:
            raise ConfigurationError(f"{name} needs an address: set {self.url_variable} or pass base_url=...")
        if options.get("retry") is None:
            options["retry"] = RetryPolicy()
        if options.get("limiter") is None:
            options["limiter"] = shared_limiter(self.provider, url, model)
        super().__init__(name=self.provider, model=model, base_url=url, **options)
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
        if batch is not None:
            self.require_batches()
            allow_batches()
        self._batch = batch
        self._batch_calls: BatchCalls | None = None
        self._prices_of = prices_of or ((self.price_list or self.provider) if own else None)
        self._family = family(model)
        self._echo_provider = self.provider if own else f"{self.provider} {url}"
        is_known(model, self._prices_of, url)
        self._prepare()

    def _prepare(self) -> None:
        # Imported here, because the import takes seconds, which would block the event loop during the first trials.
        importlib.import_module(self.package)
        self._lock = threading.Lock()
        self._clients: dict[asyncio.AbstractEventLoop, OpenClient] = {}
        # Without a reference to the adapter, so that it can be garbage collected.
        weakref.finalize(self, close_all, self._clients).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_clients")} | {
            "_batch_calls": None
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()  # A copy in another process opens clients of its own.

    @property
    def has_price(self) -> bool:
        """Whether prices were given, or a price list has the model."""
        return bool(super().has_price) or is_known(self._model, self._prices_of, self._base_url)

    @classmethod
    def _url_from_environment(cls) -> str | None:
        return os.environ.get(cls.url_variable)

    # Methods that the adapter of each provider implements.

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

    def _counted(self, usage: Mapping[str, Any]) -> TokenUsage:
        """Return the usage of an answer, without its cost."""
        raise NotImplementedError

    async def _gather(self, events: AsyncIterator[Any]) -> Mapping[str, Any]:
        """Assemble the answer from the events of a stream."""
        raise NotImplementedError

    # Shared methods.

    def _make_client(self) -> Any:
        sdk = importlib.import_module(self.package)
        http_client = sdk.DefaultAioHttpClient()
        client = getattr(sdk, self.client_class)(
            api_key=self._key,
            base_url=self._base_url,
            max_retries=0,
            timeout=self._timeout,
            default_headers=self._headers,
            http_client=http_client,
        )
        remember_addresses(client, http_client)
        return client

    async def __aenter__(self) -> Self:
        await self._client()
        return self

    async def _client(self) -> Any:
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
            known = self._clients[loop] = OpenClient(loop, client)
        await known.start()
        return known.client

    async def aclose(self) -> None:
        """Close the connections of this event loop; they are reopened on next use."""
        known = self._clients.pop(asyncio.get_running_loop(), None)
        if known is not None:
            await known.aclose()

    def require_batches(self) -> BatchWire:
        """Return the batches of the provider."""
        if self.batch_wire is None:
            raise ConfigurationError(f"{type(self).__name__} has no batches: use OpenAIAdapter or AnthropicAdapter")
        return self.batch_wire

    def _batch_send(self, call: ModelCall, trial: TrialContext | None) -> BatchSend | None:
        settings = self._batch or shared_batching()
        if settings is None or self.batch_wire is None or call.embeds:
            return None
        return functools.partial(send_in_batch, self, self.batch_wire, settings, call, trial)

    async def _answered_by_cache(self, call: ModelCall, trial: TrialContext | None) -> None:
        if self.batch_wire is not None and self._batch_send(call, trial) is not None:
            await count_cached(self, self.batch_wire, call, trial)

    async def _send(self, call: ModelCall) -> ModelReply:
        client = await self._client()
        body = self._body(call)
        try:
            # The time limit applies to the whole answer, unlike that of the SDK, which applies between two reads.
            async with asyncio.timeout(self._timeout):  # Cheaper than anyio's.
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
        return self._completed(call, tree)

    def _adapts(self, error: ModelError) -> bool:
        """Leave out of requests what the model has refused; returns whether the call should be sent again."""
        return False

    def _completed(self, call: ModelCall, tree: Any) -> ModelReply:
        """Parse an answer that may have no content."""
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
        return {} if self._renewed_key is None else {"headers": self._key_headers(await self._current_key())}

    def _response_type(self) -> Any:
        """Return the response class of the HTTP library that the SDK uses."""
        return _response_type(self.package)

    async def _posted(self, client: Any, body: dict[str, Any], path: str) -> Any:
        # The SDK's generic method, which takes half the CPU time of its typed methods.
        given = {"url": path, "json_data": body, **await self._request_options()}
        response = await client.request(self._response_type(), _post_options(self.package).model_copy(update=given))
        return self._parsed_answer(response.content)

    def _parsed_answer(self, content: bytes) -> Any:
        try:
            return parse_json(content)
        except CodecError as error:
            raise MalformedReplyError(f"{self._where()} sent an answer that is not JSON: {error}") from None

    async def _streamed(self, client: Any, body: dict[str, Any]) -> Any:
        module = importlib.import_module(self.package)
        options: dict[str, Any] = {"cast_to": object, "stream": True, "stream_cls": module.AsyncStream[object]}
        options["options"] = await self._request_options()
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
        message = provider_message(error)
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
            return found or ModelUnavailableError(
                f"{self._where()} failed while it was answering: {message}", sent=True
            )
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            return MalformedReplyError(f"{self._where()} sent an answer that is not JSON: {message}")
        # Errors that the SDKs do not convert: incomplete bodies and broken connections.
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx2", "httpx", "aiohttp"):
            return ModelUnavailableError(
                f"the connection to {self._where()} failed: {type(error).__name__}: {message}", sent=True
            )
        return None

    def _unreachable(self, error: BaseException) -> ModelUnavailableError | None:
        """Return the error for a connection that failed; None if it did not.

        The SDKs' aiohttp transport reports that as a timeout.
        """
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, TimeoutError):
                message = os.strerror(cause.errno) if cause.errno > 0 else str(cause)
                return ModelUnavailableError(
                    f"{self._where()} could not be reached at {self._base_url}: {message}", sent=cause.errno in _BROKEN
                )
            cause = cause.__cause__
        return None

    def _by_code(self, problem: Any) -> ModelError | None:
        """Return the error for an error object in an answer with status 200; None if its code says nothing."""
        return error_by_code(self._where(), problem)

    def _by_status(self, error: Any, status: int) -> ModelError:
        """Return the error for an answer with a status of its own."""
        return error_by_status(self._where(), error, status, self.key_variables[0])

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

    def _served_model(self, named: Any) -> str:
        """Return the model that answered, or else the one that was asked for."""
        return named if isinstance(named, str) and named else self._model

    def _usage(self, usage: Any, model: str, extras: UsageExtras = NO_EXTRAS) -> TokenUsage | None:
        """Return the usage of an answer, with its cost if known; None if the provider did not report it."""
        if not isinstance(usage, Mapping):
            return None
        counted = self._counted(usage)
        return priced(counted, model, provider=self._prices_of, base_url=self._base_url, extras=extras)

    def _loaded(self, part: str | Attachment) -> str | bytes:
        """Return a part of a message as it is sent: text, also of a file with text, or bytes."""
        if isinstance(part, str):
            return sendable(part)
        content = self._bytes(part)
        return content.decode("utf-8", "replace") if part.media_type.startswith("text/") else content

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


@functools.cache
def _response_type(package: str) -> Any:
    client: type = importlib.import_module(package).DefaultAsyncHttpxClient
    library = next(base.__module__ for base in client.__mro__ if base.__name__ == "AsyncClient").partition(".")[0]
    return importlib.import_module(library).Response


@functools.cache
def _post_options(package: str) -> Any:
    """Return options of a request to copy, which is cheaper than what the SDK does to make its own.

    Without an idempotency key, the SDK draws a random one for its retries, which are off.
    """
    options: Any = importlib.import_module(f"{package}._models").FinalRequestOptions
    return options.construct(method="post", url="", idempotency_key="")
