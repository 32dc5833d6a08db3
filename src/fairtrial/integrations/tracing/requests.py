"""The OTLP requests around spans and log records, as messages and as lines of OTLP's JSON."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from fairtrial._version import __version__
from fairtrial.integrations.tracing.protocol_buffers import AttributeValue, key_values, otlp_messages
from fairtrial.store.redact import current

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

SCOPE = "fairtrial"
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


def traces_request(spans: Sequence[Span], suite: str) -> ExportTraceServiceRequest:
    """Return the request that sends spans."""
    request: ExportTraceServiceRequest = otlp_messages().traces()
    group = request.resource_spans.add()
    group.resource.attributes.extend(key_values(resource_attributes(suite)))
    scope = group.scope_spans.add()
    scope.scope.name, scope.scope.version = SCOPE, __version__
    scope.spans.extend(spans)
    return request


def logs_request(logs: Sequence[LogRecord], suite: str) -> ExportLogsServiceRequest:
    """Return the request that sends log records."""
    request: ExportLogsServiceRequest = otlp_messages().logs()
    group = request.resource_logs.add()
    group.resource.attributes.extend(key_values(resource_attributes(suite)))
    scope = group.scope_logs.add()
    scope.scope.name, scope.scope.version = SCOPE, __version__
    scope.log_records.extend(logs)
    return request


def resource_attributes(suite: str, environ: Mapping[str, str] = os.environ) -> list[tuple[str, AttributeValue]]:
    """Return the attributes of this process: those of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, and our own."""
    found: dict[str, AttributeValue] = {"service.name": "fairtrial"}
    for entry in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        name, equals, value = entry.partition("=")
        if equals and name.strip():
            found[name.strip()] = unquote(value.strip())
    if environ.get("OTEL_SERVICE_NAME"):
        found["service.name"] = environ["OTEL_SERVICE_NAME"]
    found["fairtrial.suite"] = suite
    redactor = current()
    return [(name, redactor.text(value) if isinstance(value, str) else value) for name, value in found.items()]


def json_lines(spans: Sequence[Span], logs: Sequence[LogRecord], suite: str) -> Iterable[str]:
    """Yield the requests as lines of OTLP's JSON, where ids are hexadecimal."""
    from google.protobuf.json_format import MessageToDict

    for request in ((traces_request(spans, suite),) if spans else ()) + ((logs_request(logs, suite),) if logs else ()):
        tree = MessageToDict(request)
        _write_ids(tree)
        yield json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def json_request(body: bytes, signal: Literal["traces", "logs"]) -> dict[str, Any]:
    """Return a request in protobuf as OTLP's JSON."""
    from google.protobuf.json_format import MessageToDict

    messages = otlp_messages()
    kind = messages.traces if signal == "traces" else messages.logs
    tree: dict[str, Any] = MessageToDict(kind.FromString(body))
    _write_ids(tree)
    return tree


def _write_ids(tree: Any) -> None:
    if isinstance(tree, list):
        for item in tree:
            _write_ids(item)
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if name in _ID_FIELDS and isinstance(value, str):
                tree[name] = base64.b64decode(value).hex()
            elif name not in ("attributes", "body"):
                _write_ids(value)
