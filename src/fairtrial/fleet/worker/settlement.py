"""Settles messages whose handler failed, was cancelled or lost its lease."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.mailbox.dead_letters import DLQPolicy
from fairtrial.mailbox.protocol import Message
from fairtrial.mailbox.reading import RETURN_SECONDS
from fairtrial.runs.logs import trial_fields
from fairtrial.trials.keys import TrialKey

_log = logging.getLogger("fairtrial.fleet")


class MessageSettler:
    """Settles messages that their handler did not settle. Never raises.

    Args:
        mailbox: The name of their mailbox, for the log.
        policy: When to retry, and when to give up.
        counters: The counters to update.
    """

    def __init__(self, mailbox: str, policy: DLQPolicy, counters: LoopCounters) -> None:
        self._mailbox = mailbox
        self._policy = policy
        self._counters = counters

    def record_loss(self, message: Message[Any]) -> None:
        """Count a message whose lease was lost; this worker can no longer settle it."""
        self._counters.lease_losses += 1
        _log.warning("lost the lease of message %s of %s", message.id, self._mailbox, extra=message_fields(message))

    async def hand_back(self, message: Message[Any]) -> None:
        """Return an unfinished message, so that another worker receives it at once."""
        self._counters.handed_back += 1
        await self._settle(message.hand_back)

    async def fail(self, message: Message[Any], error: BaseException) -> None:
        """Return a message for a retry, or make it a dead letter, after its handler failed."""
        named, fields = (message.id, self._mailbox), message_fields(message)
        if message.settled:
            _log.error("error after message %s of %s was settled: %r", *named, error, extra=fields)
        elif self._policy.verdict(error, message.delivery_count) == "dead_letter":
            self._counters.dead_lettered += 1
            _log.error("dead-lettering message %s of %s: %r", *named, error, extra=fields)
            await self._settle(lambda: message.dead_letter(str(error), error=type(error).__name__))
        else:
            self._counters.retried += 1
            delay = self._policy.delay(message.delivery_count)
            _log.warning("message %s of %s will be redelivered in %.1f s: %r", *named, delay, error, extra=fields)
            await self._settle(lambda: message.nack(delay))

    async def _settle(self, settle: Callable[[], Awaitable[None]]) -> None:
        try:
            await retry_while_unavailable(
                settle, f"settling a message of {self._mailbox}", _log, seconds=RETURN_SECONDS
            )
        except Exception as error:
            _log.warning("a message of %s will be redelivered when its lease expires: %s", self._mailbox, error)


def message_fields(message: Message[Any]) -> dict[str, Any]:
    """Return the trial that a message asks for, as fields of a log record; bodies may have any type."""
    key = getattr(message.body, "key", None)
    return trial_fields(key, getattr(message.body, "attempt", None)) if isinstance(key, TrialKey) else {}
