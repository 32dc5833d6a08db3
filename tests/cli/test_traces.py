"""`run --trace` and `export --format otlp`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import EVALS, Cli
from tests.tracing.collector import Answer, Collector, attributes


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


def test_run_sends_traces_and_says_how_many(cli: Cli, place: Path, collector: Collector) -> None:
    Path("evals.py").write_text(EVALS)
    done = cli("run", "evals.py", "--trace", collector.url, "--trace-sample", "0", "--quiet")
    assert "traces: 1 of 1 sampled trials sent" in done.err
    assert [attributes(span)["fairtrial.sample.id"] for span in collector.spans] == ["four"]


def test_export_sends_a_stored_run(cli: Cli, place: Path, collector: Collector) -> None:
    Path("evals.py").write_text(EVALS)
    cli("run", "evals.py", "--quiet")
    done = cli("export", "doubles", "--format", "otlp", "--to", collector.url)
    assert (done.code, done.err) == (0, f"sent 4 trials to {collector.url}: 4 spans, 4 evaluation results\n")
    facts = cli("export", "doubles", "--to", collector.url, "--json").json
    assert (facts["format"], facts["trials"], facts["rejected"]) == ("fairtrial.traces/1", 4, 0)
    written = cli("export", "doubles", "--format", "otlp", "--json").json
    assert written["file"] == "doubles-1.otlp.jsonl"
    assert '"fairtrial.input"' not in Path("doubles-1.otlp.jsonl").read_text()
    printed = cli("export", "doubles", "--format", "otlp", "-o", "-", "--trace-content").out
    assert '"fairtrial.input"' in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "evals.py", "--trace-sample", "0.1"), "need --trace URL"),
        (("run", "evals.py", "--trace", "http://127.0.0.1:1", "--trace-profile", "x"), "must be one of plain"),
        (("export", "doubles", "--format", "csv", "--trace-content"), "need --format otlp"),
        (("export", "doubles", "--to", "http://127.0.0.1:1", "-o", "x"), "cannot be combined"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    cli: Cli, place: Path, words: tuple[str, ...], message: str
) -> None:  # fmt: skip
    Path("evals.py").write_text(EVALS)
    cli("run", "evals.py", "--quiet")
    done = cli(*words)
    assert done.code == 2
    assert message in done.err.replace("\n", " ")


def test_a_server_that_refuses_is_an_error_that_names_the_remedy(cli: Cli, place: Path) -> None:
    Path("evals.py").write_text(EVALS)
    cli("run", "evals.py", "--quiet")
    with Collector(Answer(403)) as collector:
        done = cli("export", "doubles", "--to", collector.url)
    assert done.code == 2
    assert "the server answered 403" in done.err
    assert "OTEL_EXPORTER_OTLP_HEADERS" in done.err


APP = """
import json, urllib.request
from fairtrial import Dataset, EvalSuite, Sample, TrialContext, tool_called

def ask(number: int, ctx: TrialContext) -> str:
    _, trace_id, span_id, _ = ctx.traceparent.split("-")
    attributes = [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}},
                  {"key": "gen_ai.tool.name", "value": {"stringValue": "weather"}}]
    span = {"traceId": trace_id, "spanId": "ab" * 8, "parentSpanId": span_id, "name": "t", "attributes": attributes}
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    url = ctx.trace_environment["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).close()
    return "snow"

suite = EvalSuite("forecast", Dataset([Sample("one", 1)], name="n"), ask, tool_called("weather"))
"""


def test_run_receives_the_spans_of_the_application(cli: Cli, place: Path) -> None:
    Path("app.py").write_text(APP)
    done = cli("run", "app.py", "--receive-traces", "0", "--trace-wait", "120", "--quiet")
    assert (done.code, "100.0% of 1 scored passed, 0 errors" in done.out) == (0, True)


def test_options_of_receiving_that_do_not_fit_are_refused(cli: Cli, place: Path) -> None:
    Path("app.py").write_text(APP)
    assert "needs --receive-traces PORT" in cli("run", "app.py", "--trace-wait", "3").err
    refused = cli("run", "app.py", "--receive-traces", "0", "--mailbox", "redis://127.0.0.1:1")
    assert "cannot be combined with a fleet" in refused.err
