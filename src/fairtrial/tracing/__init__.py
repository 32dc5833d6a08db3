"""OpenTelemetry: trials as traces for other tools, and the traces of applications as sessions of trials.

The extra `otel` installs what it needs. docs/how-to/traces.md shows both directions.
"""

from fairtrial.tracing.exporter import ExportSummary, TraceExporter
from fairtrial.tracing.in_process import TrialSpanProcessor
from fairtrial.tracing.langsmith_upload import UploadTotals, upload_run, write_experiments
from fairtrial.tracing.receiver import TraceReceiver
from fairtrial.tracing.stored import send_run, write_run

__all__ = [
    "ExportSummary",
    "TraceExporter",
    "TraceReceiver",
    "TrialSpanProcessor",
    "UploadTotals",
    "send_run",
    "upload_run",
    "write_experiments",
    "write_run",
]
