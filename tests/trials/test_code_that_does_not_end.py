"""User code that catches its own cancellation is orphaned, and nothing waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import Dataset, EvalConfig, EvalResult, PromptExecuted, Sample, Score, TokenUsage, evaluate, exact_match
from fairtrial.scoring import Evaluator, resolve
from fairtrial.trials import Experiment, TrialContext, TrialKey
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task


async def trial(fn: Any, evaluator: Evaluator = exact_match, **changes: Any) -> EvalResult:
    settings: dict[str, Any] = {"timeout_seconds": 0.1, "close_seconds": 0.1, **changes}
    rules = TrialRules((resolve_task(fn),), (Experiment(),), resolve(evaluator), **settings)
    return await run_trial(rules, TrialKey("run", "baseline", "s1"), 0, Sample("s1", "q", "a"), 0)


async def ignore_cancellation(until: asyncio.Event) -> int:
    """Wait for an event, whatever happens; returns how often it was cancelled."""
    cancelled = 0
    while not until.is_set():
        try:
            await until.wait()
        except asyncio.CancelledError:
            cancelled += 1
    return cancelled


def test_a_task_that_swallows_its_cancellation_is_orphaned_and_its_trial_is_a_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        released, ended = asyncio.Event(), asyncio.Event()
        cancels: list[int] = []

        async def stubborn(given: str, ctx: TrialContext) -> str:
            ctx.session.record(PromptExecuted(usage=TokenUsage(3, 4, cost_usd=0.5)))
            cancels.append(await ignore_cancellation(released))
            ended.set()
            return "a"

        result = await trial(stubborn, max_retries=3)
        assert (result.outcome, result.stage, result.score, result.attempt) == ("timeout", "task", None, 1)
        assert "ignored its cancellation" in (result.error or "")
        assert result.metadata["orphaned"] is True
        assert result.usage == TokenUsage(3, 4, 0, 0.5)  # What it cost until then was paid for.
        await asyncio.sleep(0.3)
        released.set()
        await ended.wait()
        await asyncio.sleep(0)
        assert cancels == [2]  # Once at its limit, once more, and not in every turn of the event loop.
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert "must let CancelledError through" in caplog.text


def test_an_evaluator_that_swallows_its_cancellation_leaves_a_scorer_error_and_the_output() -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def judge(output: str, expected: str) -> Score:
            await ignore_cancellation(released)
            return Score(1.0)

        async def work(given: str) -> str:
            return "a"

        result = await trial(work, judge)
        released.set()
        assert (result.outcome, result.stage, result.output, result.score) == ("scorer_error", "score", "a", None)
        assert result.metadata["orphaned"] is True

    asyncio.run(main())


def test_a_close_that_swallows_its_cancellation_costs_nothing_but_a_note() -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def work(given: str, ctx: TrialContext) -> str:
            ctx.resources.push_async_callback(ignore_cancellation, released)
            return "a"

        result = await trial(work)
        released.set()
        assert (result.outcome, result.passed) == ("scored", True)
        assert "ignored its cancellation" in str(result.metadata["close_error"])

    asyncio.run(main())


def test_a_task_that_swallows_only_its_first_cancellation_is_a_timeout_and_no_orphan() -> None:
    async def main() -> None:
        async def retrying(given: str) -> str:
            try:
                await asyncio.sleep(30)
            except BaseException:
                await asyncio.sleep(30)
            return "a"

        result = await trial(retrying)
        assert (result.outcome, result.metadata) == ("timeout", {})

    asyncio.run(main())


def test_a_cancelled_run_does_not_wait_for_an_orphan() -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def stubborn(given: str) -> str:
            await ignore_cancellation(released)
            return "a"

        with anyio.move_on_after(0.1) as scope:
            await trial(stubborn, timeout_seconds=300)
        released.set()
        assert scope.cancelled_caught

    asyncio.run(main())


def test_a_run_with_a_task_that_does_not_end_finishes_with_every_other_trial_scored() -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def work(given: int) -> int:
            if given == 3:
                await ignore_cancellation(released)
            return given

        dataset = Dataset([Sample(str(i), i, i) for i in range(8)])
        config = EvalConfig(max_concurrent=1, timeout_seconds=0.2, close_seconds=0.1)
        report = await evaluate(dataset, work, exact_match, config)
        released.set()
        assert {result.sample_id: result.outcome for result in report.results} == {
            str(i): "timeout" if i == 3 else "scored" for i in range(8)
        }

    asyncio.run(main())


SCRIPT = """
import asyncio, sys
from fairtrial import Dataset, EvalConfig, Sample, evaluate, evaluate_sync, exact_match

async def stubborn(x):
    print("begun", flush=True)
    while True:
        try:
            await asyncio.sleep(1000)
        except BaseException:
            pass

config = EvalConfig(timeout_seconds=LIMIT, close_seconds=0.1, grace_seconds=0.1, max_retries=0)
dataset = Dataset([Sample("a", 1, 1)])
report = CALL
print([result.outcome for result in report.results], flush=True)
"""
SYNC = "evaluate_sync(dataset, stubborn, exact_match, config)"
ASYNC = "asyncio.run(evaluate(dataset, stubborn, exact_match, config))"


@pytest.mark.parametrize("call", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_process_ends_although_a_task_in_its_run_does_not(call: str, tmp_path: Path) -> None:
    code = SCRIPT.replace("LIMIT", "0.2").replace("CALL", call)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path
    )
    assert (ended.returncode, ended.stdout) == (0, "begun\n['timeout']\n"), ended.stderr


@pytest.mark.parametrize("call", [SYNC, ASYNC], ids=["sync", "async"])
def test_ctrl_c_ends_a_run_whose_task_swallows_its_cancellation(call: str, tmp_path: Path) -> None:
    code = SCRIPT.replace("LIMIT", "1000").replace("CALL", call)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert process.returncode != 0
    assert time.monotonic() - started < 30
