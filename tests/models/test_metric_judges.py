"""Judges of metrics by name: labels, what they need, what they see, and prompts that change only with their version."""

from __future__ import annotations

import hashlib
from typing import Any

import anyio
import pytest

from fairtrial import Sample, ScriptedAdapter, ToolCall, ToolInvoked
from fairtrial.data.session import ChatMessage, Retrieved, Session
from fairtrial.errors import NothingToScoreError
from fairtrial.models import judges
from fairtrial.models.judges import MetricJudge
from fairtrial.models.judges.fence import read_fences
from fairtrial.scoring import Case
from fairtrial.testing import session_of

# The hash of what each version asks. A changed prompt needs a new version, since its scores are not those of the old.
PROMPTS = {
    "answer_correctness": (1, "d8d02d6bce3fd098"),
    "hallucination": (1, "e9cd462c06ca23c5"),
    "toxicity": (1, "2e79b943e7cb0fa3"),
    "bias": (1, "731c25c09ec432e6"),
    "summarization": (1, "442846a3f6d616bd"),
    "task_completion": (1, "f532a32215cd5106"),
    "goal_reached": (1, "12beb487d7bab58c"),
    "kept_role": (1, "5ef96d56da733821"),
    "remembered": (1, "e6c099219674225a"),
}
CONTEXT = Sample("s", "When?", "In 1932.", {"context": ["Opened in 1932."]})


def judge(name: str, label: str = "", seen: list[Any] | None = None) -> MetricJudge:
    def reply(messages: Any) -> Any:
        if seen is not None:
            seen.append({piece: value for _, piece, value in read_fences(messages[-1].text)})
        return {"reason": "because", "label": label}

    made = getattr(judges, name)(ScriptedAdapter(reply))
    assert isinstance(made, MetricJudge)
    return made


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_changes_only_with_its_version(name: str) -> None:
    made = getattr(judges, name)()
    assert made.prompt is not None
    assert made.question in made.prompt
    digest = hashlib.sha256(made.question.encode()).hexdigest()[:16]
    assert (made.rubric.version, digest) == PROMPTS[name]


@pytest.mark.parametrize("name", PROMPTS)
def test_the_first_label_passes_and_every_other_fails(name: str) -> None:
    good, *bad = getattr(judges, name)().rubric.labels
    session = session_of(ChatMessage("user", "go"))
    for label in (good, *bad):
        score = anyio.run(judge(name, label).score, Case(CONTEXT, "It opened in 1932.", session))
        assert (score.passed, score.value) == (label == good, float(label == good))
        details = score.metrics[0].metadata
        assert (details["label"], details["prompt_version"]) == (label, 1)


MISSING: dict[str, tuple[Sample[Any, Any], str]] = {
    "answer_correctness": (Sample("s", "When?"), "the sample has no right answer"),
    "hallucination": (Sample("s", "When?"), "needs the context, and there is none"),
    "summarization": (Sample("s", ""), "the sample has no input"),
    "task_completion": (Sample("s", "Book a room."), "needs the transcript"),
}


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("output", ["In 1932.", "", None])
def test_what_is_missing_is_an_error_and_the_judge_is_not_asked(name: str, output: str | None) -> None:
    seen: list[Any] = []
    sample, said = MISSING[name]
    with pytest.raises(NothingToScoreError, match=said):
        anyio.run(judge(name, "x", seen).score, Case(sample, output, Session()))
    assert not seen


def test_hallucination_reads_what_was_retrieved_before_the_metadata() -> None:
    seen: list[Any] = []
    made = judge("hallucination", "grounded", seen)
    anyio.run(made.score, Case(CONTEXT, "In 1932."))
    anyio.run(made.score, Case(CONTEXT, "In 1932.", session_of(Retrieved("q", ("Opened in 1930.",)))))
    anyio.run(made.score, Case(CONTEXT, "In 1932.", session_of(Retrieved("q", ()))))
    assert [pieces["context"] for pieces in seen] == [["Opened in 1932."], ["Opened in 1930."], []]
    assert list(seen[0]) == ["context", "input", "reference_answer", "output_to_assess"]


def test_task_completion_sees_messages_and_tool_calls() -> None:
    seen: list[Any] = []
    made = judge("task_completion", "completed", seen)
    session = session_of(ChatMessage("user", "Book."), ToolInvoked("book", {"city": "Rome"}, None, False, "full"))
    anyio.run(made.score, Case(Sample("s", "Book."), "Booked.", session))
    assert seen[0]["messages"] == [{"role": "user", "content": "Book.", "tool_calls": [], "name": ""}]
    assert seen[0]["tool_calls"] == [{"tool": "book", "arguments": {"city": "Rome"}, "result": None, "error": "full"}]
    told = session_of(
        ChatMessage("assistant", "", (ToolCall("book", {"city": "Rome"}, "1"),)),
        ChatMessage("tool", "full", name="book"),
        ToolInvoked("book", {"city": "Rome"}, "full", call_id="1"),
    )
    anyio.run(made.score, Case(Sample("s", "Book."), "Booked.", told))
    assert "tool_calls" not in seen[1]  # The messages tell of them already.
    assert "full" in str(seen[1]["messages"])


def test_a_judge_without_a_model_uses_that_of_the_suite() -> None:
    from fairtrial import Dataset, EvalSuite

    model = ScriptedAdapter(lambda messages: {"reason": "r", "label": "respectful"})
    suite = EvalSuite("s", Dataset.of({"Hello": "x"}, name="d"), str, judges.toxicity(), adapter=model)
    assert suite.run_sync(store="memory:").pass_rate == 1.0
