"""Suites for tests of runs in several processes, which each process can import."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, Score, ToolInvoked, TrialContext, exact_match, task
from fairtrial.models.limiter import Budget, FixedLimiter
from fairtrial.models.scripted import ScriptedAdapter
from fairtrial.store.redact import register_secret


@dataclass(frozen=True)
class Question:
    number: int


@dataclass(frozen=True)
class Answer:
    number: int
    process: int


def note(folder: str, name: str) -> None:
    """Record something in a file of its own name, from any process."""
    with open(Path(folder) / name, "ab", buffering=0) as file:
        file.write(f"{os.getpid()}\n".encode())


async def meet(folder: str, processes: int) -> None:
    """Wait until so many processes have a trial, because the first to start may end all trials alone."""
    if processes > 1:
        note(folder, f"process {os.getpid()}")
        async with asyncio.timeout(60):
            while sum(name.startswith("process") for name in counted(folder)) < processes:  # noqa: ASYNC110 - of others
                await asyncio.sleep(0.05)


def same_number(output: Answer, expected: int) -> Score:
    return Score(float(type(output) is Answer), output.number == expected)


async def answer(question: Question, ctx: TrialContext) -> Answer:
    assert isinstance(question, Question)
    note(ctx.experiment.params["folder"], f"{ctx.key.sample_id}-{ctx.key.repeat}")
    await meet(ctx.experiment.params["folder"], ctx.experiment.params.get("together", 1))
    await asyncio.sleep(ctx.experiment.params.get("seconds", 0.01))
    if question.number == ctx.experiment.params.get("fails"):
        raise ValueError("this one fails")
    if question.number == ctx.experiment.params.get("crashes"):
        os.kill(os.getpid(), 9)
    if question.number == ctx.experiment.params.get("hangs"):
        time.sleep(600)  # noqa: ASYNC251 - blocks the event loop of its process
    if question.number == ctx.experiment.params.get("logs"):
        logging.getLogger("application").warning("number %d is odd", question.number)
    return Answer(question.number, os.getpid())


def questions(count: int) -> Dataset[Any, Any]:
    return Dataset([Sample(f"s{number}", Question(number), number) for number in range(count)], name="questions")


def counted(folder: str) -> dict[str, int]:
    """Return how often each name was noted."""
    return {file.name: len(file.read_bytes().splitlines()) for file in Path(folder).iterdir()}


limiter = FixedLimiter(2)
limited = ScriptedAdapter(lambda messages: _reply(messages[-1].text), limiter=limiter)
budgeted = ScriptedAdapter(lambda messages: "fine", run_budget=Budget(requests=12))


async def _reply(folder: str) -> str:
    """Answer after a moment; two notes of its time let a test see how many calls there were at once."""
    began = time.time()
    await asyncio.sleep(0.02)
    with open(Path(folder) / "calls", "a") as file:  # noqa: ASYNC230 - a line
        file.write(f"{began} {time.time()}\n")
    return "fine"


async def ask_limited(question: Question, ctx: TrialContext) -> str:
    completion = await limited.complete(ctx.experiment.params["folder"], session=ctx.session)
    return completion.text


async def ask_budgeted(question: Question, ctx: TrialContext) -> str:
    return (await budgeted.complete("well?", session=ctx.session)).text


async def tell_secret(question: Question, ctx: TrialContext) -> str:
    """Return a password that only this process knows, as one that a lifespan reads from a vault."""
    secret = "-".join(("known", "in", ctx.experiment.name))
    register_secret(secret)
    logging.getLogger("application").warning("the password is %s", secret)
    return f"the password is {secret}"


@task(isolate=True)
def tell_isolated(question: Question, ctx: TrialContext) -> str:
    """Return, record or raise a password that only the child process knows, which registers it or sets a variable."""
    secret = "-".join(("isolated", *(ctx.experiment.name,) * 2))
    if question.number == 2:
        os.environ["CHILD_PASSWORD"] = secret
    else:
        register_secret(secret)
    ctx.session.record(ToolInvoked("login", {"password": secret}))
    if question.number == 1:
        raise ValueError(f"the password {secret} is wrong")
    return f"the password is {secret}"


@asynccontextmanager
async def lifespan_that_fails() -> AsyncIterator[None]:
    secret = "-".join(("lifespan", "of", "failures"))
    register_secret(secret)
    if secret:
        raise ValueError(f"the password {secret} is wrong")
    yield


def fine(output: str) -> bool:
    return output == "fine"


@asynccontextmanager
async def counted_lifespan(folder: str) -> AsyncIterator[str]:
    note(folder, f"open {os.getpid()}")
    try:
        yield folder
    finally:
        note(folder, f"close {os.getpid()}")


async def shared_folder(question: Question, ctx: TrialContext) -> str:
    note(ctx.shared, f"trial {os.getpid()}")
    await meet(ctx.shared, 2)
    return "fine"


suite = EvalSuite(
    "several", questions(6), lambda question: question.number, exact_match, config=EvalConfig(processes=2)
)


def scored_elsewhere(output: Answer, expected: int) -> Score:
    return Score(1.0, True, reason=str(os.getpid()))
