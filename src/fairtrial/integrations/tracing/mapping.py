"""Spans of applications as events of sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fairtrial.base.codec import to_json
from fairtrial.data.session.events import PromptExecuted, Retrieved, SpanClosed, TokenUsage, ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage, ConversationLog, ToolCall
from fairtrial.data.session.views import Envelope, kind_of
from fairtrial.integrations.tracing.dialects import (
    Conversation,
    conversation_of,
    cost_of,
    decoded,
    finish_reason_of,
    first_of,
    indexed,
    kind_of_span,
    model_of,
    provider_of,
    tool_of,
    usage_of,
)
from fairtrial.integrations.tracing.received import ReceivedLog, ReceivedSpan
from fairtrial.models.pricing import configured_prices, priced
from fairtrial.trials.context import CollectedTrace

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


_PRICE_LISTS = {
    "aws.bedrock": "aws", "az.ai.openai": "azure", "azure.ai.inference": "azure", "azure.ai.openai": "azure",
    "gcp.gemini": "google", "gcp.gen_ai": "google", "gcp.vertex_ai": "google", "mistral_ai": "mistral", "x_ai": "x-ai",
}  # fmt: skip
"""The price list of a provider, where its name is not that of the list."""


class _Timed(NamedTuple):
    time: float
    event: object
    span: ReceivedSpan


def collected_trace(
    spans: Sequence[ReceivedSpan], logs: Iterable[ReceivedLog] = (), *, root_id: str = "", problem: str | None = None
) -> CollectedTrace:
    """Return a trace as events, with why it is incomplete. Spans that cannot be read make it incomplete too."""
    try:
        return CollectedTrace(session_events(spans, logs, root_id=root_id), len(spans), problem)
    except Exception as error:  # Whatever a foreign program may have written.
        return CollectedTrace((), len(spans), f"its spans cannot be read: {type(error).__name__}: {error}")


def session_events(
    spans: Iterable[ReceivedSpan], logs: Iterable[ReceivedLog] = (), *, root_id: str = ""
) -> tuple[Envelope, ...]:
    """Return the events of a trace in the order of their times; spans below `root_id` are outermost.

    Spans of agents repeat the tokens of their calls, and some libraries wrap one model span in another: only model
    spans without another model span below them count. Client libraries have no spans for tools: their tool calls are
    taken from the answers of the model, and the results from the messages of the next call.
    """
    ordered = sorted(spans, key=lambda span: (span.start, span.end))
    kinds = {span.span_id: kind_of_span(span.attributes) for span in ordered}
    by_id = {span.span_id: span for span in ordered}
    outer = _with_model_below(ordered, kinds, by_id)
    by_span: dict[str, list[ReceivedLog]] = {}
    for log in logs:
        by_span.setdefault(log.span_id, []).append(log)
    calls: list[tuple[ReceivedSpan, Conversation]] = []
    found: list[_Timed] = []
    for span in ordered:
        kind = kinds[span.span_id]
        if kind == "model" and span.span_id not in outer and span.error is None:
            calls.append((span, conversation_of(span, by_span.get(span.span_id, ()))))
        elif kind == "tool":
            found.append(_Timed(span.end, _tool_invoked(span), span))
        elif is_retrieval(span) and span.error is None and (retrieved := retrieved_of(span)) is not None:
            found.append(_Timed(span.end, retrieved, span))
        else:
            found.append(_Timed(span.end, SpanClosed(span.name, _milliseconds(span), span.error), span))
    found += _model_events(calls, [each.event for each in found if isinstance(each.event, ToolInvoked)])
    found.sort(key=lambda each: each.time)  # Stable: what belongs to one moment keeps its order.
    return tuple(_envelope(each, by_id, root_id) for each in found)


def _with_model_below(
    spans: Sequence[ReceivedSpan], kinds: Mapping[str, str], by_id: Mapping[str, ReceivedSpan]
) -> set[str]:
    outer: set[str] = set()
    for span in spans:
        if kinds[span.span_id] != "model":
            continue
        parent = span.parent_id
        passed = {span.span_id}  # A trace with a circle of parents must not hold us.
        while parent in by_id and parent not in passed:
            passed.add(parent)
            outer.add(parent)
            parent = by_id[parent].parent_id
    return outer


def _model_events(calls: Sequence[tuple[ReceivedSpan, Conversation]], tools: Sequence[ToolInvoked]) -> list[_Timed]:
    """Return messages, model calls and, where no span has them, tool calls; every message once."""
    found: list[_Timed] = []
    log = ConversationLog[ReceivedSpan](_InSpans(tools).has)
    for span, conversation in calls:
        found += [_Timed(span.start, event, span) for event in log.new_events(conversation.given)]
        found.append(_Timed(span.end, _prompt_executed(span), span))
        for message in conversation.answered:
            log.answered(message, span)
            found.append(_Timed(span.end, message, span))
    found += [_Timed(span.end, invoked, span) for invoked, span in log.without_result()]
    return found


class _InSpans:
    """Tells which tool calls have a span: matched by the id of the call, else by the name of the tool."""

    def __init__(self, tools: Sequence[ToolInvoked]) -> None:
        self._ids = {tool.call_id for tool in tools if tool.call_id}
        self._names = [tool.name for tool in tools if not tool.call_id]

    def has(self, call: ToolCall) -> bool:
        if call.id in self._ids:
            return True
        if call.name in self._names:
            self._names.remove(call.name)
            return True
        return False


def _prompt_executed(span: ReceivedSpan) -> PromptExecuted:
    attributes = span.attributes
    return PromptExecuted(
        adapter=provider_of(attributes),
        model=model_of(attributes),
        usage=_priced_usage(attributes),
        finish_reason=finish_reason_of(attributes),
        duration_ms=_milliseconds(span),
    )


def _priced_usage(attributes: Mapping[str, Any]) -> TokenUsage | None:
    """Return the tokens of a call with its cost: as the span has it, by configured prices, or by the price list."""
    usage = usage_of(attributes)
    if usage is None:
        return None
    cost, model = cost_of(attributes), model_of(attributes)
    prices = configured_prices(model)
    if cost is None and prices is not None:
        cost = prices.cost(usage)
    if cost is not None:
        return replace(usage, cost_usd=cost)
    provider = provider_of(attributes).lower()
    named = _PRICE_LISTS.get(provider, provider.partition(".")[0])  # The Vercel AI SDK: `openai.chat`.
    return priced(usage, model, provider=named or None)


def _tool_invoked(span: ReceivedSpan) -> ToolInvoked:
    tool = tool_of(span)
    return ToolInvoked(
        tool.name,
        tool.params,
        tool.result,
        span.error is None,
        span.error,
        duration_ms=_milliseconds(span),
        call_id=tool.call_id,
    )


def _milliseconds(span: ReceivedSpan) -> float:
    return round(max(0.0, span.end - span.start) * 1000, 3)


def _envelope(timed: _Timed, by_id: Mapping[str, ReceivedSpan], root_id: str) -> Envelope:
    event, span = timed.event, timed.span
    enclosing: str | None = span.span_id if isinstance(event, SpanClosed) else span.parent_id
    if enclosing == root_id or enclosing not in by_id:
        enclosing = None
    parent = by_id[enclosing].parent_id if enclosing is not None else None
    if parent not in by_id:
        parent = None
    data = event.to_record() if isinstance(event, ChatMessage) else to_json(event)
    return Envelope(0, timed.time, "task", 1, enclosing, parent, kind_of(type(event)), data)
