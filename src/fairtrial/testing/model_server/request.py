"""What a client asked, free of any protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from fairtrial.testing.model_server.reply import count_tokens

type Protocol = Literal["openai", "anthropic"]
"""The two protocols the server speaks."""


class InvalidRequestError(Exception):
    """A request the server cannot serve; it is answered with status 400 and this text."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One message: its role, its text with all text parts joined, and the message as it was sent."""

    role: str
    text: str
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool the client offers."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A completion request as received. `body` is the whole of it; the rest is read from there.

    `number` counts completion requests from 1. `attempt` counts admitted requests with the very same body from 1.
    `messages` begins with the system prompt if there is one, in both protocols.
    """

    number: int
    protocol: Protocol
    model: str
    messages: tuple[ParsedMessage, ...]
    body: Mapping[str, Any]
    digest: str
    size: int = 0
    tools: tuple[ToolSpec, ...] = ()
    required_tool: str | None = None
    """The tool the client insists on; "" if it insists on some tool without naming one."""
    output_schema: Mapping[str, Any] | None = None
    stream: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 1

    @property
    def system(self) -> str:
        """The text of all system and developer messages."""
        return "\n".join(message.text for message in self.messages if message.role in ("system", "developer"))

    @property
    def last_user(self) -> str:
        """The text of the last user message, or "" if there is none."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")

    @property
    def last(self) -> ParsedMessage | None:
        """The last message of any role."""
        return self.messages[-1] if self.messages else None

    @property
    def turn(self) -> int:
        """How many times the assistant has spoken already."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def conversation(self) -> str:
        """What tells this conversation from others: the key the client gave, or else its first user message.

        A client gives a key as `metadata.conversation` (OpenAI), `metadata.user_id` (Anthropic) or `user`.
        """
        metadata = self.body.get("metadata")
        if isinstance(metadata, dict):
            for name in ("conversation", "user_id"):
                if isinstance(metadata.get(name), str):
                    return str(metadata[name])
        if isinstance(self.body.get("user"), str):
            return str(self.body["user"])
        return next((message.text for message in self.messages if message.role == "user"), "")

    @property
    def input_tokens(self) -> int:
        """The tokens of all message texts, by `count_tokens`."""
        return sum(count_tokens(message.text) for message in self.messages)


def digest_of(raw: bytes) -> str:
    """What names the content of a request."""
    return blake2b(raw, digest_size=12).hexdigest()


def required(body: Mapping[str, Any], name: str, kind: type) -> Any:
    """The field of a request that must be there and of this type."""
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequestError(f"{name}: a value of type {kind.__name__} is required")
    return value


def text_of(content: object) -> str:
    """The text of a message's content, whether it is a string or a list of parts; other parts have none."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError("messages: content must be a string or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            raise InvalidRequestError("messages: each part of a content must be an object")
        if part.get("type") == "tool_result":
            texts.append(text_of(part.get("content")))
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "".join(texts)


def parse_messages(raw: list[Any]) -> tuple[ParsedMessage, ...]:
    """The messages of a request, each with its role checked.

    Anthropic carries tool results in user messages; here they have the role `tool`, as with OpenAI, so that
    "the last user message" is what the user said in both.
    """
    parsed: list[ParsedMessage] = []
    for message in raw:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequestError("messages: each must be an object with a role")
        content = message.get("content")
        text = text_of(content)
        only_results = isinstance(content, list) and all(part.get("type") == "tool_result" for part in content)
        role = "tool" if content and only_results else message["role"]
        parsed.append(ParsedMessage(role, text, message))
    return tuple(parsed)
