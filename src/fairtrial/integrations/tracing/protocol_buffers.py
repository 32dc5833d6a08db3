"""Access to the messages of OTLP (`opentelemetry-proto`), and conversion of attribute values."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fairtrial.errors import MissingExtraError

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
    status: Any
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
            trace.Status,
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
