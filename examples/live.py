"""Live traffic of an instrumented application: days of it in a few seconds, against a fake model, and no key.

python examples/live.py 3                 three days of requests, which a watch receives, samples and scores
python examples/live.py 1 helper-2        one more day, after a change of the model
fairtrial watch alarm live --reference 200

In production the application and `fairtrial watch start live.py` are processes of their own (deploy/compose.yaml).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random, seed

import anyio
from openai import OpenAI
from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from fairtrial import Dataset, EvalSuite, Score, open_store
from fairtrial.integrations.model_server import ModelServer, ParsedRequest
from fairtrial.integrations.tracing.live import LiveWatch
from fairtrial.integrations.tracing.live_traces import Sampling, Stratum
from fairtrial.runs.runner import Interrupt

FIRST, DAY, REQUESTS = datetime(2026, 11, 1, 9, tzinfo=UTC).timestamp(), 86_400, 120
RIGHT = {"helper-1": 0.95, "helper-2": 0.35}  # How often the models are right.


def recorded(question: object) -> str:
    """Stand for the application, which is not called: its traces have the outputs."""
    raise NotImplementedError


def helpful(output: str) -> Score:
    """Judge an answer. A real judge asks a model."""
    return Score(float("label" in output), reason="" if "label" in output else "it does not say what to do")


suite = EvalSuite("live", Dataset([], name="traffic"), recorded, helpful)


class Exporter(SpanExporter):
    """Sends spans as the package opentelemetry-exporter-otlp-proto-http does."""

    def __init__(self, endpoint: str) -> None:
        self.url = f"{endpoint}/v1/traces"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [written(span) for span in spans]}]}]}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60):
            return SpanExportResult.SUCCESS  # Acknowledged: what belongs to the sample is stored.


def written(span: ReadableSpan) -> dict[str, object]:
    """Return a span in OTLP's JSON."""
    context = span.get_span_context()
    assert context is not None
    return {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": "" if span.parent is None else f"{span.parent.span_id:016x}",
        "name": span.name,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": [{"key": key, "value": any_value(value)} for key, value in (span.attributes or {}).items()],
    }


def any_value(value: object) -> dict[str, object]:
    """Return the value of an attribute in OTLP's JSON."""
    if isinstance(value, tuple):
        return {"arrayValue": {"values": [any_value(one) for one in value]}}
    return {"intValue" if type(value) is int else "stringValue": str(value)}


def answer(request: ParsedRequest) -> str:
    """Answer as the model that is asked does."""
    helps = Random(f"{request.model} {request.last_user}").random() < RIGHT[request.model]
    return "Use the label in the box." if helps else "I do not know."


def serve(numbers: range, model: str, provider: TracerProvider, client: OpenAI) -> None:
    """Answer the requests of a day: the application. Some users say that they are unhappy."""
    tracer = provider.get_tracer("shop")
    for number in numbers:
        with tracer.start_as_current_span("POST /ask") as span:
            question = f"Ticket {number}: how do I return my order?"
            reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
            if "label" not in str(reply.choices[0].message.content) and number % 2:
                span.set_attribute("user.feedback", "down")
    provider.force_flush()


def main(days: int, model: str = "helper-1") -> None:
    """Play days of traffic, which go on after those that are stored."""
    store = open_store(".fairtrial/runs.db")
    start, now = len(store.runs(suite="live")), [FIRST]
    sampling = Sampling(0.9, (Stratum("user.feedback", "down", 1.0),))
    # The clock of the watch: a day begins when the requests of the one before are scored.
    watch = LiveWatch(suite, store, sampling, port=0, settle_seconds=0.2, clock=lambda: now[0] + time.monotonic())
    interrupt = Interrupt()
    seed(start)  # Of the ids of traces, which decide what is sampled.
    service = threading.Thread(target=anyio.run, args=(watch.run, interrupt))
    server = ModelServer(answer)
    with server, OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client, watch.receiver.running():
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(Exporter(watch.receiver.endpoint), schedule_delay_millis=50))
        os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "span_only"
        OpenAIInstrumentor().instrument(tracer_provider=provider)
        now[0] += start * DAY - time.monotonic()
        service.start()
        for day in range(start, start + days):
            serve(range(day * REQUESTS, (day + 1) * REQUESTS), model, provider, client)
            while len(watch.traces):
                time.sleep(0.02)
            now[0] += DAY
        while any(run.status != "finished" for run in store.runs(suite="live")):
            time.sleep(0.02)
        interrupt()
        service.join()
        provider.shutdown()
    print(f"{days} day{'s' * (days > 1)}, {start + days} in all")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
