"""A worker in a process of its own, which some of its trials kill.

worker_process.py <redis url> forked|fresh <concurrency>   until its mailbox is empty
worker_process.py <redis url> solo <descriptor>            one trial, alone
"""

from __future__ import annotations

import asyncio
import os
import sys

from fairtrial import exact_match
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, SubprocessSolo, serve_alone
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, RedisConnection, RedisMailbox

LEASE_SECONDS = 1.0


async def work(input: str) -> str:
    await asyncio.sleep(0.05)
    if input == "die":
        os._exit(7)
    return input


async def serve(url: str, concurrency: int, solo: SubprocessSolo | None) -> None:
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
        loop = EvalLoop(requests=requests, evaluator=exact_match, loop=work, results=results, config=config, solo=solo)
        await loop.run(until_empty=True)


def main() -> None:
    url, way, *rest = sys.argv[1:]
    if way == "solo":
        nothing: InMemoryMailbox[EvalRequest] = InMemoryMailbox()
        serve_alone(EvalLoop(requests=nothing, evaluator=exact_match, loop=work), int(rest[0]))
        return
    solo = SubprocessSolo([sys.executable, __file__, url, "solo"]) if way == "fresh" else None
    asyncio.run(serve(url, int(rest[0]), solo))


if __name__ == "__main__":
    main()
