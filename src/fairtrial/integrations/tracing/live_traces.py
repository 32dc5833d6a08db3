"""Live traces of an application: sampled by a hash, and spooled before they are acknowledged."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from aiohttp import web

from fairtrial.base.offload import in_thread
from fairtrial.errors import ConfigurationError, StoreUnavailableError
from fairtrial.integrations.tracing.importing import RecordedTrace, group_traces
from fairtrial.integrations.tracing.received import ReceivedLog, ReceivedSpan
from fairtrial.integrations.tracing.receiver import RETRY_AFTER, TraceReceiver
from fairtrial.runs.events import log
from fairtrial.store.redact import current
from fairtrial.store.spool import SpooledPart, SqlSpool

DAY_SECONDS = 86_400.0
NEVER_ENDING = 30
"""Times the settle time: then spans are missing for good."""
_BATCH = 64  # Traces that are read from the spool at once.
_NO_ROOT = 6  # Times the settle time: then the caller of the outermost span is not traced.
_REMEMBERED = 10_000  # Traces that have left the spool, whose late spans are told from new ones.
_REQUESTS = 32  # That are read at once.


class Stratum(NamedTuple):
    """The traces of which a span, or its resource, has an attribute with this value. They have a share of their own."""

    key: str
    value: str
    share: float

    @property
    def name(self) -> str:
        """The attribute and its value."""
        return f"{self.key}={self.value}"

    @classmethod
    def parse(cls, text: str) -> Stratum:
        """Read "KEY=VALUE:SHARE". The key `error` with the value `true` means that the outermost span failed."""
        attribute, _, share = text.rpartition(":")
        key, equals, value = attribute.partition("=")
        try:
            if key and equals:
                return cls(key, value, checked_share(float(share)))
        except ValueError:
            pass
        raise ConfigurationError(f"a stratum must be KEY=VALUE:SHARE, as in user.feedback=down:0.5 (got {text!r})")

    def holds(self, trace: RecordedTrace) -> bool:
        """Return whether a trace belongs to the stratum."""
        if self.key == "error":
            return self.value == ("true" if trace.top.error is not None else "false")
        found = (place.get(self.key) for span in trace.spans for place in (span.attributes, span.resource))
        return any(value is not None and _text(value) == self.value for value in found)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def checked_share(share: float) -> float:
    """Return a share of traces. Raises `ConfigurationError` if it is none."""
    if not 0 < share <= 1:
        raise ConfigurationError(f"the share of traces must be above 0 and at most 1 (got {share:g})")
    return share


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which traces become trials: a share of all, other shares of strata, and the budget of a day for their judges."""

    sample: float
    strata: tuple[Stratum, ...] = ()
    max_cost_usd: float | None = None

    @property
    def highest(self) -> float:
        """The largest share, which decides before the stratum of a trace is known."""
        return max(self.sample, *(one.share for one in self.strata)) if self.strata else self.sample

    def share_of(self, trace: RecordedTrace) -> tuple[str, float]:
        """Return the stratum of a trace and its share; the first that it belongs to."""
        return next(((one.name, one.share) for one in self.strata if one.holds(trace)), ("", self.sample))


def position(trace_id: str) -> float:
    """Return the place of a trace between 0 and 1: it is taken by every share above. A hash, so ids may have a form."""
    return int.from_bytes(hashlib.blake2b(trace_id.encode(), digest_size=8).digest()) / 2**64


def utc_day(moment: float) -> str:
    """Return the day of a moment in UTC."""
    return datetime.fromtimestamp(moment, UTC).date().isoformat()


@dataclass(slots=True)
class LiveTrace:
    """A trace in the spool."""

    trace: str
    first_at: float
    last_at: float
    factor: float
    size: int
    due_at: float
    taken: bool = False  # On its way to a result.


@dataclass(slots=True)
class LiveCounts:
    """What became of what arrived, since the start."""

    received: int = 0  # Outermost spans.
    late: int = 0  # Spans of traces that have left the spool.
    refused: int = 0  # Requests, because of overload.
    incomplete: int = 0
    too_large: int = 0
    unstorable: int = 0  # The store has no place for their result, such as one with a secret in the id of the trace.


class LiveTraces:
    """The sampled traces that have no result yet. Their spans are in the spool, their times in memory.

    Safe to use from threads. Opened on a spool with traces, it continues with them.
    """

    def __init__(
        self,
        spool: SqlSpool,
        suite: str,
        sampling: Sampling,
        *,
        settle_seconds: float,
        max_traces: int = 10_000,
        max_bytes: int = 256 * 1024 * 1024,
        max_trace_bytes: int = 16 * 1024 * 1024,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settle_seconds = settle_seconds
        self.sampling = sampling
        self.counts = LiveCounts()
        self._clock = clock
        self._spool = spool
        self._suite = suite
        self._limits = (max_traces, max_bytes, max_trace_bytes)
        self._lock = threading.Lock()
        self._day, self._factor = "", 1.0
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._pending = {one.trace: LiveTrace(*one, due_at=one.last_at + settle_seconds) for one in spool.traces(suite)}
        self._bytes = sum(one.size for one in self._pending.values())

    def __len__(self) -> int:
        return len(self._pending)

    def factor(self, now: float) -> float:
        """Return the factor of all shares; 1 at the begin of each day."""
        day = utc_day(now)
        if day != self._day:
            self._day, self._factor = day, 1.0
        return self._factor

    def set_factor(self, day: str, factor: float) -> None:
        """Set the factor of the shares on a day."""
        self._day, self._factor = day, factor

    def add(self, spans: Sequence[ReceivedSpan], logs: Sequence[ReceivedLog]) -> str:
        """Store what belongs to sampled traces durably; returns why the request has to be sent again, or nothing."""
        parts: dict[str, tuple[list[ReceivedSpan], list[ReceivedLog]]] = {}
        for span in spans:
            parts.setdefault(span.trace_id, ([], []))[0].append(span)
        for record in logs:
            parts.setdefault(record.trace_id, ([], []))[1].append(record)
        find_secret = current().find
        with self._lock:
            now = self._clock()
            limit = self.factor(now) * self.sampling.highest
            known = {trace: self._pending.get(trace) for trace in parts}
            wanted = [
                trace
                for trace, one in known.items()
                if trace not in self._closed
                and (one.size <= self._limits[2] if one is not None else trace and position(trace) < limit)
            ]
            for trace in [trace for trace in wanted if (secret := find_secret(trace)) is not None]:
                log.warning("the id of a trace contains %s: the trace is left out", secret)
                wanted.remove(trace)
                self._close(trace)
                self.counts.unstorable += 1
            new = sum(known[trace] is None for trace in wanted)
            # What belongs to a trace that waits is taken: without it the trace would wait for longer.
            if new and (len(self._pending) + new > self._limits[0] or self._bytes > self._limits[1]):
                self.counts.refused += 1
                return f"{len(self._pending):,} traces wait to be scored: try again later"
            rows = [
                SpooledPart(
                    trace,
                    now,
                    self._factor if (one := known[trace]) is None else one.factor,
                    json.dumps(parts[trace]).encode(),
                )
                for trace in wanted
            ]
            try:
                # Under the lock: one writer at a time, so that a trace is not read between its row and its entry.
                sizes = self._spool.add(self._suite, rows) if rows else []
            except StoreUnavailableError as error:
                self.counts.refused += 1
                return f"the store is unavailable: {error}"
            for row, size in zip(rows, sizes, strict=True):
                one = self._pending.setdefault(row.trace, LiveTrace(row.trace, now, now, row.factor, 0, now))
                one.last_at, one.size = now, one.size + size
                if now - one.first_at < NEVER_ENDING * self.settle_seconds:  # Else it never becomes due.
                    one.due_at = now + self.settle_seconds
                self._bytes += size
            self.counts.received += sum(not span.parent_id for span in spans)
            self.counts.late += sum(len(parts[trace][0]) for trace in parts if trace in self._closed)
        return ""

    def days(self) -> list[str]:
        """Return the days on which the waiting traces were first received, in their order."""
        with self._lock:
            return sorted({utc_day(one.first_at) for one in self._pending.values()})

    def take_due(self, day: str) -> list[LiveTrace]:
        """Take traces of a day, and of earlier ones, of which nothing has arrived for the settle time."""
        now = self._clock()
        with self._lock:
            due = [one for one in self._pending.values() if not one.taken and one.due_at <= now]
            due = sorted((one for one in due if utc_day(one.first_at) <= day), key=lambda one: one.first_at)[:_BATCH]
            for one in due:
                one.taken = True
        return due

    def read(self, one: LiveTrace) -> RecordedTrace | None:
        """Return a trace if it is complete. It is put back if it may become so, and left out if not."""
        waited = self._clock() - one.last_at
        if one.size > self._limits[2]:
            self.counts.too_large += 1
            self.forget([one.trace])
            return None
        spans: list[ReceivedSpan] = []
        logs: list[ReceivedLog] = []
        for data in self._spool.read(self._suite, one.trace):
            stored = json.loads(data)
            spans += (ReceivedSpan(*values) for values in stored[0])
            logs += (ReceivedLog(*values) for values in stored[1])
        if current().find(one.trace) is not None:  # The secret was not known when the trace arrived.
            self.leave_out(one.trace)
            return None
        found = next(iter(group_traces(spans, logs)), None)
        whole = found is not None and not found.missing
        if found is not None and whole and (not found.top.parent_id or waited >= _NO_ROOT * self.settle_seconds):
            return found
        if waited >= NEVER_ENDING * self.settle_seconds or self._clock() - one.first_at >= 2 * DAY_SECONDS:
            self.counts.incomplete += 1
            self.forget([one.trace])
        else:
            self.put_back(one.trace, self.settle_seconds)
        return None

    def put_back(self, trace: str, seconds: float) -> None:
        """Let a trace wait."""
        with self._lock:
            one = self._pending[trace]
            one.taken, one.due_at = False, self._clock() + seconds

    def forget(self, traces: Collection[str]) -> None:
        """Delete traces from the spool: a run has their result, or they are left out."""
        with self._lock:  # A late span must not be acknowledged between the two.
            self._spool.delete(self._suite, traces)
            for trace in traces:
                one = self._pending.pop(trace, None)
                self._bytes -= one.size if one is not None else 0
                self._close(trace)

    def leave_out(self, trace: str) -> None:
        """Leave a trace out whose result cannot be stored."""
        self.counts.unstorable += 1
        self.forget([trace])

    def _close(self, trace: str) -> None:
        self._closed[trace] = None
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)

    def release(self, traces: Collection[str] | None = None) -> None:
        """Let the traces that were taken wait again: their run was interrupted."""
        with self._lock:
            for one in self._pending.values():
                if traces is None or one.trace in traces:
                    one.taken = False


class LiveReceiver(TraceReceiver):
    """Receives the spans of all traces, and answers when those that are sampled are in the spool."""

    def __init__(self, traces: LiveTraces, *, host: str, port: int) -> None:
        super().__init__(host=host, port=port)
        self._traces = traces
        self._requests = 0

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._requests >= _REQUESTS:
            self._traces.counts.refused += 1
            return web.Response(status=429, headers={"Retry-After": RETRY_AFTER}, text="too many requests at once\n")
        self._requests += 1
        try:
            return await super()._answer(request)
        finally:
            self._requests -= 1

    async def _accept(self, spans: Sequence[ReceivedSpan], logs: Sequence[ReceivedLog]) -> str:
        return await in_thread(lambda: self._traces.add(spans, logs))
