"""An application whose requests are traced, for tests of the receiver."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fairtrial.integrations.tracing.received import key_values


class App:
    """An application under test: sends spans for the trial whose `traceparent` it is given."""

    def __init__(self, url: str, traceparent: str) -> None:
        self.url = url
        _, self.trace_id, self.root_id, _ = traceparent.split("-")
        self.count = 0

    def span(
        self, name: str, attributes: Mapping[str, Any] | None = None, *, parent: str | None = None, span_id: str = ""
    ) -> dict[str, Any]:
        self.count += 1
        moment = time.time_ns() + self.count * 1_000_000
        return {
            "traceId": self.trace_id,
            "spanId": span_id or f"{self.count:016x}",
            "parentSpanId": self.root_id if parent is None else parent,
            "name": name,
            "startTimeUnixNano": str(moment),
            "endTimeUnixNano": str(moment + 500_000),
            "attributes": [
                {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
                for key, value in (attributes or {}).items()
            ],
        }

    def send(self, *spans: Mapping[str, Any]) -> int:
        return post(self.url, {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]})

    def whole(self) -> Sequence[dict[str, Any]]:
        """A request with a model call and a tool call below it."""
        outer = self.span("POST /ask")
        model = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt", "gen_ai.usage.input_tokens": 30,
                 "gen_ai.usage.output_tokens": 5}  # fmt: skip
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather",
                "gen_ai.tool.call.arguments": '{"city":"Oslo"}', "gen_ai.tool.call.result": "snow"}  # fmt: skip
        return (
            outer,
            self.span("chat gpt", model, parent=outer["spanId"]),
            self.span("execute_tool weather", tool, parent=outer["spanId"]),
        )


def post(url: str, tree: Any, path: str = "/v1/traces", **headers: str) -> int:
    body = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def protobuf(app: App) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for tree in app.whole():
        span = scope.spans.add(name=tree["name"])
        span.trace_id, span.span_id = bytes.fromhex(tree["traceId"]), bytes.fromhex(tree["spanId"])
        span.parent_span_id = bytes.fromhex(tree["parentSpanId"])
        span.start_time_unix_nano = int(tree["startTimeUnixNano"])
        span.end_time_unix_nano = int(tree["endTimeUnixNano"])
        pairs = [(each["key"], each["value"]) for each in tree["attributes"]]
        span.attributes.extend(
            key_values([(k, int(v["intValue"]) if "intValue" in v else v["stringValue"]) for k, v in pairs])
        )
    return request
