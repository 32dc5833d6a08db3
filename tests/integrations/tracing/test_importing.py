"""`fairtrial import traces.jsonl`: recorded traces as a run that can be rescored."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, EvalReport, EvalSuite, PromptExecuted, Session, TokenUsage, ToolInvoked, open_store
from fairtrial.data.session.events import TraceIncomplete
from fairtrial.data.session.views import RecordedView
from fairtrial.errors import DataError
from fairtrial.integrations.tracing import TraceReceiver
from fairtrial.integrations.tracing.dialects import conversation_of
from fairtrial.integrations.tracing.importing import UNSCORED, OtlpTraces
from fairtrial.integrations.tracing.mapping import session_events
from fairtrial.integrations.tracing.received import ReceivedSpan, parse_logs, parse_traces
from fairtrial.runs.imported import detect_format, load_importer, store_run, write_suite
from fairtrial.scoring import token_usage_under, tool_called
from fairtrial.trials import TrialKey
from fairtrial.trials.context import trace_id_of, trial_span_id
from tests.integrations.tracing.traced_app import App, post, protobuf


def lines(count: int = 3, *, lose: int | None = None) -> list[str]:
    """Traces of an application that was called by another one, whose span is not in the file."""
    found = []
    for number in range(count):
        app = App("", f"00-{number + 1:032x}-{'ef' * 8}-01")
        spans = list(app.whole())
        spans[0]["attributes"] = [{"key": "input.value", "value": {"stringValue": f"question {number}"}},
                                  {"key": "output.value", "value": {"stringValue": f"answer {number}"}}]  # fmt: skip
        if number == lose:
            spans.append(app.span("orphan", parent="77" * 8))
        found.append(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}))
    return found


def imported(path: Path) -> tuple[Any, Any, Any]:
    assert detect_format(path) == "otlp"
    suite = load_importer("otlp").read(path).suites[0]
    store = open_store("memory:")
    stored = store_run(store, suite, suite.runs[0], "otlp")
    return store, suite, stored.run


def test_every_trace_becomes_a_trial_with_its_output_and_session(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines()))
    store, suite, run = imported(path)
    assert (suite.name, run.planned) == ("traffic", 3)
    first = next(iter(EvalReport(store, run).results))
    assert (first.sample.input, first.output, first.error) == ("question 0", "answer 0", UNSCORED)
    assert first.usage.total_tokens == 35
    assert [call.name for call in first.session[ToolInvoked].all()] == ["weather"]


def test_an_imported_run_is_rescored_without_calling_the_application(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines()))
    store, imported_suite, run = imported(path)

    def refuse(question: str) -> str:
        raise AssertionError("the application was called")

    suite = EvalSuite("traffic", imported_suite.dataset, refuse, tool_called("weather"))
    assert suite.rescore_sync(run.run_id, store=store).pass_rate == 1.0
    assert suite.rescore_sync(run.run_id, token_usage_under(34), store=store).pass_rate == 0.0
    files = {file.name: file for file, _ in write_suite(imported_suite, tmp_path / "out")}
    assert sorted(files) == ["traffic.jsonl", "traffic.py"]
    compile(files["traffic.py"].read_text(), "traffic.py", "exec")


def test_a_trace_with_missing_spans_is_an_error_for_evaluators_of_the_session(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines(lose=1)))
    store, imported_suite, run = imported(path)
    results = list(EvalReport(store, run).results)
    assert [len(result.session[TraceIncomplete].all()) for result in results] == [0, 1, 0]
    suite = EvalSuite("traffic", imported_suite.dataset, len, tool_called("weather"))
    report = suite.rescore_sync(run.run_id, store=store)
    assert (report.successful, report.errors["scorer_error"]) == (2, 1)
    assert OtlpTraces().read(path).left_out == ("1 of 3 traces are incomplete: spans are missing",)


def test_protobuf_and_json_files_give_the_same_trials(tmp_path: Path) -> None:
    app = App("", f"00-{1:032x}-{'ef' * 8}-01")
    (tmp_path / "a.pb").write_bytes(protobuf(app).SerializeToString())
    again = App("", f"00-{1:032x}-{'ef' * 8}-01")
    (tmp_path / "a.json").write_text(
        json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(again.whole())}]}]}, indent=2)
    )
    found = []
    for name in ("a.pb", "a.json"):
        trial = next(OtlpTraces().read(tmp_path / name).suites[0].runs[0].trials())
        found.append((trial.outcome, trial.usage, [(event.kind, event.span_id) for event in trial.events]))  # type: ignore[attr-defined]
    assert found[0] == found[1]
    assert len(found[0][2]) == 3


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(lines(1)[0] + '\n{"resourceSpans": 7}\n')
    with pytest.raises(DataError, match=r"traffic\.jsonl:2: the body must be an OTLP request"):
        OtlpTraces().read(path)


def test_other_files_are_not_taken_for_traces(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "1", "input": "x"}\n')
    assert detect_format(path) is None
    path.write_text('{"resourceSpans": []}\n')
    with pytest.raises(DataError, match="must contain spans"):
        OtlpTraces().read(path)


# What instrumentations really sent for one conversation with a tool (scripts/peers tracers) gives the same session.


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


# The trace receiver answers hostile bodies with 4xx or ignores them, and serves others meanwhile.


PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[TraceReceiver]:
    with TraceReceiver() as started:
        yield started


def span(**changes: Any) -> bytes:
    one = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "x", **changes}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}).encode()


def attribute(value: Any) -> bytes:
    return span(attributes=[{"key": "gen_ai.operation.name", "value": value}])


DEEP: dict[str, Any] = {"intValue": "1"}
for _ in range(40):
    DEEP = {"arrayValue": {"values": [DEEP]}}
TOO_DEEP = b'{"key":"a","value":' + b'{"arrayValue":{"values":[' * 300 + b'{"intValue":"1"}' + b"]}}" * 300 + b"}"
DEEP_SPAN = (
    b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"a","spanId":"b","attributes":[%s]}]}]}]}' % TOO_DEEP
)
BODIES: dict[str, tuple[bytes, dict[str, str], int]] = {
    "random protobuf": (random.Random(1).randbytes(100_000), PROTOBUF, 400),
    "a protobuf that is cut off": (b"\x0a\xff\xff\xff\xff\x0f", PROTOBUF, 400),
    "a deep protobuf": (b"\x0a\x02" * 5000, PROTOBUF, 400),
    "no JSON": (b"\xff\xfe{", {}, 400),
    "an empty body": (b"", {}, 400),
    "100,000 levels": (b"[" * 100_000, {}, 400),
    "a list": (b"[]", {}, 400),
    "a text for a list": (b'{"resourceSpans":"x"}', {}, 400),
    "nulls": (b'{"resourceSpans":[null]}', {}, 400),
    "spans that are numbers": (b'{"resourceSpans":[{"scopeSpans":[{"spans":[5]}]}]}', {}, 400),
    "an integer that is none": (attribute({"intValue": "zz"}), {}, 400),
    "an attribute without a key": (span(attributes=[{"value": {"intValue": "1"}}, 7]), {}, 400),
    "a text that is a list": (attribute({"stringValue": ["chat"]}), {}, 400),
    "a list for a text": (attribute({"arrayValue": {"values": [{"stringValue": "chat"}]}}), {}, 200),
    "an attribute of 40 levels": (attribute(DEEP), {}, 200),
    "an attribute of 300 levels": (DEEP_SPAN, {}, 400),
    "times that never were": (span(startTimeUnixNano="9" * 26, endTimeUnixNano="-5"), {}, 200),
    "a time of 400 digits": (span(startTimeUnixNano=10**400), {}, 400),
    "no gzip": (b"zzzz", {"Content-Encoding": "gzip"}, 400),
    "half a gzip": (gzip.compress(b"{}")[:-4], {"Content-Encoding": "gzip"}, 400),
    "deflate": (zlib.compress(b"{}"), {"Content-Encoding": "deflate"}, 200),
    "an unknown encoding": (b"x", {"Content-Encoding": "br"}, 400),
    "a long encoding": (b"x", {"Content-Encoding": "a" * 5000}, 400),
    "another content type": (b"x", {"Content-Type": "text/html"}, 415),
    "100 MB of zeros": (gzip.compress(bytes(100_000_000), 1), {"Content-Encoding": "gzip"}, 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_answered_and_the_next_one_too(receiver: TraceReceiver, name: str) -> None:
    body, headers, status = BODIES[name]
    assert post(receiver.endpoint, body, **headers) == status
    assert post(receiver.endpoint, b"{}") == 200


def test_many_empty_gzip_members_delay_nobody(receiver: TraceReceiver) -> None:
    empty = gzip.compress(b"")
    body = empty * (8 * 1024 * 1024 // len(empty))
    answers: list[int] = []
    before = time.monotonic()
    sender = threading.Thread(
        target=lambda: answers.append(post(receiver.endpoint, body, **{"Content-Encoding": "gzip"}))
    )
    sender.start()
    assert post(receiver.endpoint, b"{}") == 200
    sender.join()
    assert answers == [413]
    assert time.monotonic() - before < 30  # 400,000 members took hours.


def test_a_span_with_a_list_for_a_name_is_part_of_its_trial(receiver: TraceReceiver) -> None:
    expected = receiver.expect(TrialKey("run", "b", "list"), 1)
    app = App(receiver.endpoint, f"00-{expected.trace_id}-{expected.root_id}-01")
    odd = app.span("odd")
    odd["attributes"] = [{"key": "gen_ai.operation.name", "value": {"arrayValue": {"values": [{"intValue": 1}]}}}]
    app.send(odd)
    assert expected.collected().spans == 1


def test_floods_of_spans_are_counted_and_forgotten(receiver: TraceReceiver) -> None:
    def spans(trace: str, first: int) -> dict[str, Any]:
        made = [
            {"traceId": trace, "spanId": f"{first + n:016x}", "name": "x", "startTimeUnixNano": "1"}
            for n in range(2000)
        ]
        return {"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}

    unknown, surplus = receiver.counts.unknown, receiver.counts.surplus
    for number in range(1, 4):
        assert post(receiver.endpoint, spans(f"{number:032x}", 1)) == 200
    assert receiver.counts.unknown == unknown + 6000
    expected = receiver.expect(TrialKey("run", "b", "flood"), 1)
    for number in range(7):
        assert post(receiver.endpoint, spans(expected.trace_id, number * 2000 + 1)) == 200
    assert receiver.counts.surplus > surplus
    assert expected.collected().spans <= 10_000
