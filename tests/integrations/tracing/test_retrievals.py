"""Spans of retrievers become `Retrieved` events, which the judges of retrieval read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalSuite, Sample, ScriptedAdapter, Session, TrialContext
from fairtrial.data.session import Retrieved, SpanClosed
from fairtrial.integrations.tracing.mapping import session_events
from fairtrial.integrations.tracing.received import ReceivedSpan, parse_traces
from fairtrial.integrations.tracing.spans import TrialConverter, traces_request
from fairtrial.models.judges import faithfulness
from fairtrial.models.judges.fence import read_fences
from fairtrial.scoring.evaluator import Case

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
