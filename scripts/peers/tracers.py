"""Records what instrumentations send for one conversation with a tool, and for one search, for tests of `tracing`.

python scripts/peers tracers [NAME]... [--folder DIR]          record these (default: all)
python scripts/peers tracers [NAME]... [--folder DIR] --live   evaluate them live instead, as the application of a suite

The recordings are in tests/integrations/tracing/recorded.

Each instrumentation is installed by pip into an environment of its own below DIR (default: a folder for temporary
files) and run for real against the model server of `fairtrial.testing`. The spans and log records that arrive are kept
as lines of OTLP's JSON, without what says where they were recorded. With `--live` nothing is recorded: a suite with a
`TraceReceiver` holds the conversation three times, and its evaluators check tools and tokens. It needs fairtrial
installed, as in .venv.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from environments import python_environment

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, TrialContext, TrialKey, all_of, tool_called
from fairtrial.integrations.model_server import ModelServer, Reply, Script, ToolCallReply, Usage
from fairtrial.integrations.tracing import TraceReceiver
from fairtrial.integrations.tracing.spans import otlp_json, otlp_messages
from fairtrial.scoring import token_usage_under, tool_call_count
from fairtrial.trials.context import traceparent_of

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "integrations" / "tracing" / "recorded"
SEARCHES = RECORDED.with_name("retrievals")
KEY = TrialKey("recorded", "baseline", "oslo")
SDK = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")

CONVERSATION = """
import json, os
from opentelemetry import context, propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

BASE, OTLP = os.environ["MODEL_URL"], os.environ["RECEIVER"]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
QUESTION = "Who may open the vault?"
PAGES = ["The vault is opened by two guards.", "Guards work in pairs."]

def make_provider():
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=OTLP + "/v1/traces")))
    trace.set_tracer_provider(provider)
    return provider

def converse(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The weather in Oslo?"}]
    reply = client.chat.completions.create(model="test-model", messages=messages, tools=TOOLS).choices[0].message
    messages.append(reply.model_dump(exclude_none=True))
    for call in reply.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "snow in " + city})
    client.chat.completions.create(model="test-model", messages=messages, tools=TOOLS)

def client():
    import openai
    return openai.OpenAI(base_url=BASE + "/v1", api_key="none")

context.attach(propagate.extract({"traceparent": os.environ["TRACEPARENT"]}))
"""

# Run by Node.js: the Vercel AI SDK with the official packages of OpenTelemetry, which send JSON.
JAVASCRIPT = {
    "vercel-ai": (
        (
            "@opentelemetry/api", "@opentelemetry/sdk-trace-node", "@opentelemetry/exporter-trace-otlp-http",
            "ai", "@ai-sdk/openai-compatible", "zod",
        ),
        """
import { context, propagation } from "@opentelemetry/api";
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-http";
import { BatchSpanProcessor, NodeTracerProvider } from "@opentelemetry/sdk-trace-node";

const exporter = new OTLPTraceExporter({ url: process.env.RECEIVER + "/v1/traces" });
const provider = new NodeTracerProvider({ spanProcessors: [new BatchSpanProcessor(exporter)] });
provider.register();
const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
const { generateText, stepCountIs, tool } = await import("ai");
const { z } = await import("zod");
const models = createOpenAICompatible({ name: "test", baseURL: process.env.MODEL_URL + "/v1", apiKey: "none" });
const weather = tool({
  description: "The weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => "snow in " + city,
});
const parent = propagation.extract(context.active(), { traceparent: process.env.TRACEPARENT });
await context.with(parent, () => generateText({
  model: models("test-model"), system: "Be brief.", prompt: "The weather in Oslo?", tools: { weather },
  stopWhen: stepCountIs(3), experimental_telemetry: { isEnabled: true },
}));
await provider.forceFlush();
""",
    ),
}  # fmt: skip

# Name -> packages, environment variables, program.
PROGRAMS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "openinference": (
        ("openinference-instrumentation-openai", "openai"),
        {},
        """
provider = make_provider()
from openinference.instrumentation.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument(tracer_provider=provider)
converse(client())
provider.force_flush()
""",
    ),
    "openllmetry": (
        ("opentelemetry-instrumentation-openai", "openai"),
        {},
        """
provider = make_provider()
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument(tracer_provider=provider)
converse(client())
provider.force_flush()
""",
    ),
    "genai": (
        ("opentelemetry-instrumentation-genai-openai", "openai"),
        {
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "span_only",
            "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
        },
        """
provider = make_provider()
from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument(tracer_provider=provider)
converse(client())
provider.force_flush()
""",
    ),
    "genai-events": (
        ("opentelemetry-instrumentation-genai-openai", "openai"),
        {
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "event_only",
            "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT": "true",
            "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
        },
        """
provider = make_provider()
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
logs = LoggerProvider()
logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(endpoint=OTLP + "/v1/logs")))
from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument(tracer_provider=provider, logger_provider=logs)
converse(client())
provider.force_flush()
logs.force_flush()
""",
    ),
    "logfire": (
        ("logfire", "openai"),
        {},
        """
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = OTLP
import logfire
logfire.configure(send_to_logfire=False, console=False, distributed_tracing=True)
openai_client = client()
logfire.instrument_openai(openai_client)
converse(openai_client)
logfire.force_flush()
""",
    ),
    "langfuse": (
        ("langfuse", "openai"),
        {"LANGFUSE_PUBLIC_KEY": "pk-lf-none", "LANGFUSE_SECRET_KEY": "sk-lf-none"},
        """
os.environ["LANGFUSE_HOST"] = os.environ["LANGFUSE_BASE_URL"] = OTLP
from langfuse import get_client
from langfuse.openai import openai
converse(openai.OpenAI(base_url=BASE + "/v1", api_key="none"))
get_client().flush()
""",
    ),
    "langsmith": (
        ("langsmith[otel]", "openai"),
        {"LANGSMITH_TRACING": "true", "LANGSMITH_OTEL_ENABLED": "true", "LANGSMITH_API_KEY": "none"},
        """
os.environ["LANGSMITH_ENDPOINT"] = OTLP
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = OTLP + "/otel"
from langsmith.run_trees import get_cached_client
from langsmith.wrappers import wrap_openai
converse(wrap_openai(client()))
get_cached_client().flush()
trace.get_tracer_provider().force_flush()
""",
    ),
    "pydantic-ai": (
        ("pydantic-ai-slim[openai]",),
        {},
        """
provider = make_provider()
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
Agent.instrument_all()
model = OpenAIChatModel("test-model", provider=OpenAIProvider(base_url=BASE + "/v1", api_key="none"))
agent = Agent(model, name="forecaster", instructions="Be brief.")

@agent.tool_plain
def weather(city: str) -> str:
    return "snow in " + city

agent.run_sync("The weather in Oslo?")
provider.force_flush()
""",
    ),
}

# One search each, recorded into tests/integrations/tracing/retrievals: the spans of retrievers.
RETRIEVALS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "openinference-retrieval": (
        ("openinference-instrumentation-langchain", "langchain-core"),
        {},
        """
provider = make_provider()
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from openinference.instrumentation.langchain import LangChainInstrumentor
LangChainInstrumentor().instrument(tracer_provider=provider)

class Handbook(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(page_content=page) for page in PAGES]

Handbook().invoke(QUESTION)
provider.force_flush()
""",
    ),
    "langsmith-retrieval": (
        ("langsmith[otel]",),
        {"LANGSMITH_TRACING": "true", "LANGSMITH_OTEL_ENABLED": "true", "LANGSMITH_API_KEY": "none"},
        """
os.environ["LANGSMITH_ENDPOINT"] = OTLP
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = OTLP + "/otel"
from langsmith import traceable
from langsmith.run_trees import get_cached_client

@traceable(run_type="retriever", name="Handbook")
def search(query):
    return [{"page_content": page, "type": "Document", "metadata": {}} for page in PAGES]

search(QUESTION)
get_cached_client().flush()
trace.get_tracer_provider().force_flush()
""",
    ),
    "langfuse-retrieval": (
        ("langfuse",),
        {"LANGFUSE_PUBLIC_KEY": "pk-lf-none", "LANGFUSE_SECRET_KEY": "sk-lf-none"},
        """
os.environ["LANGFUSE_HOST"] = os.environ["LANGFUSE_BASE_URL"] = OTLP
from langfuse import get_client
client = get_client()
with client.start_as_current_observation(as_type="retriever", name="Handbook", input=QUESTION) as search:
    search.update(output=PAGES)
client.flush()
""",
    ),
}
PROGRAMS |= RETRIEVALS

NAMES = (*PROGRAMS, *JAVASCRIPT)


class Recorder:
    """A server that keeps the OTLP requests it gets as JSON."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                signal = self.path.rpartition("/v1/")[2]
                if signal in ("traces", "logs"):
                    is_json = "json" in self.headers.get("Content-Type", "")
                    tree = json.loads(body) if is_json else otlp_json(getattr(otlp_messages(), signal).FromString(body))
                    recorder.lines.append(json.dumps(_without_origin(tree), ensure_ascii=False))
                self._answer(b"" if signal in ("traces", "logs") else b"{}")

            def do_GET(self) -> None:
                self._answer(b"{}")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


def _without_origin(tree: Any) -> Any:
    """Leave out the resource, which describes this machine, and attributes with paths, ports and processes."""
    for groups, scopes, items in (
        ("resourceSpans", "scopeSpans", "spans"),
        ("resourceLogs", "scopeLogs", "logRecords"),
    ):
        for group in tree.get(groups, ()):
            group["resource"] = {}
            for scope in group[scopes]:
                scope.get("scope", {}).pop("attributes", None)
            for item in (item for scope in group[scopes] for item in scope[items]):
                item["attributes"] = [
                    each
                    for each in item.get("attributes", ())
                    if not each["key"].startswith(("code.", "server.", "thread.", "process.", "host."))
                    and not each["key"].endswith(".revision_id")
                    and "127.0.0.1" not in json.dumps(each)
                ]
    return tree


def node_environment(name: str, packages: tuple[str, ...], program: str, folder: Path) -> Path:
    """Install the packages of a program for Node.js; returns the program's file."""
    place = folder / name
    if not (place / "installed").exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text('{"type": "module"}\n')
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", *packages], cwd=place, check=True)
        (place / "installed").touch()
    file = place / "conversation.mjs"
    file.write_text(program)
    return file


def command(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that holds the conversation, and its environment variables."""
    if name in JAVASCRIPT:
        return ["node", str(node_environment(name, *JAVASCRIPT[name], folder))], {}
    packages, variables, program = PROGRAMS[name]
    python = python_environment(folder / name.removesuffix("-events"), *packages, *SDK)
    return [str(python), "-c", CONVERSATION + program], variables


def replies() -> Script:
    """What the model answers: a call of the tool, then the answer."""
    return Script(
        (
            Reply(tool_calls=(ToolCallReply("weather", {"city": "Oslo"}),), usage=Usage(40, 12)),
            Reply("It snows in Oslo.", usage=Usage(60, 6)),
        ),
        per="turn",
    )


def variables_for(model_url: str, receiver: str, traceparent: str, own: dict[str, str]) -> dict[str, str]:
    """Return the environment of a conversation; what is set here for tracing is left out."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "LANG"))}
    return {**kept, "MODEL_URL": model_url, "RECEIVER": receiver, "TRACEPARENT": traceparent, **own}


def evaluate(name: str, folder: Path) -> int:
    """Evaluate an instrumented program live, by its tools and tokens."""
    words, own = command(name, folder)
    receiver = TraceReceiver(trace_wait_seconds=60.0)

    def converse(question: str, ctx: TrialContext) -> str:
        environ = variables_for(server.base_url, receiver.endpoint, ctx.traceparent, own)
        subprocess.run(words, env=environ, capture_output=True, check=True, timeout=300)
        return "done"

    checks = all_of(tool_called("weather"), token_usage_under(118), tool_call_count("weather", max_count=1))
    samples: Dataset[str, None] = Dataset(
        [Sample(f"turn-{number}", "The weather in Oslo?") for number in range(3)], name="weather"
    )
    with ModelServer(replies()) as server:
        suite = EvalSuite(name, samples, converse, checks, config=EvalConfig(max_concurrent=1), traces=receiver)
        report = suite.run_sync(store="memory:")
    tokens = {result.usage.total_tokens for result in report.results}
    problems = {result.error for result in report.results if result.error}
    passed = sum(result.passed for result in report.results)
    print(f"{name}: {passed} of 3 trials passed, tokens of each {sorted(tokens)}", *sorted(problems), flush=True)
    return 0 if passed == 3 and tokens == {118} else 1


def record(name: str, folder: Path) -> int:
    words, own = command(name, folder)
    recorder = Recorder()
    with ModelServer(replies()) as server:
        environ = variables_for(server.base_url, recorder.url, traceparent_of(KEY, 1), own)
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    recorder.server.shutdown()
    if done.returncode or not recorder.lines:
        print(f"{name}: failed\n{done.stderr[-2000:]}")
        return 1
    folder = SEARCHES if name in RETRIEVALS else RECORDED
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(line + "\n" for line in recorder.lines), encoding="utf-8")
    print(f"{name}: {len(recorder.lines)} requests, {path.stat().st_size:,} bytes")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fairtrial-tracers")
    parser.add_argument("--live", action="store_true", help="evaluate instead of recording")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    work = evaluate if options.live else record
    usual = [name for name in NAMES if not options.live or name not in RETRIEVALS]
    return max([work(name, options.folder) for name in options.names or usual])
