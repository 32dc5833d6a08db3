"""A loop assembled by a program, in a separate process, until a signal ends it.

loop_process.py one|eval|main REDIS_URL FOLDER

`one` executes and scores, and waits in every trial for the file FOLDER/go; `eval` scores what `main` executes, with
sessions in FOLDER/sessions. Every execution writes a line to FOLDER/executed.log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairtrial import ToolInvoked, exact_match
from fairtrial.fleet import (
    EvalLoop,
    EvalLoopConfig,
    EvalReply,
    EvalRequest,
    FolderSessionStore,
    MainLoop,
    MainLoopConfig,
    MainLoopRequest,
)
from fairtrial.mailbox import DLQPolicy, RedisMailbox
from fairtrial.trials.context import current_trial


@dataclass(frozen=True)
class Problem:
    a: int
    b: int


@dataclass(frozen=True)
class Answer:
    value: int


QUICK = DLQPolicy(base_seconds=0.1, max_seconds=0.2, max_deliveries=20)


def mailboxes(url: str) -> tuple[Any, Any, Any]:
    """The mailboxes for requests, results and inputs."""
    return (
        RedisMailbox("hand.requests", EvalRequest, url, sweep_seconds=0.1),
        RedisMailbox("hand.results", EvalReply, url, sweep_seconds=0.1),
        RedisMailbox("hand.inputs", MainLoopRequest, url, sweep_seconds=0.1),
    )


def main(role: str, url: str, folder: Path) -> None:
    logging.basicConfig(level="INFO")
    requests, _, inputs = mailboxes(url)
    sessions = FolderSessionStore(folder / "sessions")

    def log() -> None:
        with open(folder / "executed.log", "a") as file:
            file.write(f"{os.getpid()}\n")

    def may_go() -> bool:
        return (folder / "go").exists()

    async def wait_and_add(problem: Problem) -> Answer:
        log()
        while not may_go():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)
        return Answer(problem.a + problem.b)

    async def add(problem: Problem) -> Answer:
        log()
        current_trial().session.record(ToolInvoked("add"))
        await asyncio.sleep(0.02)
        return Answer(problem.a + problem.b)

    if role == "one":
        config = EvalLoopConfig(concurrency=2, drain_seconds=60)
        EvalLoop(requests=requests, evaluator=exact_match, loop=wait_and_add, config=config).run_sync()
    elif role == "eval":
        EvalLoop(
            requests=requests,
            evaluator=exact_match,
            mainloop_requests=inputs,
            sessions=sessions,
            expected_type=Answer,
            output_type=Answer,
            config=EvalLoopConfig(lease_seconds=1, mainloop_timeout=8, dlq=QUICK),
        ).run_sync()
    else:
        MainLoop(
            add,
            requests=inputs,
            input_type=Problem,
            sessions=sessions,
            config=MainLoopConfig(lease_seconds=1, dlq=QUICK),
        ).run_sync()
    print("ended")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
