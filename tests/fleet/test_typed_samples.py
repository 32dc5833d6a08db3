"""Typed samples keep their types on the way to workers that a program assembled."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from fairtrial import Dataset, Experiment, Sample, ScriptedAdapter, Session, TrialKey, exact_match, open_store
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, MainLoop, MainLoopRequest, collect_results, submit_dataset
from fairtrial.fleet.client import collect
from fairtrial.mailbox import InMemoryMailbox, RedisMailbox
from fairtrial.models import MarkdownSection, Prompt, PromptTemplate
from tests.fleet.build import serving
from tests.fleet.loop_process import Answer, Problem

PROBLEMS = Dataset([Sample(f"s{i}", Problem(i, i), Answer(2 * i)) for i in range(5)])


class Adds(MainLoop[Problem, Answer]):
    def initialize(self, input: Problem) -> tuple[Prompt[Answer], Session]:
        section = MarkdownSection[Problem]("", "$a plus $b", "q")
        return Prompt(PromptTemplate[Answer]("m", "k", "math", [section])).bind(input), Session()


def script(messages: Any) -> dict[str, int]:
    a, _, b = messages[-1].text.split()
    return {"value": int(a) + int(b)}


async def add(problem: Problem) -> Answer:
    return Answer(problem.a + problem.b)


async def add_anything(problem: Any) -> Any:
    return Answer(problem.a + problem.b)


def same(output: Answer, expected: Answer) -> bool:
    return output == expected


@asynccontextmanager
async def mailbox(where: str, kind: type[Any], url: str) -> AsyncIterator[Any]:
    name = f"typed-{uuid.uuid4().hex}"
    if where == "redis":
        async with RedisMailbox(name, kind, url) as made:
            yield made
    else:
        yield InMemoryMailbox(name, kind if where == "encoded" else None)


async def scored(where: str, url: str, dataset: Any = PROBLEMS, main: Any = None, **loop: Any) -> Any:
    """The report of a dataset that was submitted, executed and collected."""
    async with AsyncExitStack() as stack:
        requests = await stack.enter_async_context(mailbox(where, EvalRequest, url))
        results = await stack.enter_async_context(mailbox(where, EvalReply, url))
        if main is not None:
            inputs = loop["mainloop_requests"] = await stack.enter_async_context(mailbox(where, MainLoopRequest, url))
            await stack.enter_async_context(serving(main(requests=inputs)))
        evals = EvalLoop(requests=requests, results=results, **{"evaluator": exact_match, **loop})
        await stack.enter_async_context(serving(evals))
        run_id = await submit_dataset(dataset, Experiment(), requests)
        return await collect_results(results, len(dataset), timeout_seconds=30, run_id=run_id)


@pytest.mark.parametrize("where", ["by reference", "encoded", "redis"])
@pytest.mark.parametrize(
    "task", [Adds(adapter=ScriptedAdapter(script)), add, MainLoop(add)], ids=["loop", "fn", "main"]
)
async def test_one_hop_types_come_from_the_loop_or_the_task(where: str, task: Any, redis_url: str) -> None:
    report = await scored(where, redis_url, loop=task)
    assert (report.pass_rate, report.total, dict(report.errors)) == (1.0, 5, {})


@pytest.mark.parametrize("where", ["by reference", "encoded", "redis"])
@pytest.mark.parametrize("said", [{"output_type": Answer}, {"output_type": Answer, "evaluator": same}])
async def test_two_hops_types_come_from_the_worker_that_scores(where: str, said: Any, redis_url: str) -> None:
    for main in (partial(Adds, adapter=ScriptedAdapter(script)), partial(MainLoop, add)):
        report = await scored(where, redis_url, main=main, **said)
        assert (report.pass_rate, report.total, dict(report.errors)) == (1.0, 5, {})


async def test_a_type_that_is_not_declared_is_an_error(redis_url: str) -> None:
    report = await scored("redis", redis_url, loop=add_anything)
    assert dict(report.errors) == {"scorer_error": 5}
    (error, *_) = [result.error for result in report.results]
    assert error == (
        "the input of the sample has type tests.fleet.loop_process.Problem, which cannot be resolved here: pass "
        "input_type=..., or annotate the task"
    )
    report = await scored("redis", redis_url, loop=add_anything, input_type=Problem, expected_type=Answer)
    assert report.pass_rate == 1.0
    report = await scored("redis", redis_url, main=partial(MainLoop, add))
    assert "has type tests.fleet.loop_process.Answer, which cannot be resolved here" in report.results[0].error


async def test_requests_that_are_sent_again_keep_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_LOST_SECONDS", 0.05)
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
    store = open_store("memory:")
    run_id = await submit_dataset(PROBLEMS, Experiment(), requests, store=store)
    await requests.purge()
    loop = EvalLoop(loop=add, evaluator=exact_match, requests=requests, results=results)
    async with serving(loop):
        report = await collect_results(results, 5, timeout_seconds=20, store=store, run_id=run_id, requests=requests)
        assert (report.pass_rate, report.total) == (1.0, 5)


@pytest.mark.parametrize(
    "expected",
    [(1, 2), {1, 2}, Decimal("1.10"), date(2026, 1, 2), b"x", [1, {"a": None}], {"a": [1.5]}, "text", None],
    ids=repr,
)
async def test_standard_types_are_known_to_every_worker(expected: Any, redis_url: str) -> None:
    async def task(input: str) -> Any:
        return expected

    def equal(output: Any, expected: Any) -> bool:
        return bool(output == expected and isinstance(expected, type(output)))

    report = await scored("redis", redis_url, Dataset([Sample("s", "x", expected)]), loop=task, evaluator=equal)
    assert report.pass_rate == 1.0, report.results[0].error


def test_plain_samples_are_sent_unchanged() -> None:
    request = EvalRequest.from_wire(
        EvalRequest(key=TrialKey("r", "a", "s"), sample=Sample("s", {"a": [1]}, "x")).to_wire()
    )
    assert request.types == ("", "")
    assert b"types" not in request.to_wire()
