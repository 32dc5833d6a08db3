"""Batches of requests: the options of the server, the faults of its batches, and the ledger of what was paid for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.reply import Protocol, Record, draw

type LineFault = Literal[
    "rate_limited", "server_failed", "invalid", "expired", "missing", "duplicate", "unknown", "malformed"
]
"""What can happen to one request of a batch. The first four are not executed, and so not billed; the others are.

`missing`: no line in the results. `duplicate`: its line comes twice. `unknown`: a second line with a custom_id that
nobody sent. `malformed`: its line is no JSON.
"""

type WholeFault = Literal["failed", "no_files", "gone", "reordered", "counts_hidden", "never_ends"]
"""What can happen to a whole batch.

`failed`: it ends as `failed` without executing anything (OpenAI). `no_files`: it ends without files or results.
`gone`: the files of its results answer 404. `reordered`: the lines of the results are shuffled. `counts_hidden`: the
counts stay 0. `never_ends`: it stays in progress until it is cancelled.
"""

LINE_FAULTS: frozenset[str] = frozenset(LineFault.__value__.__args__)


@first_is(str)
@dataclass(frozen=True, slots=True)
class BatchFault(Record):
    """A fault of batches, or of their lines.

    - `batches`: only these batches of clients, counted from 1 in the order of their creation; None: all.
    - `lines`: only these requests of a batch, counted from 1; None: all. `probability`: a random share of them.
    - `code`, `message`: those of a batch that `failed`.
    """

    kind: LineFault | WholeFault
    probability: float = 1.0
    batches: tuple[int, ...] | None = field(default=None, kw_only=True)
    lines: tuple[int, ...] | None = field(default=None, kw_only=True)
    code: str = field(default="token_limit_exceeded", kw_only=True)
    message: str = field(default="Enqueued token limit reached. Please try again later.", kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"the probability of a BatchFault must be from 0 to 1 (got {self.probability!r})")
        if self.lines is not None and self.kind not in LINE_FAULTS:
            raise ValueError(f"a BatchFault of kind {self.kind!r} is about whole batches: it has no lines")

    def holds(self, seed: int, batch: int, line: int | None = None) -> bool:
        """Return whether it applies to a batch, or to one of its lines."""
        if self.batches is not None and batch not in self.batches:
            return False
        if line is not None and self.lines is not None and line not in self.lines:
            return False
        return self.probability >= 1 or draw(seed, self.kind, batch, line) < self.probability


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class BatchOptions(Record):
    """How a server treats batches. The times are seconds of the server's own clock.

    - `seconds`: how long a batch takes from its creation to its end. Its requests are executed one after another
      between a tenth and nine tenths of that time; one that is due after 24 hours expires.
    - `rate`: seconds of the server's clock per second of real time; with 0, only `advance` moves the clock.
    - `clock_offset`: by how much the server's clock differs from that of this machine at the start.
    - `list_lag`, `list_lag_polls`: a new batch is not listed for that many seconds, and in that many lists.
    - `get_lag`: who asks for a new batch by its id is answered 404 for that many seconds.
    - `foreign`: before each batch of a client, another party creates as many batches of the same size in the account.
    - `metadata`: whether batches keep the metadata that clients send.
    - `max_requests`, `max_bytes`: of one batch; None: those of the provider. `enqueued_tokens`: of all batches of a
      model that have not ended; beyond it, a new batch becomes `failed` (OpenAI).
    """

    seconds: float = 60.0
    rate: float = field(default=1.0, kw_only=True)
    clock_offset: float = field(default=0.0, kw_only=True)
    list_lag: float = field(default=0.0, kw_only=True)
    list_lag_polls: int = field(default=0, kw_only=True)
    get_lag: float = field(default=0.0, kw_only=True)
    foreign: int = field(default=0, kw_only=True)
    metadata: bool = field(default=True, kw_only=True)
    max_requests: int | None = field(default=None, kw_only=True)
    max_bytes: int | None = field(default=None, kw_only=True)
    enqueued_tokens: int | None = field(default=None, kw_only=True)
    faults: tuple[BatchFault, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.rate < 0:
            raise ValueError(f"seconds and rate must be at least 0 (got {self.seconds!r} and {self.rate!r})")


class BatchClock:
    """The server's clock, in seconds since 1970. Can be read and advanced from any thread."""

    def __init__(self, options: BatchOptions, real: Callable[[], float] = time.monotonic) -> None:
        self._real, self._began, self._rate = real, real(), options.rate
        self._offset = time.time() + options.clock_offset
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time now."""
        with self._lock:
            return self._offset + (self._real() - self._began) * self._rate

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        if seconds < 0:
            raise ValueError(f"the clock can only be advanced (got {seconds!r} seconds)")
        with self._lock:
            self._offset += seconds


@first_is(str)
@dataclass(frozen=True, slots=True)
class ExecutedRequest:
    """A request of a batch that the model answered and the provider bills, at the price of batches.

    `text` is its last user message, `digest` identifies its body, `at` is the time by the server's clock. The tokens
    read from the provider's cache and written to it are part of the input tokens.
    """

    batch: str
    custom_id: str
    protocol: Protocol
    model: str
    text: str
    digest: str
    at: float
    input_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int


@first_is(str)
@dataclass(frozen=True, slots=True)
class CreatedBatch:
    """A batch that a client created, with its state now. `foreign`: another party's."""

    id: str
    protocol: Protocol
    endpoint: str
    requests: int
    metadata: Mapping[str, str]
    created_at: float
    status: str
    foreign: bool


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class BatchLedger:
    """What the provider knows: every batch that was created, every request that was paid for, the files that exist."""

    now: float
    created: tuple[CreatedBatch, ...]
    executed: tuple[ExecutedRequest, ...]
    files: tuple[str, ...]

    def paid_twice(self) -> dict[str, int]:
        """Return how often each body of a request was paid for, of those paid for more than once."""
        counts: dict[str, int] = {}
        for request in self.executed:
            counts[request.digest] = counts.get(request.digest, 0) + 1
        return {digest: count for digest, count in counts.items() if count > 1}

    def to_json(self) -> dict[str, Any]:
        """The ledger as `GET /_batches` returns it."""
        whole: dict[str, Any] = _LEDGER.dump_python(self, mode="json")
        return whole

    @classmethod
    def from_json(cls, data: object) -> BatchLedger:
        """Parse the answer of `GET /_batches`."""
        return _LEDGER.validate_python(data)


_LEDGER = TypeAdapter(BatchLedger)
