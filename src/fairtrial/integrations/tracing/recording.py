"""Calls of the providers' own SDKs, recorded in trials."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, overload
from urllib.parse import urlsplit

from fairtrial.data.session.events import PromptExecuted
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.data.session.views import JUDGE
from fairtrial.errors import ConfigurationError, MissingExtraError, ModelError
from fairtrial.integrations.tracing.dialects import read_messages
from fairtrial.models.adapter import ModelReply
from fairtrial.models.anthropic import AnthropicAdapter
from fairtrial.models.base import ModelCallFailed
from fairtrial.models.clients import own_clients
from fairtrial.models.limiter import Unlimited
from fairtrial.models.openai import OpenAIAdapter
from fairtrial.models.providers import PROVIDERS, AzureAdapter
from fairtrial.models.sdk import SdkAdapter
from fairtrial.trials.context import TrialContext, _current, running_trial

REPLACES = "_fairtrial_recorded"
"""The attribute of a function in place of another one: that function."""


def carry_trials_into_threads() -> None:
    """Make threads and thread pools that a trial uses belong to it, which they do not by themselves."""
    if hasattr(ThreadPoolExecutor.submit, REPLACES):
        return
    submit: Any = ThreadPoolExecutor.submit
    start = threading.Thread.start

    @functools.wraps(submit)
    def submit_in_trial(self: Any, fn: Any, /, *args: Any, **options: Any) -> Any:
        trial = running_trial()
        if trial is None:
            return submit(self, fn, *args, **options)
        token = _current.set(None)  # The pool's thread, which this may start, serves other trials later.
        try:
            return submit(self, _within(trial, fn), *args, **options)
        finally:
            _current.reset(token)

    @functools.wraps(start)
    def start_in_trial(self: threading.Thread) -> None:
        trial = running_trial()
        if trial is not None:
            self.run = _within(trial, self.run)  # type: ignore[method-assign]
        start(self)

    setattr(submit_in_trial, REPLACES, submit)
    setattr(start_in_trial, REPLACES, start)
    ThreadPoolExecutor.submit = submit_in_trial  # type: ignore[method-assign]
    threading.Thread.start = start_in_trial  # type: ignore[method-assign]


def _within(trial: TrialContext, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        token = _current.set(trial)
        try:
            return function(*args, **options)
        finally:
            _current.reset(token)

    return called


# The ends of paths and the protocol that is spoken there. The last two are Vertex AI's.
_PATHS = (
    ("/chat/completions", "chat"),
    ("/responses", "responses"),
    ("/embeddings", "embeddings"),
    ("/messages", "messages"),
    (":rawPredict", "messages"),
    (":streamRawPredict", "messages"),
)
_ABANDONED = "abandoned"


def read_request(protocol: str, body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """Return the messages of a request."""
    if protocol == "embeddings":
        return ()
    if protocol == "responses":
        return read_messages(_items(body))
    messages = list(body.get("messages") or ())
    if protocol == "messages":
        if body.get("system"):
            messages.insert(0, {"role": "system", "content": body["system"]})
        messages = [_with_plain_results(message) for message in messages]
    return read_messages(messages)


def _with_plain_results(message: Any) -> Any:
    """Return a message of Anthropic's with the results of tools as text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "content": "".join(each.get("text") or "" for each in part["content"])}
        if part.get("type") == "tool_result" and isinstance(part.get("content"), list)
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _items(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the input of Responses as messages: the items of one answer are one message."""
    given = body.get("input")
    items: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    answer: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            answer = None
            result = item.get("output")
            text = result if isinstance(result, str) else "".join(part.get("text") or "" for part in result or ())
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message" and item.get("role") != "assistant":
            answer = None
            messages.append(item)
        elif kind in ("message", "function_call", "reasoning"):
            if answer is None:
                answer = {"role": "assistant", "content": [], "tool_calls": []}
                messages.append(answer)
            if kind == "function_call":
                answer["tool_calls"].append({**item, "id": item.get("call_id")})
            elif kind == "message":
                content = item.get("content")
                answer["content"] += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return messages


def read_answer(
    reader: SdkAdapter, protocol: str, content: bytes, *, streamed: bool
) -> tuple[PromptExecuted, ChatMessage | None]:
    """Return an answer as events. A stream that was not read to its end has no cost: its last part has the tokens."""
    complete = True
    if streamed:
        events = _events(content)
        complete = _is_complete(protocol, events)
        tree = _driven(reader._gather(_iterated(events if complete else _completed(protocol, events))))
    else:
        tree = json.loads(content)
    if protocol == "embeddings":
        model = str(tree.get("model") or reader.model)
        vectors = ModelReply(ChatMessage("assistant", ""), reader._usage(tree.get("usage"), model))
        return PromptExecuted("", reader.name, model, reader._priced(vectors)), None
    reply = reader._read(tree)
    usage = reader._priced(reply)
    reason = reply.finish_reason
    if not complete:
        usage, reason = None if usage is None else replace(usage, cost_usd=None), _ABANDONED
    return PromptExecuted("", reader.name, reply.model or reader.model, usage, reason), reply.message


def _events(content: bytes) -> list[Any]:
    """Return the data of server-sent events; a last one that was cut is left out."""
    found: list[Any] = []
    for block in content.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if data and data != b"[DONE]":
            try:
                found.append(json.loads(data))
            except ValueError:
                break
    return found


def _is_complete(protocol: str, events: Sequence[Any]) -> bool:
    if protocol == "chat":
        return any(choice.get("finish_reason") for event in events for choice in event.get("choices") or ())
    ends = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
    return any(event.get("type") in ends for event in events)


def _completed(protocol: str, events: Sequence[Any]) -> list[Any]:
    """Return the events of a stream that was left early, with an end."""
    if protocol == "chat":
        return [*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    if protocol == "messages":
        return [*events, {"type": "message_stop"}]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    opened: Mapping[str, Any] = next((event["response"] for event in events if "response" in event), {})
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return [{"type": "response.completed", "response": {**opened, "status": "completed", "output": [message]}}]


def _driven(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("reading an answer must not wait")


async def _iterated(events: Sequence[Any]) -> AsyncIterator[Any]:
    for event in events:
        yield event


@functools.lru_cache(maxsize=256)
def reader_of(protocol: str, url: str, model: str) -> SdkAdapter:
    """Return an adapter that reads the answers of an address, with the prices of the provider that it belongs to."""
    ending = next(ending for ending, name in _PATHS if name == protocol and url.endswith(ending))
    base_url = url.removesuffix(ending)
    wanted: type[SdkAdapter] = AnthropicAdapter if protocol == "messages" else OpenAIAdapter
    if wanted is AnthropicAdapter:
        base_url = base_url.removesuffix("/v1")
    host = urlsplit(url).hostname or ""
    own = (each for each in PROVIDERS.values() if host == urlsplit(each.default_url).hostname)
    kind = next((each for each in own if issubclass(each, wanted)), wanted)
    if kind is OpenAIAdapter and host.endswith(".azure.com"):
        kind = AzureAdapter
    # Without a key, and without what only sending needs.
    traits = {"key_variables": (), "default_key": "none", "sends": False}
    reading: type[SdkAdapter] = type(f"Recorded{kind.__name__}", (kind,), traits)
    api = "responses" if protocol == "responses" else "chat"
    options: dict[str, Any] = {} if wanted is AnthropicAdapter else {"api": api}
    return reading(model, base_url=base_url, limiter=Unlimited(), **options)


_log = logging.getLogger("fairtrial.recording")


@overload
def record_openai() -> None: ...
@overload
def record_openai[C](client: C) -> C: ...
def record_openai(client: Any = None) -> Any:
    """Record the calls of OpenAI's SDK in the session of the trial that makes them: messages, tokens, tools and cost.

        client = record_openai(OpenAI())     # this client, and copies made by `with_options`
        record_openai()                      # every client of the process, existing and future

    Outside of trials nothing is recorded. Calls of evaluators are recorded as those of a judge. Threads and thread
    pools that a trial uses belong to it. A stream has token counts only if the application asks for them with
    `stream_options={"include_usage": True}`; without them its cost is unknown.

    Args:
        client: An `OpenAI`, `AsyncOpenAI`, `AzureOpenAI` or `AsyncAzureOpenAI`; by default all of them.

    Returns:
        The same client.
    """
    return _record("openai", ("OpenAI", "AsyncOpenAI"), client)


@overload
def record_anthropic() -> None: ...
@overload
def record_anthropic[C](client: C) -> C: ...
def record_anthropic(client: Any = None) -> Any:
    """Record the calls of Anthropic's SDK in the session of the trial that makes them; see `record_openai`.

    Args:
        client: An `Anthropic`, `AsyncAnthropic`, `AnthropicVertex` or `AsyncAnthropicVertex`; by default all of them.

    Returns:
        The same client.
    """
    return _record("anthropic", ("Anthropic", "AsyncAnthropic"), client)


def _record(package: str, names: tuple[str, str], client: Any) -> Any:
    function = f"record_{package}"
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(function, "models")
    module = importlib.import_module(package)
    # The classes that send requests, which the clients for other clouds share.
    bases = [_sender(getattr(module, name)) for name in names]
    if client is not None and not isinstance(client, tuple(bases)):
        raise ConfigurationError(f"{function} needs a client of the package {package} (got {type(client).__name__})")
    carry_trials_into_threads()
    if client is not None:
        _observe(client)
        return client
    for base in bases:
        if not hasattr(base.request, REPLACES):
            base.request = _observing(base.request)
    return None


def _sender(kind: type) -> Any:
    return next(base for base in kind.__mro__ if "request" in vars(base))


def _observing(request: Any) -> Any:
    """Return a client's method `request` that observes the client first."""

    @functools.wraps(request)
    def observed(self: Any, *args: Any, **options: Any) -> Any:
        if self not in own_clients:
            _observe(self)
        return request(self, *args, **options)

    setattr(observed, REPLACES, request)
    return observed


def _observe(client: Any) -> None:
    """Wrap the method of the HTTP client that sends requests; once, because clients may share it."""
    http = client._client
    with _observing_lock:
        if http in _observed:
            return
        _observed.add(http)
    send = http.send
    if inspect.iscoroutinefunction(send):

        async def sent_async(request: Any, **options: Any) -> Any:
            call = _begin(request)
            if call is None:
                return await send(request, **options)
            with call.sending():
                response = await send(request, **options)
            return call.received(response)

        http.send = sent_async
        return

    def sent(request: Any, **options: Any) -> Any:
        call = _begin(request)
        if call is None:
            return send(request, **options)
        with call.sending():
            response = send(request, **options)
        return call.received(response)

    http.send = sent


_observed: weakref.WeakSet[Any] = weakref.WeakSet()
_observing_lock = threading.Lock()


def _begin(request: Any) -> _Call | None:
    """Return the call that a request makes; None if it is not a model call, or no trial is running."""
    trial = running_trial()
    if trial is None or request.method != "POST":
        return None
    url = str(request.url).partition("?")[0]
    protocol = next((name for ending, name in _PATHS if url.endswith(ending)), None)
    if protocol is None:
        return None
    try:
        return _Call(trial, protocol, url, json.loads(request.content))
    except Exception:
        _log.exception("a model call cannot be recorded: its request cannot be read")
        return None


class _Call:
    """One request of an application, until its answer has been read."""

    def __init__(self, trial: TrialContext, protocol: str, url: str, body: Mapping[str, Any]) -> None:
        self._trial = trial
        self._actor = JUDGE if trial.scoring else "task"
        self._protocol = protocol
        self._reader = reader_of(protocol, url, str(body.get("model") or url.rpartition("/")[2].partition(":")[0]))
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._ended = False
        self._chunks: list[bytes] = []
        self._response: Any = None
        if self._actor != JUDGE:
            trial.application_calls.begin(read_request(protocol, body), self.abandon)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Record an error of the block, which sends the request."""
        try:
            yield
        except BaseException as error:
            self.failed(_described(error))
            raise

    @contextmanager
    def reading(self) -> Iterator[Callable[[bytes], None]]:
        """Take the parts of the body that the block reads, and note its end."""
        error: BaseException | None = None
        try:
            yield self._chunks.append
        except Exception as problem:
            error = problem
            raise
        finally:
            self.ended(error)

    def received(self, response: Any) -> Any:
        """Take the response: as a whole, or as it is read by the application."""
        try:
            self._response = response
            if response.status_code >= 400:
                self.failed(_refusal(response))
            elif response.is_stream_consumed or response.is_closed:
                self._finish(response.content)
            else:
                response.stream = _tee(response, self)
        except Exception:
            _log.exception("an answer to %s cannot be recorded", self._reader.model)
        return response

    def ended(self, error: BaseException | None = None) -> None:
        """Note that the body was read to its end, was closed early, or failed."""
        if error is not None:
            self.failed(_described(error))
            return
        response = self._response
        # A response of the same library removes the content encoding, also of a body that was cut.
        self._finish(type(response)(200, headers=response.headers, content=b"".join(self._chunks)).content)

    def abandon(self) -> None:
        """Record what has arrived; called at the end of the task."""
        if self._response is None:
            self.failed("not answered before the end of the task")
        else:
            self.ended()

    def failed(self, error: str) -> None:
        """Record that the request failed. The SDK may repeat it, which is another call."""
        if self._first_end():
            reader = self._reader
            self._record(ModelCallFailed("", reader.name, reader.model, error, 0.0))

    def _first_end(self) -> bool:
        with self._lock:
            first, self._ended = not self._ended, True
        if first and self._actor != JUDGE:
            self._trial.application_calls.end(self.abandon)
        return first

    def _record(self, event: object) -> None:
        self._trial.session.record(event, actor=self._actor)

    def _finish(self, content: bytes) -> None:
        if not self._first_end():
            return
        executed = PromptExecuted("", self._reader.name, self._reader.model)
        message: ChatMessage | None = None
        try:
            streamed = "event-stream" in self._response.headers.get("content-type", "")
            executed, message = read_answer(self._reader, self._protocol, content, streamed=streamed)
        except ModelError as error:  # Such as a stream that ends with an error.
            self._record(ModelCallFailed("", self._reader.name, self._reader.model, str(error), 0.0))
        except Exception:
            _log.exception("an answer of %s cannot be read; it is recorded without its tokens", self._reader.model)
        executed = replace(executed, duration_ms=round((time.monotonic() - self._started) * 1000, 3))
        if self._actor == JUDGE:
            self._record(executed)
        else:
            self._trial.application_calls.answered(executed, message)


def _tee(response: Any, call: _Call) -> Any:
    """Return the body of a response that a call reads along; a stream of the library that the response comes from."""
    library = importlib.import_module(type(response).__module__.partition(".")[0])
    body = response.stream

    class Recorded(library.SyncByteStream, library.AsyncByteStream):  # type: ignore[name-defined, misc]
        """The body as it is read."""

        def __iter__(self) -> Iterator[bytes]:
            with call.reading() as take:
                for chunk in body:
                    take(chunk)
                    yield chunk

        async def __aiter__(self) -> AsyncIterator[bytes]:
            with call.reading() as take:
                async for chunk in body:
                    take(chunk)
                    yield chunk

        def close(self) -> None:
            call.ended()
            body.close()

        async def aclose(self) -> None:
            call.ended()
            await body.aclose()

    return Recorded()


def _refusal(response: Any) -> str:
    message = ""
    if response.is_closed:
        try:
            body = json.loads(response.content)
            message = str((body.get("error") or {}).get("message") or "")
        except (ValueError, AttributeError):
            pass
    return f"status {response.status_code}: {message or response.reason_phrase}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
