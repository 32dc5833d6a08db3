from fairtrial.integrations.tracing.exporter import (
    ExportSummary as ExportSummary,
    TraceExporter as TraceExporter,
    send_run as send_run,
    trace_every_run as trace_every_run,
    trace_to_langsmith as trace_to_langsmith,
    write_run as write_run,
)
from fairtrial.integrations.tracing.in_process import TrialSpanProcessor as TrialSpanProcessor
from fairtrial.integrations.tracing.langsmith import (
    UploadTotals as UploadTotals,
    upload_run as upload_run,
    write_experiments as write_experiments,
)
from fairtrial.integrations.tracing.receiver import TraceReceiver as TraceReceiver
from fairtrial.integrations.tracing.recording import (
    record_anthropic as record_anthropic,
    record_openai as record_openai,
)

__all__: list[str]
