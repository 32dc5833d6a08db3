"""`run --trace`, and `export` with the formats otlp and langsmith."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import EVALS, Cli
from tests.integrations.tracing.collector import Answer, Collector, attributes
from tests.integrations.tracing.langsmith_server import KEY, LangSmithServer, experiments


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


def test_run_sends_traces_as_the_settings_say_and_says_how_many(cli: Cli, place: Path, collector: Collector) -> None:
    Path("evals.py").write_text(EVALS)
    Path("pyproject.toml").write_text("[tool.fairtrial.tracing]\nsample = 0\ncontent = true\nprofile = 'langfuse'\n")
    done = cli("run", "evals.py", "--trace", collector.url, "--quiet")
    assert "traces: 1 of 1 sampled trials sent" in done.err
    (sent,) = map(attributes, collector.spans)
    assert (sent["fairtrial.sample.id"], "fairtrial.input" in sent) == ("four", True)
    assert any(name.startswith("langfuse.") for name in sent)


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
        (("export", "doubles", "--format", "otlp", "--trace-profile", "x"), "must be one of plain"),
        (("export", "doubles", "--format", "csv", "--trace-content"), "need --format otlp or langsmith"),
        (("export", "doubles", "--format", "langsmith", "--trace-profile", "plain"), "needs --format otlp"),
        (("export", "doubles", "--format", "otlp", "--max-rows", "5"), "needs --format langsmith"),
        (("export", "doubles", "--format", "langsmith", "--to", "env"), "LANGSMITH_API_KEY must be set"),
        (("export", "doubles", "--to", "http://127.0.0.1:1", "-o", "x"), "cannot be combined"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("LANGSMITH_API_KEY", raising=False)
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


def test_export_to_a_server_without_log_records_says_so(cli: Cli, place: Path) -> None:
    Path("evals.py").write_text(EVALS)
    cli("run", "evals.py", "--quiet")
    with Collector(Answer(), Answer(404)) as collector:
        done = cli("export", "doubles", "--to", collector.url)
    told = "4 spans, scores in their attributes only, as the server takes no log records"
    assert (done.code, told in done.err) == (0, True)


def test_export_uploads_a_run_to_langsmith_once(
    cli: Cli, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGSMITH_API_KEY", KEY)
    Path("evals.py").write_text(EVALS)
    cli("run", "evals.py", "--quiet")
    folder = tmp_path / "server"
    folder.mkdir()
    upload = ("export", "doubles", "--format", "langsmith", "--max-rows", "3")
    with LangSmithServer(folder) as server:
        done = cli(*upload, "--to", server.url)
        told = f"uploaded to {server.url}: 2 experiments with 4 trials created\n"
        assert (done.code, done.err) == (0, told)
        monkeypatch.setenv("LANGSMITH_ENDPOINT", server.url)
        again = cli(*upload, "--to", "env", "--json").json
    assert again == {
        "format": "fairtrial.upload/1", "run_id": again["run_id"], "to": "env", "created": 0, "existing": 2,
        "unconfirmed": 0, "trials": 0,
    }  # fmt: skip
    rows = [row for experiment in experiments(folder) for row in experiment["results"]]
    assert (len(rows), {"input" in row["inputs"] for row in rows}) == (4, {False})
    assert cli(*upload, "--json").json["file"] == "doubles-1.langsmith.jsonl"
    printed = cli(*upload, "-o", "-", "--trace-content").out.splitlines()
    assert [len(json.loads(line)["results"]) for line in printed] == [3, 1]
    assert all("input" in row["inputs"] for line in printed for row in json.loads(line)["results"])


def test_an_upload_that_is_refused_says_what_to_do(
    cli: Cli, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGSMITH_API_KEY", "another-key-0123456789")
    Path("evals.py").write_text(EVALS)
    cli("run", "evals.py", "--quiet")
    with LangSmithServer(tmp_path) as server:
        done = cli("export", "doubles", "--format", "langsmith", "--to", server.url)
    assert (done.code, "the server answered 403" in done.err) == (2, True)
    assert "check the address and LANGSMITH_API_KEY; the same command continues the upload" in done.err
    assert "another-key" not in done.err


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


@pytest.fixture
def receiving(place: Path) -> None:
    (place / "app.py").write_text(APP)
    (place / "pyproject.toml").write_text("[tool.fairtrial.tracing]\nreceive = 0\nwait = 120\n")


@pytest.mark.usefixtures("receiving")
def test_run_receives_the_spans_of_the_application(cli: Cli) -> None:
    done = cli("run", "app.py", "--quiet")
    assert (done.code, "pass rate 100.0%, 1 scored, 0 errors" in done.out) == (0, True)


@pytest.mark.usefixtures("receiving")
def test_receiving_does_not_fit_a_fleet_unless_its_suite_has_a_receiver(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0.3")
    words = ("run", "app.py", "--mailbox", "redis://127.0.0.1:1")
    assert "cannot be combined with a fleet" in cli(*words).err
    own = APP.replace('tool_called("weather")', 'tool_called("weather"), traces=TraceReceiver(port=0)')
    (place / "app.py").write_text(f"from fairtrial.integrations.tracing.receiver import TraceReceiver\n{own}")
    assert "cannot be combined with a fleet" not in cli(*words).err
