"""Conversations in the format that trainers and chat templates read, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.codec import to_json
from fairtrial.errors import ConfigurationError
from fairtrial.session.trajectory import ChatMessage, ToolCall

type ChatRow = dict[str, Any]
"""A message as trainers read it: role, content, `tool_calls` with functions, `tool_call_id`."""


def to_chat(message: ChatMessage) -> ChatRow:
    """Return a message in the chat format of trainers; its reasoning, if any, as `reasoning_content`.

    Raises:
        ConfigurationError: the message has attachments, which text formats cannot hold.
    """
    if not isinstance(message.content, str) and any(not isinstance(part, str) for part in message.content):
        raise ConfigurationError(f"a message for training must be text (got a {message.role} message with attachments)")
    row: ChatRow = {"role": message.role, "content": message.text}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": to_json(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.name
    elif message.name:
        row["name"] = message.name
    return row


def from_chat(row: Any) -> ChatMessage:
    """Return a message of the chat format as a record; None, which Arrow adds for missing keys, is ignored."""
    if not isinstance(row, Mapping) or not isinstance(row.get("role"), str):
        raise ConfigurationError(f"a message must be a mapping with a role and a content (got {row!r:.80})")
    name = row.get("tool_call_id") or row.get("name") or ""
    return ChatMessage(
        row["role"],
        _text(row.get("content")),
        tuple(_call(call) for call in row.get("tool_calls") or ()),
        str(name),
        str(row.get("reasoning_content") or ""),
    )


def messages_of(conversation: str | Sequence[Any], *, role: str) -> list[ChatMessage]:
    """Return a prompt or a completion as messages; a text is one message of `role`."""
    if isinstance(conversation, str):
        return [ChatMessage(role, conversation)]
    return [one if isinstance(one, ChatMessage) else from_chat(one) for one in conversation]


def split_prompt(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Return the messages before the first of the assistant, and the rest."""
    first = next((at for at, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, str) else part.get("text") or "" for part in content]
    return "".join(parts)


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") or call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    # Arrow gives every call the argument names of all calls, with None.
    known = {name: value for name, value in arguments.items() if value is not None} if arguments else {}
    return ToolCall(str(function.get("name") or ""), known, str(call.get("id") or ""))
