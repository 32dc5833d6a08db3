"""Keeps the spans that arrive for the traces of running trials, and tells when a trace is complete."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio

from fairtrial.base.offload import loop_caller
from fairtrial.integrations.tracing.mapping import collected_trace
from fairtrial.integrations.tracing.received import ReceivedLog, ReceivedSpan
from fairtrial.trials.traces import CollectedTrace

_NOT_USED = "the application did not use the traceparent it was given"
_REMEMBERED = 10_000  # Closed traces that are told from unknown ones.


@dataclass(slots=True)
class TraceCounts:
    """What arrived: spans by what became of them."""

    spans: int = 0
    duplicates: int = 0  # Sent twice: exporters repeat a request that was not answered in time.
    late: int = 0  # For a trace that was collected already.
    unknown: int = 0  # For a trace of no trial.
    surplus: int = 0  # Beyond the largest number of spans of a trace.


class PendingTrace:
    """The spans of one trace. Complete: every parent is known, and a span directly below the trial's has ended."""

    def __init__(self, buffer: TraceBuffer, trace_id: str, root_id: str) -> None:
        self._buffer = buffer
        self.trace_id = trace_id
        self.root_id = root_id
        self.spans: dict[str, ReceivedSpan] = {}
        self.logs: dict[str, ReceivedLog] = {}  # By all that they contain: they have no ids.
        self.changed_at = -math.inf  # On the clock `time.monotonic()`.
        self.cut_off = False
        self._notify: Callable[[], object] | None = None

    @property
    def wait_seconds(self) -> float:
        """How long `wait` may take."""
        return self._buffer.wait_seconds

    def problem(self) -> str | None:
        """Return why the trace is incomplete; None if it is complete."""
        spans = dict(self.spans)
        if self.cut_off:
            return f"it has more than {self._buffer.max_spans:,} spans"
        if not spans:
            others = self._buffer.counts.unknown
            return "no span arrived" + (f", but {others:,} of unknown traces: {_NOT_USED}" if others else "")
        missing = {span.parent_id for span in spans.values() if span.parent_id} - spans.keys() - {self.root_id}
        if missing:
            names = sorted(span.name for span in spans.values() if span.parent_id in missing)
            return f"{len(missing)} parent span(s) did not arrive, such as that of {names[0]!r}"
        if not any(span.parent_id == self.root_id for span in spans.values()):
            return f"no span is a child of the trial's: {_NOT_USED}"
        return None

    async def wait(self) -> CollectedTrace:
        """Wait until the trace is complete and nothing has arrived for a moment, or for the longest time."""
        silence, deadline = self._buffer.silence_seconds, time.monotonic() + self._buffer.wait_seconds
        call = loop_caller()
        while True:
            arrived = anyio.Event()
            self._notify = lambda event=arrived: call(event.set)
            now = time.monotonic()
            remaining = deadline - now
            if self.problem() is None:
                quiet = self.changed_at + silence - now
                if quiet <= 0:
                    break
                remaining = min(remaining, quiet)
            if remaining <= 0:
                break
            with anyio.move_on_after(remaining):
                await arrived.wait()
        self._notify = None
        return self.collected()

    def collected(self) -> CollectedTrace:
        """Return what has arrived."""
        with self._buffer.lock:
            spans, logs = list(self.spans.values()), list(self.logs.values())
        return collected_trace(spans, logs, root_id=self.root_id, problem=self.problem())

    def close(self) -> None:
        """Forget the trace."""
        self._notify = None
        self._buffer.close(self.trace_id)

    def wake(self) -> None:
        """Wake whoever waits; called from the thread that receives."""
        self.changed_at = time.monotonic()
        notify = self._notify
        if notify is not None:
            try:
                notify()
            except RuntimeError:
                pass  # Its event loop has ended.


class TraceBuffer:
    """The traces that are expected, by id. Safe to use from threads.

    Args:
        wait_seconds: How long a trial waits for its spans at most.
        silence_seconds: How long nothing must arrive before a trace counts as complete.
        max_spans: The largest number of spans of one trace.
    """

    def __init__(self, *, wait_seconds: float, silence_seconds: float, max_spans: int) -> None:
        self.wait_seconds = wait_seconds
        self.silence_seconds = silence_seconds
        self.max_spans = max_spans
        self.lock = threading.Lock()
        self.counts = TraceCounts()
        self._pending: dict[str, PendingTrace] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def expect(self, trace_id: str, root_id: str) -> PendingTrace:
        """Accept the spans of a trace from now on."""
        trace = PendingTrace(self, trace_id, root_id)
        with self.lock:
            self._pending[trace_id] = trace
            self._closed.pop(trace_id, None)
        return trace

    def close(self, trace_id: str) -> None:
        """Stop accepting the spans of a trace."""
        with self.lock:
            self._pending.pop(trace_id, None)
            self._closed[trace_id] = None
            while len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)

    def add(self, spans: Iterable[ReceivedSpan] = (), logs: Iterable[ReceivedLog] = ()) -> None:
        """Add what arrived to the traces that it belongs to."""
        touched: set[PendingTrace] = set()
        with self.lock:
            for span in spans:
                trace = self._add_span(span)
                if trace is not None:
                    touched.add(trace)
            for log in logs:
                trace = self._pending.get(log.trace_id)
                if trace is not None and len(trace.logs) < self.max_spans:
                    trace.logs.setdefault(repr(log), log)
                    touched.add(trace)
        for trace in touched:
            trace.wake()

    def _add_span(self, span: ReceivedSpan) -> PendingTrace | None:
        """Add and count a span; returns its trace if that has changed."""
        counts = self.counts
        counts.spans += 1
        trace = self._pending.get(span.trace_id)
        if trace is None:
            if span.trace_id in self._closed:
                counts.late += 1
            else:
                counts.unknown += 1
            return None
        if span.span_id in trace.spans:
            counts.duplicates += 1
            return None
        if len(trace.spans) >= self.max_spans:
            counts.surplus += 1
            trace.cut_off = True
            return None
        trace.spans[span.span_id] = span
        return trace
