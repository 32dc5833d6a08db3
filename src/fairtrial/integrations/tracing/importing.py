"""Imports recorded traces, such as production traffic, as a run of stored outputs and sessions that can be rescored."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairtrial.base.codec import parse_foreign_json, to_json
from fairtrial.base.foreign import read_whole
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import PromptExecuted, TokenUsage, TraceIncomplete
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.data.session.views import Envelope, kind_of
from fairtrial.errors import CodecError, DataError
from fairtrial.integrations.importers.records import fill, source_of
from fairtrial.integrations.tracing.dialects import decoded
from fairtrial.integrations.tracing.mapping import session_events
from fairtrial.integrations.tracing.received import ReceivedLog, ReceivedSpan, parse_logs, parse_traces
from fairtrial.runs.imported import Import, ImportedRun, ImportedSuite, ImportedTrial

UNSCORED = "imported without a score: score it with `fairtrial rescore`"
_JSON_SUFFIXES = (".jsonl", ".json")
_PROTOBUF_SUFFIXES = (".pb", ".binpb", ".otlp")
_INPUTS = ("fairtrial.input", "langfuse.observation.input", "input.value", "gen_ai.prompt", "ai.prompt")
_OUTPUTS = ("fairtrial.output", "langfuse.observation.output", "output.value", "gen_ai.completion", "ai.response.text")
_MESSAGE, _PROMPT = kind_of(ChatMessage), kind_of(PromptExecuted)


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The spans and log records of one trace."""

    trace_id: str
    spans: tuple[ReceivedSpan, ...]
    logs: tuple[ReceivedLog, ...]

    @property
    def top(self) -> ReceivedSpan:
        """The outermost span: the first to start of those whose parent is not in the trace."""
        known = {span.span_id for span in self.spans}
        return min((span for span in self.spans if span.parent_id not in known), key=lambda span: span.start)

    @property
    def missing(self) -> int:
        """The number of parents that are not in the file, besides the caller of the outermost span."""
        known = {span.span_id for span in self.spans} | {self.top.parent_id, ""}
        return len({span.parent_id for span in self.spans} - known)

    def events(self) -> tuple[Envelope, ...]:
        """Return the events of its session."""
        found = session_events(self.spans, self.logs, root_id=self.top.parent_id)
        if self.missing:
            event = TraceIncomplete(f"{self.missing} parent span(s) are not in the file", len(self.spans))
            last = max(span.end for span in self.spans)
            found += (Envelope(0, last, "framework", 1, None, None, kind_of(TraceIncomplete), to_json(event)),)
        return found


class OtlpTraces:
    """Reads a file of OTLP's JSON lines, or of protobuf: every trace becomes a sample and a trial."""

    def recognizes(self, path: Path) -> bool:
        """Return whether a file contains OTLP."""
        if not path.is_file():
            return False
        if path.suffix in _PROTOBUF_SUFFIXES:
            return True
        if path.suffix not in _JSON_SUFFIXES:
            return False
        with path.open("rb") as file:
            start = file.read(4096)
        return b'"resourceSpans"' in start or b'"resourceLogs"' in start

    def read(self, path: Path) -> Import:
        """Read a file."""
        with path.open("rb") as file:
            content = read_whole(file, str(path))
        spans, logs = _read(path, content)
        traces = group_traces(spans, logs)
        if not traces:
            raise DataError(f"{path} must contain spans (it has none)")
        name = re.sub(r"[^\w.-]+", "-", path.name.partition(".")[0]).strip("-.") or "traces"
        recorded = [recorded_trial(trace, events) for trace in traces if (events := trace.events())]
        dataset: Dataset[Any, Any] = Dataset([trial.sample for trial in recorded], name=name)
        digest = hashlib.sha256(content).hexdigest()
        run = ImportedRun(
            source_id=f"{path.name}:{digest[:12]}",
            name=path.name,
            experiments=("recorded",),
            dataset=dataset,
            repeats=1,
            rows=len(recorded),
            trials=lambda: (trial.imported(place) for place, trial in enumerate(recorded)),
            content=digest,
            created_at=min(span.start for span in spans),
            finished_at=max(span.end for span in spans),
            remarks=("the outputs have no scores yet: fairtrial rescore",),
        )
        suite = ImportedSuite(name, path.name, path.name, dataset, runs=(run,), code=lambda data: _code(name, data))
        incomplete = sum(bool(trace.missing) for trace in traces)
        left_out = [f"{incomplete} of {len(traces)} traces are incomplete: spans are missing"] if incomplete else []
        return Import((suite,), tuple(left_out))


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """A trace as a sample and a trial."""

    sample: Sample[Any, Any]
    output: Any
    top: ReceivedSpan
    events: tuple[Envelope, ...]

    def imported(self, place: int) -> ImportedTrial:
        """Return the trial of the sample at a place, which is not scored yet."""
        top = self.top
        failed = top.error is not None and self.output is None
        return ImportedTrial(
            place,
            "task_error" if failed else "scorer_error",
            output=self.output,
            error=top.error if failed else UNSCORED,
            stage="task" if failed else "score",
            usage=_usage(self.events),
            latency_ms=round((top.end - top.start) * 1000),
            started_at=top.start,
            events=self.events,
        )


def recorded_trial(trace: RecordedTrace, events: tuple[Envelope, ...]) -> RecordedTrial:
    """Return a trace as a sample and a trial."""
    given, output = _exchange(trace, events)
    service = str(trace.top.resource.get("service.name") or "")
    sample: Sample[Any, Any] = Sample(trace.trace_id, given, metadata={"service": service} if service else {})
    return RecordedTrial(sample, output, trace.top, events)


def _read(path: Path, content: bytes) -> tuple[list[ReceivedSpan], list[ReceivedLog]]:
    if path.suffix not in _JSON_SUFFIXES:
        return parse_traces(content, is_json=False), []
    spans: list[ReceivedSpan] = []
    logs: list[ReceivedLog] = []
    try:
        parse_foreign_json(content)
        lines: Sequence[bytes] = [content]  # One object over several lines.
    except CodecError:
        lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                spans += parse_traces(line, is_json=True)
                logs += parse_logs(line, is_json=True)
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None
    return spans, logs


def group_traces(spans: Sequence[ReceivedSpan], logs: Sequence[ReceivedLog]) -> list[RecordedTrace]:
    """Return the traces, each span once."""
    by_trace: dict[str, dict[str, ReceivedSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        by_trace.setdefault(span.trace_id, {}).setdefault(span.span_id, span)
    records: dict[str, list[ReceivedLog]] = {}
    for log in logs:
        records.setdefault(log.trace_id, []).append(log)
    traces = [
        RecordedTrace(trace_id, tuple(found.values()), tuple(records.get(trace_id, ())))
        for trace_id, found in by_trace.items()
    ]
    # A circle of parents has no outermost span.
    return [trace for trace in traces if {span.parent_id for span in trace.spans} - {s.span_id for s in trace.spans}]


def _exchange(trace: RecordedTrace, events: Sequence[Envelope]) -> tuple[Any, Any]:
    """Return input and output: as the outermost span has them, else the first question and the last answer."""
    attributes = trace.top.attributes
    given = next((decoded(attributes[name]) for name in _INPUTS if name in attributes), None)
    output = next((decoded(attributes[name]) for name in _OUTPUTS if name in attributes), None)
    messages = [event.data for event in events if event.kind == _MESSAGE]
    if given is None:
        given = next((message["content"] for message in messages if message["role"] == "user"), trace.top.name)
    if output is None:
        answers = [message["content"] for message in messages if message["role"] == "assistant" and message["content"]]
        output = answers[-1] if answers else None
    return given, output


def _usage(events: Sequence[Envelope]) -> TokenUsage:
    total = TokenUsage()
    for event in events:
        if event.kind == _PROMPT and event.data["usage"]:
            total += TokenUsage(**event.data["usage"])
    return total


_CODE = '''
from pathlib import Path
from fairtrial import Dataset, EvalSuite
from fairtrial.scoring import token_usage_under
dataset = Dataset.load(Path(__file__).with_name(DATA), name=NAME)

def recorded(question: object) -> object:
    """The outputs are stored: rescoring does not call the application."""
    raise NotImplementedError("use `fairtrial rescore`")

suite = EvalSuite(NAME, dataset, recorded, token_usage_under(10_000))
'''


def _code(name: str, data: str) -> str:
    title = f"Scores recorded traces: `fairtrial rescore {name} THIS_FILE`. Replace the evaluator by your own."
    body = fill(_CODE, DATA=ast.Constant(data), NAME=ast.Constant(name))
    return source_of([ast.Expr(ast.Constant(title)), *body])
