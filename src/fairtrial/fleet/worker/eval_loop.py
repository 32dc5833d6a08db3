"""The worker that executes and scores trials."""

from __future__ import annotations

import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Generic

from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.messages import EvalRequest, ExpectedT, InputT, MainLoopRequest, MainLoopResult, new_id
from fairtrial.fleet.worker.code_version import FingerprintCheck, WorkerAnnouncement
from fairtrial.fleet.worker.config import EvalLoopConfig
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.fleet.worker.execution import SuspectExecutor, TrialExecutor, executor_of_task, known_types
from fairtrial.fleet.worker.isolated import ExecuteInChild
from fairtrial.fleet.worker.one_transaction import delivery_to
from fairtrial.fleet.worker.outbox import Outbox
from fairtrial.fleet.worker.remote import RemoteMainLoop
from fairtrial.fleet.worker.request_handler import RequestHandler
from fairtrial.fleet.worker.sessions import SessionStore
from fairtrial.fleet.worker.worker import Worker, run_interruptibly, worker_from_config
from fairtrial.mailbox.body import bind_body_type
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.runs.logs import log_fields
from fairtrial.scoring.evaluator import Evaluator, Scorer
from fairtrial.store.protocol import RunStore
from fairtrial.trials.result import EvalResult, OutputT
from fairtrial.trials.run_trial import TrialRules


class EvalLoop(Generic[InputT, OutputT, ExpectedT]):  # noqa: UP046 - they have defaults
    """Receives `EvalRequest`s, executes and scores each trial, delivers the result, then acknowledges the request.

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
        self.config = settings = config or EvalLoopConfig()
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
                worker=self.name,
                timeout_seconds=settings.mainloop_timeout,
                sessions=sessions,
                output_type=output_type,
                evaluator=evaluator,
                seed=settings.seed,
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
        handler = RequestHandler(
            self._executor,
            self._suspects,
            Outbox(self._delivery, requests, self.name, settings, counters),
            FingerprintCheck(settings, counters, lambda seconds: self._worker.pause(seconds)),
            settings,
            counters,
            has_address=results is not None,
        )
        self._worker: Worker[EvalRequest] = worker_from_config(
            requests,
            handler.handle,
            settings,
            counters,
            hold_seconds=settings.hold_seconds(self._executor.rules.longest_seconds, "a trial with its scoring"),
            handle_late=handler.handle_late,
        )

    def __repr__(self) -> str:
        return f"<EvalLoop {self.name} on {self._requests.name}>"

    @property
    def beat(self) -> float:
        """The time of the last heartbeat on the clock `time.monotonic()`: about once a second while the loop runs."""
        return self._worker.beat

    @property
    def running(self) -> bool:
        """Whether `run` is in progress."""
        return self._worker.running

    @property
    def ready(self) -> bool:
        """Whether `run` is in progress and has reached its mailbox."""
        return self._worker.ready

    def stop(self) -> None:
        """Receive no more and end: work in flight may finish within `drain_seconds`, the rest is handed back.

        May be called from any thread, and from a signal handler.
        """
        self._worker.stop()

    def hurry(self) -> None:
        """Receive no more and end now: work in flight is cancelled and handed back, as after a second signal."""
        self._worker.hurry()

    async def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Work until stopped.

        Args:
            max_iterations: End after this many iterations. An iteration waits up to `wait_seconds` for work, executes
                all messages that are in the mailbox by then, `concurrency` at a time, and leaves later messages to the
                next iteration. So `max_iterations=1` after `submit_dataset` executes the whole dataset.
            until_empty: End when the mailbox is empty and no message is in flight or waiting for a retry, on any
                worker, and this has been so for `empty_seconds`. Unlike an iteration, this includes messages sent
                meanwhile and does not wait for the first one.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(log_fields(worker=self.name))
            if self._remote is not None:
                await stack.enter_async_context(self._remote)
            stack.callback(self._executor.rules.isolated.close)
            stack.callback(self._delivery.close)
            await stack.enter_async_context(self._announcement)
            await self._worker.run(max_iterations=max_iterations, until_empty=until_empty)

    def run_sync(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Call `run` from synchronous code. SIGTERM and Ctrl-C call `stop`, a second signal `hurry`; then this returns.

        Signals are handled only in the main thread, and only if the program has no handlers of its own. After Ctrl-C
        this raises KeyboardInterrupt.
        """
        call = partial(self.run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.hurry, self.config.drain_seconds)

    async def execute(self, request: EvalRequest) -> EvalResult:
        """Execute and score one request in this process."""
        return await self._executor.execute(request)
