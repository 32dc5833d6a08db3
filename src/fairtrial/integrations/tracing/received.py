"""Spans and log records as applications send them: OTLP in protobuf or JSON as plain records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fairtrial.base.codec import parse_foreign_json
from fairtrial.errors import DataError
from fairtrial.integrations.tracing.protocol_buffers import (
    json_attributes,
    json_value,
    otlp_messages,
    plain_attributes,
    plain_value,
)

_ERROR = 2


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


def _json_spans(tree: Any) -> Iterator[ReceivedSpan]:
    for group, scope in _scopes(tree, "resourceSpans", "scopeSpans"):
        resource = json_attributes((group.get("resource") or {}).get("attributes"))
        for span in scope.get("spans") or ():
            status = span.get("status") or {}
            failed = status.get("code") in (_ERROR, "STATUS_CODE_ERROR")
            yield ReceivedSpan(
                str(span["traceId"]).lower(),
                str(span["spanId"]).lower(),
                str(span.get("parentSpanId") or "").lower(),
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
                str(log.get("traceId") or "").lower(),
                str(log.get("spanId") or "").lower(),
                str(log.get("eventName") or ""),
                json_value(log.get("body")),
                json_attributes(log.get("attributes")),
                int(log.get("timeUnixNano") or 0),
            )


def _scopes(tree: Any, groups: str, scopes: str) -> Iterable[tuple[Any, Any]]:
    for group in tree.get(groups) or ():
        for scope in group.get(scopes) or ():
            yield group, scope
