"""A worker in a process of its own, which some of its trials kill.

worker_process.py <redis url> sent|loaded <concurrency>   until its mailbox is empty

Its suspected trials are sent to a child process, or executed there by what the child loads itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from fairtrial import Score, ToolInvoked
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest
from fairtrial.fleet.worker.execution import ExecuteInChild, emit_answers
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, RedisConnection, RedisMailbox
from fairtrial.store import register_secret
from fairtrial.trials.context import current_trial

LEASE_SECONDS = 1.0


async def work(input: str) -> str:
    await asyncio.sleep(0.05)
    if input == "die":
        os._exit(7)
    if input.startswith("tell"):
        secret = "-".join(("known", "to", "a", "worker"))
        register_secret(secret)
        current_trial().session.record(ToolInvoked("login", {"password": secret}))
        if input == "tell by an error":
            raise ValueError(f"the password {secret} is wrong")
        return f"the password is {secret}"
    return input


def judge(output: str, expected: str) -> Score:
    return Score(output == expected, reason=output)


def execute(requests: Sequence[bytes]) -> None:
    nothing: InMemoryMailbox[EvalRequest] = InMemoryMailbox()
    loop = EvalLoop(requests=nothing, evaluator=judge, loop=work)

    async def one(request: bytes) -> bytes:
        return EvalReply(await loop.execute(EvalRequest.from_wire(request)), 0).to_wire()

    asyncio.run(emit_answers(one, requests))


async def serve(url: str, concurrency: int, isolated: ExecuteInChild | None) -> None:
    async with (
        RedisConnection(url) as connection,
        RedisMailbox("poison.requests", EvalRequest, connection, sweep_seconds=0.1) as requests,
        RedisMailbox("poison.results", EvalReply, connection) as results,
    ):
        config = EvalLoopConfig(
            concurrency=concurrency,
            lease_seconds=LEASE_SECONDS,
            timeout_seconds=20.0,
            dlq=DLQPolicy(base_seconds=0.1, max_seconds=0.1),
        )
        loop = EvalLoop(
            requests=requests, evaluator=judge, loop=work, results=results, config=config, isolated=isolated
        )
        await loop.run(until_empty=True)


def main() -> None:
    url, way, concurrency = sys.argv[1:]
    isolated = execute if way == "loaded" else None
    asyncio.run(serve(url, int(concurrency), isolated))


if __name__ == "__main__":
    main()
