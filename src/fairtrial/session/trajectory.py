"""The messages of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairtrial.codec import to_json
from fairtrial.codec.encode import PRIVATE
from fairtrial.data.attachment import Attachment
from fairtrial.frozen import EMPTY
from fairtrial.session.events import check_text, fill_mapping, fill_text


@dataclass(frozen=True, slots=True)
class Echo:
    """Opaque data that a provider requires back, unchanged, with a message or a tool call.

    Attributes:
        provider: Who gets it back: provider, API and, where it is not the provider's own, the address.
        family: The family of models that gets it back.
        data: JSON text.
    """

    provider: str
    family: str
    data: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call requested by the model. `echo` is the data that its provider requires back with it."""

    name: str
    arguments: Mapping[str, Any] = EMPTY
    id: str = ""
    echo: Echo | None = field(default=None, compare=False, repr=False, metadata=PRIVATE)

    def __post_init__(self) -> None:
        fill_text(self, "id")
        check_text(self, "name", "id")
        fill_mapping(self, "arguments")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. A content or name of None, which SDKs use with tool calls, becomes "".

    `reasoning` is what the model thought before it spoke, as far as its provider shows it: for people to read. It is no
    part of the answer: not of `text`, of equality, nor of the message as JSON, so that neither evaluators nor judges
    see it unless they read this attribute. `echo` is what the provider wants back with the message. Sessions and caches
    keep both (`to_record`).
    """

    role: str
    content: str | tuple[str | Attachment, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    reasoning: str = field(default="", compare=False, repr=False, metadata=PRIVATE)
    echo: Echo | None = field(default=None, compare=False, repr=False, metadata=PRIVATE)

    def __post_init__(self) -> None:
        if not type(self.role) is type(self.name) is type(self.reasoning) is str:
            fill_text(self, "name")
            fill_text(self, "reasoning")
            check_text(self, "role", "name", "reasoning")
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

    def to_record(self) -> Any:
        """Return the message as JSON with its reasoning and echoes, for records from which it is restored."""
        tree = to_json(self)
        if self.reasoning:
            tree["reasoning"] = to_json(self.reasoning)
        if self.echo is not None:
            tree["echo"] = to_json(self.echo)
        if self.tool_calls:
            for call, written in zip(self.tool_calls, tree["tool_calls"], strict=True):
                if call.echo is not None:
                    written["echo"] = to_json(call.echo)
        return tree


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The messages of a trial, in order."""

    messages: tuple[ChatMessage, ...] = ()

    @property
    def last_reply(self) -> str | None:
        """The text of the assistant's last reply; None if there is none.

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
