"""Runs with a key: executed once, however often the command is repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from fairtrial import ConfigurationError, EvalConfig, EvalSuite, exact_match, matches, open_store
from fairtrial.errors import RunBusyError, RunMismatchError
from fairtrial.runs import opening, run_lease
from fairtrial.runs.runner import Interrupt, execute_run
from fairtrial.store import RunStore
from tests.runs.doubles import doubles


class Counting:
    """A task that counts its calls and fails at one of them."""

    def __init__(self, failing: int = -1) -> None:
        self.calls = 0
        self.failing = failing

    async def __call__(self, given: int) -> int:
        self.calls += 1
        if given == self.failing:
            raise ValueError("no")
        return 2 * given


def suite(task: Any, evaluator: Any = exact_match, **config: Any) -> EvalSuite[int, int, Any]:
    return EvalSuite("s", doubles(4), task, evaluator, version="1", config=EvalConfig(max_concurrent=1, **config))


async def test_a_key_resumes_its_run_and_a_finished_one_is_not_executed_again(store: RunStore) -> None:
    first, second, third = Counting(1), Counting(), Counting()
    stopped = await suite(first, stop_on_error=True).run(store=store, once="nightly")
    between = await suite(Counting()).run(store=store, resume="never")
    resumed = await suite(second).run(store=store, once="nightly")
    again = await suite(third).run(store=store, once="nightly")
    assert (stopped.status, resumed.status, again.status) == ("interrupted", "finished", "finished")
    assert stopped.run_id == resumed.run_id == again.run_id != between.run_id
    assert (first.calls, second.calls, third.calls, again.total) == (2, 2, 0, 4)
    other = await suite(third).run(store=store, once="weekly")
    assert (other.run_id == again.run_id, third.calls) == (False, 4)
    assert "nightly" not in str(again.run.notes)


async def test_a_key_of_a_run_that_differs_is_refused_unless_only_the_code_does_and_it_is_forced() -> None:
    store = open_store("memory:")
    ended = await suite(Counting()).run(store=store, once="nightly")
    with pytest.raises(RunMismatchError, match=r"has this key and cannot be resumed: its evaluator .* another key"):
        await suite(Counting(), matches("x")).run(store=store, once="nightly")
    changed = EvalSuite("s", doubles(4), Counting(), exact_match, version="2", config=EvalConfig(max_concurrent=1))
    with pytest.raises(RunMismatchError, match="has this key and cannot be resumed: its code has changed"):
        await changed.run(store=store, once="nightly")
    assert (await changed.run(store=store, once="nightly", allow_changed_code=True)).run_id == ended.run_id


@pytest.mark.parametrize("odd", [{"once": ""}, {"resume": "never"}, {"resume": "errors"}, {"resume": "x"}])
async def test_a_key_is_text_and_says_by_itself_which_run_is_meant(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="once must be a text that is not empty"):
        await suite(Counting()).run(store="memory:", **{"once": "k", **odd})


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_run_that_another_process_executes_is_waited_for(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: RunStore
) -> None:
    monkeypatch.setattr(run_lease, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(opening, "_POLL_SECONDS", 0.01)
    stopped = await suite(Counting(1), stop_on_error=True).run(store=store, once="k")
    lease = await run_lease.acquire(store, stopped.run_id)
    task, interrupt = Counting(), Interrupt()
    request = replace(suite(task).prepared(), store=store, once="k")
    errors: list[BaseException] = []

    async def execute() -> None:
        try:
            await execute_run(request, interrupt=interrupt)
        except RunBusyError as error:
            errors.append(error)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(execute)
            while "has the same key and is being executed by another process" not in caplog.text:
                await anyio.sleep(0.01)
                lease.heartbeat()
            assert task.calls == 0
            if interrupted:
                interrupt()
            else:
                lease.release()
    assert len(errors) == interrupted
    assert task.calls == (0 if interrupted else 2)
    lease.stop()
