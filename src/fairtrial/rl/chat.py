"""Conversations in the format that trainers and chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairtrial.base.codec import to_json
from fairtrial.data.session.trajectory import ChatMessage, from_chat
from fairtrial.errors import ConfigurationError

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


def messages_of(conversation: str | Sequence[Any], *, role: str) -> list[ChatMessage]:
    """Return a prompt or a completion as messages; a text is one message of `role`."""
    if isinstance(conversation, str):
        return [ChatMessage(role, conversation)]
    return [one if isinstance(one, ChatMessage) else from_chat(one, sampled=True) for one in conversation]


def split_prompt(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Return the messages before the first of the assistant, and the rest."""
    first = next((at for at, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])
