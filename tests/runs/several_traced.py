"""A suite whose task records spans in its own process."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import TracerProvider

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, tool_called
from fairtrial.integrations.tracing import TrialSpanProcessor

provider, processor = TracerProvider(), TrialSpanProcessor()
provider.add_span_processor(processor)  # type: ignore[arg-type]  # the same methods


def forecast(number: int) -> str:
    with provider.get_tracer("app").start_as_current_span("execute_tool weather") as span:
        span.set_attribute("gen_ai.operation.name", "execute_tool")
        span.set_attribute("gen_ai.tool.name", "weather")
    return "snow"


def suite_with(traces: Any) -> EvalSuite[Any, Any, Any]:
    dataset = Dataset([Sample(f"s{number}", number, "snow") for number in range(4)], name="questions")
    return EvalSuite("traced", dataset, forecast, tool_called("weather"), config=EvalConfig(processes=2), traces=traces)
