"""A session as a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.data.attachment import Attachment
from fairtrial.frozen import EMPTY
from fairtrial.session.events import check_text, fill_mapping, fill_text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model asked for."""

    name: str
    arguments: Mapping[str, Any] = EMPTY
    id: str = ""

    def __post_init__(self) -> None:
        fill_text(self, "id")
        check_text(self, "name", "id")
        fill_mapping(self, "arguments")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: who spoke, and what. A content or a name of None, as SDKs give it beside tool calls, becomes ""."""

    role: str
    content: str | tuple[str | Attachment, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        fill_text(self, "name")
        check_text(self, "role", "name")
        if type(self.content) is not str:
            object.__setattr__(self, "content", _content(self.content))
        if self.tool_calls:
            object.__setattr__(self, "tool_calls", _tool_calls(self.tool_calls))
        elif type(self.tool_calls) is not tuple:
            object.__setattr__(self, "tool_calls", ())

    @property
    def text(self) -> str:
        """The textual part of the content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The messages of a trial in the order they were spoken."""

    messages: tuple[ChatMessage, ...] = ()

    @property
    def last_reply(self) -> str | None:
        """The last thing the assistant said; None if it said nothing.

        Turns that only call tools, and what the tools answered, are not replies.
        """
        for message in reversed(self.messages):
            if message.role == "assistant" and message.text:
                return message.text
        return None


def _content(value: Any) -> str | tuple[str | Attachment, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(part, str | Attachment) for part in value):
        return tuple(value)
    raise TypeError(f"ChatMessage.content must be text, or a sequence of text and Attachments (got {value!r})")


def _tool_calls(value: Any) -> tuple[ToolCall, ...]:
    if isinstance(value, list | tuple) and all(isinstance(call, ToolCall) for call in value):
        return tuple(value)
    raise TypeError(f"ChatMessage.tool_calls must be a sequence of ToolCall (got {value!r})")
