"""Amazon Bedrock's `Converse` and `ConverseStream`, with requests signed by Signature Version 4."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from fairtrial.integrations.model_server.openai_wire import PathWire, to_bytes
from fairtrial.integrations.model_server.reply import (
    InvalidRequestError,
    ParsedMessage,
    ParsedRequest,
    ParsedTool,
    Reply,
    Usage,
    pieces,
    required,
)

_STOP = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "content_filtered",
    "refusal": "content_filtered",
}


class BedrockWire(PathWire):
    """Reads one request, whose path has the model, and writes its answer."""

    name = "bedrock"
    path = re.compile(r"/model/(?P<model>[^/]+)/converse(?P<stream>-stream)?$")

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form; the system prompt becomes its first message."""
        messages = required(body, "messages", list)
        if not messages:
            raise InvalidRequestError("A conversation must start with a user message.")
        system = body.get("system") or []
        first = (ParsedMessage("system", _text(system), {"content": system}),) if system else ()
        tools = (body.get("toolConfig") or {}).get("tools") or []
        return ParsedRequest(
            number,
            self.name,
            self.model,
            (*first, *(_message(message) for message in messages)),
            body,
            tools=tuple(_tool(tool["toolSpec"]) for tool in tools if "toolSpec" in tool),
            output_schema=_output_schema(body.get("outputConfig")),
            stream=self.stream,
        )

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""
        return {
            "output": {"message": {"role": "assistant", "content": _blocks(request, reply)}},
            "stopReason": _stop_reason(reply),
            **_metadata(usage),
        }

    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """The events of a streamed answer."""
        sent = [_event("messageStart", {"role": "assistant"})]
        for index, block in enumerate(_blocks(request, reply)):
            place = {"contentBlockIndex": index}
            if "toolUse" in block:
                use = block["toolUse"]
                start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
                sent.append(_event("contentBlockStart", {"start": start, **place}))
                deltas: list[dict[str, Any]] = [
                    {"toolUse": {"input": piece}} for piece in pieces(json.dumps(use["input"]))
                ]
            elif "reasoningContent" in block:
                text = block["reasoningContent"]["reasoningText"]
                deltas = [{"reasoningContent": {"text": piece}} for piece in pieces(text["text"])]
                deltas.append({"reasoningContent": {"signature": text["signature"]}})
            else:
                deltas = [{"text": piece} for piece in pieces(block["text"])]
            sent.extend(_event("contentBlockDelta", {"delta": delta, **place}) for delta in deltas)
            sent.append(_event("contentBlockStop", place))
        sent.append(_event("messageStop", {"stopReason": _stop_reason(reply)}))
        sent.append(_event("metadata", _metadata(usage)))
        return sent

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The body of an error answer."""
        return {"message": message}

    def error_event(self, message: str) -> bytes:
        """The event that ends a stream in failure."""
        return _frame(
            {":message-type": "exception", ":exception-type": "internalServerException"}, {"message": message}
        )

    def raw_event(self, data: str) -> bytes:
        """An event with any text as its data."""
        return _event("messageStart", data.encode())


def call_parts(message: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Return the ids of the tool calls in an answer or a message, and the reasoning that must come back with them."""
    blocks = message["output"]["message"]["content"] if "output" in message else message.get("content") or []
    calls = [block["toolUse"]["toolUseId"] for block in blocks if "toolUse" in block]
    return calls, [block["reasoningContent"] for block in blocks if "reasoningContent" in block]


def _event(kind: str, payload: dict[str, Any] | bytes) -> bytes:
    return _frame({":message-type": "event", ":event-type": kind, ":content-type": "application/json"}, payload)


def _frame(headers: Mapping[str, str], payload: dict[str, Any] | bytes) -> bytes:
    """Encode a message of AWS's event streams: lengths, a checksum of them, headers, payload, a checksum of all."""
    body = to_bytes(payload)
    named = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", len(named) + len(body) + 16, len(named))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + named + body
    return message + struct.pack(">I", zlib.crc32(message))


def _blocks(request: ParsedRequest, reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        signed = {"text": reply.reasoning, "signature": reply.signature_for(request.number)}
        blocks.append({"reasoningContent": {"reasoningText": signed}})
    if reply.visible_text or not reply.tool_calls:
        blocks.append({"text": reply.visible_text})
    for index, call in enumerate(reply.tool_calls):
        use = {"toolUseId": call.id or f"tooluse_{request.number}_{index}", "name": call.name}
        blocks.append({"toolUse": {**use, "input": call.arguments_object}})
    return blocks


def _stop_reason(reply: Reply) -> str:
    return "content_filtered" if reply.refusal is not None else _STOP.get(reply.reason, reply.reason)


def _metadata(usage: Usage) -> dict[str, Any]:
    return {
        "usage": {
            # As at Anthropic's API, the tokens read from the cache or written to it are not part of the input tokens.
            "inputTokens": usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens,
            "outputTokens": usage.output_tokens,
            "totalTokens": usage.input_tokens + usage.output_tokens,
            "cacheReadInputTokens": usage.cached_tokens,
            "cacheWriteInputTokens": usage.cache_write_tokens,
            "cacheDetails": [{"ttl": "1h", "inputTokens": usage.hour_write_tokens}] if usage.hour_write_tokens else [],
        },
        "metrics": {"latencyMs": 1},
        "serviceTier": {"type": usage.service_tier or "default"},
    }


def _message(message: Any) -> ParsedMessage:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise InvalidRequestError("messages: role must be user or assistant")
    content = message.get("content")
    if not isinstance(content, list) or not content:
        raise InvalidRequestError("messages: content must not be empty")
    results = [block["toolResult"] for block in content if "toolResult" in block]
    if results and len(results) == len(content):
        return ParsedMessage("tool", "".join(_text(result["content"]) for result in results), message)
    return ParsedMessage(message["role"], _text(content), message)


def _text(blocks: Any) -> str:
    return "".join(block["text"] for block in blocks if "text" in block)


def _tool(spec: Any) -> ParsedTool:
    return ParsedTool(spec["name"], spec.get("description") or "", spec["inputSchema"]["json"])


def _output_schema(config: Any) -> Mapping[str, Any] | None:
    wanted = ((config or {}).get("textFormat") or {}).get("structure") or {}
    schema = (wanted.get("jsonSchema") or {}).get("schema")
    return None if schema is None else dict(json.loads(schema))
