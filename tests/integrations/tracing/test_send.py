"""Sending traces: the protocol, retries, the queue of a run, and the commands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from fairtrial import Dataset, EvalResult, EvalSuite, Sample, Score, TrialKey, exact_match, open_store, task
from fairtrial.errors import ConfigurationError, TraceSendError
from fairtrial.integrations.tracing import TraceExporter, send_run
from fairtrial.integrations.tracing.sender import OtlpEndpoint, OtlpSender, SendTotals, resolve_endpoint
from fairtrial.integrations.tracing.spans import TrialConverter
from fairtrial.runs.events import SampleEvaluated
from fairtrial.store import redact
from tests.integrations.tracing.collector import Answer, Collector, attributes
from tests.servers import free_port

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    for name in ("ENDPOINT", "HEADERS", "TIMEOUT", "COMPRESSION"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def result(number: int = 0, *, passed: bool = True) -> EvalResult:
    return EvalResult(
        key=TrialKey("run1", "baseline", f"q{number}"), ordinal=number, outcome="scored", score=Score(float(passed))
    )


def send(endpoint: OtlpEndpoint, *, patience_seconds: float = 60.0) -> SendTotals:
    async def work() -> SendTotals:
        async with OtlpSender(endpoint, patience_seconds=patience_seconds) as sender:
            await sender.send([TrialConverter("run1", "support", "judge").convert(result())], "support")
            return sender.totals

    return anyio.run(work)


class TestEndpoint:
    def test_an_address_is_the_base_of_traces_and_logs_unless_it_names_the_traces(self) -> None:
        for url in ("http://h:4318", "http://h:4318/", "http://h:4318/v1/traces"):
            found = resolve_endpoint(url, {})
            assert (found.traces, found.logs) == ("http://h:4318/v1/traces", "http://h:4318/v1/logs")
        assert resolve_endpoint("https://h/api/public/otel", {}).traces == "https://h/api/public/otel/v1/traces"

    def test_the_standard_variables_give_address_headers_time_limit_and_compression(self) -> None:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1",
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://logs/in",
            "OTEL_EXPORTER_OTLP_HEADERS": "X-Api-Key=one%20two,b=2",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "b=3",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        assert resolve_endpoint("env", environ) == OtlpEndpoint(
            "http://h:1/v1/traces", "http://logs/in", {"x-api-key": "one two", "b": "3"},
            {"x-api-key": "one two", "b": "2"}, 2.5, False,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("url", "environ", "words"),
        [
            ("env", {}, "OTEL_EXPORTER_OTLP_ENDPOINT must be set"),
            ("ftp://h", {}, "must be an http:// or https:// URL"),
            ("localhost:4317", {}, "must be an http:// or https:// URL"),
            ("http://h", {"OTEL_EXPORTER_OTLP_HEADERS": "a=1,secretvalue"}, "its entry 2 is not"),
            ("http://h", {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "milliseconds"),
        ],
    )
    def test_what_cannot_work_is_refused_without_repeating_headers(
        self, url: str, environ: dict[str, str], words: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=words) as caught:
            resolve_endpoint(url, environ)
        assert "secretvalue" not in str(caught.value)

    def test_header_values_are_secrets_from_then_on(self) -> None:
        resolve_endpoint("http://h", {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic cGs6c2stbGYtMTIz"})
        assert "cGs6c2stbGYtMTIz" not in redact.current().text("sent with cGs6c2stbGYtMTIz")


class TestSender:
    def test_requests_are_gzipped_protobuf_with_the_headers_of_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=top")
        with Collector() as collector:
            totals = send(resolve_endpoint(collector.url))
        assert (totals.trials, totals.spans, totals.logs, totals.rejected) == (1, 1, 1, 0)
        assert [request.path for request in collector.requests] == ["/v1/traces", "/v1/logs"]
        for request in collector.requests:
            headers = request.headers
            assert (headers["x-api-key"], headers["content-encoding"]) == ("top", "gzip")
            assert headers["content-type"] == "application/x-protobuf"
        assert attributes(collector.spans[0])["fairtrial.sample.id"] == "q0"
        assert collector.logs[0].span_id == collector.spans[0].span_id

    def test_a_busy_server_is_asked_again_after_the_pause_it_wants(self) -> None:
        busy = Answer(503, b"", {"Retry-After": "0"})
        with Collector(busy, Answer(429, b"", {"Retry-After": "0.01"})) as collector:
            totals = send(resolve_endpoint(collector.url))
        assert (totals.spans, len(collector.requests)) == (1, 4)
        assert collector.requests[0].body == collector.requests[2].body

    def test_a_refusal_is_not_repeated_and_says_what_the_server_said(self) -> None:
        with (
            Collector(Answer(401, b"no such key")) as collector,
            pytest.raises(TraceSendError, match="traces were refused: the server answered 401: no such key"),
        ):
            send(resolve_endpoint(collector.url))
        assert len(collector.requests) == 1

    def test_a_server_that_is_not_there_is_an_error_after_the_patience(self) -> None:
        with pytest.raises(TraceSendError, match=r"could not be sent within 0\.1 s: ClientConnector"):
            send(resolve_endpoint(f"http://127.0.0.1:{free_port()}"), patience_seconds=0.1)

    def test_what_the_server_did_not_take_is_counted(self) -> None:
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = 1
        answer.partial_success.error_message = "too old"
        with Collector(Answer(200, answer.SerializeToString())) as collector:
            totals = send(resolve_endpoint(collector.url))
        assert (totals.rejected, totals.remark) == (1, "too old")

    @pytest.mark.parametrize("status", [404, 405, 501])
    def test_a_server_without_log_records_gets_the_spans_and_is_not_asked_again(self, status: int) -> None:
        async def work(url: str) -> SendTotals:
            async with OtlpSender(resolve_endpoint(url)) as sender:
                for number in range(2):
                    await sender.send([TrialConverter("run1").convert(result(number))], "support")
                return sender.totals

        with Collector(Answer(), Answer(status, b"no such page")) as collector:
            totals = anyio.run(work, collector.url)
        assert [request.path for request in collector.requests] == ["/v1/traces", "/v1/logs", "/v1/traces"]
        assert (totals.trials, totals.spans, totals.logs, totals.takes_logs) == (2, 2, 0, False)
        assert "takes no log records" in totals.remark

    def test_a_server_that_refuses_spans_is_an_error_whatever_it_says_of_logs(self) -> None:
        with Collector(Answer(404)) as collector, pytest.raises(TraceSendError, match="traces were refused"):
            send(resolve_endpoint(collector.url))

    def test_an_answer_in_json_is_an_answer(self) -> None:
        with Collector(Answer(200, b'{"partialSuccess":{}}')) as collector:
            assert send(resolve_endpoint(collector.url)).rejected == 0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


class TestExporter:
    def test_failed_trials_are_always_sent_and_passed_ones_by_their_share(self, collector: Collector) -> None:
        with TraceExporter(collector.url, sample=0.0) as traces:
            for number in range(40):
                traces.publish(SampleEvaluated("run1", result(number, passed=number % 10 != 0)))
            traces.publish(
                SampleEvaluated(
                    "run1", EvalResult(key=TrialKey("run1", "b", "e"), ordinal=9, outcome="timeout", error="late")
                )
            )
        ids = {attributes(span)["fairtrial.sample.id"] for span in collector.spans}
        assert ids == {"q0", "q10", "q20", "q30", "e"}
        assert str(traces.summary()) == "traces: 5 of 5 sampled trials sent"

    def test_a_full_queue_drops_trials_and_counts_them_without_waiting(self, collector: Collector) -> None:
        collector.gate.clear()
        traces = TraceExporter(collector.url, max_queue=10)
        traces.publish(SampleEvaluated("run1", result(0)))
        assert_within(lambda: collector.requests)  # The sender is held by the server, with the first trial.
        for number in range(1, 31):
            traces.publish(SampleEvaluated("run1", result(number)))
        assert traces.summary().dropped == 20
        collector.gate.set()
        summary = traces.close()
        assert (summary.sampled, summary.sent, summary.dropped) == (31, 11, 20)
        assert "20 dropped" in str(summary)

    def test_large_transcripts_count_towards_the_queue(self, collector: Collector) -> None:
        collector.gate.clear()
        traces = TraceExporter(collector.url, max_queue_bytes=1000)
        large = EvalResult(
            key=TrialKey("run1", "b", "big"),
            ordinal=0,
            outcome="scored",
            score=Score(1.0),
            output_json='"' + "x" * 2000 + '"',
        )
        traces.publish(SampleEvaluated("run1", large))
        assert traces.close().dropped == 1

    def test_trials_that_the_server_refuses_are_dropped_and_the_reason_is_reported(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Collector(Answer(400, b"bad request")) as collector:
            traces = TraceExporter(collector.url)
            traces.publish(SampleEvaluated("run1", result()))
            summary = traces.close()
        assert (summary.sent, summary.dropped) == (0, 1)
        assert "400: bad request" in summary.problem
        assert "1 dropped" in caplog.text

    def test_a_server_without_log_records_gets_the_trials_of_a_run_and_the_summary_says_so(self) -> None:
        with Collector(Answer(), Answer(404)) as collector, TraceExporter(collector.url) as traces:
            for number in range(3):
                traces.publish(SampleEvaluated("run1", result(number)))
        assert (traces.summary().sent, traces.summary().dropped) == (3, 0)
        assert str(traces.summary()).startswith("traces: 3 of 3 sampled trials sent (the server takes no log records")

    def test_a_share_outside_of_0_to_1_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="must be from 0 to 1"):
            TraceExporter("http://127.0.0.1:1", sample=1.5)

    @pytest.mark.parametrize("backend", ["asyncio", "trio"])
    def test_a_run_is_exported_while_it_executes(self, collector: Collector, backend: str) -> None:
        @task(inline=True)
        def double(number: int) -> int:
            return number * 2

        samples = Dataset([Sample(f"s{n}", n, 2 * n) for n in range(5)], name="numbers")
        suite = EvalSuite("numbers", samples, double, exact_match)
        with TraceExporter(collector.url, content=True) as traces:
            report: Any = anyio.run(lambda: suite.run(store="memory:", bus=traces), backend=backend)
        found = {attributes(span)["fairtrial.sample.id"]: attributes(span) for span in collector.spans}
        assert set(found) == {f"s{n}" for n in range(5)}
        assert (found["s3"]["fairtrial.input"], found["s3"]["fairtrial.output"]) == ("3", "6")
        assert found["s3"]["fairtrial.run.id"] == report.run_id
        assert {attributes(log)["gen_ai.evaluation.name"] for log in collector.logs} == {"exact_match"}
        assert "fairtrial traces" not in {thread.name for thread in threading.enumerate()}

    def test_a_stored_run_is_sent_with_the_same_ids_as_while_it_executed(self, collector: Collector) -> None:
        samples = Dataset([Sample(f"s{n}", n, n) for n in range(5)], name="numbers")
        store = open_store("memory:")
        with TraceExporter(collector.url) as traces:
            report = EvalSuite("numbers", samples, abs, exact_match).run_sync(store=store, bus=traces)
        live = collector.spans
        collector.requests.clear()
        assert send_run(store, report.run, collector.url).trials == 5
        assert sorted((s.trace_id, s.span_id) for s in collector.spans) == sorted((s.trace_id, s.span_id) for s in live)


def assert_within(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    waited = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("it never happened")
