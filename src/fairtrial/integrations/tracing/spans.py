"""Trials as spans."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from fairtrial._version import __version__
from fairtrial.base.codec import dumps, to_json
from fairtrial.data.session.events import PromptExecuted, Retrieved, SpanClosed, ToolInvoked
from fairtrial.data.session.session import restore_session
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.data.session.views import JUDGE, USER, Envelope, kind_of
from fairtrial.integrations.tracing.facts import (
    FAILED_OUTCOMES,
    PLAIN,
    EvaluationFact,
    Profile,
    error_type,
    evaluations_of,
    output_text,
    utf8,
)
from fairtrial.integrations.tracing.received import AttributeValue, key_values, otlp_messages
from fairtrial.models.agent import AgentEnded
from fairtrial.store.redact import Redactor, current
from fairtrial.trials.context import event_span_id, trace_id_of, trial_span_id

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from fairtrial.data.sample import Sample
    from fairtrial.store.protocol import RunRecord
    from fairtrial.trials.result import EvalResult


def genai_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return recorded messages as `{"role", "parts"}`. Reasoning and what providers want back are left out."""
    return [{"role": str(message["role"]), "parts": _parts(message)} for message in messages]


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part for part in content if isinstance(part, str)]
    text = "".join(texts)
    if message["role"] == "tool":
        return [{"type": "tool_call_response", "id": message.get("name") or "", "response": text}]
    parts: list[dict[str, Any]] = [{"type": "text", "content": text}] if text else []
    return parts + [
        {"type": "tool_call", "id": one.get("id") or "", "name": one["name"], "arguments": one.get("arguments") or {}}
        for one in message.get("tool_calls") or ()
    ]


SCOPE = "fairtrial"
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


def traces_request(spans: Sequence[Span], suite: str) -> ExportTraceServiceRequest:
    """Return the request that sends spans."""
    request: ExportTraceServiceRequest = otlp_messages().traces()
    group = request.resource_spans.add()
    _describe(group, group.scope_spans.add(spans=spans), suite)
    return request


def logs_request(logs: Sequence[LogRecord], suite: str) -> ExportLogsServiceRequest:
    """Return the request that sends log records."""
    request: ExportLogsServiceRequest = otlp_messages().logs()
    group = request.resource_logs.add()
    _describe(group, group.scope_logs.add(log_records=logs), suite)
    return request


def _describe(group: Any, scope: Any, suite: str) -> None:
    group.resource.attributes.extend(key_values(resource_attributes(suite)))
    scope.scope.name, scope.scope.version = SCOPE, __version__


def resource_attributes(suite: str, environ: Mapping[str, str] = os.environ) -> list[tuple[str, AttributeValue]]:
    """Return the attributes of this process: those of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, and our own."""
    found: dict[str, AttributeValue] = {"service.name": "fairtrial"}
    for entry in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        name, equals, value = entry.partition("=")
        if equals and name.strip():
            found[name.strip()] = unquote(value.strip())
    if environ.get("OTEL_SERVICE_NAME"):
        found["service.name"] = environ["OTEL_SERVICE_NAME"]
    found["fairtrial.suite"] = suite
    redactor = current()
    return [(name, redactor.text(value) if isinstance(value, str) else value) for name, value in found.items()]


def json_lines(spans: Sequence[Span], logs: Sequence[LogRecord], suite: str) -> Iterable[str]:
    """Yield the requests as lines of OTLP's JSON, where ids are hexadecimal."""
    for request in ((traces_request(spans, suite),) if spans else ()) + ((logs_request(logs, suite),) if logs else ()):
        yield json.dumps(otlp_json(request), separators=(",", ":"), ensure_ascii=False)


def otlp_json(request: Any) -> dict[str, Any]:
    """Return a request of protobuf as OTLP's JSON."""
    from google.protobuf.json_format import MessageToDict

    tree: dict[str, Any] = MessageToDict(request)
    _write_ids(tree)
    return tree


def _write_ids(tree: Any) -> None:
    if isinstance(tree, list):
        for item in tree:
            _write_ids(item)
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if name in _ID_FIELDS and isinstance(value, str):
                tree[name] = base64.b64decode(value).hex()
            elif name not in ("attributes", "body"):
                _write_ids(value)


TRIAL_SPAN = "fairtrial.trial"
EVALUATION_EVENT = "gen_ai.evaluation.result"
_INTERNAL, _CLIENT = 1, 3  # Span kinds.
_OK, _ERROR = 1, 2  # Status codes.
_INFO, _WARN = 9, 13  # Severity numbers of log records.
# Providers by the names that OpenTelemetry's registry gives them.
_PROVIDERS = {
    "google": "gcp.gemini",
    "gemini": "gcp.gemini",
    "vertex": "gcp.vertex_ai",
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "bedrock-runtime": "aws.bedrock",
    "mistral": "mistral_ai",
}
_SPANS = {kind_of(kind): kind for kind in (PromptExecuted, ToolInvoked, Retrieved, AgentEnded, SpanClosed)}
_MESSAGE = kind_of(ChatMessage)
_MARKS = tuple(name.rpartition(":")[2].encode() for name in _SPANS)

type Attributes = list[tuple[str, AttributeValue]]


class ConvertedTrial(NamedTuple):
    """The spans and log records of one trial."""

    spans: Sequence[Span]
    logs: Sequence[LogRecord]


@dataclass(slots=True)
class TrialConverter:
    """Converts the trials of one run.

    Attributes:
        run_id: The id of the run.
        suite: The name of its suite.
        evaluator: The name of its evaluator.
        content: Whether inputs, outputs, messages, arguments, errors and reasons are included.
        profile: Additional attributes for one product.
        dataset: The name of its dataset.
        redactor: Replaces secrets; by default those of this process.
    """

    run_id: str
    suite: str = ""
    evaluator: str = ""
    content: bool = False
    profile: Profile = PLAIN
    dataset: str = ""
    redactor: Redactor = field(default_factory=current)

    @classmethod
    def of_run(cls, run: RunRecord, *, content: bool = False, profile: Profile = PLAIN) -> TrialConverter:
        """Return the converter for a stored run."""
        return cls(run.run_id, run.suite, run.evaluator, content, profile, run.dataset_name)

    def convert(self, result: EvalResult, sample: Sample[Any, Any] | None = None) -> ConvertedTrial:
        """Convert one trial; its session is read from the result's snapshot, if it has one."""
        trace_id = trace_id_of(result.key, result.attempt)
        root_id = trial_span_id(trace_id)
        recorded = self._recorded(result)
        ends = [result.started_at + result.latency_ms / 1000, *(envelope.time for envelope in recorded)]
        end = max(ends)
        root = self._span(
            trace_id,
            root_id,
            b"",
            TRIAL_SPAN,
            _INTERNAL,
            result.started_at,
            end,
            self._trial_attributes(result, sample),
            self._error_text(result) if result.outcome in FAILED_OUTCOMES else None,
        )
        spans = [root]
        if recorded:
            shared = self._redacted(self.profile.every_span(self.run_id, result))
            spans.extend(self._event_spans(trace_id, root_id, recorded, shared))
        return ConvertedTrial(spans, self._evaluations(trace_id, root_id, result, end))

    def _recorded(self, result: EvalResult) -> tuple[Envelope, ...]:
        snapshot = result.snapshot
        # Reading a snapshot costs more than all the rest: most trivial trials have nothing in it that becomes a span.
        if snapshot is None or not any(mark in snapshot for mark in _MARKS):
            return ()
        return restore_session(snapshot).everything().envelopes

    def _trial_attributes(self, result: EvalResult, sample: Sample[Any, Any] | None) -> Attributes:
        key, score = result.key, result.score
        found: Attributes = [
            ("fairtrial.run.id", key.run_id),
            ("fairtrial.suite", self.suite),
            ("fairtrial.experiment", key.experiment),
            ("fairtrial.sample.id", key.sample_id),
            ("fairtrial.repeat", key.repeat),
            ("fairtrial.attempt", result.attempt),
            ("fairtrial.outcome", result.outcome),
        ]
        if self.dataset:
            found.append(("fairtrial.dataset", self.dataset))
        if score is not None:
            found += (("fairtrial.score", score.value), ("fairtrial.passed", score.passed))
            # For servers that take no log records.
            found += [(f"fairtrial.metric.{self._clean(each.name)}", float(each.value)) for each in score.metrics]
        if result.outcome != "scored" and result.error is not None:
            found.append(("error.type", error_type(result.error, result.outcome)))
        if result.usage.cost_usd is not None:
            found.append(("fairtrial.cost_usd", result.usage.cost_usd))
        given = output = None
        if self.content:
            given = None if sample is None else dumps(sample.input)
            output = output_text(result)
            if given is not None:
                found.append(("fairtrial.input", given))
            if output is not None:
                found.append(("fairtrial.output", output))
            if sample is not None and sample.has_expected:
                found.append(("fairtrial.expected", dumps(sample.expected)))
        found += self.profile.every_span(self.run_id, result)
        found += (*self.profile.trial(self.suite, result), *self.profile.trial_texts(given, output))
        return self._redacted(found)

    def _event_spans(
        self, trace_id: bytes, root_id: bytes, recorded: Sequence[Envelope], shared: Attributes
    ) -> Iterable[Span]:
        known = {envelope.span_id for envelope in recorded if _SPANS.get(envelope.kind) is SpanClosed}
        agents = _agents(recorded)
        for position, envelope in enumerate(recorded):
            kind = _SPANS.get(envelope.kind)
            if kind is None:
                continue
            data = to_json(envelope.data)
            parent = envelope.parent_id if kind is SpanClosed else envelope.span_id
            span_id = event_span_id(trace_id, envelope.seq)
            if kind is SpanClosed and envelope.span_id:
                span_id = bytes.fromhex(envelope.span_id)
            parent_id = bytes.fromhex(parent) if parent in known and parent is not None else root_id
            agent = next((each for each in agents if each.called(envelope, data)), None)
            if agent is not None:
                parent_id = event_span_id(trace_id, agent.ended.seq)
            if kind is PromptExecuted:
                name, attributes, error = self._model_call(data, recorded, position)
            elif kind is ToolInvoked:
                name, attributes, error = self._tool_call(data)
            elif kind is Retrieved:
                name, attributes, error = self._retrieval(data)
            elif kind is AgentEnded:
                name, attributes, error = self._agent(data)
            else:
                name, attributes, error = str(data["name"]), [], data.get("error")
            if envelope.actor in (JUDGE, USER):
                attributes.append(("fairtrial.actor", envelope.actor))
            duration = data.get("duration_ms") or 0.0
            yield self._span(
                trace_id,
                span_id,
                parent_id,
                name,
                _CLIENT if kind is PromptExecuted else _INTERNAL,
                envelope.time - duration / 1000,
                envelope.time,
                [*self._redacted(attributes), *shared],
                None if error is None else (str(error) if self.content else ""),
            )

    def _model_call(
        self, data: Mapping[str, Any], recorded: Sequence[Envelope], position: int
    ) -> tuple[str, Attributes, str | None]:
        model = str(data.get("model") or "")
        adapter = str(data.get("adapter") or "unknown")
        found: Attributes = [
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", _PROVIDERS.get(adapter, adapter)),
            ("gen_ai.request.model", str(data.get("requested_model") or model)),
            ("gen_ai.response.model", model),
        ]
        usage = data.get("usage") or {}
        for name, attribute in _USAGE:
            if usage.get(name) or (name in ("input_tokens", "output_tokens") and usage):
                found.append((attribute, int(usage.get(name) or 0)))
        if usage.get("cost_usd") is not None:
            found.append(("fairtrial.cost_usd", float(usage["cost_usd"])))
        if data.get("finish_reason"):
            found.append(("gen_ai.response.finish_reasons", (str(data["finish_reason"]),)))
        if data.get("cached"):
            found.append(("fairtrial.cached", True))
        found += self.profile.model_call
        if self.content:
            asked, answered = _conversation(recorded, position)
            found.append(("gen_ai.input.messages", dumps(genai_messages(asked))))
            found.append(("gen_ai.output.messages", dumps(genai_messages(answered))))
        return f"chat {model}".rstrip(), found, None

    def _tool_call(self, data: Mapping[str, Any]) -> tuple[str, Attributes, str | None]:
        name = str(data["name"])
        found: Attributes = [
            ("gen_ai.operation.name", "execute_tool"),
            ("gen_ai.tool.name", name),
            ("gen_ai.tool.type", "function"),
        ]
        if data.get("call_id"):
            found.append(("gen_ai.tool.call.id", str(data["call_id"])))
        if self.content:
            found.append(("gen_ai.tool.call.arguments", dumps(data.get("params") or {})))
        found += self.profile.tool_call
        error = data.get("error")
        if error is None and data.get("success") is False:
            error = "the tool reported a failure"
        if self.content and (error is None or data.get("result") is not None):
            found.append(("gen_ai.tool.call.result", _as_text(data.get("result"))))
        if error is not None:
            found.append(("error.type", error_type(str(error), "tool_error")))
        return f"execute_tool {name}", found, error

    def _agent(self, data: Mapping[str, Any]) -> tuple[str, Attributes, str | None]:
        name = str(data.get("name") or "")
        found: Attributes = [
            ("gen_ai.operation.name", "invoke_agent"),
            ("fairtrial.agent.end", str(data["reason"])),
            ("fairtrial.agent.turns", int(data["turns"])),
        ]
        if name:
            found.append(("gen_ai.agent.name", name))
        error = str(data.get("detail") or "") if data["reason"] == "error" else None
        if error is not None:
            found.append(("error.type", error_type(error, "agent_error")))
        return f"invoke_agent {name}".rstrip(), found, error

    def _retrieval(self, data: Mapping[str, Any]) -> tuple[str, Attributes, str | None]:
        source = str(data.get("source") or "")
        found: Attributes = [("gen_ai.operation.name", "retrieval")]
        if source:
            found.append(("gen_ai.data_source.id", source))
        if self.content:
            documents = [{"id": str(place), "content": text} for place, text in enumerate(data["documents"])]
            found.append(("gen_ai.retrieval.query.text", str(data["query"])))
            found.append(("gen_ai.retrieval.documents", dumps(documents)))
        return f"retrieval {source}".rstrip(), found, None

    def _evaluations(self, trace_id: bytes, root_id: bytes, result: EvalResult, end: float) -> list[LogRecord]:
        if result.outcome == "scorer_error" and result.score is None:
            attributes: Attributes = [
                ("gen_ai.evaluation.name", self.evaluator or "score"),
                ("error.type", error_type(result.error or "", "scorer_error")),
            ]
            if self.content and result.error:
                attributes.append(("gen_ai.evaluation.explanation", result.error))
            return [self._log(trace_id, root_id, end, attributes, _WARN)]
        found = evaluations_of(result, self.evaluator)
        return [self._log(trace_id, root_id, end, self._evaluation(each), _INFO) for each in found]

    def _evaluation(self, evaluation: EvaluationFact) -> Attributes:
        found: Attributes = [
            ("gen_ai.evaluation.name", evaluation.name),
            ("gen_ai.evaluation.score.value", evaluation.value),
        ]
        if evaluation.passed is not None:
            found.append(("gen_ai.evaluation.score.label", "pass" if evaluation.passed else "fail"))
        if self.content and evaluation.reason:
            found.append(("gen_ai.evaluation.explanation", evaluation.reason))
        return found

    def _span(
        self,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        name: str,
        kind: int,
        start: float,
        end: float,
        attributes: Attributes,
        error: str | None,
    ) -> Span:
        messages = otlp_messages()
        span: Span = messages.span(
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=parent_id,
            name=self._clean(name),
            kind=kind,
            start_time_unix_nano=_nanoseconds(start),
            end_time_unix_nano=_nanoseconds(end),
            attributes=key_values(attributes),
        )
        if error is not None:
            span.status.code = _ERROR  # type: ignore[assignment]  # an int is what protobuf's enums are
            span.status.message = self._clean(error)
        return span

    def _log(self, trace_id: bytes, span_id: bytes, moment: float, attributes: Attributes, severity: int) -> LogRecord:
        log: LogRecord = otlp_messages().log_record(
            time_unix_nano=_nanoseconds(moment),
            observed_time_unix_nano=_nanoseconds(moment),
            severity_number=severity,
            event_name=EVALUATION_EVENT,
            trace_id=trace_id,
            span_id=span_id,
            attributes=key_values(self._redacted(attributes)),
        )
        return log

    def _error_text(self, result: EvalResult) -> str:
        return (result.error or "") if self.content else ""

    def _redacted(self, attributes: Iterable[tuple[str, AttributeValue]]) -> Attributes:
        """Replace secrets in every text."""
        found: Attributes = []
        for name, value in attributes:
            if type(value) is str:
                is_json = value[:1] in _JSON_STARTS
                found.append((name, utf8(self.redactor.json(value) if is_json else self.redactor.text(value))))
            elif type(value) is tuple:
                found.append((name, tuple(self._clean(item) for item in value)))
            else:
                found.append((name, value))
        return found

    def _clean(self, text: str) -> str:
        return utf8(self.redactor.text(text))


class _Agent(NamedTuple):
    """The end of an agent's loop, and the name under which its calls were recorded."""

    ended: Envelope
    name: str

    def called(self, envelope: Envelope, data: Mapping[str, Any]) -> bool:
        """Return whether an event before the end is a model call or a tool call of this agent."""
        ended = self.ended
        return (
            envelope.seq < ended.seq
            and _SPANS[envelope.kind] in (PromptExecuted, ToolInvoked)
            and data.get("prompt_name") == self.name != ""
            and (envelope.span_id, envelope.actor, envelope.attempt) == (ended.span_id, ended.actor, ended.attempt)
        )


def _agents(recorded: Sequence[Envelope]) -> list[_Agent]:
    """Return the agents of a session, in the order in which they ended."""
    ends = [envelope for envelope in recorded if _SPANS.get(envelope.kind) is AgentEnded]
    return [_Agent(envelope, str(to_json(envelope.data).get("name") or "")) for envelope in ends]


_JSON_STARTS = frozenset("{[")
_USAGE = (
    ("input_tokens", "gen_ai.usage.input_tokens"),
    ("output_tokens", "gen_ai.usage.output_tokens"),
    ("cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
    ("cache_write_tokens", "gen_ai.usage.cache_write.input_tokens"),
    ("reasoning_tokens", "gen_ai.usage.reasoning.output_tokens"),
)


def _conversation(recorded: Sequence[Envelope], position: int) -> tuple[list[Any], list[Any]]:
    """Return the messages before a model's answer, and the answer, which is recorded after the call.

    Some tasks record the messages of a call before it, others after it: the answer is the first message of the
    assistant behind the call, and everything before it was sent.
    """
    call = recorded[position]
    ours = [
        (place, to_json(envelope.data))
        for place, envelope in enumerate(recorded)
        if envelope.kind == _MESSAGE and envelope.actor == call.actor and envelope.attempt == call.attempt
    ]
    following = next(
        (place for place in range(position + 1, len(recorded)) if recorded[place].kind == call.kind), len(recorded)
    )
    for index, (place, message) in enumerate(ours):
        if position < place < following and message["role"] == "assistant":
            return [each for _, each in ours[:index]], [message]
    return [each for place, each in ours if place < position], []


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
