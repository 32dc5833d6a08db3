"""Tasks, evaluators, inputs and resources that misbehave cost only their own trial."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from pydantic import BaseModel, field_serializer

from fairtrial import PromptExecuted, Sample, Score, TokenUsage, TrialContext, all_of, evaluator, exact_match, task
from fairtrial.data.session.views import Envelope, kind_of
from fairtrial.scoring import Evaluator
from fairtrial.trials.run_trial import run_trial
from tests.trials.build import KEY, answer, rules, trial


def five(given: str) -> str:
    raise ValueError("five!")


def leave(given: str) -> str:
    sys.exit(3)


def recurse(given: str) -> str:
    return recurse(given)


class Rude(BaseException):
    """Not even an Exception."""


async def rude(given: str) -> str:
    raise Rude("no")


async def cancelled_by_itself(given: str) -> str:
    raise asyncio.CancelledError


async def hang(given: str) -> str:
    await anyio.sleep_forever()
    raise AssertionError


def hang_in_thread(given: str) -> str:
    threading.Event().wait(30)
    return "a"


@task(isolate=True)
def hold_the_interpreter(given: str) -> str:
    while True:
        pass


@task(isolate=True)
def kill_the_process(given: str) -> str:
    os._exit(9)


async def not_a_number(given: str) -> float:
    return float("nan")


async def nested_infinity(given: str) -> Any:
    return {"deep": [1.0, float("inf")]}


async def giant(given: str) -> str:
    return "x" * 200_000_000


async def giant_list(given: str) -> list[str]:
    return ["x" * 1000] * 20_000


async def no_json(given: str) -> Any:
    return {"handle": object()}


class Untextable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


def untextable(given: str) -> str:
    raise Untextable


async def interrupt(given: str) -> str:
    raise KeyboardInterrupt


def interrupt_in_thread(given: str) -> str:
    raise KeyboardInterrupt("stop")


async def leave_from_async(given: str) -> str:
    sys.exit(4)


async def end_the_generator(given: str) -> str:
    await anyio.lowlevel.checkpoint()
    raise GeneratorExit


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__

    @property
    def retry_after(self) -> float:
        raise ZeroDivisionError


async def unprintable(given: str) -> str:
    raise Unprintable


class DetachedRow(dict[str, int]):
    """Like a row of an ORM whose session is closed: looking at it raises."""

    def items(self) -> Any:
        raise RuntimeError("the session is closed")

    def __iter__(self) -> Any:
        raise RuntimeError("the session is closed")


async def detached_row(given: str) -> Any:
    return DetachedRow(a=1)


class Refusing(BaseModel):
    a: int = 1

    @field_serializer("a")
    def refuse(self, value: int) -> int:
        raise KeyError("boom")


async def raising_serializer(given: str) -> Any:
    return Refusing()


async def cyclic(given: str) -> Any:
    found: list[Any] = []
    found.append(found)
    return found


async def deep(given: str) -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


async def infinite_cost(given: str, ctx: TrialContext) -> str:
    ctx.session.record(PromptExecuted(usage=TokenUsage(1, 1, cost_usd=float("inf"))))
    return "a"


async def forged_event(given: str, ctx: TrialContext) -> str:
    ctx.session.extend([Envelope(0, 0.0, "task", 1, None, None, kind_of(PromptExecuted), {"usage": {"cost_usd": "x"}})])
    return "a"


async def block_the_loop(given: str) -> str:
    time.sleep(0.5)  # noqa: ASYNC251 - that is what is tested
    return "a"


HOSTILE_TASKS: list[tuple[Callable[..., Any], str, str, str]] = [
    (five, "task_error", "task", "ValueError: five!"),
    (leave, "task_error", "task", "SystemExit: 3"),
    (recurse, "task_error", "task", "RecursionError"),
    (rude, "task_error", "task", "Rude: no"),
    (cancelled_by_itself, "task_error", "task", "CancelledError"),
    (hang, "timeout", "task", "did not finish within 0.2 s"),
    (hang_in_thread, "timeout", "task", "did not finish within 0.2 s"),
    (hold_the_interpreter, "timeout", "task", "did not finish within 0.2 s"),
    (kill_the_process, "task_error", "task", "exit code 9"),
    (not_a_number, "task_error", "output", "NaN"),
    (nested_infinity, "task_error", "output", "infinity"),
    (giant, "task_error", "output", "larger than 16,777,216 bytes"),
    (giant_list, "task_error", "output", "larger than 16,777,216 bytes"),
    (no_json, "task_error", "output", "at $.handle: a builtins.object cannot be encoded"),
    (untextable, "task_error", "task", "Untextable"),
    (interrupt, "task_error", "task", "KeyboardInterrupt"),
    (interrupt_in_thread, "task_error", "task", "KeyboardInterrupt: stop"),
    (leave_from_async, "task_error", "task", "SystemExit: 4"),
    (end_the_generator, "task_error", "task", "GeneratorExit"),
    (unprintable, "task_error", "task", "Unprintable"),
    (detached_row, "task_error", "output", "the session is closed"),
    (raising_serializer, "task_error", "output", "boom"),
    (cyclic, "task_error", "output", "the output cannot be stored"),
    (deep, "task_error", "output", "the output cannot be stored"),
    (infinite_cost, "task_error", "task", "cost"),
    (forged_event, "task_error", "output", "the recorded events cannot be stored"),
    (block_the_loop, "timeout", "task", "did not finish within 0.2 s"),
]


@pytest.mark.parametrize(
    ("fn", "outcome", "stage", "message"), HOSTILE_TASKS, ids=lambda value: getattr(value, "__name__", None)
)
async def test_a_hostile_task_costs_only_its_own_trial(
    fn: Callable[..., Any], outcome: str, stage: str, message: str
) -> None:
    started = time.monotonic()
    result = await trial(fn, timeout_seconds=0.2 if outcome == "timeout" else 20.0)
    assert (result.outcome, result.stage) == (outcome, stage)
    assert result.error is not None
    assert message in result.error
    assert result.score is None
    assert result.output is None
    assert time.monotonic() - started < 20
    gc.collect()


def evaluator_raises(output: str, expected: str) -> Score:
    raise KeyError("expected")


def evaluator_leaves(output: str, expected: str) -> Score:
    raise SystemExit(1)


async def evaluator_hangs(output: str, expected: str) -> Score:
    await anyio.sleep_forever()
    raise AssertionError


def evaluator_hangs_in_thread(output: str, expected: str) -> Score:
    threading.Event().wait(30)
    return Score(1.0)


@evaluator(isolate=True)
def evaluator_holds_the_interpreter(output: str, expected: str) -> Score:
    while True:
        pass


def evaluator_returns_nan(output: str, expected: str) -> float:
    return float("nan")


def evaluator_returns_nothing(output: str, expected: str) -> None:
    return None


HOSTILE_EVALUATORS: list[tuple[Evaluator, str]] = [
    (evaluator_raises, "KeyError: 'expected'"),
    (evaluator_leaves, "SystemExit: 1"),
    (evaluator_hangs, "scoring did not finish within 0.2 s"),
    (evaluator_hangs_in_thread, "scoring did not finish within 0.2 s"),
    (evaluator_holds_the_interpreter, "scoring did not finish within 0.2 s"),
    (evaluator_returns_nan, "finite"),
    (evaluator_returns_nothing, "returned None;"),
    (all_of(exact_match, evaluator_raises), "KeyError"),
]


@pytest.mark.parametrize(("judge", "message"), HOSTILE_EVALUATORS, ids=lambda value: getattr(value, "__name__", None))
async def test_a_hostile_evaluator_leaves_a_scorer_error_and_keeps_the_paid_answer(
    judge: Evaluator, message: str
) -> None:
    result = await trial(answer, judge, timeout_seconds=0.2 if "finish" in message else 20.0)
    assert (result.outcome, result.stage, result.score) == ("scorer_error", "score", None)
    assert result.output == "a"
    assert result.output_json == '"a"'
    assert message in (result.error or "")


@dataclass
class Uncopyable:
    error: type[BaseException]

    def __deepcopy__(self, memo: object) -> Any:
        raise self.error("no copies")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, asyncio.CancelledError])
async def test_an_input_that_cannot_be_copied_costs_only_its_own_trial(error: type[BaseException]) -> None:
    result = await trial(answer, given=Uncopyable(error))
    assert (result.outcome, result.stage) == ("task_error", "setup")
    assert "the input cannot be copied" in (result.error or "")


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise KeyboardInterrupt

    __hash__ = None  # type: ignore[assignment]  # it is compared, never hashed


async def test_an_input_that_cannot_be_compared_is_taken_for_unchanged() -> None:
    result = await trial(answer, given=Incomparable())
    assert result.passed


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
async def test_a_close_that_raises_anything_costs_nothing_but_a_note(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    async def work(given: str, ctx: TrialContext) -> str:
        ctx.resources.callback(fail)
        return "a"

    result = await trial(work)
    assert result.passed
    assert error.__name__ in str(result.metadata["close_error"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
async def test_an_evaluator_that_raises_what_ends_programs_leaves_a_scorer_error(error: type[BaseException]) -> None:
    def judge(output: str, expected: str) -> bool:
        raise error

    for judging in (judge, evaluator(inline=True)(judge)):
        result = await trial(answer, judging)
        assert (result.outcome, result.output) == ("scorer_error", "a")
        assert error.__name__ in (result.error or "")


@pytest.mark.parametrize("handler", ["asyncio", "default", "own"])
def test_a_real_interrupt_in_a_task_is_not_the_trials_error(handler: str) -> None:
    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    @task(inline=True)
    def work(given: str) -> str:
        if handler == "asyncio":  # It cancels at the first signal, and raises at the second.
            os.kill(os.getpid(), signal.SIGINT)
        else:
            signal.signal(signal.SIGINT, leave if handler == "own" else signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return "a"

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(trial(work))
    finally:
        signal.signal(signal.SIGINT, before)


async def test_many_hung_threads_end_in_a_sentence_not_in_a_full_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.base.offload._MAX_HUNG", 2)
    release = threading.Event()

    def hang(given: str) -> str:
        release.wait(30)
        return "a"

    made = rules(hang, timeout_seconds=0.05)
    results = [await run_trial(made, KEY, ordinal, Sample("s1", "q", "a"), 0) for ordinal in range(3)]
    assert [result.outcome for result in results] == ["timeout", "timeout", "task_error"]
    assert "isolate=True" in (results[2].error or "")
    release.set()
    deadline = time.monotonic() + 10
    while made.threads.hung and time.monotonic() < deadline:  # noqa: ASYNC110 - a thread ends without an event
        await anyio.sleep(0.01)
    assert made.threads.hung == 0
