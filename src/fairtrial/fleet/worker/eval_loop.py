"""A worker that scores: it checks the version of the code and handles requests."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Generic, Self

from fairtrial.base.isolation import ChildDiedError
from fairtrial.base.metrics import TRIAL_SECONDS
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxError
from fairtrial.fleet.messages import EvalRequest, ExpectedT, InputT, MainLoopRequest, MainLoopResult, new_id
from fairtrial.fleet.worker.config import EvalLoopConfig, LoopCounters
from fairtrial.fleet.worker.execution import (
    ExecuteInChild,
    SuspectExecutor,
    TrialExecutor,
    executor_of_task,
    failed,
    known_types,
)
from fairtrial.fleet.worker.jobs import Job
from fairtrial.fleet.worker.outbox import Outbox, delivery_to
from fairtrial.fleet.worker.remote import RemoteMainLoop
from fairtrial.fleet.worker.sessions import SessionStore
from fairtrial.fleet.worker.worker import Worker, WorkerLoop
from fairtrial.mailbox.body import bind_body_type
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.mailbox.server import ANNOUNCEMENT_SECONDS, announce
from fairtrial.runs.events import log_fields
from fairtrial.scoring.evaluator import Evaluator, Scorer
from fairtrial.store.protocol import RunStore
from fairtrial.trials.result import EvalResult, OutputT
from fairtrial.trials.run_trial import TrialRules

_log = logging.getLogger("fairtrial.fleet")
_ANNOUNCE_SECONDS = ANNOUNCEMENT_SECONDS / 3
_NAME_SHOWN = 60
_MAX_LOGGED = 1000


class FingerprintCheck:
    """Hands back requests with a different fingerprint, so that a matching worker can take them.

    Receiving backs off as such requests follow each other: if only requests for other code are queued, receiving them
    again at once is useless.

    Args:
        config: Settings.
        counters: The counters to update.
        pause: Stops receiving for this many seconds.
    """

    def __init__(self, config: EvalLoopConfig, counters: LoopCounters, pause: Callable[[float], None]) -> None:
        self._config = config
        self._counters = counters
        self._pause = pause
        self._in_a_row = 0
        self._logged: set[str] = set()

    def matches(self, request: EvalRequest) -> bool:
        """Return whether the fingerprints of request and worker match, if both have one."""
        here, there = self._config.fingerprint, request.fingerprint
        return not here or not there or here == there or self._config.allow_drift

    def accept(self) -> None:
        """Reset the backoff after a matching request."""
        self._in_a_row = 0

    async def refuse(self, message: Message[EvalRequest]) -> None:
        """Hand back a request for other code with a delay, and pause receiving."""
        self._counters.refused += 1
        self._log_once(message.body)
        self._in_a_row += 1
        self._pause(min(self._config.refuse_seconds, 0.05 * self._in_a_row))
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - a delay, not a secret
        await message.hand_back(self._config.refuse_seconds * jitter)

    def _log_once(self, request: EvalRequest) -> None:
        if request.fingerprint in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add(request.fingerprint)
        _log.warning(
            "requests of run %s were made from other code than this worker's (fingerprint %s, here %s) and are "
            "handed back. Start workers with the submitter's code, or with --allow-drift "
            "(EvalLoopConfig.allow_drift)",
            request.key.run_id,
            request.fingerprint,
            self._config.fingerprint,
            extra={"run": request.key.run_id},
        )


class WorkerAnnouncement:
    """Announces a worker and its fingerprint to clients, also while it drains.

    Use it as an async context manager around the work. Announcements expire; the last one is withdrawn.
    """

    def __init__(self, requests: Mailbox[Any], worker: str, config: EvalLoopConfig) -> None:
        self._requests = requests
        self._worker = worker
        self._fingerprint = "" if config.allow_drift else config.fingerprint
        # The name is only displayed and not unique; it must not contain white space.
        self._id = f"{new_id()} {'-'.join(worker.split())[:_NAME_SHOWN]}"
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._repeat())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._announce(0)

    async def _repeat(self) -> None:
        while True:
            await self._announce(ANNOUNCEMENT_SECONDS)
            await asyncio.sleep(_ANNOUNCE_SECONDS)

    async def _announce(self, ttl_seconds: float) -> None:
        try:
            await announce(self._requests, self._id, self._fingerprint, ttl_seconds)
        except MailboxError as error:
            _log.debug("worker %s could not be announced: %s", self._worker, error)


class EvalLoop(WorkerLoop, Generic[InputT, OutputT, ExpectedT]):  # noqa: UP046 - they have defaults
    """Receives `EvalRequest`s, executes and scores each trial, delivers the result, then acknowledges the request.

        other code ──> handed back              nowhere to deliver to ──> dead letter
        suspected ──> executed in a child       all others ──> executed here

    Exactly one of `rules`, `loop` and `mainloop_requests` is required; the last two also require an evaluator. No
    error in a request, user code, a mailbox or a store ends the loop.

    Args:
        requests: The mailbox of the requests.
        evaluator: Scores outputs.
        loop: Executes inputs in this process: a MainLoop, or any task.
        mainloop_requests: Executes inputs remotely: the mailbox of MainLoops.
        rules: A suite's tasks, experiments, evaluator and timeouts.
        results: The destination of results: a mailbox or a store; each request's `reply_to` by default.
        config: Settings.
        input_type: The type of inputs. By default the type that the request names, if the annotations of the loop, the
            task or the evaluator mention it.
        expected_type: The type of expected values; found in the same way by default.
        output_type: The type of outputs from `mainloop_requests`.
        replies: The mailbox for answers from `mainloop_requests`; created next to it by default.
        sessions: The session store in which MainLoops save sessions that are not sent with their results.
        isolated: Called in a child process to execute suspected poison messages, with the bytes of several requests
            (see `emit_answers`). By default, the task and the evaluator are sent to the child; a worker that knows the
            location of its suite loads it there instead.
        name: The name of this worker in results.
        dataset: The dataset of the suite, with `rules`. A sample of it that equals the requested one is used itself.
    """

    def __init__(
        self,
        *,
        requests: Mailbox[EvalRequest[InputT, ExpectedT]],
        evaluator: Evaluator | Scorer | None = None,
        loop: Any = None,
        mainloop_requests: Mailbox[MainLoopRequest] | None = None,
        rules: TrialRules | None = None,
        results: Mailbox[Any] | RunStore | None = None,
        config: EvalLoopConfig | None = None,
        input_type: Any = None,
        expected_type: Any = None,
        output_type: Any = object,
        replies: Mailbox[MainLoopResult] | None = None,
        sessions: SessionStore | None = None,
        isolated: ExecuteInChild | None = None,
        name: str | None = None,
        dataset: Dataset[Any, Any] | None = None,
    ) -> None:
        if sum(given is not None for given in (rules, loop, mainloop_requests)) != 1:
            raise ConfigurationError("EvalLoop requires exactly one of loop, mainloop_requests and rules")
        if (evaluator is None) is (rules is None):
            raise ConfigurationError("EvalLoop requires an evaluator unless rules are given")
        bind_body_type(requests, EvalRequest)
        self.config: EvalLoopConfig = config or EvalLoopConfig()
        settings = self.config
        self.name = name or f"{socket.gethostname()}.{os.getpid()}.{new_id()[:6]}"
        self.counters = counters = LoopCounters()
        self._requests = requests
        self._remote: RemoteMainLoop | None = None
        if mainloop_requests is not None:
            if replies is not None:
                bind_body_type(replies, MainLoopResult)
            self._remote = RemoteMainLoop(
                mainloop_requests,
                replies,
                settings,
                worker=self.name,
                sessions=sessions,
                output_type=output_type,
                evaluator=evaluator,
            )
        types = (input_type, expected_type)
        if rules is None:
            self._executor = executor_of_task(loop, self._remote, evaluator, settings, types, counters)
        else:
            known = known_types(rules, dataset)
            self._executor = TrialExecutor(rules, None, None, types, counters, known, dataset)
        self._suspects = SuspectExecutor(self._executor, settings, counters, isolated)
        self._announcement = WorkerAnnouncement(requests, self.name, settings)
        self._delivery = delivery_to(results, requests, counters)
        self._outbox = Outbox(self._delivery, requests, self.name, settings, counters)
        self._has_address = results is not None
        longest = settings.hold_seconds(self._executor.rules.longest_seconds, "a trial with its scoring")
        self._worker: Worker[EvalRequest] = Worker(
            requests, self._handle, settings, counters, hold_seconds=longest, handle_late=self._handle_late
        )
        self._code = FingerprintCheck(settings, counters, self._worker.pause)

    def __repr__(self) -> str:
        return f"<EvalLoop {self.name} on {self._requests.name}>"

    async def _open_resources(self, stack: AsyncExitStack) -> None:
        stack.enter_context(log_fields(worker=self.name))
        if self._remote is not None:
            await stack.enter_async_context(self._remote)
        stack.callback(self._executor.rules.isolated.close)
        stack.callback(self._delivery.close)
        await stack.enter_async_context(self._announcement)

    async def execute(self, request: EvalRequest) -> EvalResult:
        """Execute and score one request in this process."""
        return await self._executor.execute(request)

    async def _handle(self, job: Job[EvalRequest]) -> None:
        """Handle one request; the worker settles errors that this raises, according to its policy."""
        message = job.message
        if not self._code.matches(message.body):
            await self._code.refuse(message)
            return
        if not self._has_address and message.reply_to is None:
            # The result could not be delivered, so do not pay for it.
            why = "the request names no mailbox for its result, and the worker has none"
            await self._outbox.set_aside(message, why)
            return
        self._code.accept()
        began = time.monotonic()
        try:
            if message.expiries and self.config.dlq.treatment(message.expiries) == "run_isolated":
                result = await self._suspects.run(job)
            else:
                result = await self._executor.run(message.body)
        except (LeaseLostError, asyncio.CancelledError):
            raise
        except ChildDiedError as error:
            self.counters.crashes += 1
            await self._outbox.dead_letter(job, f"the trial crashes its process: {error}", error)
            return
        except BaseException as error:  # User code may raise anything, KeyboardInterrupt too.
            if job.orphaned:
                return
            if self.config.dlq.verdict(error, message.delivery_count) != "dead_letter":
                raise
            reason = f"given up after {message.delivery_count} deliveries: {error!r}"
            await self._outbox.dead_letter(job, reason, error)
            return
        if job.orphaned:
            return  # Too late: a timeout is being delivered as its result.
        TRIAL_SECONDS.observe(time.monotonic() - began, result.outcome)
        job.executed()
        if message.delivery_count > 1:
            result = replace(result, metadata={**result.metadata, "deliveries": message.delivery_count})
        self._outbox.put(job, result)

    async def _handle_late(self, job: Job[EvalRequest]) -> None:
        """Deliver a timeout for a trial whose code ignored its cancellation."""
        seconds = self._executor.rules.longest_seconds
        text = f"the trial did not end within {seconds:g} s and ignored its cancellation"
        self._outbox.put(job, failed(job.message.body, "timeout", "task", text))
