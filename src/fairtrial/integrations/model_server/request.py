"""Requests of clients, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.reply import count_tokens

type Protocol = Literal["openai", "responses", "anthropic", "gemini", "bedrock"]
"""The protocols the server speaks: OpenAI's chat completions and Responses, Anthropic's messages, Google's
`generateContent`, Amazon Bedrock's `Converse`."""


class InvalidRequestError(Exception):
    """A request is invalid; the server answers with status 400 and this message."""


@first_is(str)
@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One message: its role, its text with all text parts joined, and the message as it was sent."""

    role: str
    text: str
    raw: Mapping[str, Any]


@first_is(str)
@dataclass(frozen=True, slots=True)
class ParsedTool:
    """A tool the client offers."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@first_is(int)
@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A completion request as received. `body` is the whole request; the other fields are derived from it.

    `number` counts completion requests from 1. `attempt` counts admitted requests with the same body from 1.
    `messages` begins with the system prompt if there is one, in both protocols.
    """

    number: int
    protocol: Protocol
    model: str
    messages: tuple[ParsedMessage, ...]
    body: Mapping[str, Any]
    digest: str
    size: int = 0
    tools: tuple[ParsedTool, ...] = ()
    required_tool: str | None = None
    """The tool that the client requires; "" if it requires any tool."""
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
        """The number of assistant messages in the request."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def conversation(self) -> str:
        """A key that identifies the conversation: the one that the client sent, or the first user message.

        A client sends a key as `metadata.conversation` (OpenAI), `metadata.user_id` (Anthropic) or `user`.
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
        return sum(_tokens_of(message) for message in self.messages)

    @property
    def max_output_tokens(self) -> int | None:
        """The largest number of tokens of the answer that the client allows; None without a limit."""
        for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
            limit = self.body.get(name)
            if isinstance(limit, int) and not isinstance(limit, bool):
                return limit
        return None


def _tokens_of(message: ParsedMessage) -> int:
    content = message.raw.get("content")
    if message.role != "tool" or not isinstance(content, list):
        return count_tokens(message.text)
    # Anthropic puts the results of several calls into one message; other protocols have one message for each.
    return sum(count_tokens(text_of([part])) for part in content)


def digest_of(raw: bytes) -> str:
    """Return a hash of the content of a request."""
    return blake2b(raw, digest_size=12).hexdigest()


def required(body: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a required field of a request; raises if it is missing or has another type."""
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequestError(f"{name}: a value of type {kind.__name__} is required")
    return value


def text_of(content: object) -> str:
    """Return the text of a message's content, which is a string or a list of parts; only text parts count."""
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
    """Parse the messages of a request and check their roles.

    Anthropic sends tool results in user messages; here they have the role `tool`, as with OpenAI, so that the last
    user message means the same in both protocols.
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
