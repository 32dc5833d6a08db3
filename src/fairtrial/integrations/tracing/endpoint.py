"""Where OTLP is sent: addresses, headers and time limits from arguments and the standard OTEL_ variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fairtrial.base.frozen import EMPTY
from fairtrial.errors import ConfigurationError
from fairtrial.store.redact import register_guess

FROM_ENVIRONMENT = "env"
"""The address that stands for the one in OTEL_EXPORTER_OTLP_ENDPOINT."""

_PATHS = {"traces": "/v1/traces", "logs": "/v1/logs"}
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """The addresses of traces and logs, with headers for each; `compress` for gzip."""

    traces: str
    logs: str
    trace_headers: Mapping[str, str] = EMPTY
    log_headers: Mapping[str, str] = EMPTY
    timeout_seconds: float = 10.0
    compress: bool = True


def resolve_endpoint(url: str, environ: Mapping[str, str] = os.environ) -> OtlpEndpoint:
    """Return the endpoint for an address, or for that of the environment if it is "env".

    `http://host:4318` stands for `/v1/traces` and `/v1/logs` below it; an address that ends in `/v1/traces` is used as
    it is. Headers, time limit and compression come from the OTEL_EXPORTER_OTLP_ variables. The values of headers are
    secrets from then on.
    """
    if url == FROM_ENVIRONMENT:
        base = environ.get(_ENDPOINT, "")
        traces = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (base and _join(base, "traces"))
        logs = environ.get("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT") or (base and _join(base, "logs"))
        if not traces:
            raise ConfigurationError(
                f"{_ENDPOINT} must be set to send traces to the address of the environment (it is not set)\n"
                f"set it, as in {_ENDPOINT}=http://127.0.0.1:4318, or name the address"
            )
        logs = logs or _sibling(traces)
    else:
        traces = url if url.endswith(_PATHS["traces"]) else _join(url, "traces")
        logs = _sibling(traces)
    for address in (traces, logs):
        _check_address(address)
    shared = _headers(environ, "OTEL_EXPORTER_OTLP_HEADERS")
    return OtlpEndpoint(
        traces,
        logs,
        shared | _headers(environ, "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
        shared | _headers(environ, "OTEL_EXPORTER_OTLP_LOGS_HEADERS"),
        _timeout(environ),
        environ.get("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip").strip().lower() != "none",
    )


def _join(base: str, signal: str) -> str:
    return base.rstrip("/") + _PATHS[signal]


def _sibling(traces: str) -> str:
    if traces.endswith(_PATHS["traces"]):
        return traces.removesuffix(_PATHS["traces"]) + _PATHS["logs"]
    return traces  # An address of its own, which tells the two apart by their content.


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"the address of traces must be an http:// or https:// URL (got {address!r})\n"
            "as in http://127.0.0.1:4318; gRPC is not supported"
        )


def _headers(environ: Mapping[str, str], variable: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in environ.get(variable, "").split(","):
        if not entry.strip():
            continue
        name, equals, value = entry.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(
                f"{variable} must be a list of NAME=VALUE separated by commas (its entry {len(found) + 1} is not)"
            )
        value = unquote(value.strip())
        found[name.strip().lower()] = value
        for secret in (value, value.rpartition(" ")[2]):  # `Basic abc`: the value without its scheme.
            register_guess(secret, "key", f"a header of {variable}")
    return found


def _timeout(environ: Mapping[str, str]) -> float:
    text = environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", "")
    if not text.strip():
        return 10.0
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ConfigurationError(f"OTEL_EXPORTER_OTLP_TIMEOUT must be a number of milliseconds above 0 (got {text!r})")
    return milliseconds / 1000
