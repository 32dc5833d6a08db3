"""Finished trials as OpenTelemetry spans and evaluation results."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import Dataset, EvalConfig, EvalResult, EvalSuite, Metric, Sample, Score, TrialContext, TrialKey, task
from fairtrial.data.session import ChatMessage, PromptExecuted, Session, TokenUsage, ToolCall, ToolInvoked
from fairtrial.integrations.tracing.exporter import converted_trials, write_run
from fairtrial.integrations.tracing.facts import profile_named
from fairtrial.integrations.tracing.spans import TRIAL_SPAN, ConvertedTrial, TrialConverter
from fairtrial.models import PROVIDERS, BaseAdapter, ModelCall, ModelReply, ScriptedAdapter, agent_task
from fairtrial.store import open_store, redact, register_secret
from fairtrial.store.redact import current
from fairtrial.testing import FakeClock
from fairtrial.trials.context import trace_id_of, trial_span_id
from tests.integrations.tracing.collector import attributes

KEY = TrialKey("run1", "baseline", "q1", 0)
SECRET = "sk-live-0123456789abcdefXYZ"
WORDS = ("Oslo", "snow", "weather forecast", "too cold", "brief")  # What only content contains.


def agent_session() -> bytes:
    """A session with two model calls and a tool call inside a span."""
    session = Session(clock=FakeClock(1_800_000_001.0))
    session.record(ChatMessage("system", "Be brief."))
    session.record(ChatMessage("user", "The weather forecast for Oslo?"))
    usage = TokenUsage(100, 20, 30, 0.5, reasoning_tokens=7)
    with session.span("plan"):
        session.record(PromptExecuted("agent", "openai", "gpt", usage, "tool_calls", duration_ms=250.0))
    session.record(ChatMessage("assistant", "", (ToolCall("weather", {"city": "Oslo"}, "c1"),)))
    session.record(ToolInvoked("weather", {"city": "Oslo"}, "snow", True, duration_ms=5.0, call_id="c1"))
    session.record(ChatMessage("tool", "snow", name="c1"))
    session.record(PromptExecuted("agent", "openai", "gpt", TokenUsage(150, 4), "stop"))
    session.record(ChatMessage("assistant", "snow"))
    session.record(ToolInvoked("warn", {}, None, False, "ValueError: too cold in Oslo"))
    session.record(PromptExecuted("judge", "anthropic", "claude", TokenUsage(9, 1)), actor="judge")
    return session.snapshot()


def agent_result(**changes: Any) -> EvalResult:
    score = Score(0.25, False, "too cold", [Metric("words", 1.0, passed=True, reason="brief")])
    facts: dict[str, Any] = {"score": score, "output": "snow", "latency_ms": 1500, "started_at": 1_800_000_000.0}
    facts["snapshot"] = agent_session()
    return EvalResult(key=KEY, ordinal=0, outcome="scored", **(facts | changes))


def by_name(converted: ConvertedTrial) -> dict[str, Any]:
    return {span.name: span for span in converted.spans}


def whole(converted: ConvertedTrial) -> bytes:
    return b"".join(message.SerializeToString() for message in (*converted.spans, *converted.logs))


@pytest.mark.proves("R90")
def test_model_calls_and_tool_calls_become_spans_below_the_trial() -> None:
    converted = TrialConverter("run1", "support", "judge").convert(agent_result())
    root, plan = by_name(converted)[TRIAL_SPAN], by_name(converted)["plan"]
    assert attributes(root) == {
        "fairtrial.run.id": "run1", "fairtrial.suite": "support", "fairtrial.experiment": "baseline",
        "fairtrial.sample.id": "q1", "fairtrial.repeat": 0, "fairtrial.attempt": 1, "fairtrial.outcome": "scored",
        "fairtrial.score": 0.25, "fairtrial.passed": False, "fairtrial.metric.words": 1.0,
    }  # fmt: skip
    first, second, judge = [span for span in converted.spans if span.name.startswith("chat ")]
    assert (first.name, first.kind, judge.name) == ("chat gpt", 3, "chat claude")
    assert attributes(first) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt",
        "gen_ai.response.model": "gpt", "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 30, "gen_ai.usage.reasoning.output_tokens": 7,
        "fairtrial.cost_usd": 0.5, "gen_ai.response.finish_reasons": ["tool_calls"],
    }  # fmt: skip
    assert attributes(judge)["fairtrial.actor"] == "judge"
    assert (first.parent_span_id, plan.parent_span_id) == (plan.span_id, root.span_id)
    assert second.parent_span_id == root.span_id == trial_span_id(trace_id_of(KEY, 1))
    assert first.end_time_unix_nano - first.start_time_unix_nano == pytest.approx(250e6, abs=1e3)
    tool = by_name(converted)["execute_tool weather"]
    assert attributes(tool) == {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather", "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "c1",
    }  # fmt: skip
    warn = by_name(converted)["execute_tool warn"]
    assert (warn.status.code, warn.status.message, attributes(warn)["error.type"]) == (2, "", "ValueError")
    assert len({span.span_id for span in converted.spans}) == len(converted.spans) == 7
    assert {span.trace_id for span in converted.spans} == {trace_id_of(KEY, 1)}
    assert root.start_time_unix_nano <= min(span.start_time_unix_nano for span in converted.spans)
    assert root.end_time_unix_nano >= max(span.end_time_unix_nano for span in converted.spans)


def test_an_agent_is_a_span_above_its_calls() -> None:
    def weather(city: str) -> str:
        return "snow"

    def agent(name: str, *replies: Any) -> Any:
        return agent_task(ScriptedAdapter(replies), tools=[weather], name=name)

    call = ChatMessage("assistant", "", (ToolCall("weather", {"city": "Oslo"}, "c1"),))
    guide, style = agent("guide", call, "snow"), agent("style", "fine")

    @task
    async def two_agents(question: str, ctx: TrialContext) -> Any:
        ctx.session.record(PromptExecuted("plan", "openai", "gpt"))
        await style(question, ctx)
        await guide(question, ctx)
        return await guide(question, ctx)  # An error: its script is used up.

    suite = EvalSuite("s", Dataset([Sample("q1", "Oslo?")]), two_agents, lambda output: True)
    store = open_store("memory:")
    (converted,) = converted_trials(store, suite.run_sync(store=store).run)
    names = {span.span_id: span.name for span in converted.spans}
    children = [(names.get(span.parent_span_id, ""), span.name) for span in converted.spans[1:]]
    assert sorted(children) == [
        ("fairtrial.trial", "chat gpt"),
        ("fairtrial.trial", "invoke_agent guide"),
        ("fairtrial.trial", "invoke_agent guide"),
        ("fairtrial.trial", "invoke_agent style"),
        ("invoke_agent guide", "chat scripted"),
        ("invoke_agent guide", "chat scripted"),
        ("invoke_agent guide", "execute_tool weather"),
        ("invoke_agent style", "chat scripted"),
    ]
    ended, failed = [span for span in converted.spans if span.name == "invoke_agent guide"]
    assert attributes(ended) == {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "guide",
        "fairtrial.agent.end": "terminated", "fairtrial.agent.turns": 2,
    }  # fmt: skip
    assert ended.start_time_unix_nano < ended.end_time_unix_nano
    assert ended.status.code == 0
    assert (failed.status.code, attributes(failed)["fairtrial.agent.end"]) == (2, "error")


class Dated(BaseAdapter):
    """Answers with the full name of its model, as providers do."""

    async def _send(self, call: ModelCall) -> ModelReply:
        return ModelReply(ChatMessage("assistant", "hi"), None, "stop", f"{self._model}-2026-10-01")


@pytest.mark.parametrize(
    ("adapter", "registered"),
    [
        ("openai", "openai"),
        ("anthropic", "anthropic"),
        ("google", "gcp.gemini"),
        ("gemini", "gcp.gemini"),
        ("vertex", "gcp.vertex_ai"),
        ("azure", "azure.ai.openai"),
        ("bedrock", "aws.bedrock"),
        ("bedrock-runtime", "aws.bedrock"),
        ("mistral", "mistral_ai"),
    ],
)
def test_providers_have_the_names_of_the_registry_and_models_both_names(adapter: str, registered: str) -> None:
    assert adapter in PROVIDERS
    session = Session()
    anyio.run(partial(Dated(name=adapter, model="gpt-6").complete, "Hello", session=session))
    found = TrialConverter("run1").convert(agent_result(snapshot=session.snapshot())).spans[1]
    assert found.name == "chat gpt-6-2026-10-01"
    named = attributes(found)
    assert named["gen_ai.provider.name"] == registered
    assert (named["gen_ai.request.model"], named["gen_ai.response.model"]) == ("gpt-6", "gpt-6-2026-10-01")


def test_a_tool_that_failed_has_no_result() -> None:
    session = Session()
    session.record(ToolInvoked("warn", {}, None, False, "ValueError: too cold"))
    session.record(ToolInvoked("log", {}, None, True))
    warn, log = TrialConverter("run1", content=True).convert(agent_result(snapshot=session.snapshot())).spans[1:]
    assert "gen_ai.tool.call.result" not in attributes(warn)
    assert attributes(log)["gen_ai.tool.call.result"] == "null"


@pytest.mark.proves("R90")
def test_a_score_and_its_metrics_become_evaluation_results_of_the_trial() -> None:
    converted = TrialConverter("run1", "support", "judge").convert(agent_result())
    assert [(log.event_name, attributes(log)) for log in converted.logs] == [
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "judge", "gen_ai.evaluation.score.value": 0.25,
                                      "gen_ai.evaluation.score.label": "fail"}),
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "words", "gen_ai.evaluation.score.value": 1.0,
                                      "gen_ai.evaluation.score.label": "pass"}),
    ]  # fmt: skip
    assert {(log.trace_id, log.span_id) for log in converted.logs} == {
        (trace_id_of(KEY, 1), trial_span_id(trace_id_of(KEY, 1)))
    }


def test_an_error_of_the_task_is_the_status_of_the_trial_and_one_of_the_evaluator_a_result_with_a_warning() -> None:
    failed = EvalResult(key=KEY, ordinal=0, outcome="task_error", error="KeyError: 'Oslo'", stage="task")
    root = TrialConverter("run1").convert(failed).spans[0]
    assert (root.status.code, root.status.message, attributes(root)["error.type"]) == (2, "", "KeyError")
    scorer = EvalResult(key=KEY, ordinal=0, outcome="scorer_error", error="the judge said nothing", stage="score")
    converted = TrialConverter("run1", evaluator="judge").convert(scorer)
    assert (converted.spans[0].status.code, converted.logs[0].severity_number) == (0, 13)
    assert attributes(converted.logs[0]) == {"gen_ai.evaluation.name": "judge", "error.type": "scorer_error"}


def test_no_content_is_exported_unless_it_is_asked_for() -> None:
    sample = Sample("q1", "The weather forecast for Oslo?", "snow in Oslo")
    error = "ValueError: too cold in Oslo"
    for result in (
        agent_result(),
        agent_result(score=None),
        EvalResult(key=KEY, ordinal=0, outcome="task_error", error=error),
        EvalResult(key=KEY, ordinal=0, outcome="scorer_error", error=error, output="snow"),
    ):
        for profile in ("plain", "langsmith", "langfuse"):
            found = whole(TrialConverter("run1", profile=profile_named(profile)).convert(result, sample))
            assert [word for word in WORDS if word.encode() in found] == []
    found = whole(TrialConverter("run1", content=True).convert(agent_result(), sample))
    assert [word for word in WORDS if word.encode() not in found] == []


def test_content_has_the_messages_of_each_call_the_input_and_the_output() -> None:
    sample = Sample("q1", "The weather forecast for Oslo?", "snow")
    converted = TrialConverter("run1", content=True).convert(agent_result(), sample)
    root = attributes(converted.spans[0])
    assert (root["fairtrial.input"], root["fairtrial.output"]) == ('"The weather forecast for Oslo?"', '"snow"')
    first, second, _ = [attributes(span) for span in converted.spans if span.name.startswith("chat ")]
    asked = json.loads(second["gen_ai.input.messages"])
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool"]
    call = {"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Oslo"}}
    assert json.loads(first["gen_ai.output.messages"]) == [{"role": "assistant", "parts": [call]}]
    assert asked[3]["parts"] == [{"type": "tool_call_response", "id": "c1", "response": "snow"}]
    tool = attributes(by_name(converted)["execute_tool weather"])
    assert (tool["gen_ai.tool.call.arguments"], tool["gen_ai.tool.call.result"]) == ('{"city":"Oslo"}', "snow")


@pytest.mark.parametrize("profile", ["plain", "langsmith", "langfuse"])
def test_no_secret_is_exported_wherever_it_stands(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    register_secret(SECRET)
    session = Session()
    session.record(ChatMessage("user", f"my key is {SECRET}"))
    with session.span(f"span {SECRET}"):
        session.record(PromptExecuted("p", f"a{SECRET}", f"m{SECRET}", TokenUsage(1, 1), f"stop {SECRET}"))
    session.record(ChatMessage("assistant", SECRET, (ToolCall("t", {"k": SECRET}, f"id{SECRET}"),)))
    session.record(
        ToolInvoked(f"tool{SECRET}", {SECRET: SECRET}, {"r": SECRET}, False, f"{SECRET}: bad", call_id=SECRET)
    )
    result = EvalResult(
        key=KEY._replace(sample_id=SECRET, experiment=SECRET),
        ordinal=0,
        outcome="scored",
        score=Score(
            1.0, True, f"because {SECRET}", [Metric(f"m{SECRET}", 1.0, passed=True, reason=SECRET)], name=SECRET
        ),
        output={"answer": SECRET},
        error=SECRET,
        snapshot=session.snapshot(),
    )
    converter = TrialConverter(
        "run1", f"suite {SECRET}", f"judge {SECRET}", True, profile_named(profile), redactor=current()
    )
    found = whole(converter.convert(result, Sample("q", {"x": SECRET}, [SECRET], {})))
    failed = EvalResult(
        key=KEY, ordinal=0, outcome="task_error", error=f"{SECRET}: {SECRET}", metadata={"traceback": SECRET}
    )
    found += whole(converter.convert(failed))
    assert SECRET.encode() not in found
    assert found.count(b"[redacted]") > 20


def test_text_that_utf8_cannot_encode_is_exported_with_question_marks() -> None:
    result = EvalResult(
        key=KEY._replace(sample_id="a\udc80b"), ordinal=0, outcome="scored", score=Score(1.0), output="x\ud800"
    )
    converted = TrialConverter("run1", content=True).convert(result, Sample("a\udc80b", "y\udfff"))
    assert attributes(converted.spans[0])["fairtrial.sample.id"] == "a?b"


def test_profiles_add_the_attributes_of_their_products() -> None:
    langsmith = TrialConverter("run1", "support", content=True, profile=profile_named("langsmith"))
    converted = langsmith.convert(agent_result(), Sample("q1", "hello"))
    root = attributes(converted.spans[0])
    assert (root["langsmith.span.kind"], root["gen_ai.prompt"], root["gen_ai.completion"]) == (
        "chain", '"hello"', '"snow"',
    )  # fmt: skip
    assert "langsmith.trace.id" not in root
    kinds = {span.name: attributes(span).get("langsmith.span.kind") for span in converted.spans}
    assert (kinds["chat gpt"], kinds["execute_tool weather"]) == ("llm", "tool")
    langfuse = TrialConverter("run1", "support", profile=profile_named("langfuse")).convert(agent_result())
    assert {attributes(span)["langfuse.experiment.id"] for span in langfuse.spans} == {"run1:baseline"}


@task(inline=True)
def answer(number: int, ctx: TrialContext) -> int:
    ctx.session.record(PromptExecuted("p", "openai", "gpt", TokenUsage(3, number)))
    return number


def test_a_stored_run_is_written_as_lines_of_otlp_json_with_hexadecimal_ids(tmp_path: Path) -> None:
    store = open_store("memory:")
    samples = Dataset([Sample(f"s{n}", n, n) for n in range(3)], name="numbers")
    report = EvalSuite("numbers", samples, answer, lambda o, e: Score(1.0), config=EvalConfig(repeats=2)).run_sync(
        store=store
    )
    path = tmp_path / "traces.jsonl"
    assert write_run(store, report.run, path) == 6
    traces, logs = (json.loads(line) for line in path.read_text().splitlines())
    spans = traces["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [span["name"] for span in spans] == [TRIAL_SPAN, "chat gpt"] * 6
    expected = trace_id_of(TrialKey(report.run_id, "baseline", "s0", 1), 1)
    assert (spans[2]["traceId"], spans[3]["parentSpanId"]) == (expected.hex(), trial_span_id(expected).hex())
    assert len(logs["resourceLogs"][0]["scopeLogs"][0]["logRecords"]) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["traces.jsonl"]
    assert sum(len(each.spans) for each in converted_trials(store, report.run)) == 12
