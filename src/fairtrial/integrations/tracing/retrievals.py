"""One reading of the spans of retrievers: the query, the texts that were found and where.

Known: the GenAI conventions (`gen_ai.operation.name` is `retrieval`), OpenInference (`RETRIEVER`), LangSmith and
Langfuse (`retriever`), and OpenLLMetry's spans of vector databases, which have an event for each result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairtrial.data.session.events import Retrieved
from fairtrial.integrations.tracing.dialects import decoded, first_of, indexed
from fairtrial.integrations.tracing.received import ReceivedSpan

_TEXTS = ("content", "page_content", "pageContent", "text", "document", "node", "kwargs")
_LISTS = ("documents", "output", "outputs", "results", "nodes", "matches")
_QUERIES = ("query", "question", "input", "text", "query_str", "inputs")
_RESULT_EVENT, _RESULT_TEXT = "db.query.result", "db.query.result.document"
_DEPTH = 5


def is_retrieval(span: ReceivedSpan) -> bool:
    """Return whether a span stands for a retrieval."""
    attributes = span.attributes
    return (
        attributes.get("gen_ai.operation.name") == "retrieval"
        or attributes.get("openinference.span.kind") == "RETRIEVER"
        or attributes.get("langsmith.span.kind") == "retriever"
        or attributes.get("langfuse.observation.type") == "retriever"
        or any(name == _RESULT_EVENT and _RESULT_TEXT in event for name, event in span.events)
    )


def retrieved_of(span: ReceivedSpan) -> Retrieved | None:
    """Return what a span retrieved; None if the texts were not recorded, only their ids or nothing at all."""
    documents = _documents_of(span)
    if documents is None:
        return None
    attributes = span.attributes
    query = first_of(
        attributes, "gen_ai.retrieval.query.text", "input.value", "langfuse.observation.input", "gen_ai.prompt",
        "traceloop.entity.input",
    )  # fmt: skip
    source = first_of(attributes, "gen_ai.data_source.id", "db.collection.name", "db.system") or span.name
    duration = round(max(0.0, span.end - span.start) * 1000, 3)
    return Retrieved(_query(decoded(query)), documents, str(source), duration)


def _documents_of(span: ReceivedSpan) -> tuple[str, ...] | None:
    attributes = span.attributes
    flat = [each.get("document.content") for each in indexed(attributes, "retrieval.documents")]
    stored = [event.get(_RESULT_TEXT) for name, event in span.events if name == _RESULT_EVENT]
    given: Any = flat or stored
    if not given:
        output = first_of(
            attributes, "gen_ai.retrieval.documents", "output.value", "langfuse.observation.output",
            "gen_ai.completion", "traceloop.entity.output",
        )  # fmt: skip
        given = _list_in(decoded(output))
    if given is None:
        return None
    texts = tuple(text for each in given if (text := _text_of(decoded(each))) is not None)
    return texts if texts or not given else None


def _list_in(value: Any, depth: int = 0) -> list[Any] | None:
    """Return the list of documents, however it is wrapped."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Mapping) and depth < _DEPTH:
        inner = next((value[name] for name in _LISTS if name in value), None)
        return _list_in(decoded(inner), depth + 1)
    return None


def _text_of(document: Any, depth: int = 0) -> str | None:
    if isinstance(document, str):
        return document
    if isinstance(document, Mapping) and depth < _DEPTH:
        found = (_text_of(document[name], depth + 1) for name in _TEXTS if name in document)
        return next((text for text in found if text is not None), None)
    return None


def _query(value: Any) -> str:
    if isinstance(value, Mapping):
        texts = [each for each in (value.get(name) for name in _QUERIES) if isinstance(each, str)]
        texts += [each for each in value.values() if isinstance(each, str)]
        return texts[0] if texts else ""
    return "" if value is None else str(value)
