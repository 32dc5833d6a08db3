"""OpenAI's Responses API without state: every request contains the whole conversation, including reasoning items."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fairtrial.data.attachment import Attachment
from fairtrial.errors import InvalidCallError, ModelUnavailableError
from fairtrial.models.reply import ModelCall, ModelReply
from fairtrial.models.schema import output_schema
from fairtrial.models.sdk import SdkAdapter, arguments_text, base64_text, instruction, sendable, text_of, tool_call
from fairtrial.session.trajectory import ChatMessage, ToolCall

# Models without reasoning, which refuse requests for encrypted reasoning.
_NOT_REASONING = re.compile(r"^(ft:)?(gpt-3|gpt-4|chatgpt)")
_ENDED = ("response.completed", "response.incomplete")


def body(adapter: SdkAdapter, call: ModelCall) -> dict[str, Any]:
    """Return the body of the request for a call."""
    sent: dict[str, Any] = {
        "model": adapter._model,
        "input": [item for message in call.messages for item in _items(adapter, message)],
        "store": False,
    }
    if not _NOT_REASONING.match(adapter._model):
        sent["include"] = ["reasoning.encrypted_content"]
    if call.tools:
        sent["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
                "strict": False,
            }
            for tool in call.tools
        ]
    schema = output_schema(call.output_type)
    if schema is not None and adapter._structured == "native":
        wanted = {"type": "json_schema", "name": schema.name, "schema": schema.schema, "strict": schema.strict}
        sent["text"] = {"format": wanted}
    elif schema is not None:
        sent["input"].append({"role": "user", "content": instruction(schema)})
    return _with_params(sent, call.params)


def _with_params(sent: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Add parameters to a request; names of chat completions are also accepted."""
    given = dict(params)
    for name in ("max_completion_tokens", "max_tokens"):
        if name in given:
            given.setdefault("max_output_tokens", given.pop(name))
    if "reasoning_effort" in given:
        given["reasoning"] = {"effort": given.pop("reasoning_effort"), **(given.get("reasoning") or {})}
    if "verbosity" in given:
        given["text"] = {"verbosity": given.pop("verbosity"), **(given.get("text") or {})}
    if "text" in given:
        given["text"] = {**sent.get("text", {}), **given["text"]}
    if given.get("logprobs"):
        raise InvalidCallError(
            'log-probabilities are only supported by chat completions: use OpenAIAdapter(..., api="chat")'
        )
    given.pop("logprobs", None)
    return {**sent, **given}


def _items(adapter: SdkAdapter, message: ChatMessage) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.name, "output": sendable(message.text)}]
    if message.role != "assistant":
        return [{"role": message.role, "content": _content(adapter, message)}]
    echoed = adapter._echoed(message.echo)
    if echoed is not None and _spoken(echoed)[:2] == (message.text, message.tool_calls):
        return list(echoed)  # Unchanged, with reasoning; not used if the message was edited.
    items: list[dict[str, Any]] = []
    if message.text:
        items.append({"role": "assistant", "content": sendable(message.text)})
    items.extend(
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments_text(call)}
        for call in message.tool_calls
    )
    return items


def _content(adapter: SdkAdapter, message: ChatMessage) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return sendable(message.content)
    return [_part(adapter, part) for part in message.content]


def _part(adapter: SdkAdapter, part: str | Attachment) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": sendable(part)}
    content = adapter._bytes(part)
    kind = part.media_type.partition("/")[0]
    if kind == "text":
        return {"type": "input_text", "text": content.decode("utf-8", "replace")}
    url = f"data:{part.media_type};base64,{base64_text(content)}"
    if kind == "image":
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if part.media_type == "application/pdf":
        return {"type": "input_file", "filename": part.name or "document.pdf", "file_data": url}
    raise InvalidCallError(
        f'OpenAI\'s Responses do not support attachments of type {part.media_type}; audio needs api="chat"'
    )


def read(adapter: SdkAdapter, tree: Mapping[str, Any]) -> ModelReply:
    """Parse the answer in a response."""
    items: Sequence[Mapping[str, Any]] = tree["output"]
    if tree.get("status") == "failed":
        raise ModelUnavailableError(f"{adapter._where()} failed while it was answering: {tree.get('error')}")
    text, calls, refusal = _spoken(items)
    incomplete = (tree.get("incomplete_details") or {}).get("reason")
    reason = "length" if incomplete == "max_output_tokens" else incomplete or ("tool_calls" if calls else "stop")
    if reason == "content_filter":
        refusal = refusal or "cut off by the content filter"
    named = tree.get("model")
    model = named if isinstance(named, str) and named else adapter._model
    echo = adapter._echo(items) if _must_return(items) else None
    message = ChatMessage("assistant", text, calls, reasoning=_reasoning(items), echo=echo)
    return ModelReply(message, adapter._usage(tree.get("usage"), model), reason, model, refusal)


def _spoken(items: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...], str | None]:
    """Return the text, the tool calls and the refusal of an answer."""
    texts: list[str] = []
    refusals: list[str] = []
    for item in items:
        for part in item["content"] if item["type"] == "message" else ():
            if part["type"] == "output_text":
                texts.append(text_of(part["text"]))
            elif part["type"] == "refusal":
                refusals.append(text_of(part["refusal"]))
    called = (item for item in items if item["type"] == "function_call")
    calls = tuple(tool_call(item["name"], item["arguments"], item["call_id"]) for item in called)
    return "".join(texts), calls, "".join(refusals) if refusals else None


def _reasoning(items: Sequence[Mapping[str, Any]]) -> str:
    thoughts = [
        text_of(part["text"])
        for item in items
        if item["type"] == "reasoning"
        for part in (item.get("summary") or item.get("content") or ())
    ]
    return "\n\n".join(thoughts)


def _must_return(items: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an answer has items that must be sent back. Reasoning that is not encrypted cannot be."""
    reasoning = [item for item in items if item["type"] == "reasoning"]
    if any(not item.get("encrypted_content") for item in reasoning):
        return False
    return bool(reasoning) or any(item["type"] == "message" and item.get("phase") for item in items)


async def gather(adapter: SdkAdapter, events: AsyncIterator[Any]) -> Mapping[str, Any]:
    """Return the response from the last event of its stream, with the completed items of earlier events."""
    done: dict[int, Any] = {}
    response: dict[str, Any] | None = None
    async for event in events:
        kind = event["type"]
        if kind == "response.output_item.done":
            done[event["output_index"]] = event["item"]
        elif kind in _ENDED:
            response = dict(event["response"])
        elif kind == "response.failed":
            problem = (event["response"].get("error") or {}).get("message")
            raise ModelUnavailableError(f"{adapter._where()} failed while it was answering: {problem}")
        elif kind == "error":
            raise ModelUnavailableError(f"{adapter._where()} failed while it was answering: {event.get('message')}")
    if response is None:
        raise ModelUnavailableError(f"{adapter._where()} ended its stream before the answer was complete")
    if done:
        response["output"] = [done[index] for index in sorted(done)]
    return response
