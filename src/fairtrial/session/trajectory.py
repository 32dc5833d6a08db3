"""A session as a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.data.attachment import Attachment
from fairtrial.frozen import EMPTY


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model asked for."""

    name: str
    arguments: Mapping[str, Any] = EMPTY
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: who spoke, and what."""

    role: str
    content: str | tuple[str | Attachment, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""

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
