"""Sends a run to real receivers of OpenTelemetry traces and reads it back through their own interfaces.

python scripts/peers receivers [NAME]... [--folder DIR]   try these: phoenix, mlflow (default: both)

Each receiver is installed by pip into an environment of its own below DIR (default: a folder for temporary files) and
started on the loopback interface. A run with model calls, tool calls, spans of its own, a failed trial and an error is
sent by `fairtrial export --format otlp --to`. What the receiver has is compared span by span: ids, names, parents,
tokens, scores and verdicts. It needs fairtrial installed, as in .venv. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any, NamedTuple

from environments import python_environment

from fairtrial import (
    Dataset,
    EvalSuite,
    Metric,
    PromptExecuted,
    Sample,
    Score,
    TokenUsage,
    ToolInvoked,
    TrialContext,
    open_store,
    task,
)  # fmt: skip
from fairtrial.integrations.tracing.exporter import converted_trials
from fairtrial.integrations.tracing.received import plain_attributes

START_SECONDS = 300.0
SETTLE_SECONDS = 60.0
TOKENS = (
    ("gen_ai.usage.input_tokens", "llm.token_count.prompt"),
    ("gen_ai.usage.output_tokens", "llm.token_count.completion"),
)


class SpanFacts(NamedTuple):
    """What must be the same on both sides."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    failed: bool
    tokens: tuple[int | None, ...]
    score: float | None
    passed: bool | None


@task(inline=True)
def agent(city: str, ctx: TrialContext) -> str:
    if city == "Atlantis":
        raise LookupError("there is no such city")
    with ctx.session.span("plan"):
        usage = TokenUsage(40 + len(city), 12)
        ctx.session.record(PromptExecuted("agent", "openai", "gpt-5", usage, "tool_calls", duration_ms=120.0))
    ctx.session.record(ToolInvoked("weather", {"city": city}, "snow", True, duration_ms=4.0, call_id="c1"))
    ctx.session.record(PromptExecuted("agent", "openai", "gpt-5", TokenUsage(60, 6), "stop", duration_ms=80.0))
    return "snow"


def forecast(output: str, expected: str) -> Score:
    return Score(0.9 if output == expected else 0.2, output == expected, "compared", [Metric("words", 1.0)])


def store_run(folder: Path) -> tuple[str, list[SpanFacts]]:
    """Execute and store the run; returns the store's address and the facts of its spans."""
    cities = {"Oslo": "snow", "Lima": "sun", "Atlantis": "rain", "Bern": "snow"}
    samples = Dataset([Sample(city.lower(), city, weather) for city, weather in cities.items()], name="cities")
    address = f"sqlite:///{folder}/runs.db"
    store = open_store(address)
    run = EvalSuite("forecast", samples, agent, forecast).run_sync(store=store).run
    facts = []
    for trial in converted_trials(store, run, content=True):
        for span in trial.spans:
            attributes = plain_attributes(span.attributes)
            facts.append(
                _facts(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name,
                       span.status.code == 2, attributes)
            )  # fmt: skip
    store.close()
    return address, facts


def _facts(
    trace_id: str, span_id: str, parent_id: str | None, name: str, failed: bool, attributes: dict[str, Any]
) -> SpanFacts:
    flat = _flat(attributes)
    tokens = tuple(
        next((int(flat[key]) for key in names if flat.get(key) is not None), None) for names in TOKENS
    )  # fmt: skip
    score, passed = flat.get("fairtrial.score"), flat.get("fairtrial.passed")
    return SpanFacts(
        trace_id, span_id, parent_id or "", name, failed, tokens,
        None if score is None else round(float(score), 9), None if passed is None else bool(passed),
    )  # fmt: skip


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested attributes with dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def version(programs: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([programs / "python", "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


@contextmanager
def serving(words: list[str], variables: dict[str, str], health: str, folder: Path) -> Iterator[None]:
    """Run a server until the block ends; its output is kept in the folder and printed if it does not start."""
    log = folder / "server.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PHOENIX_", "MLFLOW_"))}
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env=kept | variables, cwd=folder, stdout=file, stderr=file, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(health, timeout=5).close()
                break
            except (OSError, urllib.error.HTTPError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}") from None
                time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, 15)  # It has worker processes of its own.
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def export(store: str, url: str, **variables: str) -> str:
    """Send the run by the command; returns what it says."""
    words = [sys.executable, "-m", "fairtrial.cli", "export", "forecast", "--format", "otlp", "--to", url]
    done = subprocess.run(
        [*words, "--trace-content", "--store", store], env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"fairtrial export failed:\n{done.stderr}")
    return done.stderr.strip()


def until_complete(read: Callable[[], list[SpanFacts]], count: int) -> list[SpanFacts]:
    """Read until all spans are there: receivers store them a moment after they accept them."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = read()
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def try_phoenix(programs: Path, folder: Path, store: str, count: int) -> tuple[str, list[SpanFacts]]:
    port, grpc_port = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    variables = {
        "PHOENIX_WORKING_DIR": str(folder), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc_port), "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }  # fmt: skip

    def read() -> list[SpanFacts]:
        found: list[SpanFacts] = []
        cursor = ""
        while True:
            try:
                page = ask(f"{base}/v1/projects/fairtrial/spans?limit=100{cursor}")
            except urllib.error.HTTPError as error:
                if error.code == 404:  # The project is created with its first span.
                    return []
                raise
            for span in page["data"]:
                found.append(
                    _facts(span["context"]["trace_id"], span["context"]["span_id"], span["parent_id"], span["name"],
                           span["status_code"] == "ERROR", span["attributes"])
                )  # fmt: skip
            if not page.get("next_cursor"):
                return found
            cursor = f"&cursor={page['next_cursor']}"

    with serving([str(programs / "phoenix"), "serve"], variables, f"{base}/healthz", folder):
        said = export(store, base, OTEL_RESOURCE_ATTRIBUTES="openinference.project.name=fairtrial")
        return said, until_complete(read, count)


READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client, found, token = MlflowClient(sys.argv[1]), [], None
while True:
    page = client.search_traces(locations=[sys.argv[2]], max_results=50, page_token=token, include_spans=True)
    for trace in page:
        for span in trace.data.spans:
            found.append([trace.info.trace_id, span.span_id, span.parent_id, span.name, str(span.status.status_code),
                          dict(span.attributes)])
    token = page.token
    if not token:
        break
print(json.dumps(found, default=str))
"""


def try_mlflow(programs: Path, folder: Path, store: str, count: int) -> tuple[str, list[SpanFacts]]:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    words = [
        str(programs / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder / "artifacts"),
    ]  # fmt: skip
    variables = {
        "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }  # fmt: skip

    def read() -> list[SpanFacts]:
        done = subprocess.run(
            [programs / "python", "-c", READ_MLFLOW, base, experiment], env={**os.environ, **variables},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [
            _facts(trace_id.removeprefix("tr-"), span_id, parent_id, name, status.endswith("ERROR"), attributes)
            for trace_id, span_id, parent_id, name, status, attributes in json.loads(done.stdout.splitlines()[-1])
        ]

    with serving(words, variables, f"{base}/health", folder):
        experiment = ask(f"{base}/api/2.0/mlflow/experiments/create", {"name": "fairtrial"})["experiment_id"]
        said = export(store, base, OTEL_EXPORTER_OTLP_HEADERS=f"x-mlflow-experiment-id={experiment}")
        return said, until_complete(read, count)


RECEIVERS: dict[str, tuple[str, Callable[[Path, Path, str, int], tuple[str, list[SpanFacts]]]]] = {
    "phoenix": ("arize-phoenix", try_phoenix),
    "mlflow": ("mlflow", try_mlflow),
}


def compare(sent: list[SpanFacts], received: list[SpanFacts]) -> list[str]:
    """Return what differs, one line each."""
    theirs = {(span.trace_id, span.span_id): span for span in received}
    problems = [] if len(theirs) == len(received) else [f"{len(received) - len(theirs)} spans are there twice"]
    for span in sent:
        found = theirs.pop((span.trace_id, span.span_id), None)
        if found is None:
            problems.append(f"{span.name} {span.span_id} is missing")
        elif found != span:
            differing = [name for name in SpanFacts._fields if getattr(found, name) != getattr(span, name)]
            problems += [
                f"{span.name}: {name} is {getattr(found, name)!r}, sent was {getattr(span, name)!r}"
                for name in differing
            ]
    return problems + [f"{span.name} {span.span_id} was not sent" for span in theirs.values()]


def try_receiver(name: str, folder: Path) -> int:
    package, attempt = RECEIVERS[name]
    programs = python_environment(folder / package, package).parent
    label = f"{package} {version(programs, package)}"
    with tempfile.TemporaryDirectory() as place:
        store, sent = store_run(Path(place))
        said, received = attempt(programs, Path(place), store, len(sent))
    problems = compare(sent, received)
    tokens = sum(count or 0 for span in received for count in span.tokens)
    scores = sum(span.score is not None for span in received)
    print(f"{label}: {len(sent)} spans sent, {len(received)} read back with {tokens} tokens and {scores} scores")
    print(f"  {said}")
    print("  ids, names, parents, errors, tokens, scores and verdicts are equal" if not problems else "")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECEIVERS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fairtrial-receivers")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(RECEIVERS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    return max([try_receiver(name, options.folder) for name in options.names or RECEIVERS])
