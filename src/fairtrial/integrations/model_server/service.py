"""The HTTP service: requests checked, answered and refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from hashlib import blake2b
from time import monotonic
from typing import Any, NamedTuple

from aiohttp import web

from fairtrial.base.frozen import LruCache
from fairtrial.integrations.model_server import bedrock_wire, faults, gemini_wire
from fairtrial.integrations.model_server.anthropic_wire import AnthropicWire
from fairtrial.integrations.model_server.batch_account import BatchHost
from fairtrial.integrations.model_server.batch_routes import BatchApiRoutes
from fairtrial.integrations.model_server.batch_wire import BatchApiWire
from fairtrial.integrations.model_server.bedrock_wire import BedrockWire
from fairtrial.integrations.model_server.config import FaultPlan, ServerConfig
from fairtrial.integrations.model_server.faults import Fault, ProviderRule, RateLimited
from fairtrial.integrations.model_server.gemini_wire import GeminiWire
from fairtrial.integrations.model_server.openai_wire import EPOCH, EmbeddingsWire, OpenAIWire, Wire, to_bytes
from fairtrial.integrations.model_server.reply import InvalidRequestError, ParsedRequest, Reply, draw
from fairtrial.integrations.model_server.responses_wire import ResponsesWire
from fairtrial.integrations.model_server.rules import ResourceWire, Speaker
from fairtrial.integrations.model_server.stats import RequestLog, request_to_json, stats_to_json

_MAX_CALLS = 100_000
_THINKING = ("thinking", "redacted_thinking")


class Refusal(NamedTuple):
    """Why a request is refused, and the provider's code and status for it."""

    message: str
    code: str | None = None
    status: int = 400


class SentReasoning:
    """The reasoning that was sent with each tool call, by the id of the call; clients must return it unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: LruCache[str, Any] = LruCache(_MAX_CALLS)

    def note(self, request: ParsedRequest, answer: Mapping[str, Any]) -> None:
        """Remember the reasoning of an answer that calls tools."""
        spoken = answer["choices"][0]["message"] if request.protocol == "openai" else answer
        calls, reasoning = _PARTS[request.protocol](spoken)
        with self._lock:
            for call_id in calls:
                self._sent.put(call_id, reasoning)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._sent.clear()

    def problem(self, request: ParsedRequest) -> Refusal | None:
        """Return the provider's refusal if reasoning that it sent is missing or changed, else None."""
        parts = _PARTS[request.protocol]
        for index, message in enumerate(request.messages):
            if message.role != "assistant":
                continue
            calls, returned = parts(message.raw)
            for call_id in calls:
                with self._lock:
                    sent = self._sent.get(call_id)
                if sent and _canonical(sent) != _canonical(returned):
                    return _not_returned(request, index, sent, returned)
        return None


def refusal(fault: faults.Fault, request: ParsedRequest, sent: SentReasoning) -> Refusal | None:
    """Return why a provider with this rule refuses the request; None if it does not, or if the fault is another one."""
    body = request.body
    match fault:
        case faults.ReasoningNotReturned():
            return sent.problem(request)
        case faults.ToolsNeedResponses():
            if request.protocol != "openai" or not request.tools or body.get("reasoning_effort") == "none":
                return None
            return Refusal(
                f"Function tools with reasoning_effort are not supported for {request.model} in /v1/chat/completions. "
                "To use function tools, use /v1/responses or set reasoning_effort to 'none'."
            )
        case faults.StreamOptionsRefused():
            return Refusal("Extra inputs are not permitted", status=422) if "stream_options" in body else None
        case faults.EncryptedRefused():
            wanted = "reasoning.encrypted_content" in (body.get("include") or ())
            return Refusal("Encrypted content is not supported with this model.") if wanted else None
        case faults.TemperatureRefused():
            given = body.get("temperature")
            if given is None or given == 1:
                return None
            if request.protocol == "anthropic":
                return Refusal("`temperature` may only be set to 1 when thinking is enabled or in adaptive mode.")
            if request.protocol == "responses":
                return Refusal("Unsupported parameter: 'temperature' is not supported with this model.")
            problem = f"Unsupported value: 'temperature' does not support {given} with this model."
            return Refusal(f"{problem} Only the default (1) value is supported.", "unsupported_value")
    return None


def _not_returned(request: ParsedRequest, index: int, sent: Any, returned: Any) -> Refusal:
    if request.protocol == "openai":
        if sent.get("reasoning_content") != returned.get("reasoning_content"):
            return Refusal("The `reasoning_content` in the thinking mode must be passed back to the API.")
        return Refusal(
            "Function call is missing a thought_signature in functionCall parts. This is required for tools to work "
            "correctly, and missing thought_signature may lead to degraded model performance."
        )
    if request.protocol == "responses":
        if not returned:
            return Refusal(
                f"Item of type 'function_call' was provided without its required 'reasoning' item: '{sent[0]['id']}'."
            )
        return Refusal(
            f"The encrypted content for item {sent[0]['id']} could not be verified. Reason: Encrypted content could "
            "not be decrypted or parsed.",
            "invalid_encrypted_content",
        )
    if request.protocol == "gemini":
        return Refusal("Function call is missing a thought_signature in functionCall parts.")
    place = f"messages.{index - (request.body.get('system') is not None)}.content.0"
    if not returned:
        return Refusal(
            f"{place}.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` is "
            "enabled, a final `assistant` message must start with a thinking block."
        )
    return Refusal(
        f"{place}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. These "
        "blocks must remain as they were in the original response."
    )


def _chat_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    calls: Any = message.get("tool_calls") or []
    kept: dict[str, Any] = {}
    if message.get("reasoning_content"):
        kept["reasoning_content"] = message["reasoning_content"]
    extra = {call["id"]: call["extra_content"] for call in calls if call.get("extra_content")}
    return [call["id"] for call in calls], kept | ({"extra_content": extra} if extra else {})


def _response_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    items: Any = message.get("output") or message.get("items") or []
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    return calls, [item for item in items if item["type"] == "reasoning"]


def _message_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    content = message.get("content")
    blocks: Any = content if isinstance(content, list) else []
    calls = [block["id"] for block in blocks if block.get("type") == "tool_use"]
    return calls, [block for block in blocks if block.get("type") in _THINKING]


_PARTS = {
    "openai": _chat_parts,
    "responses": _response_parts,
    "anthropic": _message_parts,
    "gemini": gemini_wire.call_parts,
    "bedrock": bedrock_wire.call_parts,
}


def _canonical(value: Any) -> str:
    # Clients add `cache_control`, which is not part of what was sent.
    if isinstance(value, list):
        value = [{key: item[key] for key in item if key != "cache_control"} for item in value]
    return json.dumps(value, sort_keys=True)


class TokenBucket:
    """Grants `rate` requests per second on average, and up to `burst` at once after a pause."""

    def __init__(self, rate: float, burst: int | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        if rate <= 0:
            raise ValueError(f"the rate of a quota must be more than 0 requests per second (got {rate!r})")
        self._rate = rate
        self._burst = float(max(1, int(rate)) if burst is None else burst)
        if self._burst < 1:
            raise ValueError(f"the burst of a quota must be at least 1 (got {burst!r})")
        self._clock = clock
        self._tokens = self._burst
        self._filled_at = clock()

    def take(self) -> bool:
        """Take one request from the bucket; returns whether it was granted."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


_MAX_BODY = 256 * 1024 * 1024
_SECRET_HEADERS = frozenset(
    {"authorization", "x-api-key", "api-key", "x-goog-api-key", "x-amz-security-token", "cookie"}
)

# Answers with faults do not consume replies of a script: a client that retries gets each scripted reply once.
_LOST = Reply("This answer is about to be lost on its way to the client.")
_AFTER_THE_WORK = faults.Slow | faults.HalfSent | faults.MalformedJson | faults.WrongShape | faults.EmptyBody
_CUT = Reply("This answer was cut", finish_reason="content_filter")


class Service:
    """Answers HTTP requests as its configuration says."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.ledger = RequestLog(log_limit=config.log_limit, log_bytes=config.log_bytes)
        self._speaker = Speaker(config.replies)
        self._sent_reasoning = SentReasoning()
        self._plan = FaultPlan(config.faults, seed=config.seed, applies=self._applies)
        self._attempts: dict[str, int] = {}
        self._bucket = self._new_bucket()
        self._closing = asyncio.Event()
        self._wires: dict[tuple[str, str], Wire] = {
            ("POST", "/v1/chat/completions"): OpenAIWire(config.token_ids),
            ("POST", "/v1/responses"): ResponsesWire(),
            ("POST", "/v1/embeddings"): EmbeddingsWire(),
            ("POST", "/v1/messages"): AnthropicWire(),
        }
        self.batches: BatchHost | None = None
        if config.batches is not None:
            self.batches = BatchHost(config.batches, self._speaker.reply, config.seed)
            self._batch_routes = BatchApiRoutes(self.batches, {path: wire for (_, path), wire in self._wires.items()})
        self._pages: dict[tuple[str, str], Callable[[web.BaseRequest], object]] = {
            ("GET", "/v1/models"): lambda request: self._models(),
            ("GET", "/_stats"): lambda request: stats_to_json(self.ledger.stats()),
            ("GET", "/_requests"): self._requests,
            ("POST", "/_reset"): lambda request: self.reset(),
        }

    def _applies(self, fault: Fault, request: ParsedRequest) -> bool:
        """Return whether a fault applies to a request: rules of providers refuse only requests that break them."""
        return not isinstance(fault, ProviderRule) or refusal(fault, request, self._sent_reasoning) is not None

    def _new_bucket(self) -> TokenBucket | None:
        rate = self._config.requests_per_second
        return None if rate is None else TokenBucket(rate, self._config.burst)

    def reset(self) -> dict[str, Any]:
        """Reset counters, log, scripts, attempts and quota; requests in flight continue."""
        self._speaker.reset()
        self._attempts.clear()
        self._sent_reasoning.clear()
        self._bucket = self._new_bucket()
        self.ledger.reset()
        return {}

    def close(self) -> None:
        """End hanging requests."""
        self._closing.set()

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer an HTTP request."""
        key = (http.method, http.path)
        wire: Wire | None = self._wires.get(key)
        if wire is None and http.method == "POST":  # Protocols with the model in the path.
            wire = GeminiWire.at(http.path) or BedrockWire.at(http.path)
        if self.batches is not None:
            if http.path.startswith("/_batches"):
                return _response(await self._control(http, self.batches))
            wire = wire or self._batch_routes.at(http)
        if wire is not None:
            return await self._complete(http, wire)
        if (page := self._pages.get(key)) is not None:
            return _response(page(http))
        if http.method == "GET" and self._config.evals is not None:
            resource = self._config.evals.answer(http.path, http.query)
            if resource is not None:
                return await self._complete(http, resource)
        return _response(OpenAIWire().error(404, f"nothing is served at {http.method} {http.path}"), status=404)

    async def _control(self, http: web.BaseRequest, batches: BatchHost) -> dict[str, Any]:
        if http.method == "POST":
            batches.clock.advance(float(http.query["advance"]))
        await batches.settle()
        return batches.ledger().to_json()

    def _models(self) -> dict[str, Any]:
        """Return the list of models with the fields of both protocols; each client reads its own."""
        common = {"object": "model", "type": "model", "created": EPOCH, "created_at": "2023-11-14T22:13:20Z"}
        data = [{"id": name, "display_name": name, "owned_by": "test", **common} for name in self._config.models]
        ends = {"first_id": self._config.models[0], "last_id": self._config.models[-1]} if data else {}
        return {"object": "list", "data": data, "has_more": False, **ends}

    def _requests(self, http: web.BaseRequest) -> dict[str, Any]:
        after = http.query.get("after", "0")
        first = int(after) if after.isdecimal() else 0
        return {"requests": [request_to_json(one) for one in self.ledger.log() if one.number > first]}

    async def _complete(self, http: web.BaseRequest, wire: Wire) -> web.StreamResponse:
        if isinstance(wire, BatchApiWire):
            await wire.receive()
            raw = to_bytes({"resource": wire.resource})
        else:
            raw = to_bytes({"resource": http.path_qs}) if http.method == "GET" else await http.read()
        number = self.ledger.next_number()
        try:
            request = self._parse(wire, raw, number, http)
        except InvalidRequestError as problem:
            return self._invalid(wire, problem)
        if (limit := self._exceeded_limit()) is not None:
            self.ledger.received(request)
            self.ledger.refused(limit)
            return self._rate_limited(wire, self._config.refusal)
        if self._plan.counts_attempts:
            attempt = self._attempts[request.digest] = self._attempts.get(request.digest, 0) + 1
            request = dataclasses.replace(request, attempt=attempt)
        self.ledger.received(request)
        self.ledger.began()
        try:
            return await self._admitted(http, wire, request)
        except (asyncio.CancelledError, ConnectionError):
            self.ledger.abandoned()
            raise
        finally:
            self.ledger.ended()

    def _parse(self, wire: Wire, raw: bytes, number: int, http: web.BaseRequest) -> ParsedRequest:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as problem:
            raise InvalidRequestError(f"the body must be JSON: {problem}") from None
        if not isinstance(body, dict):
            raise InvalidRequestError("the body must be a JSON object")
        headers = {name.lower(): value for name, value in http.headers.items()}
        for name in _SECRET_HEADERS & headers.keys():
            headers[name] = "(not kept)"
        request = wire.parse(body, number)
        digest = blake2b(raw, digest_size=12).hexdigest()
        return dataclasses.replace(request, digest=digest, size=len(raw), headers=headers)

    def _exceeded_limit(self) -> str | None:
        cap = self._config.max_concurrent
        if cap is not None and self.ledger.in_flight >= cap:
            return "concurrency_cap"
        if self._bucket is not None and not self._bucket.take():
            return "quota"
        return None

    async def _admitted(self, http: web.BaseRequest, wire: Wire, request: ParsedRequest) -> web.StreamResponse:
        fault = self._plan.fault(request)
        seconds = self._config.latency.at(draw(self._config.seed, "latency", request.number))
        if isinstance(fault, faults.Slow):
            seconds += fault.latency.at(draw(self._config.seed, "slow", request.number))
        if seconds > 0:
            await asyncio.sleep(seconds)
        if isinstance(fault, faults.ReplyLost):
            return await self._lose(http, wire, request, fault)
        if fault is not None:
            self.ledger.faulted(fault.kind)
        if isinstance(wire, BatchApiWire) and (fault is None or isinstance(fault, _AFTER_THE_WORK)):
            await self._work(wire)
        if fault is None or isinstance(fault, faults.Slow | faults.CutOff | faults.TokensDamaged):
            if isinstance(wire, ResourceWire):
                self.ledger.answered(wire.status)
                return _response(wire.body, _numbered(request.number), wire.status)
            if isinstance(wire, EmbeddingsWire):  # Vectors follow from the texts, not from the script.
                return await self._say(http, wire, request, Reply(""))
            try:
                reply = await self._speaker.reply(request)
            except InvalidRequestError as problem:
                return self._invalid(wire, problem)
            except Exception as problem:
                # A function of the test failed: report it in the client's error, where the test shows it.
                self.ledger.faulted("reply_error")
                what = f"the rules of the model server raised {type(problem).__name__}: {problem}"
                return self._error(wire, 500, what)
            if isinstance(fault, faults.CutOff):
                limit = request.max_output_tokens if fault.tokens is None else fault.tokens
                reply = reply if limit is None else reply.cut_to(limit)
            if isinstance(fault, faults.TokensDamaged):
                reply = dataclasses.replace(reply, tokens=fault.how)
            return await self._say(http, wire, request, reply)
        return await self._fail(http, wire, request, fault)

    async def _work(self, wire: BatchApiWire) -> None:
        assert self.batches is not None  # noqa: S101 - its routes made the wire
        await self.batches.settle()
        wire.execute()
        await self.batches.settle()  # A batch that takes no time has ended.

    async def _lose(
        self, http: web.BaseRequest, wire: Wire, request: ParsedRequest, fault: faults.ReplyLost
    ) -> web.StreamResponse:
        """Answer as without a fault, and lose the answer on its way."""
        if isinstance(wire, BatchApiWire):
            await self._work(wire)
        elif not isinstance(wire, ResourceWire):
            reply = await self._speaker.reply(request)
            await self._say(http, wire, dataclasses.replace(request, stream=False), reply)
        self.ledger.faulted(fault.kind)  # Now, so that a test that sees it knows that the work is done.
        if fault.seconds > 0:
            await self._pause(fault.seconds)
        if fault.status is not None:
            return self._error(wire, fault.status, "The server did not answer in time.")
        return _drop(http)

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until the server stops."""
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            pass

    async def _say(self, http: web.BaseRequest, wire: Wire, request: ParsedRequest, reply: Reply) -> web.StreamResponse:
        usage = reply.usage_for(request.input_tokens)
        self.ledger.answered(200, usage)
        if not request.stream or reply.tool_calls:
            answer = wire.completion(request, reply, usage)
            if reply.tool_calls:
                self._sent_reasoning.note(request, answer)
            if not request.stream:
                return _response(answer, _numbered(request.number))
        return await self._stream(http, wire.events(request, reply, usage), request.number)

    async def _stream(self, http: web.BaseRequest, events: list[bytes], number: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", **_numbered(number)})
        response.enable_chunked_encoding()
        await response.prepare(http)
        for index, event in enumerate(events):
            if index and self._config.stream_interval > 0:
                await asyncio.sleep(self._config.stream_interval)
            await response.write(event)
        return response

    async def _fail(
        self, http: web.BaseRequest, wire: Wire, request: ParsedRequest, fault: Fault
    ) -> web.StreamResponse:
        match fault:
            case RateLimited():
                return self._rate_limited(wire, fault)
            case faults.ServerFailed(status, retry_after):
                message = "The server is overloaded." if status in (503, 529) else "The server had an error."
                headers = {} if retry_after is None else _retry_after(retry_after, "seconds")
                return self._error(wire, status, message, headers=headers)
            case faults.NotAuthorised(status):
                message = "The key is not valid." if status == 401 else "The key may not do this."
                return self._error(wire, status, message)
            case faults.ContextTooLong(limit):
                claimed = max(request.input_tokens, limit + 1)
                message = f"prompt is too long: {claimed} tokens > {limit} maximum"
                return self._error(wire, 400, message, code="context_length_exceeded")
            case ProviderRule():
                found = refusal(fault, request, self._sent_reasoning) or Refusal("The request is refused.")
                return self._error(wire, found.status, found.message, code=found.code)
            case faults.Hang(seconds):
                await self._pause(seconds)
                return _drop(http)
            case faults.ConnectionReset():
                return _drop(http)
            case faults.Refused(text):
                return await self._say(http, wire, request, Reply(refusal=text))
            case faults.ContentFiltered():
                return await self._say(http, wire, request, _CUT)
            case faults.StreamFailed() if not request.stream:
                return self._error(wire, 500, "The server had an error.")
        return await self._spoil(http, wire, request, fault)

    async def _spoil(
        self, http: web.BaseRequest, wire: Wire, request: ParsedRequest, fault: Fault
    ) -> web.StreamResponse:
        """Answer with a fault that starts with status 200."""
        usage = _LOST.usage_for(request.input_tokens)
        body = to_bytes(wire.completion(request, _LOST, usage))
        events = wire.events(request, _LOST, usage)
        self.ledger.answered(200)
        match fault:
            case faults.HalfSent(fraction):
                if request.stream:
                    await self._stream(http, events[: int(len(events) * fraction)], request.number)
                else:
                    size = {"content-type": "application/json", "content-length": str(len(body))}
                    response = web.StreamResponse(headers={**size, **_numbered(request.number)})
                    await response.prepare(http)
                    await response.write(body[: int(len(body) * fraction)])
                if http.transport is not None:
                    http.transport.close()  # After sending what was written.
                return web.Response()  # It is never sent.
            case faults.MalformedJson():
                # A truncated JSON object is never valid JSON. Results of batches must not end with a whole line.
                body = body[: len(body) * 2 // 3].rstrip()[:-1]
                events = [wire.raw_event(body.decode("ascii"))]
            case faults.WrongShape(wrong):
                body = to_bytes(wrong)
                events = [wire.raw_event(body.decode("ascii"))]
            case faults.EmptyBody():
                body, events = b"", []
            case _:
                events = [*events[: len(events) // 2], wire.error_event("The server had an error in mid-stream.")]
        if request.stream:
            return await self._stream(http, events, request.number)
        return _response(body, _numbered(request.number))

    def _invalid(self, wire: Wire, problem: InvalidRequestError) -> web.Response:
        self.ledger.faulted("invalid_request")
        return self._error(wire, 400, str(problem))

    def _rate_limited(self, wire: Wire, fault: RateLimited) -> web.Response:
        if fault.form == "body" and fault.retry_after is not None:
            self.ledger.answered(429)
            return _response(_google_error(fault.retry_after), status=429)
        headers = {} if fault.retry_after is None else _retry_after(fault.retry_after, fault.form)
        return self._error(wire, 429, "Too many requests.", headers=headers)

    def _error(
        self, wire: Wire, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None
    ) -> web.Response:
        self.ledger.answered(status)
        return _response(wire.error(status, message, code), headers, status)


def _retry_after(seconds: float, form: str) -> dict[str, str]:
    if form == "milliseconds":
        return {"retry-after-ms": f"{seconds * 1000:g}"}
    if form == "date":
        # The header has whole seconds; if rounded down, the client would retry too early.
        return {"retry-after": formatdate(math.ceil(time.time() + seconds), usegmt=True)}
    if form == "reset":
        at = datetime.fromtimestamp(time.time() + seconds, UTC).isoformat()
        openai = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": f"{seconds:g}s"}
        unrelated = {"x-ratelimit-remaining-tokens": "9000", "x-ratelimit-reset-tokens": "6m0s"}
        anthropic = {"anthropic-ratelimit-requests-remaining": "0", "anthropic-ratelimit-requests-reset": at}
        return openai | unrelated | anthropic
    return {"retry-after": f"{seconds:g}"}


def _google_error(seconds: float) -> list[dict[str, Any]]:
    """The body of Google's rate limits, which is a list."""
    detail = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{seconds:g}s"}
    error = {"code": 429, "message": "You exceeded your quota.", "status": "RESOURCE_EXHAUSTED", "details": [detail]}
    return [{"error": error}]


def _numbered(number: int) -> dict[str, str]:
    return {"x-request-id": f"req_{number}", "request-id": f"req_{number}"}


def _response(value: object, headers: dict[str, str] | None = None, status: int = 200) -> web.Response:
    sent = {"content-type": "application/json", **(headers or {})}
    return web.Response(body=to_bytes(value), status=status, headers=sent)


def _drop(http: web.BaseRequest) -> web.Response:
    """Reset the connection; the returned response is never sent."""
    if (transport := http.transport) is not None:
        if (sock := transport.get_extra_info("socket")) is not None:
            # Without lingering, closing the socket resets the connection.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response()


class CountingServer(web.Server):
    """aiohttp's server, with a counter of connections and a higher limit for bodies."""

    def __init__(self, service: Service) -> None:
        # With cancellation, the request of a client that gives up is not counted as in flight any more.
        super().__init__(service.handle, handler_cancellation=True, access_log=None, keepalive_timeout=600.0)
        self._ledger = service.ledger

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Count the connection."""
        self._ledger.connected(+1)
        super().connection_made(handler, transport)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Remove the connection from the count."""
        self._ledger.connected(-1)
        super().connection_lost(handler, exc)

    def _make_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=_MAX_BODY)
