"""OpenTelemetry: trials as traces for other tools, and the traces of applications as sessions of trials.

The extra `otel` installs what it needs. docs/how-to/traces.md shows both directions.
"""

from fairtrial.integrations.tracing.exporter import (
    ExportSummary,
    TraceExporter,
    send_run,
    trace_every_run,
    trace_to_langsmith,
    write_run,
)
from fairtrial.integrations.tracing.in_process import TrialSpanProcessor
from fairtrial.integrations.tracing.langsmith import UploadTotals, upload_run, write_experiments
from fairtrial.integrations.tracing.receiver import TraceReceiver
from fairtrial.integrations.tracing.recording import record_anthropic, record_openai

__all__ = [
    "ExportSummary",
    "TraceExporter",
    "TraceReceiver",
    "TrialSpanProcessor",
    "UploadTotals",
    "record_anthropic",
    "record_openai",
    "send_run",
    "trace_every_run",
    "trace_to_langsmith",
    "upload_run",
    "write_experiments",
    "write_run",
]
