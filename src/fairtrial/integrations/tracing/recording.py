"""Records the model calls that an application makes with its own client of OpenAI or Anthropic.

Clients are observed at their HTTP client, through which every method of an SDK sends its requests: whole or streamed,
parsed, raw, sync and async. The answers are read as those of our own adapters are. What the application receives does
not change, and an answer that cannot be read is recorded without its tokens.
"""

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
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any, overload

from fairtrial.data.session.events import PromptExecuted
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.data.session.views import JUDGE
from fairtrial.errors import ConfigurationError, MissingExtraError, ModelError
from fairtrial.integrations.tracing.recorded_calls import protocol_of, read_answer, read_request, reader_of
from fairtrial.integrations.tracing.trial_threads import REPLACES, carry_trials_into_threads, leave_threads_alone
from fairtrial.models.base import ModelCallFailed
from fairtrial.models.clients import own_clients
from fairtrial.trials.context import TrialContext, running_trial

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
        raise MissingExtraError(function, package)
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
            try:
                response = await send(request, **options)
            except BaseException as error:
                call.failed(_described(error))
                raise
            return call.received(response)

        http.send = sent_async
        return

    def sent(request: Any, **options: Any) -> Any:
        call = _begin(request)
        if call is None:
            return send(request, **options)
        try:
            response = send(request, **options)
        except BaseException as error:
            call.failed(_described(error))
            raise
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
    protocol = protocol_of(url)
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
            trial.application_calls.begin(read_request(protocol, body), self)

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

    def add(self, chunk: bytes) -> None:
        """Take a part of the body."""
        self._chunks.append(chunk)

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
            self._trial.application_calls.end(self)
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
            error: BaseException | None = None
            try:
                for chunk in body:
                    call.add(chunk)
                    yield chunk
            except Exception as problem:
                error = problem
                raise
            finally:
                call.ended(error)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            error: BaseException | None = None
            try:
                async for chunk in body:
                    call.add(chunk)
                    yield chunk
            except Exception as problem:
                error = problem
                raise
            finally:
                call.ended(error)

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


def stop_recording() -> None:
    """Undo `record_openai()` and `record_anthropic()` for clients that have not been used yet, and for threads."""
    for package in ("openai", "anthropic"):
        if importlib.util.find_spec(package) is None:
            continue
        module = importlib.import_module(package)
        for name in ("OpenAI", "AsyncOpenAI", "Anthropic", "AsyncAnthropic"):
            if hasattr(module, name):
                base = _sender(getattr(module, name))
                base.request = getattr(base.request, REPLACES, base.request)
    leave_threads_alone()
