"""The worker that executes and scores trials."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from fairtrial.backoff import UNAVAILABLE
from fairtrial.data.sample import Sample
from fairtrial.errors import (
    BodyError,
    CodecError,
    ConfigurationError,
    FairtrialError,
    LeaseLostError,
    MailboxConnectionError,
    MailboxError,
    MessageTooLargeError,
    ReplyNotAvailableError,
)
from fairtrial.fleet.config import EvalLoopConfig
from fairtrial.fleet.counters import LoopCounters
from fairtrial.fleet.delivery import delivery_to
from fairtrial.fleet.isolated import ExecuteInChild, SuspectPool, emit_answers
from fairtrial.fleet.remote import RemoteMainLoop, transport_problem
from fairtrial.fleet.sessions import SessionStore
from fairtrial.fleet.wire import EvalReply, EvalRequest, MainLoopRequest, MainLoopResult, new_id, without_payload
from fairtrial.fleet.worker import Job, Worker, backoff, run_interruptibly
from fairtrial.isolation import ChildDiedError, IsolatedError, NotSendableError
from fairtrial.logs import log_fields, trial_fields
from fairtrial.mailbox.bulk import acknowledge_all, announce
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.metrics import TRIAL_SECONDS
from fairtrial.scoring.evaluator import Evaluator, Scorer, resolve
from fairtrial.session.session import Session
from fairtrial.store.protocol import RunStore
from fairtrial.trials.context import TrialContext
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.result import EvalResult, Outcome, Stage
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import ResolvedTask, resolve_task

_log = logging.getLogger("fairtrial.fleet")
_REPLY_TTL = 120.0
_KNOWN_EXPERIMENTS = 256
_DEPARTURES = 2
_MAX_DEPARTING = 500
_ANNOUNCE_SECONDS = 5.0
_ANNOUNCEMENT_TTL = 20.0
_REOPEN_SECONDS = 5.0  # How long a reply mailbox that does not exist is waited for.


class EvalLoop:
    """Receives `EvalRequest`s, executes and scores each trial, delivers the result, and only then acknowledges.

    Exactly one of `rules`, `loop` and `mainloop_requests` says what executes them; the last two need an evaluator.
    Nothing that a request, user code, a mailbox or a store does ends the loop.

    Args:
        requests: Where requests come from.
        evaluator: Scores outputs.
        loop: Executes inputs here: a MainLoop, or any task.
        mainloop_requests: Executes inputs elsewhere: the mailbox of MainLoops.
        rules: A suite's tasks, experiments, evaluator and timeouts, all together.
        results: Where results go: a mailbox, or a store; to each request's `reply_to` unless given.
        config: Settings.
        input_type: What inputs are read as.
        expected_type: What expected values are read as.
        output_type: What outputs from `mainloop_requests` are read as.
        replies: The mailbox for answers from `mainloop_requests`; made beside it unless given.
        sessions: Where MainLoops save sessions that do not travel in their results.
        isolated: Called in a child process to execute suspected poison messages, with the bytes of several requests
            (see `emit_answers`). Unless given, the task and the evaluator are sent to the child; a worker that knows
            where its suite is loads it there instead.
        name: What results call this worker.
    """

    def __init__(
        self,
        *,
        requests: Mailbox[EvalRequest],
        evaluator: Evaluator | Scorer | None = None,
        loop: Any = None,
        mainloop_requests: Mailbox[MainLoopRequest] | None = None,
        rules: TrialRules | None = None,
        results: Mailbox[Any] | RunStore | None = None,
        config: EvalLoopConfig | None = None,
        input_type: Any = object,
        expected_type: Any = object,
        output_type: Any = object,
        replies: Mailbox[MainLoopResult] | None = None,
        sessions: SessionStore | None = None,
        isolated: ExecuteInChild | None = None,
        name: str | None = None,
    ) -> None:
        if sum(given is not None for given in (rules, loop, mainloop_requests)) != 1:
            raise ConfigurationError("an EvalLoop needs exactly one of loop, mainloop_requests and rules")
        if (evaluator is None) is (rules is None):
            raise ConfigurationError("an EvalLoop needs an evaluator, unless rules bring one along")
        self.config = config or EvalLoopConfig()
        self.name = name or f"{socket.gethostname()}.{os.getpid()}.{new_id()[:6]}"
        self.counters = LoopCounters()
        self._id = new_id()
        self._requests = requests
        self._types = (input_type, expected_type)
        self._delivery = delivery_to(results, requests)
        self._unreachable: dict[str, float] = {}  # Reply address -> when it is given up; grows only with made-up ones.
        self._has_address = results is not None
        self._remote: RemoteMainLoop | None = None
        self._replies: Mailbox[MainLoopResult] | None = None
        if mainloop_requests is not None:
            self._replies = None if replies is not None else _reply_mailbox(mainloop_requests, self.name)
            self._remote = RemoteMainLoop(
                mainloop_requests,
                replies or self._replies,  # type: ignore[arg-type]  # one of them is there
                timeout_seconds=self.config.mainloop_timeout,
                sessions=sessions,
                output_type=output_type,
                seed=self.config.seed,
            )
        self._task: ResolvedTask | None = None
        if rules is None:
            self._task = resolve_task(loop if self._remote is None else self._remote)
            rules = self._own_rules(evaluator)
        self._rules = rules
        self._indexes = {experiment.name: index for index, experiment in enumerate(rules.experiments)}
        self._known: OrderedDict[Any, TrialRules] = OrderedDict()
        self._trial_seconds = rules.longest_seconds
        self._loads_in_child = isolated is not None
        self._suspects = SuspectPool(
            isolated or execute_trials,
            rules.isolated,
            processes=self.config.isolated_processes,
            concurrency=self.config.concurrency,
            limit_seconds=self._trial_seconds,
            buffer_seconds=self.config.buffer_seconds,
            stall_seconds=self.config.lease_seconds,
        )
        self._suspected = 0
        self._leaving: list[tuple[Job[EvalRequest], EvalReply]] = []
        self._departures: set[asyncio.Task[None]] = set()
        self._refusals = 0
        self._told: set[str] = set()
        settings = self.config
        self._worker: Worker[EvalRequest] = Worker(
            requests,
            self._handle,
            concurrency=settings.concurrency,
            lease_seconds=settings.lease_seconds,
            hold_seconds=settings.hold_seconds(self._trial_seconds, "a trial with its scoring"),
            wait_seconds=settings.wait_seconds,
            drain_seconds=settings.drain_seconds,
            stall_seconds=settings.stall_seconds,
            policy=settings.dlq,
            counters=self.counters,
            handle_late=self._handle_late,
        )

    def __repr__(self) -> str:
        return f"<EvalLoop {self.name} on {self._requests.name}>"

    @property
    def beat(self) -> float:
        """When the loop last turned, on the clock `time.monotonic()`: about once a second while it lives."""
        return self._worker.beat

    @property
    def running(self) -> bool:
        """Whether `run` is under way."""
        return self._worker.running

    @property
    def ready(self) -> bool:
        """Whether `run` is under way and has reached its mailbox."""
        return self._worker.running and self._worker.reached

    def stop(self) -> None:
        """Receive no more and end: what is in flight may finish for `drain_seconds`, the rest is handed back.

        May be called from any thread, and from a signal handler.
        """
        self._worker.stop()

    async def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Work until stopped.

        Args:
            max_iterations: End after so many receives; what they brought is finished.
            until_empty: End when the mailbox is empty, nothing in flight elsewhere either.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(log_fields(worker=self.name))
            if self._replies is not None:
                await stack.enter_async_context(self._replies)
            if self._remote is not None:
                await stack.enter_async_context(self._remote)
            stack.callback(self._rules.isolated.close)
            announcing = asyncio.get_running_loop().create_task(self._announce())
            stack.push_async_callback(self._withdraw_announcement, announcing)
            await self._worker.run(max_iterations=max_iterations, until_empty=until_empty)

    def run_sync(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """`run`, from ordinary code."""
        call = partial(self.run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.config.drain_seconds)

    async def _announce(self) -> None:
        """Tell clients that there is a worker, and which code it has; also while it drains, since it has their work."""
        while True:
            await self._quietly_announce(_ANNOUNCEMENT_TTL)
            await asyncio.sleep(_ANNOUNCE_SECONDS)

    async def _withdraw_announcement(self, announcing: asyncio.Task[None]) -> None:
        announcing.cancel()
        await asyncio.wait([announcing])
        await self._quietly_announce(0)

    async def _quietly_announce(self, seconds: float) -> None:
        code = "" if self.config.allow_drift else self.config.fingerprint
        try:
            await announce(self._requests, self._id, code, seconds)
        except MailboxError as error:
            _log.debug("worker %s could not be announced: %s", self.name, error)

    async def execute(self, request: EvalRequest) -> EvalResult:
        """Execute and score one request, here and now."""
        try:
            rules, experiment, sample = self._prepare(request)
        except (CodecError, ConfigurationError) as error:
            return failed(request, "task_error", "setup", str(error))
        result = await run_trial(rules, request.key, request.ordinal, sample, experiment, attempt=request.attempt)
        if result.metadata.get("orphaned"):
            self.counters.hung += 1
        return result

    def _prepare(self, request: EvalRequest) -> tuple[TrialRules, int, Sample[Any, Any]]:
        rules, experiment = self._rules_for(request)
        if request.tags:
            rules = replace(rules, tags=tuple(request.tags.items()))
        return rules, experiment, request.typed(*self._types)

    async def _for_child(self, request: EvalRequest) -> Any:
        """What a child process executes for a request; a task that is elsewhere is asked from here and scored there."""
        if self._loads_in_child:
            return request.to_wire()
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

    async def _handle(self, job: Job[EvalRequest]) -> None:
        message = job.message
        request = message.body
        settings = self.config
        if self._drifted(request):
            await self._refuse(message, request)
            return
        if not self._has_address and message.reply_to is None:
            # Nobody would ever see the result: not worth paying for.
            await self._set_aside(message, "the request names no mailbox for its result, and the worker has none")
            return
        self._refusals = 0
        try:
            began = time.monotonic()
            if message.expiries and settings.dlq.treatment(message.expiries) == "run_isolated":
                reply = await self._run_suspected(job, request)
            else:
                reply = self._reply(request, await self._run(request))
        except (LeaseLostError, asyncio.CancelledError):
            raise
        except ChildDiedError as error:
            self.counters.crashes += 1
            await self._dead_letter(job, request, f"the trial ends its process: {error}", error)
            return
        except BaseException as error:  # User code may raise anything, KeyboardInterrupt too.
            if job.orphaned:
                return
            if settings.dlq.verdict(error, message.delivery_count) == "dead_letter":
                reason = f"given up after {message.delivery_count} deliveries: {error!r}"
                await self._dead_letter(job, request, reason, error)
                return
            raise
        if job.orphaned:
            return  # Too late: its result is a timeout, and on its way.
        TRIAL_SECONDS.observe(time.monotonic() - began, reply.result.outcome)
        job.executed()
        self._hand_over(job, reply)

    async def _handle_late(self, job: Job[EvalRequest]) -> None:
        """A trial whose code goes on although it was cancelled has timed out, whatever it thinks of it."""
        request = job.message.body
        text = f"the trial did not end within {self._trial_seconds:g} s and goes on although it was cancelled"
        self._hand_over(job, self._reply(request, failed(request, "timeout", "task", text)))

    def _hand_over(self, job: Job[EvalRequest], reply: EvalReply) -> None:
        """Put a result with the others that leave next: what is ready in one turn, or meanwhile, leaves together."""
        job.detach()
        self._leaving.append((job, reply))
        if len(self._departures) < _DEPARTURES:
            departure = asyncio.get_running_loop().create_task(self._depart())
            self._departures.add(departure)
            departure.add_done_callback(self._departures.discard)

    async def _depart(self) -> None:
        """Deliver results and acknowledge their requests; whatever does not go smoothly goes its own way."""
        while self._leaving:
            batch, self._leaving = self._leaving[:_MAX_DEPARTING], self._leaving[_MAX_DEPARTING:]
            try:
                await self._delivery.deliver_all([(job.message, reply) for job, reply in batch])
            except BaseException as error:
                self.counters.delivery_retries += len(batch)
                for job, reply in batch:
                    job.resume(partial(self._finish, reply=reply))
                if not isinstance(error, Exception):
                    raise
                continue
            outcomes = self.counters.outcomes
            for _, reply in batch:
                outcomes[reply.result.outcome] += 1
            try:
                kept = await acknowledge_all(self._requests, [job.message for job, _ in batch])
            except BaseException as error:
                for job, _ in batch:
                    job.resume(self._acknowledge)
                if not isinstance(error, Exception):
                    raise
                continue
            for (job, _), ours in zip(batch, kept, strict=True):
                self.counters.finished += ours
                job.end(lost=not ours)

    async def _finish(self, job: Job[EvalRequest], *, reply: EvalReply) -> None:
        if await self._deliver(job, reply):
            await self._acknowledge(job)

    async def _acknowledge(self, job: Job[EvalRequest]) -> None:
        await self._settled(job, job.message.acknowledge)

    def _drifted(self, request: EvalRequest) -> bool:
        here, there = self.config.fingerprint, request.fingerprint
        return bool(here and there) and here != there and not self.config.allow_drift

    async def _run(self, request: EvalRequest) -> EvalResult:
        if self._remote is None:
            return await self.execute(request)
        problems: list[BaseException] = []
        transport_problem.set(problems)
        result = await self.execute(request)
        if problems and result.outcome in ("task_error", "timeout"):
            raise problems[-1]  # Not the trial's fault: try again, or give up, as the policy says.
        return result

    async def _run_suspected(self, job: Job[EvalRequest], request: EvalRequest) -> EvalReply:
        """Execute a suspected poison message in a child process."""
        self.counters.suspects += 1
        self._suspected += 1
        # It may have to wait for those before it, twice, and they may take all the time they have.
        turns = 3 + self._suspected // self.config.isolated_processes
        job.keep_until(time.monotonic() + turns * (self._trial_seconds + self.config.buffer_seconds))
        try:
            try:
                given = await self._for_child(request)
            except (CodecError, ConfigurationError) as error:
                return self._reply(request, failed(request, "task_error", "setup", str(error)))
            try:
                answer = await self._suspects.run(given)
            except TimeoutError:
                text = f"the trial did not end within {self._trial_seconds:g} s in a process of its own, and was killed"
                return self._reply(request, failed(request, "timeout", "task", text))
            return self._reply(request, EvalReply.from_wire(answer).result)
        except ChildDiedError:
            raise
        except (IsolatedError, NotSendableError) as error:
            if job.message.expiries > 1:
                raise
            # It lost one worker, which proves little, and children cannot execute what this process can.
            _log.warning("suspected trial %s is executed in this process: %s", request.key, error)
            return self._reply(request, await self._run(request))
        finally:
            self._suspected -= 1

    async def _deliver(self, job: Job[EvalRequest], reply: EvalReply) -> bool:
        """Deliver a result; False if that could not be done, and its message is settled already."""
        message = job.message
        fields = trial_fields(reply.result.key, reply.result.attempt)
        end = time.monotonic() + self.config.delivery_seconds
        address = message.reply_to or ""
        failures = 0
        replaced = False
        while True:
            try:
                await self._delivery.deliver(message, reply)
            except LeaseLostError:
                raise
            except BodyError as error:
                if isinstance(error, MessageTooLargeError) and (smaller := without_payload(reply)) is not None:
                    _log.warning("the result of %s is delivered in part: %s", reply.result.key, error, extra=fields)
                    reply = smaller
                    continue
                if replaced:
                    raise
                replaced = True
                text = f"the result cannot be delivered: {error}"
                reply = self._reply(message.body, failed(message.body, "task_error", "delivery", text))
                continue
            except Exception as error:
                if not isinstance(error, FairtrialError):
                    raise
                failures += 1
                if isinstance(error, ReplyNotAvailableError):
                    # A client whose Redis lost its data opens its mailbox again within a moment. One that does not is
                    # gone, and its requests must not hold up this worker.
                    end = min(end, self._unreachable.setdefault(address, time.monotonic() + _REOPEN_SECONDS))
                # What is unavailable comes back, and the result was paid for: it is kept while this process lives.
                if time.monotonic() >= end and not isinstance(error, UNAVAILABLE):
                    why = f"the result could not be delivered: {error}"
                    await self._set_aside(message, why, type(error).__name__)
                    return False
                self.counters.delivery_retries += 1
                delay = backoff(failures)
                job.keep_until(max(end, time.monotonic() + delay) + self.config.buffer_seconds)
                said = "the result of %s is delivered again in %.1f s: %s"
                _log.warning(said, reply.result.key, delay, error, extra=fields)
                await asyncio.sleep(delay)
                continue
            self._unreachable.pop(address, None)
            self.counters.outcomes[reply.result.outcome] += 1
            return True

    async def _settled(self, job: Job[EvalRequest], settle: Any) -> None:
        """Settle a message whose result is delivered; a server that is away is asked again while the lease lasts."""
        failures = 0
        while True:
            try:
                await settle()
            except MailboxConnectionError as error:
                failures += 1
                _log.warning("message %s is settled again: %s", job.message.id, error)
                await asyncio.sleep(backoff(failures))
            else:
                self.counters.finished += 1
                return

    async def _dead_letter(
        self, job: Job[EvalRequest], request: EvalRequest, reason: str, error: BaseException
    ) -> None:
        """Set a message aside for good: first its outcome is delivered, so that the run can end."""
        fields = trial_fields(request.key, request.attempt)
        _log.error("trial %s is a dead letter: %s", request.key, reason, extra=fields)
        job.executed()
        if await self._deliver(job, self._reply(request, failed(request, "dead_letter", "task", reason))):
            await self._settled(job, lambda: job.message.dead_letter(reason, error=type(error).__name__))
            self.counters.dead_lettered += 1

    async def _set_aside(self, message: Message[EvalRequest], reason: str, error: str = "") -> None:
        fields = trial_fields(message.body.key, message.body.attempt)
        _log.error("request %s of %s is a dead letter: %s", message.id, self._requests.name, reason, extra=fields)
        await message.dead_letter(reason, error=error)
        self.counters.dead_lettered += 1
        self.counters.finished += 1

    async def _refuse(self, message: Message[EvalRequest], request: EvalRequest) -> None:
        """Give back a request for a suite made of something else: another worker may be the right one."""
        self.counters.refused += 1
        if request.fingerprint not in self._told and len(self._told) < 1000:
            self._told.add(request.fingerprint)
            _log.warning(
                "requests of run %s were made from other code than this worker's (fingerprint %s, here %s): they are "
                "given back. Start workers with the submitter's code, or with --allow-drift "
                "(EvalLoopConfig.allow_drift)",
                request.key.run_id,
                request.fingerprint,
                self.config.fingerprint,
                extra={"run": request.key.run_id},
            )
        self._refusals += 1
        # Nothing but strangers: look less often, or the queue is stirred for nothing.
        self._worker.pause(min(self.config.refuse_seconds, 0.05 * self._refusals))
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - a delay, not a secret
        await message.hand_back(self.config.refuse_seconds * jitter)

    def _reply(self, request: EvalRequest, result: EvalResult) -> EvalReply:
        sample = request.sample if request.echo or self._delivery.needs_sample else None
        return EvalReply(result, request.sample_ordinal, sample, request.request_id, self.name)

    def _own_rules(self, evaluator: Any) -> TrialRules:
        settings = self.config
        # Ours is the clock that decides how long to wait for a MainLoop; the trial's own only catches what hangs.
        remote = settings.mainloop_timeout + settings.buffer_seconds if self._remote is not None else 0.0
        return TrialRules(
            tasks=(),
            experiments=(),
            scorer=resolve(evaluator),
            timeout_seconds=max(settings.timeout_seconds, remote),
            max_retries=settings.max_retries,
            seed=settings.seed,
        )

    def _rules_for(self, request: EvalRequest) -> tuple[TrialRules, int]:
        name = request.key.experiment
        if self._task is None:
            index = self._indexes.get(name)
            if index is None:
                known = ", ".join(self._indexes)
                raise ConfigurationError(f"this worker's suite has no experiment {name!r}; it has {known}")
            return self._rules, index
        which = (name, request.params)
        rules = self._known.get(which)
        if rules is None:
            experiment = Experiment(name, request.params)
            rules = self._known[which] = replace(self._rules, tasks=(self._task,), experiments=(experiment,))
            if len(self._known) > _KNOWN_EXPERIMENTS:
                self._known.popitem(last=False)
        return rules, 0


def execute_trials(trials: Sequence[tuple[Any, ...]]) -> None:
    """Execute trials that were sent to this child process with the rules they need."""
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
    """The result of a trial that was not carried out as it should have been."""
    return EvalResult(
        key=request.key,
        ordinal=request.ordinal,
        outcome=outcome,
        error=error[:10_000],
        stage=stage,
        attempt=request.attempt,
        execution=random.getrandbits(62),
        started_at=time.time(),
    )


def _reply_mailbox(requests: Mailbox[Any], worker: str) -> Mailbox[MainLoopResult]:
    make = getattr(requests, "for_replies", None)
    if make is None:
        raise ConfigurationError(f"{requests!r} cannot make a mailbox for answers: give the EvalLoop replies=...")
    made: Mailbox[MainLoopResult] = make(f"{requests.name[:120]}.replies.{worker[:70]}", MainLoopResult, _REPLY_TTL)
    return made
