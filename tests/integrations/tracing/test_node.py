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
from typing import Any

import pytest

from fairtrial import (
    Dataset,
    EvalConfig,
    EvalSuite,
    Experiment,
    Sample,
    ScriptedAdapter,
    Session,
    TokenUsage,
    ToolInvoked,
    TrialContext,
    all_of,
    tool_called,
)
from fairtrial.data.session import PromptExecuted, Retrieved, SpanClosed
from fairtrial.integrations.tracing import TraceReceiver
from fairtrial.integrations.tracing.mapping import session_events
from fairtrial.integrations.tracing.received import ReceivedSpan, parse_traces
from fairtrial.integrations.tracing.spans import TrialConverter, traces_request
from fairtrial.models.judges import faithfulness
from fairtrial.models.judges.fence import read_fences
from fairtrial.models.pricing import Prices, configure_prices, priced
from fairtrial.scoring import token_usage_under
from fairtrial.scoring.evaluator import Case
from tests.integrations.tracing.test_receive import only, suite_of
from tests.integrations.tracing.traced_app import App


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


# Spans of retrievers become `Retrieved` events, which the judges of retrieval read.


RECORDED = Path(__file__).with_name("retrievals")
NAMES = sorted(path.stem for path in RECORDED.glob("*.jsonl"))
QUESTION = "Who may open the vault?"
PAGES = ("The vault is opened by two guards.", "Guards work in pairs.")


def span(attributes: dict[str, Any], *, error: str | None = None, events: Any = ()) -> ReceivedSpan:
    return ReceivedSpan("1" * 32, "2" * 16, "", "search", 10.0, 10.25, error, attributes, events)


def session_of(*spans: ReceivedSpan) -> Session:
    session = Session()
    session.extend(session_events(spans))
    return session


def test_the_instrumentations_are_recorded() -> None:
    assert NAMES == ["langfuse-retrieval", "langsmith-retrieval", "openinference-retrieval"]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_retriever_found_is_the_same_whatever_recorded_it(name: str) -> None:
    lines = (RECORDED / f"{name}.jsonl").read_bytes().splitlines()
    spans = [span for line in lines for span in parse_traces(line, is_json=True)]
    (found,) = session_of(*spans).view()[Retrieved].all()
    assert (found.query, found.documents, found.source) == (QUESTION, PAGES, "Handbook")
    assert found.duration_ms is not None


DIALECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "conventions": (
        {
            "gen_ai.operation.name": "retrieval",
            "gen_ai.retrieval.query.text": QUESTION,
            "gen_ai.data_source.id": "handbook",
            "gen_ai.retrieval.documents": [
                {"id": str(n), "score": 0.5, "content": page} for n, page in enumerate(PAGES)
            ],
        },
        (),
    ),
    "as JSON": (
        {
            "gen_ai.operation.name": "retrieval",
            "gen_ai.retrieval.query.text": QUESTION,
            "gen_ai.data_source.id": "handbook",
            "gen_ai.retrieval.documents": json.dumps([{"id": "1", "text": page} for page in PAGES]),
        },
        (),
    ),
    "nodes": (
        {
            "openinference.span.kind": "RETRIEVER",
            "input.value": json.dumps({"query_str": QUESTION}),
            "gen_ai.data_source.id": "handbook",
            "output.value": json.dumps({"nodes": [{"node": {"text": page}, "score": 0.5} for page in PAGES]}),
        },
        (),
    ),
    "vector database": (
        {"db.system": "handbook", "traceloop.entity.input": json.dumps({"inputs": QUESTION})},
        tuple(("db.query.result", {"db.query.result.id": "1", "db.query.result.document": page}) for page in PAGES),
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_of_retrieval(dialect: str) -> None:
    attributes, events = DIALECTS[dialect]
    (found,) = session_of(span(attributes, events=events)).view()[Retrieved].all()
    assert found == Retrieved(QUESTION, PAGES, "handbook")
    assert found.duration_ms == 250.0


def test_a_search_that_found_nothing_is_one_and_texts_that_were_not_recorded_are_not_made_up() -> None:
    kind = {"gen_ai.operation.name": "retrieval"}
    nothing = session_of(span({**kind, "gen_ai.retrieval.documents": "[]"})).view()
    assert [event.documents for event in nothing[Retrieved].all()] == [()]
    for attributes in ({}, {"gen_ai.retrieval.documents": [{"id": "1", "score": 0.9}]}, {"output.value": "7 found"}):
        view = session_of(span({**kind, **attributes})).view()
        assert not view[Retrieved].all()
        assert [event.name for event in view[SpanClosed].all()] == ["search"]
    failed = session_of(span({**kind, "gen_ai.retrieval.documents": "[]"}, error="timeout")).view()
    assert (len(failed[Retrieved].all()), failed[SpanClosed].all()[0].error) == (0, "timeout")


async def test_a_judge_of_retrieval_reads_what_a_traced_application_retrieved() -> None:
    view = session_of(span(*DIALECTS["conventions"][:1])).view()
    model = ScriptedAdapter([{"claims": [{"claim": "two guards", "reason": "r", "supported": "yes"}]}])
    score = await faithfulness(model).score(Case(Sample("q", QUESTION), "Two guards.", view))
    assert score.value == 1.0
    fences = {name: piece for _, name, piece in read_fences(model.calls[0].text)}
    assert fences["retrieved_documents"] == list(PAGES)


def test_a_retrieval_that_was_exported_is_read_back_and_without_content_it_has_no_texts() -> None:
    def answer(question: str, ctx: TrialContext) -> str:
        ctx.session.record(Retrieved(question, PAGES, "handbook", 20.0))
        return "two guards"

    suite = EvalSuite("vault", Dataset([Sample("q", QUESTION)]), answer, lambda output: 1.0)
    report = suite.run_sync(store="memory:")
    (result,) = report.store.results(report.run.run_id, snapshots=True)
    for content in (True, False):
        converted = TrialConverter("run", "vault", content=content).convert(result)
        spans = parse_traces(traces_request(converted.spans, "vault").SerializeToString(), is_json=False)
        assert [each.name for each in spans] == ["fairtrial.trial", "retrieval handbook"]
        found = session_of(spans[1]).view()[Retrieved].all()
        assert list(found) == ([Retrieved(QUESTION, PAGES, "handbook")] if content else [])
        assert content or QUESTION not in str(spans)


# The cost of model calls that an application's spans report.


USAGE = TokenUsage(1_000, 200, 400)
TOKENS = {
    "gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 1_000, "gen_ai.usage.output_tokens": 200,
    "gen_ai.usage.cache_read.input_tokens": 400,
}  # fmt: skip


@pytest.fixture
def prices() -> Iterator[None]:
    before = configure_prices({"my-model": Prices(1.0, 10.0), "gpt-4o": Prices(2.0, 20.0)})
    yield
    configure_prices(before)


def cost(**attributes: Any) -> float | None:
    """The cost that a model call with these attributes is recorded with."""
    given = {name.replace("__", "."): value for name, value in attributes.items()}
    span = ReceivedSpan("t", "s", "", "chat", 1.0, 2.0, None, TOKENS | given)
    (event,) = session_events([span])
    assert event.kind.endswith(":PromptExecuted")
    assert event.data["usage"]["input_tokens"] == 1_000
    found: float | None = event.data["usage"]["cost_usd"]
    return found


@pytest.mark.parametrize(
    ("name", "provider", "model"),
    [
        ("openai", "openai", "gpt-4o"),
        ("openai.responses", "openai", "gpt-4o"),
        ("azure.ai.openai", "azure", "gpt-4o"),
        ("Anthropic", "anthropic", "claude-3-5-haiku-latest"),
        ("gcp.gemini", "google", "gemini-2.5-pro"),
        ("mistral_ai", "mistral", "mistral-large-latest"),
    ],
)
def test_the_price_list_of_the_provider_applies_under_every_name_of_it(name: str, provider: str, model: str) -> None:
    expected = priced(USAGE, model, provider=provider).cost_usd
    assert expected is not None
    assert cost(gen_ai__provider__name=name, gen_ai__response__model=model) == expected


def test_configured_prices_precede_the_list_and_the_cost_of_the_span_precedes_both(prices: None) -> None:
    assert cost(gen_ai__provider__name="openai", gen_ai__response__model="gpt-4o") == pytest.approx(0.006)
    assert cost(gen_ai__request__model="my-model") == pytest.approx(0.003)
    for name in ("llm__cost__total", "gen_ai__usage__cost", "fairtrial__cost_usd"):
        assert cost(gen_ai__request__model="my-model", **{name: 0.5}) == 0.5
    assert cost(gen_ai__request__model="my-model", langfuse__observation__cost_details='{"total": 0.25}') == 0.25


@pytest.mark.parametrize("nonsense", [-1.0, "much", True, float("nan"), float("inf")])
def test_a_cost_that_is_no_amount_is_ignored(prices: None, nonsense: Any) -> None:
    assert cost(gen_ai__request__model="my-model", llm__cost__total=nonsense) == pytest.approx(0.003)


@pytest.mark.parametrize("attributes", [{}, {"gen_ai__provider__name": "openai"}, {"gen_ai__provider__name": "nobody"}])
def test_the_cost_of_an_unknown_model_is_unknown(attributes: dict[str, str]) -> None:
    assert cost(gen_ai__request__model="no-such-model", **attributes) is None


def test_the_costs_of_received_calls_are_those_of_the_trial(prices: None) -> None:
    def answer(number: int, ctx: TrialContext) -> str:
        app = App(ctx.trace_endpoint, ctx.traceparent)
        outer = app.span("POST /ask")
        models = [TOKENS | {"gen_ai.request.model": model} for model in ("my-model", "no-such-model")]
        app.send(outer, *(app.span("chat", attributes, parent=outer["spanId"]) for attributes in models))
        return "snow"

    def scored(output: str, expected: str, session: Any) -> float:
        return float(len(session[PromptExecuted].all()) == 2)

    receiver = TraceReceiver(trace_wait_seconds=120.0)
    result = only(suite_of(answer, receiver, evaluator=scored).run_sync(store="memory:"))
    assert result.passed
    assert (result.usage.cost_usd, result.unpriced_calls) == (pytest.approx(0.003), 1)
