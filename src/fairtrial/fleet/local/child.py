"""A process of a run: it executes the trials that it is sent, with a lifespan of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fairtrial.base.codec import decode, dumps
from fairtrial.base.garbage import fewer_collections
from fairtrial.base.isolation.child import parent_connection
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import CodecError
from fairtrial.fleet.local.channel import (
    ANSWER,
    ASK,
    CANCEL,
    END,
    FAILED,
    READY,
    RESULT,
    TELL,
    TRIAL,
    WITHDRAW,
    Channel,
    decode_trial,
)
from fairtrial.fleet.messages import EvalReply
from fairtrial.models.cache import ResponseCache, share_cache, without_cache
from fairtrial.models.limiter import AdaptiveLimiter, Permit, Verdict, set_limit_host
from fairtrial.models.pricing import Prices, configure_prices
from fairtrial.runs.events import trial_fields
from fairtrial.runs.executor import OwnExecutor, execute_here
from fairtrial.runs.plan import Lifespan
from fairtrial.store.redact import known_secrets, secrets_version
from fairtrial.trials.context import CollectedTrace, TrialKey, running_trial
from fairtrial.trials.result import failed_result
from fairtrial.trials.run_trial import TrialRules

_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime"))


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What a process of a run needs before its first trial.

    Attributes:
        rules: The rules of the run.
        lifespan: The resources that all trials of the process share.
        cache: The response cache of adapters that have none.
        cache_disabled: Whether answers from caches may not be used for tasks.
        prices: Prices by model, of the settings.
        levels: The levels of loggers by name; "" is the root.
        prints_to_stderr: Whether standard output is reserved for something else.
        trace_endpoint: The address at which the run receives traces for all its processes; "" if it does not.
    """

    rules: TrialRules
    lifespan: Lifespan | None
    cache: ResponseCache | None
    cache_disabled: bool
    prices: Mapping[str, Prices]
    levels: Mapping[str, int]
    prints_to_stderr: bool
    trace_endpoint: str


def serve(setup: ProcessSetup) -> None:
    """Execute trials until the run ends. Called in the child process."""
    share_cache(setup.cache)
    configure_prices(setup.prices)
    connection = parent_connection()
    with (
        contextlib.redirect_stdout(sys.stderr) if setup.prints_to_stderr else contextlib.nullcontext(),
        without_cache() if setup.cache_disabled else contextlib.nullcontext(),
        fewer_collections(),
    ):
        try:
            asyncio.run(_TrialServer(setup).run())
        finally:
            connection.setblocking(True)


class _TrialServer:
    """The trials of this process, and what it asks the run."""

    def __init__(self, setup: ProcessSetup) -> None:
        self._setup = setup
        self._trials: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._ended = asyncio.Event()
        self._secrets = (0, 0)
        self._channel: Channel
        self._executor: OwnExecutor

    async def run(self) -> None:
        """Open the lifespan, execute trials, close it."""
        setup = self._setup
        self._channel = Channel(parent_connection(), self._receive, lambda _: self._ended.set())
        set_limit_host(self)
        traces = _RunTraces(self, setup.trace_endpoint) if setup.trace_endpoint else setup.rules.traces
        try:
            with _logs_to(self, setup.levels):
                async with execute_here(replace(setup.rules, traces=traces), setup.lifespan) as self._executor:
                    self._send(READY, 0)
                    await self._ended.wait()
                    await self._cancel_all()
                await asyncio.sleep(0)  # What was written last is sent in this turn.
        finally:
            self._channel.close()

    async def _cancel_all(self) -> None:
        for task in self._trials.values():
            task.cancel()
        if self._trials:
            await asyncio.wait(list(self._trials.values()))

    def _receive(self, kind: bytes, id: int, content: bytes) -> None:
        if kind == TRIAL:
            self._trials[id] = asyncio.get_running_loop().create_task(self._execute(id, content))
        elif kind == CANCEL:
            if (task := self._trials.get(id)) is not None:
                task.cancel()
        elif kind == ANSWER:
            if (answer := self._questions.pop(id, None)) is not None and not answer.done():
                answer.set_result(content)
        elif kind == END:
            self._ended.set()

    async def _execute(self, id: int, content: bytes) -> None:
        kind, reply = FAILED, b"cancelled"
        try:
            trial = decode_trial(content)
            result = await self._executor.execute(trial)
            try:
                reply = EvalReply(result).to_wire()
            except CodecError as error:
                text = f"the result cannot be sent: {error}"
                failed = failed_result(trial.key, trial.ordinal, trial.attempt, "task_error", "output", text)
                reply = EvalReply(failed).to_wire()
            kind = RESULT
        except Exception as error:
            reply = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        finally:
            del self._trials[id]
            self._send(kind, id, reply)

    def _send(self, kind: bytes, id: int, content: bytes = b"") -> None:
        """Send a message; before it the secrets that are new here, because the run redacts what it stores and logs."""
        if (secrets := secrets_version()) != self._secrets:
            self._secrets = secrets
            self._channel.send(TELL, 0, json.dumps(("secrets", known_secrets())).encode())
        self._channel.send(kind, id, content)

    def tell(self, *facts: Any) -> None:
        """Tell the run something."""
        self._send(TELL, 0, json.dumps(facts).encode())

    @asynccontextmanager
    async def asking(self, *facts: Any) -> AsyncIterator[bytes]:
        """Ask the run something; its answer holds during the block."""
        id = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[id] = answer
        self._channel.send(ASK, id, json.dumps(facts).encode())
        try:
            yield await answer
        finally:
            self._questions.pop(id, None)
            self._channel.send(WITHDRAW, id)

    # What `LimitHost` asks for.

    @asynccontextmanager
    async def slot(self, limiter: AdaptiveLimiter) -> AsyncIterator[Permit]:
        """Wait until one call may begin."""
        async with self.asking("slot", limiter.name, limiter.settings) as answer:
            yield Permit(int(answer))

    def report(
        self, limiter: AdaptiveLimiter, permit: Permit | None, verdict: Verdict, retry_after: float | None
    ) -> None:
        """Report the outcome of a call."""
        epoch = None if permit is None else permit.epoch
        self.tell("called", limiter.name, limiter.settings, epoch, verdict, retry_after)

    async def spent(self, name: str, run_id: str) -> tuple[TokenUsage, int]:
        """Return the usage of a run in all processes."""
        async with self.asking("spent", name, run_id) as answer:
            return decode(tuple[TokenUsage, int], answer.decode())

    def spend(self, name: str, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        self.tell("spend", name, run_id, None if usage is None else dumps(usage))


class _RunTraces:
    """The source of traces of a run, which receives those of all its processes."""

    def __init__(self, server: _TrialServer, endpoint: str) -> None:
        self._server = server
        self.endpoint = endpoint

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def expect(self, key: TrialKey, attempt: int) -> _RunTrace:
        return _RunTrace(self._server, key, attempt)


class _RunTrace:
    """The trace of one attempt. The run has expected it since it sent the trial."""

    wait_seconds = 3600.0  # The run limits it.

    def __init__(self, server: _TrialServer, key: TrialKey, attempt: int) -> None:
        self._server = server
        self._key = key
        self._attempt = attempt

    async def wait(self) -> CollectedTrace:
        async with self._server.asking("trace", str(self._key), self._attempt) as answer:
            return decode(CollectedTrace, answer.decode())

    def collected(self) -> CollectedTrace:
        return CollectedTrace((), 0, None)

    def close(self) -> None:
        pass


class _RunHandler(logging.Handler):
    """Passes log records on to the run, from any thread."""

    def __init__(self, server: _TrialServer) -> None:
        super().__init__()
        self._server = server
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        trial = running_trial()
        fields = {} if trial is None else trial_fields(trial.key, trial.attempt)
        fields |= {name: str(value) for name, value in vars(record).items() if name not in _STANDARD}
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        with contextlib.suppress(RuntimeError):  # The event loop has ended.
            self._loop.call_soon_threadsafe(self._server.tell, "log", record.name, record.levelno, text, fields)


@contextlib.contextmanager
def _logs_to(server: _TrialServer, levels: Mapping[str, int]) -> Iterator[None]:
    """Let the run log what is logged in this process."""
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = [_RunHandler(server)]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        root.handlers[:] = before
