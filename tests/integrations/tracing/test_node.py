"""An application that is not written in Python, evaluated live by the spans that it sends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, ToolInvoked, TrialContext, all_of, tool_called
from fairtrial.data.session import PromptExecuted, SpanClosed
from fairtrial.integrations.tracing import TraceReceiver
from fairtrial.scoring import token_usage_under


@pytest.fixture
def node() -> str:
    found = shutil.which("node")
    assert found is not None, "this test needs Node.js: run scripts/setup"
    return found


@contextmanager
def agent(node: str, endpoint: str) -> Iterator[str]:
    """The agent as a server, which sends its spans to this endpoint."""
    with subprocess.Popen(
        [node, str(Path(__file__).with_name("agent.mjs"))],
        env={"PATH": os.environ["PATH"], "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


@pytest.mark.proves("R90")
def test_an_agent_in_javascript_is_evaluated_by_its_tools_and_tokens(node: str) -> None:
    with TraceReceiver(trace_wait_seconds=120.0) as receiver, agent(node, receiver.endpoint) as url:

        def ask(question: str, ctx: TrialContext) -> str:
            body = json.dumps({"question": question}).encode()
            headers = {"Content-Type": "application/json", **ctx.trace_headers}
            request = urllib.request.Request(url, body, headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                return str(json.load(answer)["answer"])

        questions = {"oslo": "In Oslo?", "lima": "And in Lima?", "paris": "And Paris?", "long": "Oslo " * 20,
                     "lost": "Atlantis?"}  # fmt: skip
        suite = EvalSuite(
            "forecast",
            Dataset([Sample(name, question) for name, question in questions.items()], name="questions"),
            ask,
            all_of(tool_called("weather"), token_usage_under(100)),
            experiments=[Experiment("a"), Experiment("b")],
            config=EvalConfig(max_concurrent=4),
            traces=receiver,
        )
        report = suite.run_sync(store="memory:")
    assert (report.successful, sum(report.errors.values())) == (10, 0)
    passed = {result.sample_id: result.passed for result in report.results}
    assert passed == {"oslo": True, "lima": True, "paris": False, "long": False, "lost": True}
    for result in report.results:
        session = result.session
        (call,) = session[PromptExecuted].all()
        assert (call.model, call.usage and call.usage.output_tokens) == (
            "small-model", len(questions[result.sample_id]),
        )  # fmt: skip
        assert [span.name for span in session[SpanClosed].all()] == ["POST /ask"]
        if result.sample_id == "lima":
            (tool,) = session[ToolInvoked].all()
            assert (tool.name, dict(tool.params), tool.result, tool.success) == (
                "weather",
                {"city": "Lima"},
                "sun",
                True,
            )
            assert result.output == "Expect sun."
        if result.sample_id == "lost":
            assert [(tool.failed, tool.error) for tool in session[ToolInvoked].all()] == [(True, "no such city")]
    assert receiver.counts.unknown == receiver.counts.late == 0
