"""Export trials as traces: while they run, of every run, or afterwards."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO
from urllib.parse import quote

import anyio

from fairtrial.errors import ConfigurationError, TraceSendError
from fairtrial.integrations.tracing.facts import profile_named, trials_with_samples
from fairtrial.integrations.tracing.langsmith import langsmith_address
from fairtrial.integrations.tracing.received import otlp_messages
from fairtrial.integrations.tracing.sender import OtlpEndpoint, OtlpSender, SendTotals, resolve_endpoint, write_whole
from fairtrial.integrations.tracing.spans import ConvertedTrial, TrialConverter, json_lines
from fairtrial.runs.events import EvalRunStarted, RunEvent, SampleEvaluated, observe_every_run
from fairtrial.store.redact import RedactingFilter
from fairtrial.trials.context import is_sampled

if TYPE_CHECKING:
    from fairtrial.data.sample import Sample
    from fairtrial.store.protocol import RunRecord, RunStore
    from fairtrial.trials.result import EvalResult


_log = logging.getLogger("fairtrial.tracing")
_log.addFilter(RedactingFilter())  # A server's answer may repeat a header.
_BATCH = 256  # Trials in one request.
_IDLE_SECONDS = 1.0  # How long a trial waits for others at most before it is sent.


class _Queued(NamedTuple):
    run_id: str
    result: EvalResult
    sample: Sample[Any, Any] | None


class ExportSummary(NamedTuple):
    """How the export of a run's traces ended. `dropped` trials were not sent: the queue was full, or sending failed."""

    sampled: int
    sent: int
    dropped: int
    rejected: int  # Spans and log records that the server did not take.
    problem: str

    def __str__(self) -> str:
        text = f"traces: {self.sent:,} of {self.sampled:,} sampled trials sent"
        if self.dropped:
            text += f", {self.dropped:,} dropped"
        if self.rejected:
            text += f", {self.rejected:,} spans or log records rejected by the server"
        return f"{text} ({self.problem})" if self.problem else text


class TraceExporter:
    """An observer that sends trials to an OTLP endpoint as they end.

    For example::

        with TraceExporter("http://127.0.0.1:4318", sample=0.01) as traces:
            suite.run_sync(bus=traces)
        print(traces.summary())

    Trials that failed or ended in an error are always sent, others by a hash of their key. Publishing never waits: a
    trial that finds the queue full is dropped and counted.

    Args:
        url: The address, `http://host:4318` or with `/v1/traces`; "env" for OTEL_EXPORTER_OTLP_ENDPOINT. Headers come
            from OTEL_EXPORTER_OTLP_HEADERS. Or an endpoint with headers of its own.
        sample: The share of passed trials that is sent, from 0 to 1.
        content: Send inputs, outputs, messages, tool arguments, errors and reasons too; secrets are replaced.
        profile: "langsmith" or "langfuse" for additional attributes.
        max_queue: Trials that may wait to be sent.
        max_queue_bytes: The size of their transcripts and outputs together.
        patience_seconds: For how long a request is retried.
    """

    ignores_trial_starts = True

    def __init__(
        self,
        url: str | OtlpEndpoint,
        *,
        sample: float = 1.0,
        content: bool = False,
        profile: str | None = None,
        max_queue: int = 10_000,
        max_queue_bytes: int = 64 * 1024 * 1024,
        patience_seconds: float = 30.0,
    ) -> None:
        if not 0.0 <= sample <= 1.0:
            raise ConfigurationError(f"the share of sampled trials must be from 0 to 1 (got {sample!r})")
        otlp_messages("sending traces")
        self._endpoint = url if isinstance(url, OtlpEndpoint) else resolve_endpoint(url)
        self._share = sample
        self._content = content
        self._profile = profile_named(profile)
        self._max_queue = max_queue
        self._max_bytes = max_queue_bytes
        self._patience = patience_seconds
        self._queue: deque[_Queued] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._closing = False
        self._converters: dict[str, TrialConverter] = {}
        self._sampled = self._dropped = 0
        self._sender = OtlpSender(self._endpoint, patience_seconds=patience_seconds)
        self._problem = ""
        self._thread: threading.Thread | None = None

    def publish(self, event: RunEvent) -> None:
        """Take note of an event of the run; called on its event loop."""
        if type(event) is SampleEvaluated:
            result = event.result
            score = result.score
            if score is None or not score.passed or is_sampled(result.key, self._share):
                self._add(event.run_id, result, event.sample)
        elif isinstance(event, EvalRunStarted):
            self._converters[event.run_id] = TrialConverter.of_run(
                event.run, content=self._content, profile=self._profile
            )

    def _add(self, run_id: str, result: EvalResult, sample: Sample[Any, Any] | None) -> None:
        size = len(result.snapshot or b"") + len(result.output_json or "")
        with self._lock:
            self._sampled += 1
            if len(self._queue) >= self._max_queue or self._bytes + size > self._max_bytes or self._closing:
                self._dropped += 1
                return
            self._queue.append(_Queued(run_id, result, sample))
            self._bytes += size
            full = len(self._queue) >= _BATCH
        if self._thread is None:
            self.start()
        if full and not self._ready.is_set():
            self._ready.set()

    def start(self) -> None:
        """Start the thread that sends; the first trial does so too."""
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._work, name="fairtrial traces", daemon=True)
                self._thread.start()

    def close(self, *, timeout_seconds: float | None = None) -> ExportSummary:
        """Send what is queued, within the time limit, and return the summary; logs a warning if trials were dropped."""
        with self._lock:
            self._closing = True
        self._ready.set()
        thread = self._thread
        if thread is not None:
            thread.join(self._patience + 5 if timeout_seconds is None else timeout_seconds)
            with self._lock:
                self._dropped += len(self._queue)
                self._queue.clear()
        summary = self.summary()
        if summary.dropped or summary.rejected:
            _log.warning("%s", summary)
        return summary

    def summary(self) -> ExportSummary:
        """Return the numbers up to now."""
        totals = self._sender.totals
        return ExportSummary(
            self._sampled, totals.trials, self._dropped, totals.rejected, self._problem or totals.remark
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _work(self) -> None:
        try:
            asyncio.run(self._send_all())
        except Exception as error:  # Whatever it is, it must not be silent.
            self._problem = f"{type(error).__name__}: {error}"
            _log.exception("sending traces ended")

    async def _send_all(self) -> None:
        async with self._sender:
            while True:
                # Blocks this thread, whose event loop has nothing else to do.
                if not self._closing:
                    self._ready.wait(_IDLE_SECONDS)
                batch = self._take()
                if batch:
                    await self._send(batch)
                elif self._closing:
                    return

    def _take(self) -> list[_Queued]:
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            for each in batch:
                self._bytes -= len(each.result.snapshot or b"") + len(each.result.output_json or "")
            if len(self._queue) < _BATCH and not self._closing:
                self._ready.clear()
        return batch

    async def _send(self, batch: list[_Queued]) -> None:
        by_run: dict[str, list[_Queued]] = {}
        for each in batch:
            by_run.setdefault(each.run_id, []).append(each)
        for run_id, trials in by_run.items():
            converter = self._converters.get(run_id) or TrialConverter(
                run_id, content=self._content, profile=self._profile
            )
            sent = self._sender.totals.trials
            try:
                converted = [converter.convert(each.result, each.sample) for each in trials]
                await self._sender.send(converted, converter.suite)
            except Exception as error:
                lost = len(trials) - (self._sender.totals.trials - sent)
                with self._lock:
                    self._dropped += lost
                if not self._problem:
                    self._problem = (
                        str(error) if isinstance(error, TraceSendError) else f"{type(error).__name__}: {error}"
                    )
                    _log.warning("the traces of %d trials were dropped: %s", lost, self._problem)


_STORED_BATCH = 128


def converted_trials(
    store: RunStore, run: RunRecord, *, content: bool = False, profile: str | None = None
) -> Iterator[ConvertedTrial]:
    """Yield the trials of a stored run as spans and log records, in the order of the plan."""
    converter = TrialConverter.of_run(run, content=content, profile=profile_named(profile))
    for result, sample in trials_with_samples(store, run, content=content, snapshots=True):
        yield converter.convert(result, sample)


def send_run(
    store: RunStore, run: RunRecord, url: str, *, content: bool = False, profile: str | None = None
) -> SendTotals:
    """Send a stored run to an OTLP endpoint. Raises `TraceSendError` if that fails."""
    otlp_messages("sending traces")
    endpoint = resolve_endpoint(url)

    async def send() -> SendTotals:
        async with OtlpSender(endpoint) as sender:
            for trials in batched(converted_trials(store, run, content=content, profile=profile), _STORED_BATCH):
                await sender.send(trials, run.suite)
            return sender.totals

    return anyio.run(send)


def write_run(
    store: RunStore, run: RunRecord, target: Path | TextIO, *, content: bool = False, profile: str | None = None
) -> int:
    """Write a stored run as lines of OTLP's JSON; returns the number of trials. A file appears when it is complete."""
    otlp_messages("exporting traces")

    def write(file: TextIO) -> int:
        count = 0
        for trials in batched(converted_trials(store, run, content=content, profile=profile), _STORED_BATCH):
            spans = [span for trial in trials for span in trial.spans]
            logs = [log for trial in trials for log in trial.logs]
            for line in json_lines(spans, logs, run.suite):
                file.write(line + "\n")
            count += len(trials)
        return count

    return write_whole(target, write)


_lock = threading.Lock()
_active: TraceExporter | None = None


def trace_every_run(exporter: TraceExporter | None) -> ExportSummary | None:
    """Send the trials of every run of this process from now on; None switches it off.

    What is queued is sent before the process ends, or when another exporter or None takes its place. Returns the
    summary of the exporter that was active until then.
    """
    global _active
    with _lock:
        before, _active = _active, exporter
        observe_every_run(exporter)
    if before is None and exporter is not None:
        atexit.register(trace_every_run, None)
    if before is None or before is exporter:
        return None
    return before.close()


def langsmith_endpoint(project: str, environ: Mapping[str, str] = os.environ) -> OtlpEndpoint:
    """Return the address of LangSmith's OTLP endpoint with the headers of a project.

    The address is LANGSMITH_ENDPOINT, by default LangSmith's own; the key is LANGSMITH_API_KEY.
    """
    if not project.strip():
        raise ConfigurationError(f"project must be the name of a LangSmith project (got {project!r})")
    base, key = langsmith_address(environ, "trace runs")
    headers = f"x-api-key={quote(key)},Langsmith-Project={quote(project)}"
    return resolve_endpoint(f"{base}/otel", {**environ, "OTEL_EXPORTER_OTLP_HEADERS": headers})


def trace_to_langsmith(project: str, *, enabled: bool = True, content: bool = False) -> None:
    """Trace every run of this process to a project of LangSmith, or stop.

    Args:
        project: The name of the project.
        enabled: False to stop.
        content: Send inputs, outputs, messages, tool arguments, errors and reasons too; secrets are replaced.
    """
    endpoint = langsmith_endpoint(project) if enabled else None
    trace_every_run(None if endpoint is None else TraceExporter(endpoint, profile="langsmith", content=content))
