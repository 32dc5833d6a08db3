"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fairtrial.integrations.model_server.openai_wire import Wire, to_named_event
from fairtrial.integrations.model_server.reply import (
    InvalidRequestError,
    ParsedMessage,
    ParsedRequest,
    ParsedTool,
    Reply,
    ToolCallReply,
    Usage,
    content_text,
    parse_messages,
    pieces,
    required,
    tools_in,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class AnthropicWire(Wire):
    """Reads `POST /v1/messages` and writes its answers."""

    name = "anthropic"

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form; the system prompt becomes its first message."""
        model = required(body, "model", str)
        required(body, "max_tokens", int)
        messages = parse_messages(required(body, "messages", list))
        system = body.get("system")
        first = () if system is None else (ParsedMessage("system", content_text(system), {"content": system}),)
        return ParsedRequest(
            number,
            self.name,
            model,
            (*first, *messages),
            body,
            tools=tuple(_tool(tool) for tool in tools_in(body)),
            required_tool=_required_tool(body.get("tool_choice")),
            output_schema=_output_schema(body.get("output_config")),
            stream=body.get("stream") is True,
        )

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""
        content = [*_thinking(request, reply), *map(dict, reply.hosted)]
        if reply.visible_text or not (reply.tool_calls or reply.hosted):
            content.append({"type": "text", "text": reply.visible_text})
        content.extend(
            {"type": "tool_use", "id": _tool_id(request, call, index), "name": call.name, "input": _input(call)}
            for index, call in enumerate(reply.tool_calls)
        )
        return {
            **_message(request),
            "content": content,
            "stop_reason": _stop_reason(reply),
            "stop_sequence": None,
            "stop_details": _stop_details(reply),
            "usage": _usage(usage) | _searches(reply),
        }

    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """The events of a streamed answer: a start, the blocks with their deltas, and the stop."""
        opening = {**_message(request), "content": [], "stop_reason": None, "stop_sequence": None}
        opening["usage"] = {**_usage(usage), "output_tokens": 1}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": opening}, {"type": "ping"}]
        blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        for block in _thinking(request, reply):
            if block["type"] == "thinking":
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
                blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
            else:
                blocks.append((block, []))
        blocks.extend(map(_hosted_events, reply.hosted))
        if reply.visible_text or not (reply.tool_calls or reply.hosted):
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(reply.visible_text)]
            blocks.append(({"type": "text", "text": ""}, deltas))
        for index, call in enumerate(reply.tool_calls):
            block = {"type": "tool_use", "id": _tool_id(request, call, index), "name": call.name, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(call.arguments_json)]
            blocks.append((block, deltas))
        for index, (block, deltas) in enumerate(blocks):
            events.append({"type": "content_block_start", "index": index, "content_block": block})
            events.extend({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
            events.append({"type": "content_block_stop", "index": index})
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": None, "stop_details": _stop_details(reply)}
        events.append({"type": "message_delta", "delta": delta, "usage": _output_usage(usage) | _searches(reply)})
        return [to_named_event(event) for event in (*events, {"type": "message_stop"})]

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The body of an error answer; this protocol has no codes beside the types."""
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_test"}

    def error_event(self, message: str) -> bytes:
        """The event that ends a stream in failure."""
        return to_named_event(self.error(529, message))

    def raw_event(self, data: str) -> bytes:
        """Return an event of type `message_start` with any text as its data."""
        return f"event: message_start\ndata: {data}\n\n".encode()


def _message(request: ParsedRequest) -> dict[str, Any]:
    return {"id": f"msg_{request.number}", "type": "message", "role": "assistant", "model": request.model}


def _stop_reason(reply: Reply) -> str:
    return "refusal" if reply.refusal is not None else _STOP_REASONS.get(reply.reason, reply.reason)


def _stop_details(reply: Reply) -> dict[str, Any] | None:
    if _stop_reason(reply) != "refusal":
        return None
    return {"type": "refusal", "category": None, "explanation": reply.refusal}


def _usage(usage: Usage) -> dict[str, Any]:
    # Unlike OpenAI, the tokens read from the cache or written to it are not part of the input tokens.
    return {
        "input_tokens": usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {
            "ephemeral_1h_input_tokens": usage.hour_write_tokens,
            "ephemeral_5m_input_tokens": usage.cache_write_tokens - usage.hour_write_tokens,
        },
        "service_tier": usage.service_tier or "standard",
        **_output_usage(usage),
    }


def _output_usage(usage: Usage) -> dict[str, Any]:
    details = {"thinking_tokens": usage.reasoning_tokens}
    return {"output_tokens": usage.output_tokens, "output_tokens_details": details}


def _searches(reply: Reply) -> dict[str, Any]:
    count = sum(block.get("name") == "web_search" for block in reply.hosted)
    return {"server_tool_use": {"web_search_requests": count, "web_fetch_requests": 0}} if count else {}


def _hosted_events(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the start of a block and its deltas; results of tools come whole."""
    if block["type"] == "text":
        deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        deltas.extend({"type": "citations_delta", "citation": one} for one in block.get("citations") or ())
        return {"type": "text", "text": "", "citations": []}, deltas
    if "input" in block:
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text)]
    return dict(block), []


def _thinking(request: ParsedRequest, reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        signature = reply.signature_for(request.number)
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": signature})
    if reply.redacted_reasoning:
        blocks.append({"type": "redacted_thinking", "data": reply.redacted_reasoning})
    return blocks


def _tool_id(request: ParsedRequest, call: ToolCallReply, index: int) -> str:
    return call.id or f"toolu_{request.number}_{index}"


def _input(call: ToolCallReply) -> Any:
    if not isinstance(call.arguments, str):
        return call.arguments
    try:
        return json.loads(call.arguments)
    except ValueError:
        # This protocol sends an object instead of text: invalid JSON can only be sent as a value of the wrong type.
        return call.arguments


def _tool(tool: Any) -> ParsedTool:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidRequestError("tools: each must be an object with a name")
    return ParsedTool(tool["name"], tool.get("description") or "", tool.get("input_schema") or {"type": "object"})


def _required_tool(choice: object) -> str | None:
    if not isinstance(choice, dict):
        return None
    if choice.get("type") == "any":
        return ""
    return str(choice.get("name", "")) if choice.get("type") == "tool" else None


def _output_schema(config: object) -> Mapping[str, Any] | None:
    match config.get("format") if isinstance(config, dict) else None:
        case None:
            return None
        case {"type": "json_schema", "schema": dict() as schema}:
            return schema
    raise InvalidRequestError("output_config: format must be a json_schema with a schema")
