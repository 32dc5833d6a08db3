"""The settings of a worker's loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from fairtrial.backoff import patience_seconds
from fairtrial.errors import ConfigurationError
from fairtrial.mailbox.dead_letters import DLQPolicy


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """How a loop takes work from its mailbox.

    Attributes:
        concurrency: How many messages are executed at once.
        lease_seconds: The lease of a message; renewed for as long as it is worked on.
        wait_seconds: How long one receive waits for work.
        visibility_seconds: How long a message may be held in all, renewals included. Worked out unless given; given,
            it must leave room for everything that can happen to a message (see `buffer_seconds`).
        buffer_seconds: The room to leave beside timeouts, for settling and for a machine that is busy.
        delivery_seconds: How long to try to deliver a result that its receiver does not take, before its message is set
            aside. While a queue or a store is unavailable, results are kept as long as the process lives.
        drain_seconds: How long work in flight may go on after `stop` before it is handed back.
        stall_seconds: When given, leases are not renewed while the event loop has not turned for this long.
        isolated_processes: How many child processes execute suspected poison messages at once. They share
            `concurrency`; each has its own copy of what the suite's lifespan opens.
        dlq: When to try again, when to isolate, and when to give up.
    """

    concurrency: int = 10
    lease_seconds: float = 60.0
    wait_seconds: float = 20.0
    visibility_seconds: float | None = None
    buffer_seconds: float = 30.0
    delivery_seconds: float = field(default_factory=patience_seconds)
    drain_seconds: float = 30.0
    stall_seconds: float | None = None
    isolated_processes: int = 4
    dlq: DLQPolicy = field(default_factory=DLQPolicy)

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise ConfigurationError(f"concurrency is a whole number of at least 1, not {self.concurrency!r}")
        if type(self.isolated_processes) is not int or self.isolated_processes < 1:
            raise ConfigurationError(
                f"isolated_processes must be a whole number of at least 1 (got {self.isolated_processes!r})"
            )
        for setting in fields(self):
            if not setting.name.endswith(("_seconds", "_timeout")):
                continue
            value = getattr(self, setting.name)
            if value is None and setting.name in ("visibility_seconds", "stall_seconds"):
                continue
            least = (
                0 if setting.name in ("wait_seconds", "drain_seconds", "buffer_seconds", "delivery_seconds") else 1e-9
            )
            if not isinstance(value, int | float) or not math.isfinite(value) or value < least:
                raise ConfigurationError(f"{type(self).__name__}.{setting.name} cannot be {value!r}")

    def hold_seconds(self, needed: float, what: str) -> float:
        """How long a message may be held when handling it may take `needed` seconds.

        Raises:
            ConfigurationError: `visibility_seconds` is too short for that: work would be lost on its last metres.
        """
        wanted = needed + self.buffer_seconds
        if self.visibility_seconds is None:
            return wanted
        if self.visibility_seconds < wanted:
            raise ConfigurationError(
                f"visibility_seconds={self.visibility_seconds:g} is too short: {what} may take {needed:g} s, and "
                f"buffer_seconds={self.buffer_seconds:g}; make it at least {wanted:g}, or leave it out"
            )
        return self.visibility_seconds


@dataclass(frozen=True, slots=True)
class EvalLoopConfig(LoopConfig):
    """The settings of an `EvalLoop`.

    Attributes:
        mainloop_timeout: How long to wait for a MainLoop behind a mailbox.
        timeout_seconds: How long a task may take, and then again its scoring; a suite's rules bring their own.
        max_retries: How often a trial whose task failed is tried again at once; a suite's rules bring their own.
        seed: The run's seed; a suite's rules bring their own.
        fingerprint: What this worker's suite is made of; requests made from something else are refused.
        allow_drift: Run them anyway.
        refuse_seconds: How long a refused request is kept from coming back.
    """

    mainloop_timeout: float = 300.0
    timeout_seconds: float = 300.0
    max_retries: int = 0
    seed: int = 0
    fingerprint: str = ""
    allow_drift: bool = False
    refuse_seconds: float = 5.0

    def __post_init__(self) -> None:
        LoopConfig.__post_init__(self)  # Not super(): a class with slots is made anew, and super() knows the old one.
        if self.max_retries < 0 or self.seed < 0:
            raise ConfigurationError("max_retries and seed are at least 0")


@dataclass(frozen=True, slots=True)
class MainLoopConfig(LoopConfig):
    """The settings of a `MainLoop` over a mailbox.

    Attributes:
        timeout_seconds: How long one input may take; a request may ask for less.
    """

    timeout_seconds: float = 300.0
