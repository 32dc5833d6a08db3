"""Executes the trials of a run in several processes of this machine; only this process writes to the store.

Each process has the suite, a lifespan of its own and one connection, on which it is sent trials and sends results back.
A trial whose process ends has no result and is executed again in another one: after the second time in a process that
executes nothing else, and after the third it has failed. Limits and budgets are asked of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from fairtrial.base.isolation import ChildDiedError, Function, IsolatedError, NotSendableError
from fairtrial.base.isolation.runner import IsolatedChild, globals_of, pack, read_answer
from fairtrial.base.offload import finish, require_asyncio
from fairtrial.base.system import require_posix
from fairtrial.errors import CodecError, ConfigurationError
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
    encode_trial,
)
from fairtrial.fleet.local.child import ProcessSetup, serve
from fairtrial.fleet.local.questions import Questions, SharedRunState
from fairtrial.fleet.messages import EvalReply
from fairtrial.models.cache import cache_disabled, shared_cache
from fairtrial.models.pricing import all_configured_prices
from fairtrial.runs.events import log, trial_fields
from fairtrial.runs.executor import Executor, receive_traces
from fairtrial.runs.plan import PlannedTrial, RunRequest
from fairtrial.trials.result import EvalResult, Outcome, failed_result
from fairtrial.trials.run_trial import TrialRules, restore_output

_DEATHS = 3
"""How many processes may end during a trial before it is blamed: processes are also killed for other reasons."""
_ALONE_AFTER = 2
_MOST_ALONE = 4
_STARTS = 3  # How often a process may end before it is ready.
_LATE_SECONDS = 30.0  # For a busy process to answer after the time limit of a trial.
_CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_REMEDY = "use processes=1"


@asynccontextmanager
async def execute_in_processes(request: RunRequest) -> AsyncIterator[Executor]:
    """Execute the trials of a run in its processes, which are started with the first trial and end with the block."""
    require_asyncio("EvalConfig.processes", "run this suite under it, or with processes=1")
    require_posix("several processes work", _REMEDY)
    async with receive_traces(request.rules.traces):
        pool = _Pool(request)
        try:
            yield pool
        finally:
            await finish(pool.close())


class ProcessHungError(ChildDiedError):
    """A process did not answer in time and was killed."""


class _Process:
    """One process of the run.

    Attributes:
        load: How many trials it has, or is about to be sent.
        ready: Done when its lifespan is open.
        ended: Done when it has ended, with what its function returned or None.
    """

    def __init__(
        self, child: IsolatedChild, connection: socket.socket, state: SharedRunState, grace_seconds: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.child = child
        self.load = 0
        self.is_hung = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[bytes | None] = loop.create_future()
        self._grace_seconds = grace_seconds
        self._results: dict[int, tuple[asyncio.Future[bytes], float]] = {}  # And when each is overdue.
        self._questions = Questions(state, lambda id, answer: self.channel.send(ANSWER, id, answer))
        self.channel = Channel(connection, self._receive, self._end)

    def close(self) -> None:
        """Stop listening."""
        self._questions.close()
        self.channel.close()

    def _receive(self, kind: bytes, id: int, content: bytes) -> None:
        if kind in (RESULT, FAILED):
            result, _ = self._results.pop(id, (None, 0.0))
            if result is not None and not result.done():
                if kind == RESULT:
                    result.set_result(content)
                else:
                    result.set_exception(IsolatedError(content.decode()))
        elif kind == ASK:
            self._questions.ask(id, content)
        elif kind == WITHDRAW:
            self._questions.withdraw(id)
        elif kind == TELL:
            self._questions.hear(content)
        elif kind == READY:
            self.ready.set_result(None)

    def _end(self, answer: bytes | None) -> None:
        self._questions.close()
        if not self.ended.done():
            self.ended.set_result(answer)

    def abandon(self) -> None:
        """Stop listening, as if the process had ended."""
        self.channel.close()
        self._end(None)

    def fail(self, error: Exception) -> int:
        """Give up the trials in the process; returns their number."""
        waiting = [result for result, _ in self._results.values() if not result.done()]
        for result in waiting:
            result.set_exception(error)
        return len(waiting)

    def check(self, now: float) -> None:
        """Note whether the process has ended, or has to: none of its trials can be told to be the cause."""
        if not self.child.is_alive:
            self.abandon()
        elif any(deadline < now for _, deadline in self._results.values()):
            self.is_hung = True
            self.abandon()

    async def execute(self, id: int, trial: bytes, seconds: float) -> bytes:
        """Execute a trial and return its result.

        Raises:
            ChildDiedError: the process has ended.
            IsolatedError: the process cannot read the trial.
        """
        result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._results[id] = result, time.monotonic() + seconds
        self.channel.send(TRIAL, id, trial)
        try:
            return await result
        except asyncio.CancelledError:
            self.channel.send(CANCEL, id)
            with anyio.CancelScope(shield=True):  # Its resources are closed there.
                ends: list[asyncio.Future[Any]] = [result, self.ended]
                await asyncio.wait(ends, timeout=self._grace_seconds, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            self._results.pop(id, None)


class _Pool:
    """The processes of a run, and further ones in which suspected trials run alone."""

    rules: TrialRules | None = None

    def __init__(self, request: RunRequest) -> None:
        config, traces = request.config, request.rules.traces
        self._rules = request.rules
        self._seconds = request.rules.longest_seconds + _LATE_SECONDS
        self._traces = traces if traces is not None and traces.endpoint else None
        self._function = Function(serve, "the process of a run")
        self._arguments = _packed_setup(request)
        self._size = {False: config.processes, True: _MOST_ALONE}  # By whether trials run alone.
        share = -(-config.max_concurrent // config.processes)
        # This process decides when a trial that only waits for its trace lets another one run.
        self._capacity = {False: share if self._traces is None else math.inf, True: 1}
        self._processes: dict[bool, list[_Process]] = {False: [], True: []}
        self._starting = {False: 0, True: 0}
        self._state = SharedRunState()
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_background(self._watch())

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Execute one trial, again if its process ends."""
        try:
            data = encode_trial(trial, _REMEDY)
        except NotSendableError as error:
            return _failed(trial, "task_error", str(error))
        deaths = 0
        with self._expecting(trial):
            while True:
                process = await self._take(alone=deaths >= _ALONE_AFTER)
                try:
                    return self._result(trial, await process.execute(next(self._numbers), data, self._seconds))
                except ProcessHungError as error:
                    if deaths >= _ALONE_AFTER:
                        return _failed(trial, "timeout", f"the trial blocks its process: {error}")
                    deaths = _ALONE_AFTER
                except ChildDiedError as error:
                    deaths += 1
                    if deaths >= _DEATHS:
                        log.error("trial %s crashes its process: %s", trial.key, error, extra=trial_fields(trial.key))
                        return _failed(trial, "task_error", f"the trial crashes its process: {error}")
                except IsolatedError as error:
                    return _failed(trial, "task_error", f"the trial cannot be sent to its process: {error}")
                finally:
                    process.load -= 1
                    self._wake()

    def _result(self, trial: PlannedTrial, reply: bytes) -> EvalResult:
        result = EvalReply.from_wire(reply).result
        if result.output_json is None:
            return result
        try:
            output = restore_output(self._rules, trial.experiment, trial.sample, result)
        except CodecError:  # The type of the output exists only in the other process.
            return result
        return result if output is result.output else replace(result, output=output)

    @contextmanager
    def _expecting(self, trial: PlannedTrial) -> Iterator[None]:
        """Accept the spans of all attempts at a trial: before the first one can arrive."""
        if self._traces is None or trial.stored is not None:
            yield
            return
        names = [(str(trial.key), trial.attempt + more) for more in range(self._rules.max_retries + 1)]
        for name in names:
            self._state.traces[name] = self._traces.expect(trial.key, name[1]), copy_context()
        try:
            yield
        finally:
            for name in names:
                self._state.traces.pop(name)[0].close()

    async def _take(self, *, alone: bool) -> _Process:
        """Wait for a process with room for a trial, the one with the fewest, and reserve it."""
        while True:
            if self._failure is not None:
                raise self._failure
            processes = self._processes[alone]
            process = min(processes, key=lambda process: process.load, default=None)
            if process is not None and process.load < self._capacity[alone]:
                process.load += 1
                return process
            for _ in range(self._starting[alone] + len(processes), self._size[alone]):
                self._start(alone)
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start(self, alone: bool) -> None:
        self._starting[alone] += 1
        self._in_background(self._start_process(alone))

    async def _start_process(self, alone: bool) -> None:
        try:
            process = await self._open_process()
            self._processes[alone].append(process)
            process.ended.add_done_callback(partial(self._remove_soon, process, alone))
        except Exception as error:
            if self._failure is None:
                self._failure = IsolatedError(f"a process of the run could not start: {error}")
        finally:
            self._starting[alone] -= 1
            self._wake()

    async def _open_process(self) -> _Process:
        """Start a process, again if it is killed meanwhile, and wait until its lifespan is open."""
        for attempt in itertools.count(1):
            try:
                child = await IsolatedChild.start()
            except IsolatedError:
                if attempt == _STARTS:
                    raise
                continue
            process = None
            try:
                connection = await child.begin(self._function, self._arguments)
                process = _Process(child, connection, self._state, self._rules.grace_seconds)
                ends: list[asyncio.Future[Any]] = [process.ready, process.ended]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if process.ready.done():
                    return process
                if (answer := process.ended.result()) is not None:
                    read_answer(answer, object)
                raise await child.died()
            except BaseException as error:
                if process is not None:
                    process.close()
                await child.end()
                if not isinstance(error, ChildDiedError) or attempt == _STARTS:
                    raise
        raise AssertionError

    def _remove_soon(self, process: _Process, alone: bool, _ended: object) -> None:
        if not self._closing:
            self._in_background(self._remove(process, alone))

    async def _remove(self, process: _Process, alone: bool) -> None:
        """Forget a process that has ended; its trials are executed in others."""
        self._processes[alone].remove(process)
        error: ChildDiedError = ProcessHungError(f"no answer within {self._seconds:g} s")
        if not process.is_hung:
            error = await process.child.died()
        await process.child.end()
        lost = process.fail(error)
        log.warning("a process of the run ended (%s): the %d trials in it are executed again", error, lost)
        if not alone:
            self._start(alone)

    async def _watch(self) -> None:
        """Find processes that end with their connection kept open by others, and trials that never end."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for process in [*self._processes[False], *self._processes[True]]:
                process.check(now)

    async def close(self) -> None:
        """End the processes: each closes its lifespan first.

        Raises:
            IsolatedError: a lifespan failed to close.
        """
        self._closing = True
        processes = [*self._processes[False], *self._processes[True]]
        for process in processes:
            process.channel.send(END, 0)
        if processes:
            await asyncio.wait([process.ended for process in processes], timeout=_CLOSE_SECONDS)
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for process in processes:
            process.close()
            await process.child.end()
        for process in processes:
            if process.ended.done() and (answer := process.ended.result()) is not None:
                read_answer(answer, object)


def _packed_setup(request: RunRequest) -> bytes:
    """Return what a process needs, serialized: by value, or taken from the suite's module if that is not possible."""
    traces = request.rules.traces
    received = traces is not None and bool(traces.endpoint)
    names = globals_of(request.home)
    # A source of traces in the same process belongs to the tracing library of that process.
    by_name = {} if traces is None or received else {id(traces): names.get(id(traces))}
    if None in by_name.values():
        raise ConfigurationError(
            f"the traces of suite {request.suite!r} are collected in the process of its task, so with several "
            "processes traces=... must be a variable of a module that each of them can import\n"
            f"move it to the top level of a module that is not the program itself, or {_REMEDY}"
        )
    ours = logging.getLogger("fairtrial")
    setup = ProcessSetup(
        rules=replace(request.rules, dispatcher=None, traces=None if received else traces),
        lifespan=request.lifespan,
        cache=shared_cache(),
        cache_disabled=cache_disabled(),
        prices=all_configured_prices(),
        levels={"": logging.getLogger().level, ours.name: ours.level},
        prints_to_stderr=sys.stdout is sys.stderr,
        trace_endpoint=traces.endpoint if traces is not None and received else "",
    )
    what = f"what the processes of suite {request.suite!r} need"
    try:
        return pack(((setup,), {}), what, remedy=_REMEDY, by_name=by_name)
    except NotSendableError:
        if not names:
            raise
        return pack(((setup,), {}), what, remedy=_REMEDY, by_name=names)


def _failed(trial: PlannedTrial, outcome: Outcome, error: str) -> EvalResult:
    return failed_result(trial.key, trial.ordinal, trial.attempt, outcome, "task", error)
