"""Reads the requests and the answers of an application's own client, as our adapters read theirs."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from fairtrial.data.session.events import PromptExecuted
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.integrations.tracing.dialects import read_messages
from fairtrial.models.anthropic import AnthropicAdapter
from fairtrial.models.limiter import Unlimited
from fairtrial.models.openai import OpenAIAdapter
from fairtrial.models.providers import PROVIDERS, AzureAdapter
from fairtrial.models.reply import ModelReply
from fairtrial.models.sdk import SdkAdapter

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


def protocol_of(url: str) -> str | None:
    """Return the protocol that is spoken at an address; None if it is none of a model."""
    return next((name for ending, name in _PATHS if url.endswith(ending)), None)


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
                said = item.get("content")
                answer["content"] += said if isinstance(said, list) else [{"type": "text", "text": said}]
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
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return [{"type": "response.completed", "response": {**opened, "status": "completed", "output": [said]}}]


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
    kind = next(
        (
            each
            for each in PROVIDERS.values()
            if host == urlsplit(each.default_url).hostname and issubclass(each, wanted)
        ),
        wanted,
    )
    if kind is OpenAIAdapter and host.endswith(".azure.com"):
        kind = AzureAdapter
    # Without a key, because it sends nothing.
    reading: type[SdkAdapter] = type(f"Recorded{kind.__name__}", (kind,), {"key_variables": (), "default_key": "none"})
    options: dict[str, Any] = (
        {} if wanted is AnthropicAdapter else {"api": "chat" if protocol != "responses" else protocol}
    )
    return reading(model, base_url=base_url, limiter=Unlimited(), **options)
