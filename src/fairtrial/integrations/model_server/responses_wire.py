"""OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairtrial.integrations.model_server.openai_wire import EPOCH, OpenAIWire, to_named_event
from fairtrial.integrations.model_server.reply import (
    InvalidRequestError,
    ParsedMessage,
    ParsedRequest,
    ParsedTool,
    Reply,
    Usage,
    content_text,
    pieces,
    required,
    tools_in,
)

_ENCRYPTED = "reasoning.encrypted_content"
_HOSTED = frozenset({"web_search", "file_search", "code_interpreter", "image_generation"})
_SPOKEN = frozenset({"reasoning", "web_search_call", "function_call"})


class ResponsesWire(OpenAIWire):
    """Reads `POST /v1/responses` and writes its answers. It is stateless: each request contains its conversation."""

    name = "responses"

    def parse(self, body: Mapping[str, Any], number: int) -> ParsedRequest:
        """The request in neutral form; consecutive items of the model become one message of the assistant."""
        model = required(body, "model", str)
        if isinstance(body.get("previous_response_id"), str):
            raise InvalidRequestError("previous_response_id: this server keeps no responses; send the whole input")
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list) or not items:
            raise InvalidRequestError("input: text or a list of at least one item is required")
        instructions = body.get("instructions")
        first = (
            (ParsedMessage("system", instructions, {"content": instructions}),) if isinstance(instructions, str) else ()
        )
        return ParsedRequest(
            number,
            self.name,
            model,
            (*first, *_messages(items)),
            body,
            tools=_tools(tools_in(body)),
            required_tool=_required_tool(body.get("tool_choice")),
            output_schema=_output_schema(body.get("text")),
            stream=body.get("stream") is True,
        )

    def completion(self, request: ParsedRequest, reply: Reply, usage: Usage) -> dict[str, Any]:
        """The body of an answer."""
        incomplete = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reply.reason)
        ended = "completed" if reply.reason in ("stop", "tool_calls", "refusal") else reply.reason
        return {
            **_response(request),
            "service_tier": usage.service_tier or "default",
            "status": ended if incomplete is None else "incomplete",
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "output": _items(request, reply),
            "usage": _usage(usage),
        }

    def events(self, request: ParsedRequest, reply: Reply, usage: Usage) -> list[bytes]:
        """The events of a streamed answer: each item with its parts, and the whole response at the end."""
        whole = self.completion(request, reply, usage)
        opening = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": opening},
            {"type": "response.in_progress", "response": opening},
        ]
        for index, item in enumerate(whole["output"]):
            events.append({"type": "response.output_item.added", "output_index": index, "item": _begun(item)})
            place = {"item_id": item["id"], "output_index": index}
            events.extend({**event, **place} for event in _parts(item))
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": f"response.{whole['status']}", "response": whole})
        return [to_named_event({**event, "sequence_number": number}) for number, event in enumerate(events)]

    def error_event(self, message: str) -> bytes:
        """The event that ends a stream in failure."""
        error = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 0}
        return to_named_event(error)

    def raw_event(self, data: str) -> bytes:
        """Return an event of type `response.completed` with any text as its data."""
        return f"event: response.completed\ndata: {data}\n\n".encode()


def _response(request: ParsedRequest) -> dict[str, Any]:
    body = request.body
    return {
        "id": f"resp_{request.number}",
        "object": "response",
        "created_at": EPOCH,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": request.model,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": body.get("store", True),
        "temperature": body.get("temperature", 1.0),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
    }


def _items(request: ParsedRequest, reply: Reply) -> list[dict[str, Any]]:
    number = request.number
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        shown = request.body.get("store") is False or _ENCRYPTED in (request.body.get("include") or ())
        items.append(
            {
                "id": f"rs_{number}",
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": reply.reasoning}],
                "encrypted_content": reply.signature_for(number) if shown else None,
            }
        )
    content: dict[str, Any] | None = None
    if reply.refusal is not None:
        content = {"type": "refusal", "refusal": reply.refusal}
    elif reply.content or not reply.tool_calls:
        content = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
    if content is not None:
        status = "incomplete" if reply.reason in ("length", "content_filter") else "completed"
        message = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        items.append({**message, "status": status, "content": [content]})
    items.extend(
        {
            "id": f"fc_{number}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id or f"call_{number}_{index}",
            "name": call.name,
            "arguments": call.arguments_json,
        }
        for index, call in enumerate(reply.tool_calls)
    )
    return items


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is sent at the beginning of its stream."""
    match item["type"]:
        case "reasoning":
            return {**item, "summary": []}
        case "message":
            return {**item, "status": "in_progress", "content": []}
        case _:
            return {**item, "status": "in_progress", "arguments": ""}


def _parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The events between the beginning and the end of an item."""
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        sent = [{"type": f"{kind}.delta", "delta": piece} for piece in pieces(arguments)]
        return [*sent, {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]}]
    if item["type"] == "reasoning":
        part = item["summary"][0]
        kind, place = "response.reasoning_summary", {"summary_index": 0}
        return [
            {"type": f"{kind}_part.added", "part": {**part, "text": ""}, **place},
            *({"type": f"{kind}_text.delta", "delta": piece, **place} for piece in pieces(part["text"])),
            {"type": f"{kind}_text.done", "text": part["text"], **place},
            {"type": f"{kind}_part.done", "part": part, **place},
        ]
    part = item["content"][0]
    kind, field = ("refusal", "refusal") if part["type"] == "refusal" else ("output_text", "text")
    extra: dict[str, Any] = {"content_index": 0} | ({"logprobs": []} if field == "text" else {})
    return [
        {"type": "response.content_part.added", "part": {**part, field: ""}, "content_index": 0},
        *({"type": f"response.{kind}.delta", "delta": piece, **extra} for piece in pieces(part[field])),
        {"type": f"response.{kind}.done", field: part[field], **extra},
        {"type": "response.content_part.done", "part": part, "content_index": 0},
    ]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _messages(items: list[Any]) -> tuple[ParsedMessage, ...]:
    parsed: list[ParsedMessage] = []
    turn: list[dict[str, Any]] = []  # Consecutive items of the model.

    def end_turn() -> None:
        if turn:
            text = "".join(content_text(item.get("content")) for item in turn if item["type"] == "message")
            parsed.append(ParsedMessage("assistant", text, {"items": list(turn)}))
            turn.clear()

    for item in items:
        if not isinstance(item, dict):
            raise InvalidRequestError("input: each item must be an object")
        kind = item.get("type", "message")
        if kind in _SPOKEN or (kind == "message" and item.get("role") == "assistant"):
            if kind == "function_call" and not isinstance(item.get("call_id"), str):
                raise InvalidRequestError("input: a function_call must have a call_id")
            turn.append({"type": kind, **item})
            continue
        end_turn()
        if kind == "function_call_output":
            parsed.append(ParsedMessage("tool", content_text(item.get("output")), item))
        elif kind == "message" and isinstance(item.get("role"), str):
            parsed.append(ParsedMessage(item["role"], content_text(item.get("content")), item))
        else:
            raise InvalidRequestError(f"input: items of type {kind!r} are not served")
    end_turn()
    return tuple(parsed)


def _tools(raw: list[Any]) -> tuple[ParsedTool, ...]:
    tools = []
    for tool in raw:
        if isinstance(tool, dict) and tool.get("type") in _HOSTED:
            continue
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise InvalidRequestError("tools: each must be a function with a name")
        parameters = tool.get("parameters") or {"type": "object"}
        tools.append(ParsedTool(tool["name"], tool.get("description") or "", parameters))
    return tuple(tools)


def _required_tool(choice: object) -> str | None:
    if choice == "required":
        return ""
    return str(choice.get("name", "")) if isinstance(choice, dict) and choice.get("type") == "function" else None


def _output_schema(text: object) -> Mapping[str, Any] | None:
    match text.get("format") if isinstance(text, dict) else None:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "name": str(), "schema": dict() as schema}:
            return schema
    raise InvalidRequestError("text: format must be text, json_object or a json_schema with a name and a schema")
