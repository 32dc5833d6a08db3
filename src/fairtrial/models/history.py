"""Hooks before the requests of an agent that keep its conversation short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairtrial.base.codec import dumps
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ConfigurationError
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.tools import arguments_text
from fairtrial.trials.context import running_trial

if TYPE_CHECKING:
    from fairtrial.models.agent import BeforeRequest

_SUMMARIZE = (
    "Below is the older part of a conversation between a user and an assistant that calls tools. Summarize it for the "
    "assistant, who will see your summary instead: what was asked, what was done and found, exact names, numbers and "
    "ids that may be needed, what is still to do."
)


def trim_history(max_chars: int) -> BeforeRequest:
    """Return a `before_request` for `agent_task` that leaves out the oldest turns of a long conversation.

    Kept are the system message, the first messages of the user, and as many of the last turns as fit, but always the
    last one. A turn is a message of the model with the results of its tool calls, which providers do not accept apart.

    Args:
        max_chars: The largest size of the conversation: the characters of texts, tool calls and results. Four
            characters are about one token.
    """
    _check(max_chars)

    def trim(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        opening, _dropped, kept = _split(messages, max_chars)
        return (*opening, *kept)

    return trim


def summarize_history(adapter: ProviderAdapter, max_chars: int, *, instructions: str = _SUMMARIZE) -> BeforeRequest:
    """Return a `before_request` for `agent_task` that replaces the oldest turns of a long conversation by a summary.

    When the conversation is longer than `max_chars`, the oldest turns are left out until the rest takes half of that,
    so that not every turn needs a summary. The call of the model is recorded with the actor "summary" and counts for
    the cost of the trial; it is not training data.

    Args:
        adapter: The model that writes the summary.
        max_chars: The largest size of the conversation, as for `trim_history`.
        instructions: What the model is asked to do with the older part of the conversation, which follows.
    """
    _check(max_chars)

    async def summarize(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        if sum(map(_size, messages)) <= max_chars:
            return messages
        opening, dropped, kept = _split(messages, max_chars // 2)
        if not dropped:
            return messages
        trial = running_trial()
        completion = await adapter.complete(
            [ChatMessage("user", f"{instructions}\n\n{_as_text(dropped)}")],
            session=None if trial is None else trial.session,
            actor="summary",
            prompt_name="summary",
        )
        return (*opening, ChatMessage("user", f"Summary of the conversation so far:\n{completion.text}"), *kept)

    return summarize


def _check(max_chars: int) -> None:
    if max_chars < 1:
        raise ConfigurationError(f"max_chars must be at least 1 (got {max_chars})")


def _split(
    messages: Sequence[ChatMessage], max_chars: int
) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage], Sequence[ChatMessage]]:
    """Return the messages before the first reply, the turns to leave out, and the turns to keep."""
    starts = [at for at, message in enumerate(messages) if message.role == "assistant"]
    if not starts:
        return messages, (), ()
    first = last = starts[0]
    room = max_chars - sum(map(_size, messages[:first]))
    for start, end in zip(reversed(starts), (len(messages), *reversed(starts[1:])), strict=True):
        room -= sum(map(_size, messages[start:end]))
        if room < 0 and end < len(messages):
            break
        last = start
    return messages[:first], messages[first:last], messages[last:]


def _size(message: ChatMessage) -> int:
    return len(message.text) + sum(len(call.name) + len(arguments_text(call)) for call in message.tool_calls)


def _as_text(messages: Sequence[ChatMessage]) -> str:
    """Return messages as JSON lines, in which no text of a message can pass for another message."""
    return "\n".join(
        dumps({"role": message.role, "text": message.text, "tool_calls": message.tool_calls}) for message in messages
    )
