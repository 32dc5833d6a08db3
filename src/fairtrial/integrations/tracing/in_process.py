"""Collects the spans of tasks that run in this process, without a server and without waiting."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fairtrial.integrations.tracing.mapping import collected_trace
from fairtrial.integrations.tracing.received import ReceivedSpan
from fairtrial.trials.context import CollectedTrace, TrialKey, running_trial

_ERROR = 2


class _OpenTrial:
    """The spans that one attempt at a trial has started and ended."""

    wait_seconds = 1.0  # There is nothing to wait for.

    def __init__(self, processor: TrialSpanProcessor, place: tuple[TrialKey, int]) -> None:
        self._processor = processor
        self.place = place
        self.running: dict[int, str] = {}  # Span id -> name.
        self.ended: list[ReceivedSpan] = []
        self.traces: set[int] = set()

    async def wait(self) -> CollectedTrace:
        return self.collected()

    def collected(self) -> CollectedTrace:
        with self._processor.lock:
            spans, names = list(self.ended), list(self.running.values())
        if names:
            problem: str | None = f"{len(names)} span(s) have not ended, such as {names[0]!r}"
        else:
            problem = None if spans else "no span was recorded"
        return collected_trace(spans, problem=problem)

    def close(self) -> None:
        self._processor.forget(self)


class TrialSpanProcessor:
    """A span processor of the OpenTelemetry SDK, and the source of traces of a suite whose task runs in this process.

        processor = TrialSpanProcessor()
        trace.get_tracer_provider().add_span_processor(processor)
        suite = EvalSuite(..., evaluator=tool_called("weather"), traces=processor)

    A span belongs to the trial that runs where it is started; spans below it belong to the same trial.
    """

    endpoint = ""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._open: dict[tuple[TrialKey, int], _OpenTrial] = {}
        self._by_trace: dict[int, _OpenTrial] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Do nothing: the tracer provider calls this object."""
        yield

    def expect(self, key: TrialKey, attempt: int) -> _OpenTrial:
        """Accept the spans of an attempt at a trial from now on."""
        trial = _OpenTrial(self, (key, attempt))
        with self.lock:
            self._open[trial.place] = trial
        return trial

    def forget(self, trial: _OpenTrial) -> None:
        """Stop accepting the spans of a trial."""
        with self.lock:
            self._open.pop(trial.place, None)
            for trace_id in trial.traces:
                self._by_trace.pop(trace_id, None)

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Assign a span to the running trial."""
        context = span.get_span_context()
        current = running_trial()
        with self.lock:
            trial = self._open.get((current.key, current.attempt)) if current is not None else None
            if trial is None:
                trial = self._by_trace.get(context.trace_id)
            if trial is None:
                return
            self._by_trace[context.trace_id] = trial
            trial.traces.add(context.trace_id)
            trial.running[context.span_id] = span.name

    def _on_ending(self, span: Any) -> None:
        """Do nothing; the SDK calls it before `on_end`."""

    def on_end(self, span: Any) -> None:
        """Take an ended span."""
        context = span.get_span_context()
        with self.lock:
            trial = self._by_trace.get(context.trace_id)
            if trial is not None and trial.running.pop(context.span_id, None) is not None:
                trial.ended.append(_received(span, context))

    def shutdown(self) -> None:
        """Do nothing: there is nothing to send."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: nothing is waiting to be sent."""
        return True


def _received(span: Any, context: Any) -> ReceivedSpan:
    failed = span.status.status_code.value == _ERROR
    return ReceivedSpan(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        "" if span.parent is None else f"{span.parent.span_id:016x}",
        span.name,
        (span.start_time or 0) / 1e9,
        (span.end_time or 0) / 1e9,
        (span.status.description or "error") if failed else None,
        {name: _plain(value) for name, value in (span.attributes or {}).items()},
        tuple((event.name, dict(event.attributes or {})) for event in span.events),
        dict(span.resource.attributes),
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
