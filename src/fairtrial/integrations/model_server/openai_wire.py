"""The protocol of OpenAI: chat completions and embeddings."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from urllib.parse import unquote

from fairtrial.integrations.model_server.reply import (
    Engine,
    InvalidRequestError,
    ParsedRequest,
    ParsedTool,
    Protocol,
    Reply,
    ToolCallReply,
    Usage,
    check_request,
    draw,
    parse_messages,
    pieces,
    requested_tokens,
    required,
    tools_in,
)

# A fixed creation time, so that equal servers give answers that are equal byte for byte.
EPOCH = 1_700_000_000


class Wire(ABC):
    """One provider's protocol: how requests are read and answers are written."""

    name: ClassVar[Protocol]

    @abstractmethod
    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """Parse a request; raises `InvalidRequestError` if the provider would refuse it."""

    @abstractmethod
    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""

    @abstractmethod
    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """The events of a streamed answer, ready to be sent."""

    @abstractmethod
    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The body of an error answer."""

    def error_event(self, message: str) -> bytes:
        """The event that ends a stream in failure."""
        return self.event(self.error(500, message))

    @abstractmethod
    def raw_event(self, data: str) -> bytes:
        """An event with any text as its data, for faults."""

    def event(self, data: dict[str, Any]) -> bytes:
        """An event with this data."""
        return self.raw_event(to_bytes(data).decode("ascii"))


@dataclass(frozen=True)
class PathWire(Wire):
    """A protocol whose requests have the model in their path."""

    model: str
    stream: bool
    path: ClassVar[re.Pattern[str]]

    @classmethod
    def at(cls, path: str) -> Self | None:
        """Return the wire of a path; None if it is none of this protocol."""
        found = cls.path.search(path)
        return None if found is None else cls(unquote(found["model"]), found["stream"] is not None)


def to_bytes(value: object) -> bytes:
    """Encode a value as ASCII JSON, so that even a lone surrogate can be sent. Bytes are returned unchanged."""
    if isinstance(value, bytes):
        return value
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def to_named_event(data: dict[str, Any]) -> bytes:
    """Encode an event that is named by the type of its data."""
    return b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode("ascii"), to_bytes(data))


_TYPES = {401: "invalid_request_error", 403: "permission_error", 404: "invalid_request_error", 429: "requests"}
_CODES = {401: "invalid_api_key", 403: "insufficient_permissions", 404: "not_found", 429: "rate_limit_exceeded"}


class OpenAIWire(Wire):
    """Reads `POST /v1/chat/completions` and writes its answers."""

    name: ClassVar[Protocol] = "openai"

    def __init__(self, token_ids: Engine | None = None) -> None:
        self._engine = token_ids

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form."""
        model = required(body, "model", str)
        messages = parse_messages(required(body, "messages", list))
        check_request(self._engine, body)
        return ParsedRequest(
            number,
            self.name,
            model,
            messages,
            body,
            tools=tuple(_tool(tool) for tool in tools_in(body)),
            required_tool=_required_tool(body.get("tool_choice")),
            output_schema=_output_schema(body.get("response_format")),
            stream=body.get("stream") is True,
        )

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer; all of `n` choices are the same."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
        if reply.refusal is not None or (reply.tool_calls and not reply.content):
            message["content"] = None
        if reply.tool_calls:
            message["tool_calls"] = _tool_calls(request, reply)
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        choice = {"message": message, "logprobs": _logprobs(request, reply), "finish_reason": _finish_reason(reply)}
        tokens = requested_tokens(self._engine, request, reply)
        if tokens is not None:
            choice |= {"logprobs": {"content": tokens.logprobs(), "refusal": None}, **tokens.of_choice()}
        return {
            **({} if tokens is None else tokens.of_answer()),
            "id": f"chatcmpl-{request.number}",
            "object": "chat.completion",
            "created": EPOCH,
            "model": request.model,
            "choices": [{"index": index, **choice} for index in range(_choices(request))],
            "usage": _usage(usage),
            "system_fingerprint": "fp_test",
            "service_tier": usage.service_tier or "default",
        }

    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """The chunks of a streamed answer and its final `[DONE]`."""
        options = request.body.get("stream_options")
        with_usage = isinstance(options, dict) and options.get("include_usage") is True
        head = {
            "id": f"chatcmpl-{request.number}",
            "object": "chat.completion.chunk",
            "created": EPOCH,
            "model": request.model,
            "system_fingerprint": "fp_test",
            "service_tier": usage.service_tier or "default",
        }
        # If usage was requested, all chunks before the last one have `"usage": null`.
        tail = {"usage": None} if with_usage else {}
        chunks: list[dict[str, Any]] = []
        tokens = requested_tokens(self._engine, request, reply)
        logprobs = None if tokens is not None else (_logprobs(request, reply) or {}).get("content")
        for index in range(_choices(request)):
            sent: list[dict[str, Any]] = []

            def chunk(
                delta: dict[str, Any], reason: str | None = None, logprob: Any = None, index: int = index
            ) -> dict[str, Any]:
                choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
                if logprob is not None:
                    choice["logprobs"] = {"content": [logprob], "refusal": None}
                return {**head, "choices": [choice], **tail}

            sent.append(chunk({"role": "assistant", "content": "", "refusal": None}))
            sent.extend(chunk({"reasoning_content": piece}) for piece in pieces(reply.reasoning))
            if reply.refusal is None:
                for at, piece in enumerate(pieces(reply.content)):
                    sent.append(chunk({"content": piece}, logprob=logprobs[at] if logprobs else None))
            else:
                sent.extend(chunk({"refusal": piece}) for piece in pieces(reply.refusal))
            for at, call in enumerate(_tool_calls(request, reply)):
                arguments = call["function"]["arguments"]
                place = _place(reply, at)
                opening = {**call, **place, "function": {"name": call["function"]["name"], "arguments": ""}}
                sent.append(chunk({"tool_calls": [opening]}))
                sent.extend(
                    chunk({"tool_calls": [{**place, "function": {"arguments": piece}}]}) for piece in pieces(arguments)
                )
            sent.append(chunk({}, _finish_reason(reply)))
            if tokens is not None:
                tokens.spread(sent)
            chunks += sent
        if with_usage:
            chunks.append({**head, "choices": [], "usage": _usage(usage)})
        return [*map(self.event, chunks), self.raw_event("[DONE]")]

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The body of an error answer."""
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code or _CODES.get(status)}}

    def raw_event(self, data: str) -> bytes:
        """An event with any text as its data."""
        return f"data: {data}\n\n".encode()


def _place(reply: Reply, index: int) -> dict[str, int]:
    return {} if reply.stream_index == "missing" else {"index": 0 if reply.stream_index == "zero" else index}


def _choices(request: ParsedRequest) -> int:
    count = request.body.get("n")
    return count if isinstance(count, int) and 1 <= count <= 128 else 1


def _finish_reason(reply: Reply) -> str:
    return "stop" if reply.reason == "refusal" else reply.reason


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "audio_tokens": usage.audio_input_tokens,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": usage.audio_output_tokens,
        },
    } | ({} if usage.cost is None else {"cost": usage.cost})


def _tool_calls(request: ParsedRequest, reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id or f"call_{request.number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json},
        }
        | _extra_content(call)
        for index, call in enumerate(reply.tool_calls)
    ]


def _extra_content(call: ToolCallReply) -> dict[str, Any]:
    if call.thought_signature is None:
        return {}
    return {"extra_content": {"google": {"thought_signature": call.thought_signature}}}


def _logprobs(request: ParsedRequest, reply: Reply) -> dict[str, Any] | None:
    """Return made-up log probabilities, one per piece of text; equal text at the same position gives equal ones."""
    if request.body.get("logprobs") is not True or reply.refusal is not None:
        return None
    alternatives = request.body.get("top_logprobs")
    content = []
    for position, token in enumerate(pieces(reply.content)):
        entry = {
            "token": token,
            "logprob": -draw("logprob", position, token),
            "bytes": list(token.encode("utf-8", "surrogatepass")),
        }
        shown = [dict(entry)] if isinstance(alternatives, int) and alternatives > 0 else []
        content.append({**entry, "top_logprobs": shown})
    return {"content": content, "refusal": None}


def _tool(tool: Any) -> ParsedTool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("tools: each must be an object with a function that has a name")
    parameters = function.get("parameters") or {"type": "object"}
    return ParsedTool(function["name"], function.get("description") or "", parameters)


def _required_tool(choice: object) -> str | None:
    if choice == "required":
        return ""
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        return str(choice["function"].get("name", ""))
    return None


def _output_schema(response_format: object) -> Mapping[str, Any] | None:
    if response_format is None:
        return None
    if not isinstance(response_format, dict):
        raise InvalidRequestError("response_format: must be an object")
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
        case {"type": "json_schema"}:
            raise InvalidRequestError("response_format: json_schema needs a schema")
    raise InvalidRequestError("response_format: type must be text, json_object or json_schema")


_DIMENSIONS = 64
_WORD = re.compile(r"\w+")


class EmbeddingsWire(OpenAIWire):
    """Reads `POST /v1/embeddings` and answers with a vector of the words of each text.

    Each word adds a fixed pseudo-random vector, so texts with the same words have a cosine of 1 and texts without a
    common word one near 0.
    """

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form: one message of the user per text."""
        model = required(body, "model", str)
        given = body.get("input")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError("input: a text or a list of texts that are not empty is required")
        dimensions = body.get("dimensions", _DIMENSIONS)
        if not isinstance(dimensions, int) or not 1 <= dimensions <= 4096:
            raise InvalidRequestError("dimensions: a whole number from 1 to 4096 is required")
        messages = parse_messages([{"role": "user", "content": text} for text in texts])
        return ParsedRequest(number, self.name, model, messages, body)

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""
        dimensions = request.body.get("dimensions", _DIMENSIONS)
        data = [
            {"object": "embedding", "index": place, "embedding": word_vector(message.text, dimensions)}
            for place, message in enumerate(request.messages)
        ]
        counts = {"prompt_tokens": usage.input_tokens, "total_tokens": usage.input_tokens}
        return {"object": "list", "data": data, "model": request.model, "usage": counts}


def word_vector(text: str, dimensions: int = _DIMENSIONS) -> list[float]:
    """Return a vector of length 1 that depends only on the words of a text, whatever their order and case."""
    words = _WORD.findall(text.casefold()) or [text]
    vector = [math.fsum(draw(0, f"{word} {place}", 0) - 0.5 for word in words) for place in range(dimensions)]
    length = math.sqrt(math.fsum(number * number for number in vector)) or 1.0
    return [number / length for number in vector]
