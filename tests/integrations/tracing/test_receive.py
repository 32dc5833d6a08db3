"""Spans of applications as events of trials: the receiver, completeness, and what happens when spans are missing."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from fairtrial import ChatMessage, Dataset, EvalReport, EvalSuite, PromptExecuted, Sample, TokenUsage, ToolInvoked, task
from fairtrial.data.session.events import SpanClosed, TraceIncomplete
from fairtrial.errors import ConfigurationError
from fairtrial.integrations.tracing import TraceReceiver, TrialSpanProcessor
from fairtrial.integrations.tracing.received import key_values
from fairtrial.scoring import exact_match, token_usage_under, tool_called
from fairtrial.store import open_store, redact, register_secret
from fairtrial.trials import EvalConfig, TrialContext, TrialKey
from fairtrial.trials.context import CollectedTrace
from tests.integrations.tracing.traced_app import App, post, protobuf

LONG = 120.0  # Seconds to wait for what must happen, on a slow machine.


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    with TraceReceiver(trace_wait_seconds=LONG) as found:
        yield found


def suite_of(app: Any, receiver: Any, *, count: int = 1, evaluator: Any = None, **config: Any) -> EvalSuite:
    samples = Dataset([Sample(f"s{n}", n, "snow") for n in range(count)], name="questions")
    return EvalSuite(
        "forecast", samples, app, evaluator or tool_called("weather"), config=EvalConfig(**config), traces=receiver
    )


def answer(number: int, ctx: TrialContext) -> str:
    app = App(ctx.trace_endpoint, ctx.traceparent)
    app.send(*app.whole())
    return "snow"


def only(report: EvalReport[Any]) -> Any:
    (result,) = report.results
    return result


@pytest.mark.proves("R90", "R143")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_spans_of_the_application_become_events_of_the_trial(backend: str) -> None:
    suite = suite_of(answer, TraceReceiver(trace_wait_seconds=LONG), count=3)
    report: Any = anyio.run(lambda: suite.run(store="memory:"), backend=backend)
    assert (report.successful, report.pass_rate) == (3, 1.0)
    result = report.results[0]
    session = result.session
    assert session[ToolInvoked].all() == (ToolInvoked("weather", {"city": "Oslo"}, "snow", True),)
    assert [call.usage for call in session[PromptExecuted].all()] == [TokenUsage(30, 5)]
    assert [span.name for span in session[SpanClosed].all()] == ["POST /ask"]
    assert result.usage.total_tokens == 35


def test_a_receiver_of_a_suite_runs_while_the_suite_does() -> None:
    receiver = TraceReceiver(trace_wait_seconds=LONG)
    assert receiver.endpoint == ""
    assert suite_of(answer, receiver).run_sync(store="memory:").pass_rate == 1.0
    assert receiver.endpoint == ""
    assert "fairtrial trace receiver" not in {thread.name for thread in threading.enumerate()}


class TestCompleteness:
    """What a trial waits for. `tell_late` sends what is missing when the trial waits for it."""

    def test_a_span_that_comes_after_the_answer_is_waited_for_outside_of_the_latency(
        self, receiver: TraceReceiver
    ) -> None:
        answered = threading.Event()

        def slow_exporter(number: int, ctx: TrialContext) -> str:
            app = App(ctx.trace_endpoint, ctx.traceparent)
            outer, *inner = app.whole()
            app.send(*inner)

            def export() -> None:
                answered.wait(60)
                time.sleep(1.5)  # As a batch processor does.
                app.send(outer)

            threading.Thread(target=export).start()
            answered.set()
            return "snow"

        result = only(suite_of(slow_exporter, receiver).run_sync(store="memory:"))
        assert result.passed
        assert result.latency_ms < 1_500

    def test_a_lost_parent_makes_the_trace_incomplete_and_the_evaluator_of_tools_an_error(self) -> None:
        def loses(number: int, ctx: TrialContext) -> str:
            app = App(ctx.trace_endpoint, ctx.traceparent)
            app.send(*app.whole()[1:])
            return "snow"

        result = only(suite_of(loses, TraceReceiver(trace_wait_seconds=0.3)).run_sync(store="memory:"))
        assert (result.outcome, result.score) == ("scorer_error", None)
        assert result.error == (
            "the application's trace is incomplete: 1 parent span(s) did not arrive, such as that of 'chat gpt'"
        )
        assert result.session[TraceIncomplete].all()[0].spans == 2
        assert result.usage.total_tokens == 35  # What did arrive is kept.

    def test_no_span_at_all_is_incomplete(self) -> None:
        result = only(suite_of(lambda n: "snow", TraceReceiver(trace_wait_seconds=0.3)).run_sync(store="memory:"))
        assert "incomplete: no span arrived" in result.error

    def test_spans_of_unknown_traces_are_named_where_none_of_the_trial_arrived(self) -> None:
        def starts_a_trace_of_its_own(number: int, ctx: TrialContext) -> str:
            app = App(ctx.trace_endpoint, f"00-{'ab' * 16}-{'cd' * 8}-01")
            app.send(*app.whole())
            return "snow"

        receiver = TraceReceiver(trace_wait_seconds=0.3)
        result = only(suite_of(starts_a_trace_of_its_own, receiver).run_sync(store="memory:"))
        assert "no span arrived, but 3 of unknown traces: the application did not use the traceparent" in result.error

    def test_spans_that_are_not_below_the_trial_are_incomplete(self) -> None:
        def ignores_the_parent(number: int, ctx: TrialContext) -> str:
            app = App(ctx.trace_endpoint, ctx.traceparent)
            app.send(app.span("alone", parent=""))
            return "snow"

        receiver = TraceReceiver(trace_wait_seconds=0.3)
        assert (
            "did not use the traceparent"
            in only(suite_of(ignores_the_parent, receiver).run_sync(store="memory:")).error
        )

    def test_evaluators_that_do_not_read_the_session_are_not_concerned(self) -> None:
        receiver = TraceReceiver(trace_wait_seconds=0.3)
        result = only(suite_of(lambda n: "snow", receiver, evaluator=exact_match).run_sync(store="memory:"))
        assert result.passed
        assert len(result.session[TraceIncomplete].all()) == 1

    def test_a_failed_task_is_not_waited_for_and_keeps_what_arrived(self, receiver: TraceReceiver) -> None:
        def fails(number: int, ctx: TrialContext) -> str:
            app = App(ctx.trace_endpoint, ctx.traceparent)
            app.send(*app.whole()[1:])
            raise ValueError("no")

        result = only(suite_of(fails, receiver).run_sync(store="memory:"))  # Waiting would take two minutes.
        assert result.outcome == "task_error"
        assert len(result.session[ToolInvoked].all()) == 1
        assert result.session[TraceIncomplete].all() == ()

    def test_only_the_trace_of_the_last_attempt_counts(self, receiver: TraceReceiver) -> None:
        attempts: list[int] = []

        def second_time_lucky(number: int, ctx: TrialContext) -> str:
            attempts.append(ctx.attempt)
            if ctx.attempt == 1:
                error = ValueError("no")
                error.retry_after = 0.0  # type: ignore[attr-defined]
                raise error
            return answer(number, ctx)

        result = only(suite_of(second_time_lucky, receiver, max_retries=1).run_sync(store="memory:"))
        assert (attempts, result.passed, result.attempt) == ([1, 2], True, 2)


def test_a_source_of_traces_that_does_not_end_its_wait_is_left_with_what_it_has(
    receiver: TraceReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.trials.run_trial._TRACE_GRACE", 0.05)

    class Stuck:
        wait_seconds = 0.0

        async def wait(self) -> CollectedTrace:
            await anyio.sleep_forever()
            raise AssertionError

        def collected(self) -> CollectedTrace:
            return CollectedTrace((), 0, "stuck")

        def close(self) -> None:
            pass

    class Source:
        endpoint = ""
        running = receiver.running

        def expect(self, key: TrialKey, attempt: int) -> Stuck:
            return Stuck()

    result = only(suite_of(lambda n: "snow", Source()).run_sync(store="memory:"))
    assert (result.outcome, result.error) == ("scorer_error", "the application's trace is incomplete: stuck")


def test_duplicated_spans_count_once(receiver: TraceReceiver) -> None:
    def sends_twice(number: int, ctx: TrialContext) -> str:
        app = App(ctx.trace_endpoint, ctx.traceparent)
        spans = app.whole()
        app.send(*spans)
        app.send(*spans)
        return "snow"

    result = only(suite_of(sends_twice, receiver, evaluator=token_usage_under(35)).run_sync(store="memory:"))
    assert result.passed
    assert (receiver.counts.spans, receiver.counts.duplicates) == (6, 3)


def test_late_spans_and_spans_of_unknown_traces_are_counted_and_change_nothing(receiver: TraceReceiver) -> None:
    seen: list[App] = []

    def ordinary(number: int, ctx: TrialContext) -> str:
        app = App(ctx.trace_endpoint, ctx.traceparent)
        seen.append(app)
        App(ctx.trace_endpoint, f"00-{'ab' * 16}-{'cd' * 8}-01").send(app.span("other") | {"traceId": "ab" * 16})
        app.send(*app.whole())
        return "snow"

    result = only(suite_of(ordinary, receiver).run_sync(store="memory:"))
    seen[0].send(seen[0].span("late"))
    assert (receiver.counts.unknown, receiver.counts.late) == (1, 1)
    assert [span.name for span in result.session[SpanClosed].all()] == ["POST /ask"]


def test_secrets_in_received_spans_are_not_stored(receiver: TraceReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-live-0123456789abcdefXYZ"
    monkeypatch.setattr(redact, "_registered", {})
    register_secret(secret)

    def leaks(number: int, ctx: TrialContext) -> str:
        app = App(ctx.trace_endpoint, ctx.traceparent)
        outer, model, tool = app.whole()
        outer["name"] = f"POST /ask?key={secret}"
        for key in ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"):
            tool["attributes"].append({"key": key, "value": {"stringValue": f'{{"key":"{secret}"}}'}})
        app.send(outer, model, tool)
        return "snow"

    result = only(suite_of(leaks, receiver).run_sync(store="memory:"))
    assert (result.passed, result.redacted_parts) == (True, ("transcript",))
    assert secret not in repr(result.session.everything().envelopes)
    assert [dict(call.params) for call in result.session[ToolInvoked].all()] == [{"key": "[redacted]"}]


def test_a_receiver_that_is_restarted_in_mid_run_keeps_the_traces_of_running_trials(receiver: TraceReceiver) -> None:
    def survives(number: int, ctx: TrialContext) -> str:
        app = App(ctx.trace_endpoint, ctx.traceparent)
        outer, *inner = app.whole()
        app.send(*inner)
        url = receiver.endpoint
        receiver.stop()
        with pytest.raises(OSError):
            app.send(outer)
        receiver.start()
        assert receiver.endpoint == url
        app.send(outer)
        return "snow"

    assert only(suite_of(survives, receiver).run_sync(store="memory:")).passed


def test_waiting_for_spans_holds_no_place_of_the_concurrent_trials() -> None:
    """One place, and every trial's spans come only when the task of the last trial has been called."""
    apps: list[App] = []
    running: list[int] = []

    def waits_for_all(number: int, ctx: TrialContext) -> str:
        running.append(number)
        assert len(running) == 1  # One at a time.
        apps.append(App(ctx.trace_endpoint, ctx.traceparent))
        if len(apps) == 3:
            for app in apps:
                app.send(*app.whole())
        running.clear()
        return "snow"

    receiver = TraceReceiver(trace_wait_seconds=20.0)
    report = suite_of(waits_for_all, receiver, count=3, max_concurrent=1).run_sync(store="memory:")
    assert (report.successful, report.pass_rate) == (3, 1.0)


def test_a_trial_goes_on_after_its_wait_when_a_place_is_free(receiver: TraceReceiver) -> None:
    """Scoring is subject to the limit of concurrent trials, as without traces."""
    active: list[int] = []
    most: list[int] = []

    async def judged(output: str, expected: str, session: Any) -> float:
        active.append(1)
        most.append(len(active))
        await anyio.sleep(0.01)
        active.pop()
        return 1.0

    report = suite_of(answer, receiver, count=30, evaluator=judged, max_concurrent=2).run_sync(store="memory:")
    assert (report.successful, max(most) <= 2) == (30, True)


def test_resuming_and_rescoring_use_the_stored_trace(receiver: TraceReceiver) -> None:
    store = open_store("memory:")
    suite = suite_of(answer, receiver, count=2)
    report = suite.run_sync(store=store)
    again = suite.rescore_sync(report.run_id, token_usage_under(35), store=store)
    assert (again.successful, again.pass_rate) == (2, 1.0)
    less = suite.rescore_sync(report.run_id, token_usage_under(34), store=store)
    assert less.pass_rate == 0.0


def test_an_incomplete_trace_stays_an_error_when_it_is_rescored_and_is_executed_again_by_retry_errors() -> None:
    store = open_store("memory:")
    sends = threading.Event()

    def sometimes(number: int, ctx: TrialContext) -> str:
        return answer(number, ctx) if sends.is_set() else "snow"

    receiver = TraceReceiver(trace_wait_seconds=0.3)
    report = suite_of(sometimes, receiver).run_sync(store=store)
    assert report.errors["scorer_error"] == 1
    rescored = suite_of(sometimes, receiver).rescore_sync(report.run_id, store=store)
    assert rescored.errors["scorer_error"] == 1
    assert "trace is incomplete" in only(rescored).error
    sends.set()
    patient = TraceReceiver(trace_wait_seconds=LONG)
    retried = suite_of(sometimes, patient).run_sync(store=store, resume=f"errors:{report.run_id}")
    assert (retried.successful, only(retried).attempt, only(retried).passed) == (1, 2, True)


class TestRequests:
    def test_protobuf_and_json_plain_and_compressed_give_the_same_spans(self, receiver: TraceReceiver) -> None:
        found = []
        for number, (as_json, compressed) in enumerate([(True, False), (True, True), (False, False), (False, True)]):
            key = TrialKey("run", "b", f"s{number}")
            expected = receiver.expect(key, 1)
            app = App(receiver.endpoint, f"00-{expected.trace_id}-{expected.root_id}-01")
            if as_json:
                body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": app.whole()}]}]}).encode()
            else:
                body = protobuf(app).SerializeToString()
            headers = {"Content-Type": "application/json" if as_json else "application/x-protobuf"}
            if compressed:
                body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
            assert post(receiver.endpoint, body, "/api/public/otel/v1/traces", **headers) == 200
            collected = expected.collected()
            assert collected.problem is None
            found.append([(each.kind, _untimed(each.data)) for each in collected.envelopes])
        assert found[0] == found[1] == found[2] == found[3]
        assert len(found[0]) == 3

    def test_a_body_of_several_gzip_members_is_read_to_its_end(self, receiver: TraceReceiver) -> None:
        expected = receiver.expect(TrialKey("run", "b", "s"), 1)
        app = App(receiver.endpoint, f"00-{expected.trace_id}-{expected.root_id}-01")
        body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": app.whole()}]}]}).encode()
        parts = gzip.compress(body[:100]) + gzip.compress(body[100:])
        assert post(receiver.endpoint, parts, **{"Content-Encoding": "gzip"}) == 200
        assert expected.collected().spans == 3

    def test_log_records_that_an_exporter_repeats_count_once(self, receiver: TraceReceiver) -> None:
        expected = receiver.expect(TrialKey("run", "b", "s"), 1)
        app = App(receiver.endpoint, f"00-{expected.trace_id}-{expected.root_id}-01")
        app.send(app.span("chat gpt", {"gen_ai.operation.name": "chat"}, span_id="12" * 8))
        records = [
            {"traceId": app.trace_id, "spanId": "12" * 8, "timeUnixNano": str(moment),
             "eventName": "gen_ai.user.message", "body": {"kvlistValue": {"values": [
                 {"key": "content", "value": {"stringValue": "hello"}}]}}}
            for moment in (1, 2)
        ]  # fmt: skip
        for _ in range(2):
            assert (
                post(receiver.endpoint, {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}, "/v1/logs") == 200
            )
        messages = [each for each in expected.collected().envelopes if each.kind.endswith(":ChatMessage")]
        assert len(messages) == 2

    def test_messages_that_come_as_log_records_are_part_of_the_model_call(self, receiver: TraceReceiver) -> None:
        expected = receiver.expect(TrialKey("run", "b", "s"), 1)
        app = App(receiver.endpoint, f"00-{expected.trace_id}-{expected.root_id}-01")
        app.send(app.span("chat gpt", {"gen_ai.operation.name": "chat"}, span_id="12" * 8))
        request = ExportLogsServiceRequest()
        log = request.resource_logs.add().scope_logs.add().log_records.add()
        log.trace_id, log.span_id = bytes.fromhex(app.trace_id), bytes.fromhex("12" * 8)
        log.event_name = "gen_ai.client.inference.operation.details"
        said = '[{"role":"user","parts":[{"type":"text","content":"hello"}]}]'
        log.attributes.extend(key_values([("gen_ai.input.messages", said)]))
        headers = {"Content-Type": "application/x-protobuf"}
        assert post(receiver.endpoint, request.SerializeToString(), "/v1/logs", **headers) == 200
        messages = [each.data for each in expected.collected().envelopes if each.kind.endswith(":ChatMessage")]
        assert messages == [ChatMessage("user", "hello").to_record()]

    def test_a_gzip_bomb_is_refused_without_being_unpacked(self) -> None:
        with TraceReceiver(max_body_bytes=1_000_000) as receiver:
            bomb = gzip.compress(bytes(100_000_000), 6)
            assert len(bomb) < 1_000_000
            headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
            assert post(receiver.endpoint, bomb, **headers) == 413
            many = gzip.compress(bytes(200_000)) * 8  # Each within the limit.
            assert post(receiver.endpoint, many, **headers) == 413
            assert post(receiver.endpoint, {}) == 200

    def test_a_body_over_the_limit_is_refused_declared_or_not(self) -> None:
        with TraceReceiver(max_body_bytes=10_000) as receiver:
            assert post(receiver.endpoint, b" " * 10_001) == 413
            host = receiver.endpoint.removeprefix("http://")
            connection = http.client.HTTPConnection(host, timeout=60)
            chunks = (b" " * 1000 for _ in range(11))
            try:
                connection.request(
                    "POST", "/v1/traces", chunks, {"Content-Type": "application/json"}, encode_chunked=True
                )
                assert connection.getresponse().status == 413
            except (BrokenPipeError, ConnectionResetError):
                pass  # Refused while it was still sending.
            finally:
                connection.close()
            assert post(receiver.endpoint, b"{}") == 200

    @pytest.mark.parametrize(
        ("body", "path", "headers", "status"),
        [
            (b"{", "/v1/traces", {}, 400),
            (b"[1]", "/v1/traces", {}, 400),
            (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"no ids"}]}]}]}', "/v1/traces", {}, 400),
            (
                b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"a","spanId":"b","startTimeUnixNano":"1'
                + b"0" * 400
                + b'"}]}]}]}',
                "/v1/traces",
                {},
                400,
            ),
            (b"[" * 200_000, "/v1/traces", {}, 400),
            (b"\xff\xff", "/v1/traces", {"Content-Type": "application/x-protobuf"}, 400),
            (b"x", "/v1/logs", {"Content-Encoding": "gzip"}, 400),
            (gzip.compress(b"{}", mtime=0)[:-6], "/v1/traces", {"Content-Encoding": "gzip"}, 400),
            (gzip.compress(b"{}", mtime=0) + b"rest", "/v1/traces", {"Content-Encoding": "gzip"}, 400),
            (b"{}", "/v1/traces", {"Content-Encoding": "br"}, 400),
            (b"{}", "/v1/traces", {"Content-Type": "text/plain"}, 415),
            (b"{}", "/v1/metrics", {}, 404),
        ],
    )
    def test_what_is_no_request_of_otlp_is_refused_and_the_receiver_goes_on(
        self, receiver: TraceReceiver, body: bytes, path: str, headers: dict[str, str], status: int
    ) -> None:
        assert post(receiver.endpoint, body, path, **headers) == status
        assert post(receiver.endpoint, b"{}") == 200

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Host": "evil.example:4318"}, 421),
            ({"Host": "127.0.0.1.evil.example"}, 421),
            ({"Host": ""}, 421),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Host": "LOCALHOST:4318"}, 200),
            ({"Host": "[::1]:4318"}, 200),
            ({"Host": "host.docker.internal:4318"}, 200),
        ],
    )
    def test_pages_of_a_browser_are_refused_whatever_name_they_reach_this_machine_by(
        self, receiver: TraceReceiver, headers: dict[str, str], status: int
    ) -> None:
        assert post(receiver.endpoint, b"{}", **headers) == status

    def test_a_receiver_for_other_machines_answers_to_any_name_but_not_to_pages(self) -> None:
        with TraceReceiver(host="0.0.0.0") as receiver:
            place = receiver.endpoint.replace("0.0.0.0", "127.0.0.1")
            assert post(place, b"{}", Host="evals.team.example:4318") == 200
            assert post(place, b"{}", Host="evals.team.example:4318", Origin="http://evals.team.example") == 403

    @pytest.mark.parametrize("sent", [b"", b"POST /v1/tr", b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\n"])
    def test_a_head_must_arrive_in_time_however_slowly_it_drips(
        self, sent: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fairtrial.integrations.tracing.receiver.HEAD_SECONDS", 0.4)
        with TraceReceiver() as receiver:
            address = ("127.0.0.1", int(receiver.endpoint.rpartition(":")[2]))
            crowd = [socket.create_connection(address, 10) for _ in range(20)]
            for slow in crowd:
                slow.sendall(sent)
            assert post(receiver.endpoint, b"{}") == 200
            end = time.monotonic() + 8
            while (left := [slow for slow in crowd if not is_closed(slow)]) and time.monotonic() < end:
                time.sleep(0.1)
            assert len(left) == 0
            assert post(receiver.endpoint, b"{}") == 200
        for slow in crowd:
            slow.close()

    def test_the_next_head_of_a_connection_must_arrive_in_time_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.integrations.tracing.receiver.HEAD_SECONDS", 0.4)
        with TraceReceiver() as receiver:
            address = ("127.0.0.1", int(receiver.endpoint.rpartition(":")[2]))
            with socket.create_connection(address, 10) as slow:
                slow.sendall(b"GET /v1/traces HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert slow.recv(1000).startswith(b"HTTP/1.1 405 ")
                slow.sendall(b"GET /v1/tr")
                assert slow.recv(1000) == b""

    def test_a_body_must_arrive_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.integrations.tracing.receiver.BODY_SECONDS", 0.3)
        head = b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with TraceReceiver() as receiver:
            address = ("127.0.0.1", int(receiver.endpoint.rpartition(":")[2]))
            with socket.create_connection(address, 20) as slow:
                slow.sendall(head + b"Content-Length: 100\r\n\r\n{")
                assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
            assert post(receiver.endpoint, b"{}") == 200

    def test_it_listens_on_this_machine_only_unless_told(self, receiver: TraceReceiver) -> None:
        assert receiver.endpoint.startswith("http://127.0.0.1:")

    def test_a_port_that_is_taken_is_an_error_that_says_so(self, receiver: TraceReceiver) -> None:
        port = int(receiver.endpoint.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match="choose another port"):
            TraceReceiver(port=port).start()

    def test_a_trace_with_too_many_spans_is_cut_off_and_incomplete(self) -> None:
        with TraceReceiver(max_spans=2) as receiver:
            expected = receiver.expect(TrialKey("run", "b", "s"), 1)
            app = App(receiver.endpoint, f"00-{expected.trace_id}-{expected.root_id}-01")
            app.send(*app.whole())
            assert expected.collected().problem == "it has more than 2 spans"
            assert receiver.counts.surplus == 1


def is_closed(slow: socket.socket) -> bool:
    """Send another byte, unless the server has closed the connection."""
    slow.settimeout(0.01)
    try:
        return not slow.recv(100)
    except TimeoutError:
        with contextlib.suppress(OSError):
            slow.sendall(b"X")
        return False
    except OSError:
        return True


def _untimed(data: Any) -> Any:
    return {name: value for name, value in dict(data).items() if name != "duration_ms"}


class TestInProcess:
    def test_spans_of_the_sdk_become_events_without_waiting(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider

        processor = TrialSpanProcessor()
        provider = TracerProvider()
        provider.add_span_processor(processor)  # type: ignore[arg-type]  # the same methods
        tracer = provider.get_tracer("app")

        @task
        def traced(number: int) -> str:
            with tracer.start_as_current_span("ask"):
                attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"}
                with tracer.start_as_current_span("execute_tool weather", attributes=attributes):
                    pass
            return "snow"

        report = suite_of(traced, processor, count=4).run_sync(store="memory:")
        assert (report.successful, report.pass_rate) == (4, 1.0)
        for result in report.results:
            assert [call.name for call in result.session[ToolInvoked].all()] == ["weather"]
            assert [span.name for span in result.session[SpanClosed].all()] == ["ask"]
        provider.shutdown()

    def test_a_span_that_has_not_ended_makes_the_trace_incomplete(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider

        processor = TrialSpanProcessor()
        provider = TracerProvider()
        provider.add_span_processor(processor)  # type: ignore[arg-type]  # the same methods
        tracer = provider.get_tracer("app")

        def leaves_open(number: int) -> str:
            tracer.start_span("forever")
            return "snow"

        result = only(suite_of(leaves_open, processor).run_sync(store="memory:"))
        assert result.error == "the application's trace is incomplete: 1 span(s) have not ended, such as 'forever'"
        provider.shutdown()
