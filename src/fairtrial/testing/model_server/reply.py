"""What the model says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairtrial.testing.model_server.record import Record

_PIECES = re.compile(r"\S+\s*|\s+")


def count_tokens(text: str) -> int:
    """The server's idea of a token: four characters, rounded up. Easy to predict in a test."""
    return -(-len(text) // 4)


def pieces(text: str) -> list[str]:
    """The text cut after each run of white space; joined again it is the same text."""
    return _PIECES.findall(text)


@dataclass(frozen=True, slots=True)
class Usage(Record):
    """The token counts a reply claims."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall(Record):
    """One call of a tool. `arguments` given as text is sent as it is, so a test can send invalid JSON."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    id: str | None = None

    @property
    def arguments_json(self) -> str:
        """The arguments as the text that OpenAI's protocol carries."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Reply(Record):
    """One answer of the model, free of any protocol.

    `output` is JSON to be sent as the text. `finish_reason` is one of OpenAI's names (`stop`, `length`, `tool_calls`,
    `content_filter`) or `refusal`, translated for Anthropic's protocol; None means what the content implies.
    """

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    output: Any = None
    finish_reason: str | None = None
    usage: Usage | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.output is not None and self.text:
            raise ValueError("a Reply has either text or output, not both")

    @property
    def content(self) -> str:
        """The text as sent: `text`, or `output` as JSON."""
        return self.text if self.output is None else json.dumps(self.output, ensure_ascii=False)

    @property
    def reason(self) -> str:
        """Why the model stopped, in OpenAI's words."""
        if self.finish_reason is not None:
            return self.finish_reason
        return "tool_calls" if self.tool_calls else "stop"

    def usage_for(self, input_tokens: int) -> Usage:
        """The usage this reply claims, counted from the text unless it was given."""
        if self.usage is not None:
            return self.usage
        spoken = count_tokens(self.content) + count_tokens(self.refusal or "")
        called = sum(count_tokens(call.name) + count_tokens(call.arguments_json) for call in self.tool_calls)
        return Usage(input_tokens, spoken + called)
