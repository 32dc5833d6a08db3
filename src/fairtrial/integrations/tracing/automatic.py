"""Trace every run of this process, switched on once."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from urllib.parse import quote

from fairtrial.errors import ConfigurationError
from fairtrial.integrations.tracing.endpoint import OtlpEndpoint, resolve_endpoint
from fairtrial.integrations.tracing.exporter import ExportSummary, TraceExporter
from fairtrial.integrations.tracing.langsmith_upload import langsmith_address
from fairtrial.runs.events import observe_every_run

_lock = threading.Lock()
_active: TraceExporter | None = None


def trace_every_run(exporter: TraceExporter | None) -> ExportSummary | None:
    """Send the trials of every run of this process from now on; None switches it off.

    What is queued is sent before the process ends, or when another exporter or None takes its place. Returns the
    summary of the exporter that was active until then.
    """
    global _active
    with _lock:
        before, _active = _active, exporter
        observe_every_run(exporter)
    if before is None and exporter is not None:
        atexit.register(trace_every_run, None)
    if before is None or before is exporter:
        return None
    return before.close()


def langsmith_endpoint(project: str, environ: Mapping[str, str] = os.environ) -> OtlpEndpoint:
    """Return the address of LangSmith's OTLP endpoint with the headers of a project.

    The address is LANGSMITH_ENDPOINT, by default LangSmith's own; the key is LANGSMITH_API_KEY.
    """
    if not project.strip():
        raise ConfigurationError(f"project must be the name of a LangSmith project (got {project!r})")
    base, key = langsmith_address(environ, "trace runs")
    headers = f"x-api-key={quote(key)},Langsmith-Project={quote(project)}"
    return resolve_endpoint(f"{base}/otel", {**environ, "OTEL_EXPORTER_OTLP_HEADERS": headers})


def trace_to_langsmith(project: str, *, enabled: bool = True, content: bool = False) -> None:
    """Trace every run of this process to a project of LangSmith, or stop.

    Args:
        project: The name of the project.
        enabled: False to stop.
        content: Send inputs, outputs, messages, tool arguments, errors and reasons too; secrets are replaced.
    """
    endpoint = langsmith_endpoint(project) if enabled else None
    trace_every_run(None if endpoint is None else TraceExporter(endpoint, profile="langsmith", content=content))
