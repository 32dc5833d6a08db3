"""Execute requests, in this process or in a child."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from fairtrial.base.codec import canonical, decode
from fairtrial.base.frozen import LruCache
from fairtrial.base.isolation import ChildDiedError, IsolatedError, IsolatedRunner, NotSendableError
from fairtrial.base.isolation.child import emit
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import Session
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.fleet.messages import EvalReply, EvalRequest
from fairtrial.fleet.worker.config import EvalLoopConfig, LoopConfig, LoopCounters
from fairtrial.fleet.worker.jobs import Job
from fairtrial.fleet.worker.remote import RemoteMainLoop, input_type_name, transport_problem
from fairtrial.scoring.evaluator import resolve
from fairtrial.trials.config import Experiment
from fairtrial.trials.context import TrialContext
from fairtrial.trials.result import EvalResult, Outcome, Stage, failed_result
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.sample_types import PLAIN, KnownTypes, TypeName, UnknownTypeError
from fairtrial.trials.task import ResolvedTask, resolve_task

type ExecuteInChild = Callable[[Sequence[Any]], None]
"""Called in a child process with several requests; executes them and emits each answer (see `emit_answers`)."""

_HEARTBEAT_SECONDS = 0.5
_LEAST_SILENCE = 5.0
_PART: Any = tuple[int, bytes] | None  # The answer to the request at an index, or a heartbeat.


class _Suspect:
    __slots__ = ("alone", "answer", "request")

    def __init__(self, request: Any, answer: asyncio.Future[bytes]) -> None:
        self.request = request
        self.answer = answer
        self.alone = False  # Whether it was in a child process that died together with other messages.


class SuspectPool:
    """Executes suspected requests in child processes.

    Args:
        execute: Called in a child with several requests.
        runner: Runs the child processes.
        config: Settings: `concurrency` is the number of requests at once, in all `isolated_processes` together.
            `buffer_seconds` is additional time for a child process, for its start and for delays. A child with several
            requests is killed if its interpreter is stalled for `lease_seconds`.
        limit_seconds: Time limit for one request.
    """

    def __init__(
        self, execute: ExecuteInChild, runner: IsolatedRunner, config: LoopConfig, limit_seconds: float
    ) -> None:
        self._execute = execute
        self._runner = runner
        self._processes = config.isolated_processes
        self._group_size = -(-config.concurrency // config.isolated_processes)
        self._limit = limit_seconds + config.buffer_seconds
        self._silence = max(config.lease_seconds, _LEAST_SILENCE)
        self._silence_alone = max(self._silence, limit_seconds)
        self._waiting: list[_Suspect] = []
        self._busy = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, request: Any) -> bytes:
        """Execute one request and return the answer. Cancelling kills the child if it has no other request.

        Raises:
            ChildDiedError: the request crashed a process in which nothing else was executed.
            TimeoutError: it exceeded its time limit in such a process and was killed.
        """
        suspect = _Suspect(request, asyncio.get_running_loop().create_future())
        self._add(suspect)
        return await suspect.answer

    def _add(self, suspect: _Suspect) -> None:
        self._waiting.append(suspect)
        if self._busy < self._processes:
            self._busy += 1
            task = asyncio.get_running_loop().create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        try:
            while group := self._next_group():
                await self._execute_group(group)
        finally:
            self._busy -= 1

    def _next_group(self) -> list[_Suspect]:
        waiting = [suspect for suspect in self._waiting if not suspect.answer.done()]
        if not waiting or waiting[0].alone:
            group = waiting[:1]
        else:
            group = [suspect for suspect in waiting if not suspect.alone][: self._group_size]
        self._waiting = [suspect for suspect in waiting if suspect not in group]
        return group

    async def _execute_group(self, group: list[_Suspect]) -> None:
        unanswered = dict(enumerate(group))

        def take(part: str) -> None:
            answered: tuple[int, bytes] | None = decode(_PART, part)
            if answered is not None and (suspect := unanswered.pop(answered[0], None)) is not None:
                _settle(suspect, answered[1])

        def look(_: object) -> None:
            if unanswered and all(suspect.answer.done() for suspect in unanswered.values()):
                call.cancel()  # All requests of the group were cancelled.

        call = asyncio.ensure_future(self._call(group, take))
        for suspect in group:
            suspect.answer.add_done_callback(look)
        error: Exception = IsolatedError("the child process did not answer every request")
        try:
            await call
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise  # This task itself was cancelled.
        except Exception as raised:
            error = raised
        for suspect in unanswered.values():
            if len(group) > 1 and isinstance(error, ChildDiedError | TimeoutError):
                suspect.alone = True
                self._add(suspect)
            elif not suspect.answer.done():
                suspect.answer.set_exception(error)

    async def _call(self, group: list[_Suspect], take: Callable[[str], None]) -> None:
        function = self._runner.function(self._execute, "what executes suspected requests")
        async with self._runner.child() as child:
            await child.load(function)
            async with asyncio.timeout(self._limit):
                await child.call(
                    function,
                    ([suspect.request for suspect in group],),
                    kind=object,
                    what="the arguments of a suspected trial",
                    on_part=take,
                    silence_seconds=self._silence if len(group) > 1 else self._silence_alone,
                )


def _settle(suspect: _Suspect, answer: bytes) -> None:
    if not suspect.answer.done():
        suspect.answer.set_result(answer)


async def emit_answers(
    execute: Callable[[Any], Awaitable[bytes]], requests: Sequence[Any], send: Callable[[Any], None] = emit
) -> None:
    """Execute requests concurrently in the child process, and send each answer as soon as it is available."""

    async def answer(index: int, request: Any) -> None:
        send((index, await execute(request)))

    async def beat() -> None:
        while True:
            send(None)
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    beating = asyncio.create_task(beat())
    try:
        await asyncio.gather(*(answer(index, request) for index, request in enumerate(requests)))
    finally:
        beating.cancel()


_log = logging.getLogger("fairtrial.fleet")
_CACHED_EXPERIMENTS = 256
_LOOKED_AT = 1000


class TrialExecutor:
    """Executes and scores trials in this process.

    A suite's `rules` have all experiments of the suite. A single task has the experiment that each request names.

    Args:
        rules: Settings that all trials share.
        task: The task to execute; None if `rules` have their own.
        remote: The remote MainLoop that executes inputs, if any.
        types: The types of inputs and expected values; None to use those that the request names.
        counters: The counters to update.
        known: Reads values by the names of their types.
        dataset: The dataset of the worker's suite. A sample of it that equals the requested one is used itself.
    """

    def __init__(
        self,
        rules: TrialRules,
        task: ResolvedTask | None,
        remote: RemoteMainLoop | None,
        types: tuple[Any, Any],
        counters: LoopCounters,
        known: KnownTypes,
        dataset: Dataset[Any, Any] | None = None,
    ) -> None:
        self.rules = rules
        self._task = task
        self._remote = remote
        self._types = types
        self._known = known
        self._dataset = dataset
        self._counters = counters
        self._indexes = {experiment.name: index for index, experiment in enumerate(rules.experiments)}
        self._rules_of_experiments: LruCache[Any, TrialRules] = LruCache(_CACHED_EXPERIMENTS)

    async def run(self, request: EvalRequest) -> EvalResult:
        """Execute a request; raises if the remote MainLoop could not be reached."""
        if self._remote is None:
            return await self.execute(request)
        problems: list[BaseException] = []
        transport_problem.set(problems)
        result = await self.execute(request)
        if problems and result.outcome in ("task_error", "timeout"):
            raise problems[-1]  # A transport error: retry or give up, according to the policy.
        return result

    async def execute(self, request: EvalRequest) -> EvalResult:
        """Execute and score one request in this process."""
        try:
            rules, experiment, sample = self._prepare(request)
        except UnknownTypeError as error:
            return failed(request, "scorer_error", "score", str(error))
        except (CodecError, ConfigurationError) as error:
            return failed(request, "task_error", "setup", str(error))
        result = await run_trial(rules, request.key, request.ordinal, sample, experiment, attempt=request.attempt)
        if result.own_metadata.get("orphaned"):
            self._counters.hung += 1
        return result

    async def for_child(self, request: EvalRequest) -> tuple[Any, ...]:
        """Return the arguments of `execute_trials`. A remote task is called here; the child scores its output."""
        rules, experiment, sample = self._prepare(request)
        if self._remote is not None:
            context = TrialContext(
                request.key,
                sample,
                rules.experiments[experiment],
                Session(),
                run_seed=rules.seed,
                attempt=request.attempt,
            )
            rules = replace(rules, tasks=(self._remote.answered(await self._remote.ask(sample.input, context)),))
        return rules, request.key, request.ordinal, sample, experiment, request.attempt

    def _prepare(self, request: EvalRequest) -> tuple[TrialRules, int, Sample[Any, Any]]:
        rules, experiment = self._rules_for(request)
        if request.tags:
            rules = replace(rules, tags=tuple(request.tags.items()))
        return rules, experiment, self._typed(request)

    def _typed(self, request: EvalRequest) -> Sample[Any, Any]:
        input_type, expected_type = self._types
        if input_type is not None and expected_type is not None:
            return request.typed(input_type, expected_type)
        if request.types is None:
            return request.sample  # Passed by reference, so it has its original types.
        if (own := self._own_sample(request)) is not None:
            return own
        sample = request.typed(input_type or object, expected_type or object)
        input_name, expected_name = request.types
        given, wanted = sample.input, sample.expected
        if input_type is None:
            given = self._input(input_name, given)
        if expected_type is None:
            wanted = self._known.read(expected_name, wanted, "expected")
        return replace(sample, input=given, expected=wanted)

    def _input(self, name: TypeName, given: Any) -> Any:
        if self._remote is None:
            return self._known.read(name, given, "input")
        try:
            given = self._known.read(name, given, "input")
        except UnknownTypeError:
            if self._known.evaluator_reads_input:
                raise  # Plain JSON might compare as different.
            input_type_name.set(name)  # The MainLoop reads the input, under the name it was sent with.
        return given

    def _own_sample(self, request: EvalRequest) -> Sample[Any, Any] | None:
        """Return the requested sample from the worker's own dataset, if it is there unchanged."""
        place = request.sample_ordinal
        if self._dataset is None or request.types == PLAIN or place >= len(self._dataset):
            return None
        own, sent = self._dataset[place], request.sample
        if (own.id, own.has_expected) != (sent.id, sent.has_expected):
            return None
        if canonical([own.input, own.expected]) != canonical([sent.input, sent.expected]):
            return None
        return own if own.metadata == sent.metadata else replace(own, metadata=sent.metadata)

    def _rules_for(self, request: EvalRequest) -> tuple[TrialRules, int]:
        name = request.key.experiment
        if self._task is None:
            index = self._indexes.get(name)
            if index is None:
                known = ", ".join(self._indexes)
                raise ConfigurationError(f"the suite of this worker has no experiment {name!r} (it has {known})")
            return self.rules, index
        cached = (name, request.params)
        rules = self._rules_of_experiments.get(cached)
        if rules is None:
            rules = replace(self.rules, tasks=(self._task,), experiments=(Experiment(name, request.params),))
            self._rules_of_experiments.put(cached, rules)
        return rules, 0


def known_types(rules: TrialRules, dataset: Dataset[Any, Any] | None) -> KnownTypes:
    """Return the types that a suite's task and the first samples of its dataset have."""
    first = () if dataset is None else tuple(islice(dataset, _LOOKED_AT))
    task = rules.tasks[0] if len(rules.tasks) == 1 else None
    return KnownTypes(
        None if task is None else task.fn,
        rules.scorer.function,
        output=None if task is None else task.output_type,
        values=[value for sample in first for value in (sample.input, sample.expected)],
    )


def executor_of_task(
    task: Any,
    remote: RemoteMainLoop | None,
    evaluator: Any,
    config: EvalLoopConfig,
    types: tuple[Any, Any],
    counters: LoopCounters,
) -> TrialExecutor:
    """Create an executor of one task or remote MainLoop, with rules from the worker's settings."""
    # `RemoteMainLoop` limits the time to wait for an answer; the trial's own timeout is only a fallback.
    remote_seconds = config.mainloop_timeout + config.buffer_seconds if remote is not None else 0.0
    rules = TrialRules(
        tasks=(),
        experiments=(),
        scorer=resolve(evaluator),
        timeout_seconds=max(config.timeout_seconds, remote_seconds),
        max_retries=config.max_retries,
        seed=config.seed,
    )
    resolved = resolve_task(task if remote is None else remote)
    known = KnownTypes(
        None if remote is not None else resolved.fn,
        evaluator,
        input=getattr(task, "input_type", None),
        output=resolved.output_type,
    )
    return TrialExecutor(rules, resolved, remote, types, counters, known)


class SuspectExecutor:
    """Executes the trials of suspected poison messages in child processes, so that a crash affects nothing else.

    Args:
        executor: Executes trials in this process.
        config: Settings.
        counters: The counters to update.
        load_in_child: Called in the child with the bytes of requests. By default, the task and the evaluator are sent
            to the child.
    """

    def __init__(
        self,
        executor: TrialExecutor,
        config: EvalLoopConfig,
        counters: LoopCounters,
        load_in_child: ExecuteInChild | None,
    ) -> None:
        self._executor = executor
        self._config = config
        self._counters = counters
        self._loads_in_child = load_in_child is not None
        self._trial_seconds = executor.rules.longest_seconds
        self._in_hand = 0
        self.pool = SuspectPool(load_in_child or execute_trials, executor.rules.isolated, config, self._trial_seconds)

    async def run(self, job: Job[EvalRequest]) -> EvalResult:
        """Execute a suspected trial.

        Raises:
            ChildDiedError: the trial crashed a process in which nothing else was executed.
        """
        request = job.message.body
        self._counters.suspects += 1
        self._in_hand += 1
        # It may wait for earlier trials, twice, and each may use its whole time limit.
        turns = 3 + self._in_hand // self._config.isolated_processes
        job.keep_until(time.monotonic() + turns * (self._trial_seconds + self._config.buffer_seconds))
        try:
            return await self._run_in_child(request)
        except ChildDiedError:
            raise
        except (IsolatedError, NotSendableError) as error:
            if job.message.expiries > 1:
                raise
            # One lost worker proves little, and this code cannot be sent to a child process.
            _log.warning("executing suspected trial %s in this process: %s", request.key, error)
            return await self._executor.run(request)
        finally:
            self._in_hand -= 1

    async def _run_in_child(self, request: EvalRequest) -> EvalResult:
        try:
            prepared = await self.prepare(request)
        except UnknownTypeError as error:
            return failed(request, "scorer_error", "score", str(error))
        except (CodecError, ConfigurationError) as error:
            return failed(request, "task_error", "setup", str(error))
        try:
            return EvalReply.from_wire(await self.pool.run(prepared)).result
        except TimeoutError:
            text = f"the trial did not end within {self._trial_seconds:g} s in an isolated process and was killed"
            return failed(request, "timeout", "task", text)

    async def prepare(self, request: EvalRequest) -> Any:
        """Return the arguments to send to a child process for a request."""
        return request.to_wire() if self._loads_in_child else await self._executor.for_child(request)


def execute_trials(trials: Sequence[tuple[Any, ...]]) -> None:
    """Execute trials in this child process, with the rules that were sent with them."""
    try:
        asyncio.run(emit_answers(_execute_trial, trials))
    finally:
        for rules, *_ in trials:
            rules.close()


async def _execute_trial(trial: tuple[Any, ...]) -> bytes:
    rules, key, ordinal, sample, experiment, attempt = trial
    result = await run_trial(rules, key, ordinal, sample, experiment, attempt=attempt)
    return EvalReply(result, 0).to_wire()


def failed(request: EvalRequest, outcome: Outcome, stage: Stage, error: str) -> EvalResult:
    """Return the result of a request that could not be executed to its end."""
    return failed_result(request.key, request.ordinal, request.attempt, outcome, stage, error)
