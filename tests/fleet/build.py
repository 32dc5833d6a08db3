"""Helpers for tests of loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio

from fairtrial import EvalResult, Experiment, Sample, TrialKey, exact_match
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, MainLoop, MainLoopRequest, MainLoopResult
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, Mailbox
from fairtrial.scoring.evaluator import resolve
from fairtrial.trials.run_trial import TrialRules
from fairtrial.trials.task import resolve_task

QUICK = DLQPolicy(base_seconds=0.01, max_seconds=0.02)


def request(number: int = 0, input: Any = "q", expected: Any = "q", **fields: Any) -> EvalRequest:
    name = fields.pop("sample_id", f"s{number}")
    key = TrialKey(fields.pop("run_id", "run"), fields.pop("experiment", "baseline"), name)
    return EvalRequest(key, Sample(name, input, expected), ordinal=number, sample_ordinal=number, **fields)


def boxes() -> tuple[InMemoryMailbox[EvalRequest], InMemoryMailbox[EvalReply]]:
    return InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)


async def sent(*bodies: EvalRequest) -> tuple[InMemoryMailbox[EvalRequest], InMemoryMailbox[EvalReply]]:
    """A mailbox with these requests, and an empty one for results."""
    requests, results = boxes()
    for body in bodies:
        await requests.send(body)
    return requests, results


class Flaky(InMemoryMailbox[Any]):
    """Raises the next of its errors, while it has any, when one of its methods is called; keeps those calls."""

    def __init__(self, kind: Any, *errors: BaseException, on: str = "receive", name: str = "flaky") -> None:
        super().__init__(name, kind)
        self.errors = list(errors)
        self.calls: list[tuple[Any, ...]] = []
        self.times: list[float] = []
        method = getattr(self, on)

        async def called(*args: Any, **named: Any) -> Any:
            self.calls.append(args)
            self.times.append(time.monotonic())
            if self.errors:
                raise self.errors.pop(0)
            return await method(*args, **named)

        setattr(self, on, called)


async def echo(input: Any) -> Any:
    return input


def rules(fn: Any = echo, *names: str, **settings: Any) -> TrialRules:
    experiments = tuple(Experiment(name, {"of": name}) for name in names or ("baseline",))
    made = TrialRules(
        tasks=tuple(resolve_task(fn) for _ in experiments), experiments=experiments, scorer=resolve(exact_match)
    )
    return replace(made, **settings)


async def emptied(requests: Mailbox[EvalRequest], results: Any = None, **options: Any) -> EvalLoop:
    """An EvalLoop that has worked until its mailbox was empty; it echoes unless it is told what to execute."""
    if not options.keys() & {"rules", "evaluator"}:
        options["rules"] = rules()
    loop = EvalLoop(requests=requests, results=results, **options)
    await loop.run(until_empty=True)
    return loop


@asynccontextmanager
async def serving(*loops: MainLoop[Any, Any] | EvalLoop) -> AsyncIterator[None]:
    running = [asyncio.create_task(loop.run()) for loop in loops]
    try:
        await until(lambda: all(loop.ready for loop in loops))
        yield
    finally:
        for loop in loops:
            loop.stop()
        await asyncio.gather(*running)


async def two_hops(
    fn: Any, *bodies: EvalRequest, main: Any = None, served: dict[str, Any] | None = None, **options: Any
) -> tuple[EvalLoop, MainLoop[Any, Any], Sequence[EvalResult]]:
    """Let a MainLoop, with the options `served`, execute requests and an EvalLoop score them."""
    main = InMemoryMailbox("main", MainLoopRequest) if main is None else main
    requests, results = await sent(*bodies)
    serves: MainLoop[Any, Any] = MainLoop(fn, requests=main, **served or {})
    async with serving(serves):
        loop = await emptied(requests, results, **{"evaluator": exact_match, "mainloop_requests": main, **options})
    return loop, serves, await take(results)


async def answers(fn: Any, *inputs: MainLoopRequest, requests: Any = None, **options: Any) -> list[MainLoopResult]:
    """What a MainLoop answers to these inputs."""
    requests = InMemoryMailbox("main", MainLoopRequest) if requests is None else requests
    replies = InMemoryMailbox("replies", MainLoopResult)
    for one in inputs:
        await requests.send(one, reply_to=replies)
    await MainLoop(fn, requests=requests, **options).run(until_empty=True)
    return [message.body for message in await replies.receive(len(inputs), wait_time_seconds=0)]


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
