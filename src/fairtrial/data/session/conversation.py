"""The conversation of several model calls as events: every message once, and the tools that were called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fairtrial.data.session.events import ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage, ToolCall


class ConversationLog[Origin]:
    """Turns the messages of model calls into events.

    Each call repeats the messages of earlier ones, which become one event. Client libraries do not see tools: their
    calls are taken from the answers of the model, and the results from the messages of the next call.

    Args:
        is_known: Whether a tool call is recorded already by other means, such as a span of the tool.
    """

    def __init__(self, is_known: Callable[[ToolCall], bool]) -> None:
        self._is_known = is_known
        self._said: list[tuple[Any, ...]] = []
        self._requested: dict[str, tuple[ToolCall, Origin]] = {}

    def given(self, messages: Iterable[ChatMessage]) -> Iterator[ChatMessage | ToolInvoked]:
        """Return the events of the messages that a call was given: those that are new, and the results of tools."""
        known = list(self._said)
        for message in messages:
            identity = identity_of(message)
            if identity in known:
                known.remove(identity)
                continue
            self._said.append(identity)
            if message.role == "tool" and message.name in self._requested:
                call, _origin = self._requested.pop(message.name)
                if not self._is_known(call):
                    yield ToolInvoked(call.name, call.arguments, result_of(message.text), call_id=call.id)
            yield message

    def answered(self, message: ChatMessage, origin: Origin) -> None:
        """Note an answer, and the tools that it calls."""
        self._said.append(identity_of(message))
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
