"""A worker in a process of its own, which some of its trials kill.

worker_process.py <redis url> sent|loaded <concurrency>   until its mailbox is empty

Its suspected trials are sent to a child process, or executed there by what the child loads itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from fairtrial import exact_match
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest
from fairtrial.fleet.worker.execution import ExecuteInChild, emit_answers
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, RedisConnection, RedisMailbox

LEASE_SECONDS = 1.0


async def work(input: str) -> str:
    await asyncio.sleep(0.05)
    if input == "die":
        os._exit(7)
    return input


def execute(requests: Sequence[bytes]) -> None:
    nothing: InMemoryMailbox[EvalRequest] = InMemoryMailbox()
    loop = EvalLoop(requests=nothing, evaluator=exact_match, loop=work)

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
            requests=requests, evaluator=exact_match, loop=work, results=results, config=config, isolated=isolated
        )
        await loop.run(until_empty=True)


def main() -> None:
    url, way, concurrency = sys.argv[1:]
    isolated = execute if way == "loaded" else None
    asyncio.run(serve(url, int(concurrency), isolated))


if __name__ == "__main__":
    main()
