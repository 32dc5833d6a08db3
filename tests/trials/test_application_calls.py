"""Model calls that a task makes with its own client: each is recorded once, even if a trace contains it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fairtrial.data.session import ChatMessage, Envelope, PromptExecuted, Session, TokenUsage, ToolCall, ToolInvoked
from fairtrial.testing import FakeClock
from fairtrial.trials.task import ApplicationCalls, without_recorded


class Call:
    """A call whose answer is still being read."""

    def __init__(self, calls: ApplicationCalls) -> None:
        self._calls = calls
        self.abandoned = 0

    def abandon(self) -> None:
        self.abandoned += 1
        self._calls.end(self.abandon)


def executed(tokens: int | None = 5, ms: float = 1000.0) -> PromptExecuted:
    usage = None if tokens is None else TokenUsage(1, tokens)
    return PromptExecuted("m", usage=usage, duration_ms=ms)


def texts(session: Session) -> list[str]:
    return [message.text for message in session.everything()[ChatMessage].all()]


def names(session: Session) -> list[str]:
    return [tool.name for tool in session.everything()[ToolInvoked].all()]


QUESTION = ChatMessage("user", "How much?")
ASKS = ChatMessage("assistant", "", tool_calls=(ToolCall("search", {"q": "price"}, id="c1"),))
FOUND = ChatMessage("tool", "7", name="c1")


def test_a_conversation_is_recorded_once_although_each_call_repeats_it() -> None:
    session = Session()
    calls = ApplicationCalls(session)
    first, second = Call(calls), Call(calls)
    calls.begin([QUESTION], first.abandon)
    calls.answered(executed(), ASKS)
    calls.end(first.abandon)
    calls.begin([QUESTION, ASKS, FOUND], second.abandon)
    calls.answered(executed(), ChatMessage("assistant", "7 euros"))
    calls.end(second.abandon)
    calls.finish()
    assert texts(session) == ["How much?", "", "7", "7 euros"]
    assert len(session.everything()[PromptExecuted].all()) == 2
    (tool,) = session.everything()[ToolInvoked].all()
    assert (tool.name, tool.call_id) == ("search", "c1")
    assert first.abandoned == second.abandoned == 0


def test_an_answer_without_a_message_is_still_a_call() -> None:
    session = Session()
    calls = ApplicationCalls(session)
    calls.answered(executed(), None)
    assert len(session.everything()[PromptExecuted].all()) == 1
    assert texts(session) == []


def test_what_is_open_at_the_end_of_the_task_is_recorded() -> None:
    session = Session()
    calls = ApplicationCalls(session)
    left, ended = Call(calls), Call(calls)
    calls.begin([QUESTION], left.abandon)
    calls.begin([QUESTION], ended.abandon)
    calls.answered(executed(), ASKS)
    calls.end(ended.abandon)
    calls.finish()
    assert (left.abandoned, ended.abandoned) == (1, 0)
    assert names(session) == ["search"]  # Without its result.
    calls.finish()
    assert left.abandoned == 1


@pytest.mark.parametrize("call_id", ["c1", ""], ids=["by id", "by name"])
def test_a_tool_call_that_the_task_recorded_is_not_recorded_again(call_id: str) -> None:
    session = Session()
    calls = ApplicationCalls(session)
    first, second = Call(calls), Call(calls)
    calls.begin([QUESTION], first.abandon)
    calls.answered(executed(), ASKS)
    calls.end(first.abandon)
    session.record(ToolInvoked("search", call_id=call_id))
    calls.begin([QUESTION, ASKS, FOUND], second.abandon)
    calls.end(second.abandon)
    calls.finish()
    assert names(session) == ["search"]


def test_each_recorded_tool_without_an_id_stands_for_one_call() -> None:
    session = Session()
    calls = ApplicationCalls(session)
    twice = ChatMessage(
        "assistant",
        "",
        tool_calls=(ToolCall("search", {}, id="c1"), ToolCall("search", {}, id="c2"), ToolCall("read", {}, id="c3")),
    )
    call = Call(calls)
    calls.begin([QUESTION], call.abandon)
    calls.answered(executed(), twice)
    session.record(ToolInvoked("search"))
    calls.end(call.abandon)
    calls.finish()
    assert sorted(names(session)) == ["read", "search", "search"]


def recorded(*events: tuple[float, object]) -> Session:
    """A session with each event at its time."""
    clock = FakeClock(0.0)
    session = Session(clock=clock)
    for time, event in events:
        clock.advance(time - clock.time())
        session.record(event)
    return session


def traced(*events: tuple[float, object]) -> Sequence[Envelope]:
    return recorded(*events).everything().envelopes


def left(session: Session, envelopes: Sequence[Envelope]) -> list[str]:
    return [envelope.kind.rpartition(":")[2] for envelope in without_recorded(session.everything(), envelopes)]


def test_a_call_that_was_seen_twice_is_kept_once_with_its_messages_and_tools() -> None:
    session = recorded((10.0, QUESTION), (10.0, executed()), (10.0, ASKS), (11.0, ToolInvoked("search", call_id="c1")))
    seen = traced(
        (10.1, QUESTION), (10.1, executed()), (10.1, ASKS), (11.0, ToolInvoked("search", call_id="c1")),
        (11.5, ToolInvoked("search", call_id="c9")), (12.0, ChatMessage("assistant", "more")),
    )  # fmt: skip
    assert left(session, seen) == ["ToolInvoked", "ChatMessage"]
    assert without_recorded(session.everything(), seen)[0].data["call_id"] == "c9"


@pytest.mark.parametrize(
    ("mine", "other", "same"),
    [
        ((10.0, executed()), (10.5, executed()), True),
        ((10.0, executed()), (12.5, executed()), False),  # It began after the other had ended.
        ((12.5, executed()), (10.0, executed()), False),
        ((10.0, executed()), (11.0, executed()), True),  # It began when the other ended.
        ((10.0, executed()), (10.0, executed(6)), False),
        ((10.0, executed(None)), (10.0, executed(6)), True),
        ((10.0, executed(ms=0)), (10.5, executed(ms=400)), False),
    ],
)
def test_calls_are_the_same_if_they_overlap_and_have_as_many_tokens(
    mine: tuple[float, Any],
    other: tuple[float, Any],
    same: bool,
) -> None:
    assert left(recorded(mine), traced(other)) == ([] if same else ["PromptExecuted"])


def test_one_recorded_call_stands_for_one_of_the_trace() -> None:
    assert left(recorded((10.0, executed())), traced((10.0, executed()), (10.1, executed()))) == ["PromptExecuted"]


def test_without_a_common_call_nothing_of_a_trace_is_left_out() -> None:
    session = recorded((10.0, QUESTION), (10.0, ToolInvoked("search")))
    seen = traced((10.0, QUESTION), (10.0, ToolInvoked("search")))
    assert without_recorded(session.everything(), seen) is seen


def test_tools_without_an_id_are_the_same_by_name() -> None:
    session = recorded((10.0, executed()), (10.0, ToolInvoked("search")), (10.0, QUESTION))
    seen = traced(
        (10.0, executed()), (10.0, ToolInvoked("search")), (10.0, ToolInvoked("search")), (10.0, ToolInvoked("read")),
        (10.0, QUESTION), (10.0, QUESTION),
    )  # fmt: skip
    assert left(session, seen) == ["ToolInvoked", "ToolInvoked", "ChatMessage"]
