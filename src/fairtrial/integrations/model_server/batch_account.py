"""The batches of one server: created, executed by the clock, ended. What providers write is in `batch_wire`."""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

from fairtrial.integrations.model_server.batches import (
    LINE_FAULTS,
    BatchClock,
    BatchLedger,
    BatchOptions,
    CreatedBatch,
    ExecutedRequest,
)
from fairtrial.integrations.model_server.openai_wire import Wire, to_bytes
from fairtrial.integrations.model_server.reply import InvalidRequestError, ParsedRequest, Protocol, Reply, Usage, draw

DAY = 86_400.0
BEGIN, END = 0.1, 0.9  # The part of a batch's time in which its requests are executed.
_CANCEL = 0.1  # The part that cancelling takes.
# The requests of batches have numbers, and so ids of replies, that those of live requests never reach.
_FIRST_NUMBER = 1_000_001
REFUSED = {"rate_limited": 429, "server_failed": 500, "invalid": 400}


@dataclass(slots=True)
class BatchLine:
    """One request of a batch, and what became of it."""

    custom_id: str
    body: Mapping[str, Any]
    outcome: str = ""  # "succeeded", "expired", "canceled" or one of REFUSED; "": not yet.
    result: bytes = b""  # Its line of the results.
    fault: str = ""


@dataclass(slots=True)
class HostedBatch:
    """A batch of one provider."""

    id: str
    endpoint: str
    created: float
    seconds: float
    lines: list[BatchLine]
    number: int = 0  # In the order of creation, of clients' batches; 0: another party's.
    metadata: dict[str, str] = field(default_factory=dict)
    input_file: str = ""
    problems: list[dict[str, Any]] = field(default_factory=list)  # Why it becomes `failed`.
    faults: frozenset[str] = frozenset()
    cancelled: float | None = None
    executed: int = 0  # How many lines have been executed or refused.
    unlisted: int = 0  # In how many lists it does not appear yet.
    ended: bool = False
    deleted: bool = False
    files: dict[str, str] = field(default_factory=dict)  # The ids of its "output" and "error" files.
    usage: list[Usage] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model of its requests."""
        return str(self.lines[0].body.get("model", "")) if self.lines else ""

    @property
    def end(self) -> float:
        """When it ends."""
        if self.problems:
            return self.created + BEGIN * self.seconds
        if self.cancelled is not None:
            return self.cancelled + _CANCEL * self.seconds
        return math.inf if "never_ends" in self.faults else self.created + min(self.seconds, DAY)

    def due_by(self, now: float) -> Iterator[tuple[float, int]]:
        """Yield when each request is executed that is due by now and was not executed yet, and its place."""
        last = min(now, self.created + DAY, now if self.cancelled is None else self.cancelled)
        for place in range(self.executed, 0 if self.problems else len(self.lines)):
            part = BEGIN + (END - BEGIN) * (place + 1) / len(self.lines)
            if (at := self.created + part * self.seconds) > last:
                break
            yield at, place

    def count(self, *outcomes: str) -> int:
        """Return how many requests have one of these outcomes."""
        return sum(line.outcome in outcomes for line in self.lines)

    def phase(self, now: float) -> str:
        """Return which part of its life it is in: validating, in_progress, finalizing, cancelling, ended."""
        if self.ended:
            return "ended"
        if self.cancelled is not None:
            return "cancelling"
        share = (now - self.created) / self.seconds if self.seconds else 0.0
        if share < BEGIN or self.problems:
            return "validating"
        return "in_progress" if share < END or self.end == math.inf else "finalizing"


class HostedFile(NamedTuple):
    """A file of the account."""

    id: str
    content: bytes
    filename: str
    purpose: str
    created: float


class BatchHost:
    """What the batch APIs of one server share: the options, the clock, the model and the ledger."""

    def __init__(self, options: BatchOptions, answer: Callable[[ParsedRequest], Awaitable[Reply]], seed: int) -> None:
        self.options, self.answer, self.seed = options, answer, seed
        self.clock = BatchClock(options)
        self.apis: list[BatchApi] = []
        self.executed: list[ExecutedRequest] = []
        self.files: dict[str, HostedFile] = {}
        self.created = self._ids = 0
        self._number = _FIRST_NUMBER - 1
        self._settling = asyncio.Lock()

    def new_id(self, prefix: str) -> str:
        """Return an id that looks random and is the same in each execution of a test."""
        self._ids += 1
        return prefix + blake2b(f"{self.seed}:{self._ids}".encode(), digest_size=12).hexdigest()

    def next_number(self) -> int:
        """Return the number of the next request of a batch."""
        self._number += 1
        return self._number

    async def settle(self) -> None:
        """Execute the requests that are due by now, and end the batches whose time is over."""
        async with self._settling:  # Two HTTP requests at a time must not execute the same request of a batch.
            for api in self.apis:
                await api.settle()

    def ledger(self) -> BatchLedger:
        """Return what was created and paid for, as of the last request to the server. Can be read from any thread."""
        now = self.clock.now()
        created = tuple(
            CreatedBatch(
                one.id,
                protocol=api.name,
                endpoint=one.endpoint,
                requests=len(one.lines),
                metadata=dict(one.metadata),
                created_at=one.created,
                status=api.status(one, now),
                foreign=one.number == 0,
            )
            for api in self.apis
            for one in list(api.batches.values())
        )
        return BatchLedger(now, created, tuple(self.executed), tuple(self.files))


class BatchApi(ABC):
    """The batches of one provider. Runs in the server's event loop."""

    name: ClassVar[Protocol]
    prefix: ClassVar[str]

    def __init__(self, host: BatchHost, wires: Mapping[str, Wire]) -> None:
        self.host, self.options, self._wires = host, host.options, wires
        self.batches: dict[str, HostedBatch] = {}
        self._running: dict[str, HostedBatch] = {}
        host.apis.append(self)

    @abstractmethod
    def status(self, batch: HostedBatch, now: float) -> str:
        """The provider's name of the batch's state."""

    @abstractmethod
    def line(self, number: int, line: BatchLine, result: dict[str, Any], status: int) -> bytes:
        """A line of the results, for a request with an answer, or with the body of an error and its status."""

    @abstractmethod
    def stopped(self, number: int, line: BatchLine) -> bytes:
        """A line of the results, for a request that expired or was cancelled."""

    @abstractmethod
    def store_results(self, batch: HostedBatch) -> None:
        """Store the results of a batch that has ended, if they are files."""

    def create(self, batch: HostedBatch) -> HostedBatch:
        """Create a client's batch, after those of other parties."""
        host, options = self.host, self.options
        for _ in range(options.foreign):
            lines = [BatchLine(f"foreign-{place}", line.body) for place, line in enumerate(batch.lines)]
            self._add(HostedBatch(host.new_id(self.prefix), batch.endpoint, batch.created, batch.seconds, lines))
        host.created += 1
        batch.number = host.created
        whole = [
            fault for fault in options.faults if fault.kind not in LINE_FAULTS and fault.holds(host.seed, batch.number)
        ]
        batch.faults = frozenset(fault.kind for fault in whole)
        if self.name == "openai":
            batch.problems += [problem(one.code, one.message) for one in whole if one.kind == "failed"]
        of_lines = [fault for fault in options.faults if fault.kind in LINE_FAULTS]
        for place, line in enumerate(batch.lines, 1):
            kinds = (fault.kind for fault in of_lines if fault.holds(host.seed, batch.number, place))
            line.fault = next(kinds, "")
        if not options.metadata:
            batch.metadata = {}
        return self._add(batch)

    def _add(self, batch: HostedBatch) -> HostedBatch:
        batch.unlisted = self.options.list_lag_polls
        self.batches[batch.id] = self._running[batch.id] = batch
        return batch

    def listed(self, *, first_page: bool) -> list[HostedBatch]:
        """Return the batches that the list shows, newest first."""
        shown, now = [], self.host.clock.now()
        for batch in self.batches.values():
            if batch.unlisted:
                batch.unlisted -= first_page
            elif now >= batch.created + self.options.list_lag and not batch.deleted:
                shown.append(batch)
        return shown[::-1]

    def enqueued(self, model: str) -> int:
        """Return the tokens of a model's requests in clients' batches that have not ended."""
        running = [one for one in self._running.values() if one.number and one.model == model and not one.problems]
        return sum(tokens_in(one) for one in running)

    async def settle(self) -> None:
        """Execute the requests that are due by now, and end the batches whose time is over."""
        now, running = self.host.clock.now(), list(self._running.values())
        due = [(at, batch.number, place, batch) for batch in running for at, place in batch.due_by(now)]
        for at, _, place, batch in sorted(due, key=lambda one: one[:3]):
            await self._execute(batch, batch.lines[place], at)
        for batch in running:
            if now >= batch.end:
                self._finish(batch)

    async def _execute(self, batch: HostedBatch, line: BatchLine, at: float) -> None:
        wire, number = self._wires[batch.endpoint], self.host.next_number()
        request = usage = None
        outcome, message = line.fault, f"This request was {line.fault}."
        if line.fault != "expired" and line.fault not in REFUSED:
            try:
                if line.body.get("stream"):
                    raise InvalidRequestError("stream: a request of a batch cannot be streamed")
                request = wire.parse(line.body, number)
                reply = await self.host.answer(request) if batch.number else Reply("another party's")
                usage, outcome = reply.usage_for(request.input_tokens), "succeeded"
                if self.name == "anthropic":
                    usage = replace(usage, service_tier="batch")
                line.result = self.line(number, line, wire.completion(request, reply, usage), 200)
            except InvalidRequestError as refusal:
                outcome, message = "invalid", str(refusal)
            except Exception as error:  # A function of the test failed: its message comes as a failed request.
                outcome, message = "server_failed", f"{type(error).__name__}: {error}"
        # No await from here on: if the HTTP request is cancelled, all of this is done or nothing.
        line.outcome = outcome
        batch.executed += 1
        if outcome in REFUSED:
            line.result = self.line(number, line, wire.error(REFUSED[outcome], message), REFUSED[outcome])
        elif request is None or usage is None:
            line.result = self.stopped(number, line)
        else:
            batch.usage.append(usage)
            if batch.number:
                self.host.executed.append(_executed(batch, line, request, usage, at))

    def _finish(self, batch: HostedBatch) -> None:
        for line in () if batch.problems else batch.lines[batch.executed :]:
            line.outcome = "expired" if batch.cancelled is None else "canceled"
            line.result = self.stopped(self.host.next_number(), line)
        batch.ended = True
        del self._running[batch.id]
        if not batch.problems and "no_files" not in batch.faults:
            self.store_results(batch)

    def results(self, batch: HostedBatch, lines: list[BatchLine]) -> bytes:
        """Return lines of the results, damaged as the faults of the batch say."""
        if "reordered" in batch.faults:
            lines = sorted(lines, key=lambda line: draw(self.host.seed, "order", line.custom_id))
        texts: list[bytes] = []
        for line in lines:
            if line.fault == "malformed":
                texts.append(line.result[: len(line.result) // 2])
            elif line.fault != "missing":
                texts.append(line.result)
            if line.fault == "duplicate":
                texts.append(line.result)
            elif line.fault == "unknown":
                texts.append(line.result.replace(to_bytes(line.custom_id), b'"nobody-sent-this"', 1))
        return b"".join(text + b"\n" for text in texts)


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an entry of the errors of a batch that becomes `failed`."""
    return {"code": code, "message": message, "line": line, "param": param}


def tokens_in(batch: HostedBatch) -> int:
    """Estimate the tokens that a batch enqueues: four characters of the JSON of its requests each."""
    return sum(-(-len(to_bytes(line.body)) // 4) for line in batch.lines)


def _executed(batch: HostedBatch, line: BatchLine, request: ParsedRequest, usage: Usage, at: float) -> ExecutedRequest:
    return ExecutedRequest(
        batch.id,
        custom_id=line.custom_id,
        protocol=request.protocol,
        model=request.model,
        text=request.last_user,
        digest=blake2b(json.dumps(line.body, sort_keys=True).encode(), digest_size=12).hexdigest(),
        at=at,
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        output_tokens=usage.output_tokens,
    )
