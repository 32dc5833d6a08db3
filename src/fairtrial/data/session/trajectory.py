"""What a trial did, in order: steps, tool calls and the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairtrial.base.codec import from_json, to_json
from fairtrial.base.codec.encode import PRIVATE
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.data.sample import Attachment
from fairtrial.data.session.events import ToolInvoked, check_text, fill_mapping, fill_text
from fairtrial.errors import CodecError, ConfigurationError


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
    see it unless they read this attribute. `echo` is what the provider wants back with the message. `failed` marks the
    result of a tool that failed, for providers that want to know. Sessions and caches keep all three (`to_record`).
    """

    role: str
    content: str | tuple[str | Attachment, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    reasoning: str = field(default="", compare=False, repr=False, metadata=PRIVATE)
    echo: Echo | None = field(default=None, compare=False, repr=False, metadata=PRIVATE)
    failed: bool = field(default=False, compare=False, repr=False, metadata=PRIVATE)

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
        content = self.content
        plain = type(self) is ChatMessage and type(self.role) is type(content) is type(self.name) is str
        if plain and not (self.tool_calls or self.reasoning or self.echo is not None or self.failed):
            # As most are; the same as `to_json` returns, with less work.
            role, text, name = escape_text(self.role), escape_text(str(content)), escape_text(self.name)
            return {"role": role, "content": text, "tool_calls": [], "name": name}
        tree = to_json(self)
        if self.reasoning:
            tree["reasoning"] = to_json(self.reasoning)
        if self.echo is not None:
            tree["echo"] = to_json(self.echo)
        if self.failed:
            tree["failed"] = True
        if self.tool_calls:
            for call, written in zip(self.tool_calls, tree["tool_calls"], strict=True):
                if call.echo is not None:
                    written["echo"] = to_json(call.echo)
        return tree


@first_is(tuple, list)
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


def as_message(value: Any) -> ChatMessage:
    """Return a message from a `ChatMessage`, a mapping of its fields, or a message in OpenAI's format."""
    if isinstance(value, ChatMessage):
        return value
    if _is_chat(value):
        return from_chat(value)
    try:
        return from_json(ChatMessage, to_json(value))
    except CodecError as error:
        raise ConfigurationError(
            "a message must be a ChatMessage or a mapping of its fields, such as "
            f'{{"role": "user", "content": "Hello"}} (got {value!r}: {error})'
        ) from None


def from_chat(row: Any, *, sampled: bool = False) -> ChatMessage:
    """Return a message in OpenAI's chat format, which trainers use too, as a record.

    Args:
        row: Role, content, `tool_calls` with functions, `tool_call_id`; None means that a key is missing.
        sampled: The message was sampled in training. Arguments that are no JSON are then mistakes of the policy and
            become none, and arguments of None are left out: Arrow gives every call the names of all calls.

    Raises:
        ConfigurationError: it is no message, or a part of it would be lost.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("role"), str):
        raise ConfigurationError(f"a message must be a mapping with a role and a content (got {row!r:.80})")
    lost = [key for key, value in row.items() if key not in _CHAT_KEYS and value]
    if lost and not sampled:
        raise ConfigurationError(
            f"a message in OpenAI's format must have no keys but {', '.join(sorted(_CHAT_KEYS))} (got {lost[0]!r})"
        )
    return ChatMessage(
        row["role"],
        _chat_text(row.get("content")),
        tuple(_chat_call(call, sampled) for call in row.get("tool_calls") or ()),
        str(row.get("tool_call_id") or row.get("name") or ""),
        str(row.get("reasoning_content") or ""),
    )


_CHAT_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
# Keys that only OpenAI's format has. Its SDK writes them all, most of them as None.
_ONLY_CHAT = frozenset({"tool_call_id", "reasoning_content", "refusal", "annotations", "audio", "function_call"})


def _is_chat(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    content, calls = value.get("content"), value.get("tool_calls") or ()
    return (
        not _ONLY_CHAT.isdisjoint(value)
        or any(isinstance(call, Mapping) and "function" in call for call in calls)
        or (isinstance(content, list | tuple) and any(isinstance(part, Mapping) and "type" in part for part in content))
    )


def _chat_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part if isinstance(part, str) else _part_text(part) for part in content)


def _part_text(part: Any) -> str:
    # Arrow gives every part the keys of all parts: a text part may have an `image_url` of None.
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise ConfigurationError(
        f"the parts of a message in OpenAI's format must be text (got {kind!r:.80})\n"
        'put files into a BlobFolder and give ChatMessage("user", ("text", folder.put_file("picture.png")))'
    )


def _chat_call(call: Any, sampled: bool) -> ToolCall:
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigurationError(f"a tool call must be a mapping with a function (got {call!r:.80})")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {} if sampled else arguments
    if not isinstance(arguments, Mapping):
        if not sampled:
            raise ConfigurationError(f"the arguments of a tool call must be a JSON object (got {arguments!r:.80})")
        arguments = {}
    known = {name: value for name, value in arguments.items() if value is not None or not sampled}
    return ToolCall(str(function.get("name") or ""), known, str(call.get("id") or ""))


def chat_messages(value: Any) -> tuple[ChatMessage, ...] | None:
    """Return the messages that an input says: a text, messages, `{"prompt": ...}` or `{"messages": [...]}`; else None.

    A mapping with further keys says something else: what they mean is not known, and they would be lost.
    """
    if isinstance(value, str):
        return (ChatMessage("user", value),)
    if _is_message(value):
        return (as_message(value),)
    if isinstance(value, Mapping) and len(value) == 1:
        ((key, inner),) = value.items()
        is_known = key == "prompt" or (key == "messages" and not isinstance(inner, str))
        return chat_messages(inner) if is_known and not isinstance(inner, Mapping) else None
    if isinstance(value, Sequence) and value and all(_is_message(message) for message in value):
        return tuple(as_message(message) for message in value)
    return None


def _is_message(value: object) -> bool:
    return isinstance(value, ChatMessage) or (
        isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)
    )


class ConversationLog[Origin]:
    """Turns the messages of model calls into events.

    Each call repeats the messages of earlier ones, which become one event. Client libraries do not see tools: their
    calls are taken from the answers of the model, and the results from the messages of the next call.

    Args:
        is_known: Whether a tool call is recorded already by other means, such as a span of the tool.
    """

    def __init__(self, is_known: Callable[[ToolCall], bool]) -> None:
        self._is_known = is_known
        self._recorded: list[tuple[Any, ...]] = []
        self._requested: dict[str, tuple[ToolCall, Origin]] = {}

    def new_events(self, messages: Iterable[ChatMessage]) -> Iterator[ChatMessage | ToolInvoked]:
        """Return the events of the messages that a call was given: those that are new, and the results of tools."""
        known = list(self._recorded)
        for message in messages:
            identity = identity_of(message)
            if identity in known:
                known.remove(identity)
                continue
            self._recorded.append(identity)
            if message.role == "tool" and message.name in self._requested:
                call, _origin = self._requested.pop(message.name)
                if not self._is_known(call):
                    yield ToolInvoked(call.name, call.arguments, result_of(message.text), call_id=call.id)
            yield message

    def answered(self, message: ChatMessage, origin: Origin) -> None:
        """Note an answer, and the tools that it calls."""
        self._recorded.append(identity_of(message))
        self._requested.update({call.id: (call, origin) for call in message.tool_calls})

    def without_result(self) -> Iterator[tuple[ToolInvoked, Origin]]:
        """Return the tool calls whose result no call was given: whether they were executed is not known."""
        requested, self._requested = self._requested, {}
        for call, origin in requested.values():
            if not self._is_known(call):
                yield ToolInvoked(call.name, call.arguments, call_id=call.id), origin


def identity_of(message: ChatMessage) -> tuple[Any, ...]:
    """Return what makes a message the same in two calls. Arguments may be written in several ways; ids are enough."""
    return message.role, message.text, message.name, tuple((call.id, call.name) for call in message.tool_calls)


def result_of(value: Any) -> Any:
    """Return the result of a tool: objects and arrays decoded, other text as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict | list) else value
