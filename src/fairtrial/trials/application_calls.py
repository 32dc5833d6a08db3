"""Model calls that a task makes with its own client, recorded in the session of its trial."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fairtrial.base.codec import from_json
from fairtrial.data.session.conversation import ConversationLog, identity_of
from fairtrial.data.session.events import PromptExecuted, ToolInvoked
from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.data.session.views import Envelope, RecordedView, kind_of

_PROMPT_EXECUTED, _TOOL_INVOKED, _MESSAGE = kind_of(PromptExecuted), kind_of(ToolInvoked), kind_of(ChatMessage)


class OpenCall(Protocol):
    """A call whose answer is still being read."""

    def abandon(self) -> None:
        """Record what has arrived."""
        ...


class ApplicationCalls:
    """The model calls of one attempt of a task, from any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()
        self._log = ConversationLog[None](self._is_recorded)
        self._own: set[str] = set()  # The tool calls that were recorded here.
        self._matched = Counter[str]()
        self._open: set[OpenCall] = set()

    def begin(self, messages: Iterable[ChatMessage], call: OpenCall) -> None:
        """Record the messages that a call is given."""
        with self._lock:
            self._open.add(call)
            for event in self._log.given(messages):
                self._record(event)

    def end(self, call: OpenCall) -> None:
        """Note that a call has ended, with an answer or without."""
        with self._lock:
            self._open.discard(call)

    def answered(self, executed: PromptExecuted, message: ChatMessage | None) -> None:
        """Record an answer."""
        with self._lock:
            self._record(executed)
            if message is not None:
                self._log.answered(message, None)
                self._record(message)

    def finish(self) -> None:
        """Record what is left at the end of the task: streams that were left early, tools without a result."""
        with self._lock:
            for call in tuple(self._open):
                call.abandon()
            for invoked, _origin in self._log.without_result():
                self._record(invoked)

    def _record(self, event: object) -> None:
        if isinstance(event, ToolInvoked):
            self._own.add(event.call_id)
        self._session.record(event)

    def _is_recorded(self, call: ToolCall) -> bool:
        """Return whether the task has recorded a tool call itself, by its id or, without one, by its name."""
        others = [
            tool
            for tool in self._session.view(attempt=self._session.attempt)[ToolInvoked].all()
            if tool.call_id not in self._own
        ]
        if any(tool.call_id == call.id for tool in others if tool.call_id):
            return True
        if sum(tool.name == call.name for tool in others if not tool.call_id) > self._matched[call.name]:
            self._matched[call.name] += 1
            return True
        return False


def without_recorded(view: RecordedView, envelopes: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return the events of a trace without those that are in the session: the same calls, seen twice.

    A model call of the trace is the same if it was under way at the same time and has as many output tokens. Names of
    models are not compared, because instrumentations write either the requested or the served one.
    """
    calls = [envelope for envelope in view.envelopes if envelope.kind == _PROMPT_EXECUTED]
    same: set[int] = set()
    for place, envelope in enumerate(envelopes):
        if envelope.kind == _PROMPT_EXECUTED:
            match = next((call for call in calls if _is_same(call, envelope)), None)
            if match is not None:
                calls.remove(match)
                same.add(place)
    if not same:
        return envelopes
    messages = Counter(identity_of(message) for message in view.trajectory.messages)
    tools = list(view[ToolInvoked].all())
    for place, envelope in enumerate(envelopes):
        if envelope.kind == _MESSAGE:
            identity = identity_of(from_json(ChatMessage, envelope.data))
            if messages[identity] > 0:
                messages[identity] -= 1
                same.add(place)
        elif envelope.kind == _TOOL_INVOKED:
            recorded = _recorded_tool(tools, envelope.data)
            if recorded is not None:
                tools.remove(recorded)
                same.add(place)
    return [envelope for place, envelope in enumerate(envelopes) if place not in same]


def _is_same(recorded: Envelope, traced: Envelope) -> bool:
    (start, end), (traced_start, traced_end) = _interval(recorded), _interval(traced)
    if traced_end < start or end < traced_start:
        return False
    counts = [envelope.data["usage"] for envelope in (recorded, traced)]
    return None in counts or counts[0]["output_tokens"] == counts[1]["output_tokens"]


def _interval(envelope: Envelope) -> tuple[float, float]:
    return envelope.time - (envelope.data.get("duration_ms") or 0.0) / 1000, envelope.time


def _recorded_tool(tools: Iterable[ToolInvoked], traced: Mapping[str, Any]) -> ToolInvoked | None:
    if traced.get("call_id"):
        return next((tool for tool in tools if tool.call_id == traced["call_id"]), None)
    return next((tool for tool in tools if tool.name == traced["name"]), None)
