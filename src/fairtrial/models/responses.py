"""OpenAI's Responses API without state: every request contains the whole conversation, including reasoning items."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import RESPONSES_ENDINGS, ending_of
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import InvalidCallError, ModelError, ModelUnavailableError
from fairtrial.models.adapter import ModelCall, ModelReply
from fairtrial.models.schema import output_schema
from fairtrial.models.sdk import SdkAdapter
from fairtrial.models.tools import (
    arguments_text,
    base64_text,
    content_of,
    instruction,
    required_text,
    sendable,
    tool_call,
    with_params,
)

# Models without reasoning, which refuse requests for encrypted reasoning.
_NOT_REASONING = re.compile(r"^(ft:)?(gpt-3|gpt-4|chatgpt)")
_ENDED = ("response.completed", "response.incomplete")
# Items that wait for an answer of the client which only functions are given.
_NOT_SERVED = frozenset({"custom_tool_call", "computer_call", "local_shell_call", "shell_call", "apply_patch_call",
                         "mcp_approval_request"})  # fmt: skip


def body(adapter: SdkAdapter, call: ModelCall, *, encrypted: bool = True) -> dict[str, Any]:
    """Return the body of the request for a call."""
    sent: dict[str, Any] = {
        "model": adapter._model,
        "input": [item for message in call.messages for item in _items(adapter, message)],
        "store": False,
    }
    if encrypted and not _NOT_REASONING.match(adapter._model):
        sent["include"] = ["reasoning.encrypted_content"]
    if call.tools:
        plain = {"type": "function", "strict": False}
        sent["tools"] = [
            {**plain, "name": tool.name, "description": tool.description, "parameters": tool.schema}
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
    return with_params(sent, given)


def _items(adapter: SdkAdapter, message: ChatMessage) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.name, "output": _content(adapter, message)}]
    if message.role != "assistant":
        return [{"role": message.role, "content": _content(adapter, message)}]
    echoed = adapter._echoed(message.echo)
    if echoed is not None and _spoken(echoed)[:2] == (message.text, message.tool_calls):
        return list(echoed)  # Unchanged, with reasoning; not used if the message was edited.
    if any(not isinstance(part, str) for part in content_of(message)):
        raise InvalidCallError(
            "a message of the assistant must be text in OpenAI's Responses (got an attachment): send it in a message "
            "of the user"
        )
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
    content = adapter._loaded(part)
    if isinstance(part, str) or isinstance(content, str):
        return {"type": "input_text", "text": content}
    url = f"data:{part.media_type};base64,{base64_text(content)}"
    if part.media_type.startswith("image/"):
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if part.media_type == "application/pdf":
        return {"type": "input_file", "filename": part.name or "document.pdf", "file_data": url}
    raise InvalidCallError(
        f'OpenAI\'s Responses do not support attachments of type {part.media_type}; audio needs api="chat"'
    )


def read(adapter: SdkAdapter, tree: Mapping[str, Any]) -> ModelReply:
    """Parse the answer in a response."""
    items: Sequence[Mapping[str, Any]] = tree["output"]
    unserved = sorted({item["type"] for item in items} & _NOT_SERVED)
    if unserved:
        raise InvalidCallError(
            f"{adapter._where()} answered with a {unserved[0]}, which is not supported: offer a function instead"
        )
    text, calls, refusal = _spoken(items)
    status = tree.get("status") or "completed"
    ended = required_text((tree.get("incomplete_details") or {}).get("reason") or status)
    ending = ending_of(ended, RESPONSES_ENDINGS)
    if ending == "complete":
        if not items:
            raise KeyError("output")
        reason = "tool_calls" if calls else "stop"
    else:
        reason = "length" if ending == "cut off" else ended
    if ending == "refused":
        refusal = refusal or f"ended with {ended!r}"
    model = adapter._served_model(tree.get("model"))
    echo = adapter._echo(items) if _must_return(items) else None
    message = ChatMessage("assistant", text, calls, reasoning=_reasoning(items), echo=echo)
    extras = adapter._extras(tree)
    return ModelReply(message, adapter._usage(tree.get("usage"), model, extras), reason, model, refusal, extras=extras)


def _spoken(items: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...], str | None]:
    """Return the text, the tool calls and the refusal of an answer."""
    texts: list[str] = []
    refusals: list[str] = []
    for item in items:
        for part in item["content"] if item["type"] == "message" else ():
            if part["type"] == "output_text":
                texts.append(required_text(part["text"]))
            elif part["type"] == "refusal":
                refusals.append(required_text(part["refusal"]))
    called = (item for item in items if item["type"] == "function_call")
    calls = tuple(tool_call(item["name"], item["arguments"], item["call_id"]) for item in called)
    return "".join(texts), calls, "".join(refusals) if refusals else None


def _reasoning(items: Sequence[Mapping[str, Any]]) -> str:
    thoughts = [
        required_text(part["text"])
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
            raise _failure(adapter, event["response"].get("error") or {})
        elif kind == "error":
            raise _failure(adapter, event)
    if response is None:
        raise ModelUnavailableError(f"{adapter._where()} ended its stream before the answer was complete", sent=True)
    if done:
        response["output"] = [done[index] for index in sorted(done)]
    return response


def _failure(adapter: SdkAdapter, problem: Mapping[str, Any]) -> ModelError:
    found = adapter._by_code(problem)
    message = f"{adapter._where()} failed while it was answering: {problem.get('message')}"
    return found or ModelUnavailableError(message, sent=True)
