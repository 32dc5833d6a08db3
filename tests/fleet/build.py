"""Helpers for tests of loops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from fairtrial import EvalResult, Sample, TrialKey
from fairtrial.fleet import EvalReply, EvalRequest
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, Mailbox

QUICK = DLQPolicy(base_seconds=0.01, max_seconds=0.02)


def request(number: int = 0, input: Any = "q", expected: Any = "q", **fields: Any) -> EvalRequest:
    name = fields.pop("sample_id", f"s{number}")
    key = TrialKey(fields.pop("run_id", "run"), fields.pop("experiment", "baseline"), name)
    return EvalRequest(key, Sample(name, input, expected), ordinal=number, sample_ordinal=number, **fields)


def boxes() -> tuple[InMemoryMailbox[EvalRequest], InMemoryMailbox[EvalReply]]:
    return InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)


async def take(results: Mailbox[EvalReply], count: int | None = None) -> Sequence[EvalResult]:
    """The results in a mailbox, in plan order; waits for `count` of them."""
    found: list[EvalResult] = []
    with anyio.fail_after(30):
        while True:
            messages = await results.receive(1000, wait_time_seconds=0 if count is None else 1)
            for message in messages:
                found.append(message.body.result)
                await message.acknowledge()
            if (count is None and not messages) or (count is not None and len(found) >= count):
                return sorted(found, key=lambda result: result.ordinal)


async def until(happened: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    """Wait for something to become true, and fail if it does not."""
    with anyio.fail_after(seconds):
        while True:
            said = happened()
            if said if isinstance(said, bool) else await said:
                return
            await anyio.sleep(0.005)
