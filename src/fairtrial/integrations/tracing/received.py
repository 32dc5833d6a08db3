"""Spans as they are received."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fairtrial.base.codec import parse_foreign_json
from fairtrial.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


type AttributeValue = str | bool | int | float | tuple[str, ...]

_MAX_INT = 2**63


class OtlpMessages(NamedTuple):
    """The message types that are used."""

    traces: Any  # ExportTraceServiceRequest
    traces_response: Any
    logs: Any  # ExportLogsServiceRequest
    logs_response: Any
    span: Any
    log_record: Any
    any_value: Any
    array_value: Any
    key_value: Any


_loaded: OtlpMessages | None = None


def otlp_messages(purpose: str = "OpenTelemetry") -> OtlpMessages:
    """Return the message types; raises `MissingExtraError` if opentelemetry-proto is not installed."""
    global _loaded
    if _loaded is None:
        try:
            import opentelemetry.proto.collector.logs.v1.logs_service_pb2 as logs_service
            import opentelemetry.proto.collector.trace.v1.trace_service_pb2 as trace_service
            import opentelemetry.proto.common.v1.common_pb2 as common
            import opentelemetry.proto.logs.v1.logs_pb2 as logs
            import opentelemetry.proto.trace.v1.trace_pb2 as trace
        except ImportError:
            raise MissingExtraError(purpose, "otel") from None
        _loaded = OtlpMessages(
            trace_service.ExportTraceServiceRequest,
            trace_service.ExportTraceServiceResponse,
            logs_service.ExportLogsServiceRequest,
            logs_service.ExportLogsServiceResponse,
            trace.Span,
            logs.LogRecord,
            common.AnyValue,
            common.ArrayValue,
            common.KeyValue,
        )
    return _loaded


def key_values(attributes: Iterable[tuple[str, AttributeValue]]) -> list[KeyValue]:
    """Return attributes as OTLP messages."""
    messages = otlp_messages()
    key_value, any_value = messages.key_value, messages.any_value
    found = []
    for name, value in attributes:
        if type(value) is str:
            wrapped = any_value(string_value=value)
        elif type(value) is bool:
            wrapped = any_value(bool_value=value)
        elif type(value) is int and -_MAX_INT <= value < _MAX_INT:
            wrapped = any_value(int_value=value)
        elif isinstance(value, int | float):
            wrapped = any_value(double_value=float(value))
        else:
            items = [any_value(string_value=item) for item in value]
            wrapped = any_value(array_value=messages.array_value(values=items))
        found.append(key_value(key=name, value=wrapped))
    return found


def plain_value(value: AnyValue) -> Any:
    """Return an OTLP value as plain Python; bytes become base64 text."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [plain_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return plain_attributes(value.kvlist_value.values)
    found = getattr(value, kind)
    return base64.b64encode(found).decode("ascii") if kind == "bytes_value" else found


def plain_attributes(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Return OTLP attributes as a dictionary."""
    return {attribute.key: plain_value(attribute.value) for attribute in attributes}


def json_value(value: Any) -> Any:
    """Return a value of OTLP's JSON form as plain Python."""
    if not isinstance(value, Mapping) or not value:
        return None
    kind, found = next(iter(value.items()))
    if kind == "arrayValue":
        return [json_value(item) for item in (found or {}).get("values") or ()]
    if kind == "kvlistValue":
        return json_attributes((found or {}).get("values"))
    if kind == "intValue":
        return int(found)
    if isinstance(found, Mapping | list):
        raise TypeError(f"{kind} must be a single value")
    return float(found) if kind == "doubleValue" else found


def json_attributes(attributes: Any) -> dict[str, Any]:
    """Return attributes of OTLP's JSON form as a dictionary."""
    return {str(attribute["key"]): json_value(attribute.get("value")) for attribute in attributes or ()}


_ERROR = 2
_LONGEST_ID = 128


class ReceivedSpan(NamedTuple):
    """One ended span. Ids are hexadecimal, times are seconds since the epoch; `error` is None unless it failed."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: float
    end: float
    error: str | None
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    resource: Mapping[str, Any] = {}


class ReceivedLog(NamedTuple):
    """One log record that belongs to a span; `time` is in nanoseconds since the epoch, 0 if it is not given."""

    trace_id: str
    span_id: str
    name: str
    body: Any
    attributes: Mapping[str, Any]
    time: int = 0


def parse_traces(body: bytes, *, is_json: bool) -> list[ReceivedSpan]:
    """Read a request with spans. Raises `DataError` if it is none."""
    if is_json:
        return _checked(body, _json_spans)
    request = _message(otlp_messages("receiving traces").traces, body)
    found = []
    for group in request.resource_spans:
        resource = plain_attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                events = tuple((event.name, plain_attributes(event.attributes)) for event in span.events)
                found.append(
                    ReceivedSpan(
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.name,
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        (span.status.message or "error") if span.status.code == _ERROR else None,
                        plain_attributes(span.attributes),
                        events,
                        resource,
                    )
                )
    return found


def parse_logs(body: bytes, *, is_json: bool) -> list[ReceivedLog]:
    """Read a request with log records. Raises `DataError` if it is none."""
    if is_json:
        return _checked(body, _json_logs)
    request = _message(otlp_messages("receiving traces").logs, body)
    return [
        ReceivedLog(
            log.trace_id.hex(),
            log.span_id.hex(),
            log.event_name,
            plain_value(log.body),
            plain_attributes(log.attributes),
            log.time_unix_nano,
        )
        for group in request.resource_logs
        for scope in group.scope_logs
        for log in scope.log_records
    ]


def _message(kind: Any, body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise DataError(f"the body must be an OTLP request in protobuf ({error})") from None


def _checked[T](body: bytes, read: Any) -> list[T]:
    try:
        return list(read(parse_foreign_json(body)))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"the body must be an OTLP request in JSON ({type(error).__name__}: {error})") from None


def _id(value: Any) -> str:
    """Return the id of a trace or a span. Not all senders write hexadecimal numbers."""
    text = str(value).lower()
    if len(text) > _LONGEST_ID or not (text.isascii() and text.isprintable()):
        raise ValueError(f"ids must be up to {_LONGEST_ID} printable ASCII characters (got {text[:_LONGEST_ID]!r})")
    return text


def _json_spans(tree: Any) -> Iterator[ReceivedSpan]:
    for group, scope in _scopes(tree, "resourceSpans", "scopeSpans"):
        resource = json_attributes((group.get("resource") or {}).get("attributes"))
        for span in scope.get("spans") or ():
            status = span.get("status") or {}
            failed = status.get("code") in (_ERROR, "STATUS_CODE_ERROR")
            yield ReceivedSpan(
                _id(span["traceId"]),
                _id(span["spanId"]),
                _id(span.get("parentSpanId") or ""),
                str(span.get("name") or ""),
                int(span.get("startTimeUnixNano") or 0) / 1e9,
                int(span.get("endTimeUnixNano") or 0) / 1e9,
                str(status.get("message") or "error") if failed else None,
                json_attributes(span.get("attributes")),
                tuple(
                    (str(e.get("name") or ""), json_attributes(e.get("attributes"))) for e in span.get("events") or ()
                ),
                resource,
            )


def _json_logs(tree: Any) -> Iterator[ReceivedLog]:
    for _group, scope in _scopes(tree, "resourceLogs", "scopeLogs"):
        for log in scope.get("logRecords") or ():
            yield ReceivedLog(
                _id(log.get("traceId") or ""),
                _id(log.get("spanId") or ""),
                str(log.get("eventName") or ""),
                json_value(log.get("body")),
                json_attributes(log.get("attributes")),
                int(log.get("timeUnixNano") or 0),
            )


def _scopes(tree: Any, groups: str, scopes: str) -> Iterable[tuple[Any, Any]]:
    for group in tree.get(groups) or ():
        for scope in group.get(scopes) or ():
            yield group, scope
