"""Handles one request: refuses, executes or isolates it, and passes its result to the outbox."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from fairtrial.base.isolation import ChildDiedError
from fairtrial.base.metrics import TRIAL_SECONDS
from fairtrial.errors import LeaseLostError
from fairtrial.fleet.messages import EvalRequest
from fairtrial.fleet.worker.code_version import FingerprintCheck
from fairtrial.fleet.worker.config import EvalLoopConfig
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.fleet.worker.execution import SuspectExecutor, TrialExecutor, failed
from fairtrial.fleet.worker.jobs import Job
from fairtrial.fleet.worker.outbox import Outbox


class RequestHandler:
    """Handles requests for trials.

        other code ──> handed back              nowhere to deliver to ──> dead letter
        suspected ──> executed in a child       all others ──> executed here

    Args:
        executor: Executes trials in this process.
        suspects: Executes suspected poison messages in child processes.
        outbox: Delivers results.
        code: Detects requests made from other code.
        config: Settings.
        counters: The counters to update.
        has_address: Whether results have a destination if a request has no `reply_to`.
    """

    def __init__(
        self,
        executor: TrialExecutor,
        suspects: SuspectExecutor,
        outbox: Outbox,
        code: FingerprintCheck,
        config: EvalLoopConfig,
        counters: LoopCounters,
        *,
        has_address: bool,
    ) -> None:
        self._executor = executor
        self._suspects = suspects
        self._outbox = outbox
        self._code = code
        self._policy = config.dlq
        self._counters = counters
        self._has_address = has_address

    async def handle(self, job: Job[EvalRequest]) -> None:
        """Handle one request; the worker settles errors that this raises, according to its policy."""
        message = job.message
        if not self._code.matches(message.body):
            await self._code.refuse(message)
            return
        if not self._has_address and message.reply_to is None:
            # The result could not be delivered, so do not pay for it.
            why = "the request names no mailbox for its result, and the worker has none"
            await self._outbox.single.set_aside(message, why)
            return
        self._code.accept()
        began = time.monotonic()
        try:
            if message.expiries and self._policy.treatment(message.expiries) == "run_isolated":
                result = await self._suspects.run(job)
            else:
                result = await self._executor.run(message.body)
        except (LeaseLostError, asyncio.CancelledError):
            raise
        except ChildDiedError as error:
            self._counters.crashes += 1
            await self._outbox.single.dead_letter(job, f"the trial crashes its process: {error}", error)
            return
        except BaseException as error:  # User code may raise anything, KeyboardInterrupt too.
            if job.orphaned:
                return
            if self._policy.verdict(error, message.delivery_count) != "dead_letter":
                raise
            reason = f"given up after {message.delivery_count} deliveries: {error!r}"
            await self._outbox.single.dead_letter(job, reason, error)
            return
        if job.orphaned:
            return  # Too late: a timeout is being delivered as its result.
        TRIAL_SECONDS.observe(time.monotonic() - began, result.outcome)
        job.executed()
        if message.delivery_count > 1:
            result = replace(result, metadata={**result.metadata, "deliveries": message.delivery_count})
        self._outbox.put(job, result)

    async def handle_late(self, job: Job[EvalRequest]) -> None:
        """Deliver a timeout for a trial whose code ignored its cancellation."""
        seconds = self._executor.rules.longest_seconds
        text = f"the trial did not end within {seconds:g} s and ignored its cancellation"
        self._outbox.put(job, failed(job.message.body, "timeout", "task", text))
