"""What instrumentations really sent for one conversation with a tool (scripts/peers tracers) gives the same session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, PromptExecuted, Session, TokenUsage, ToolInvoked, TrialKey
from fairtrial.data.session.views import RecordedView
from fairtrial.integrations.tracing.dialects import conversation_of
from fairtrial.integrations.tracing.mapping import session_events
from fairtrial.integrations.tracing.received import ReceivedSpan, parse_logs, parse_traces
from fairtrial.trials.context import trace_id_of, trial_span_id

RECORDED = Path(__file__).with_name("recorded")
KEY = TrialKey("recorded", "baseline", "oslo")
TRACE_ID = trace_id_of(KEY, 1)
NAMES = sorted(path.stem for path in RECORDED.glob("*.jsonl"))


def recorded_session(name: str) -> RecordedView:
    lines = (RECORDED / f"{name}.jsonl").read_bytes().splitlines()
    spans = [span for line in lines for span in parse_traces(line, is_json=True)]
    logs = [log for line in lines for log in parse_logs(line, is_json=True)]
    assert {span.trace_id for span in spans} == {TRACE_ID.hex()}
    session = Session()
    session.extend(session_events(spans, logs, root_id=trial_span_id(TRACE_ID).hex()))
    return session.view()


def facts(session: RecordedView) -> dict[str, Any]:
    return {
        "models": [(call.model, call.usage) for call in session[PromptExecuted].all()],
        "tools": [(call.name, dict(call.params), call.result, call.failed) for call in session[ToolInvoked].all()],
        "messages": [
            (message.role, message.text, [(call.name, dict(call.arguments)) for call in message.tool_calls])
            for message in session[ChatMessage].all()
        ],
        "last": session.trajectory.last_reply,
    }


def test_the_instrumentations_are_recorded() -> None:
    assert NAMES == [
        "genai", "genai-events", "langfuse", "langsmith", "logfire", "openinference", "openllmetry", "pydantic-ai",
        "vercel-ai",
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"langfuse"}))  # Langfuse does not send it.
def test_the_reasons_for_which_answers_ended_are_the_same(name: str) -> None:
    assert [call.finish_reason for call in recorded_session(name)[PromptExecuted].all()] == ["tool_calls", "stop"]


@pytest.mark.proves("R90")
@pytest.mark.parametrize("name", NAMES)
def test_the_session_is_the_same_whatever_recorded_it(name: str) -> None:
    assert facts(recorded_session(name)) == {
        "models": [
            ("test-model", TokenUsage(40, 12)),
            ("test-model", TokenUsage(60, 6)),
        ],
        "tools": [("weather", {"city": "Oslo"}, "snow in Oslo", False)],
        "messages": [
            ("system", "Be brief.", []),
            ("user", "The weather in Oslo?", []),
            ("assistant", "", [("weather", {"city": "Oslo"})]),
            ("tool", "snow in Oslo", []),
            ("assistant", "It snows in Oslo.", []),
        ],
        "last": "It snows in Oslo.",
    }


@pytest.mark.parametrize("written", ["gen_ai.prompt", "llm.input_messages", "gen_ai.completion"])
def test_a_call_that_failed_before_its_answer_keeps_what_it_was_asked(written: str) -> None:
    attributes = {f"{written}.0.role": "user", f"{written}.0.content": "The weather in Oslo?"}
    read = conversation_of(ReceivedSpan("01", "02", "", "chat", 0.0, 1.0, "timed out", attributes))
    one_sided, other = (read.answered, read.given) if written == "gen_ai.completion" else (read.given, read.answered)
    assert ([(message.role, message.text) for message in one_sided], other) == (
        [("user", "The weather in Oslo?")],
        (),
    )


@pytest.mark.parametrize("name", NAMES)
def test_recordings_name_no_machine(name: str) -> None:
    text = (RECORDED / f"{name}.jsonl").read_text()
    assert not [word for word in ("127.0.0.1", "/tmp/", "/work/", "host.name", "process.") if word in text]
