"""Parts of a run that are easily missed: leases that are looked at, traces, interrupts, batches and observers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from fairtrial import Dataset, EvalConfig, EvalResult, EvalSuite, Sample, Score, SessionView, TrialContext, exact_match
from fairtrial.data.session import ControlDispatcher, Session, ToolInvoked
from fairtrial.errors import ConfigurationError, StoreError
from fairtrial.runs import run_lease
from fairtrial.runs.adaptive import check_inputs
from fairtrial.runs.events import Observers
from fairtrial.runs.plan import missing_ordinals
from fairtrial.runs.run_lease import RunLease, active_owner, with_current_status
from fairtrial.runs.runner import Interrupt, execute_run
from fairtrial.runs.sync import run_interruptibly
from fairtrial.runs.writer import size_of
from fairtrial.store import RunStore
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import RunOwner, RunRecord
from fairtrial.trials.context import CollectedTrace, TrialKey
from fairtrial.trials.task import CHECK_INPUT
from tests.runs.doubles import double, doubles
from tests.trials.build import rules

RECORD = RunRecord("run", "s", "doubles", "", "f", 4, ("baseline",), 1)
ELSEWHERE = json.dumps({"host": "far", "pid": 7})


class Owned(MemoryStore):
    """A store with a run whose owner and heartbeat are given."""

    def __init__(self, owner: str | None, *, heartbeat_at: float | None = None, age: float | None = None) -> None:
        super().__init__()
        self.create_run(RECORD)
        self._seen = RunOwner(owner, 1, heartbeat_at, age)

    def run_owner(self, run_id: str) -> RunOwner:
        return self._seen


@pytest.mark.parametrize(
    ("heartbeat", "age", "is_active"),
    [
        (None, 29.9, True),
        (None, 30.0, True),
        (None, 30.1, False),
        (-25.0, None, True),  # By the clock of this machine, where the database has none.
        (-35.0, None, False),
        (-25.0, 31.0, False),
        (None, None, False),
    ],
)
def test_a_run_is_executed_by_the_owner_whose_heartbeat_is_not_stale(
    heartbeat: float | None, age: float | None, is_active: bool
) -> None:
    store = Owned(ELSEWHERE, heartbeat_at=None if heartbeat is None else time.time() + heartbeat, age=age)
    assert active_owner(store, "run") == ("process 7 on far" if is_active else None)
    run = store.get_run("run")
    shown = with_current_status(store, run)
    assert shown.status == ("running" if is_active else "interrupted")
    assert (shown is run) == is_active


def test_a_run_without_an_owner_or_with_one_that_has_ended_is_executed_by_nobody() -> None:
    assert active_owner(Owned(None, age=0.0), "run") is None
    ended = json.dumps({**run_lease._describe_process(), "token": "of an earlier run of this process"})
    assert active_owner(Owned(ended, age=0.0), "run") is None
    assert active_owner(Owned("[]", age=0.0), "run") == "process ? on an unknown host"


def test_a_process_of_another_user_may_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not run_lease._has_ended(json.dumps({**run_lease._describe_process(), "started": "1"}))


def test_a_heartbeat_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "HEARTBEAT_SECONDS", 0.01)

    class Failing(MemoryStore):
        asked = 0
        renewed = threading.Event()

        def renew_run(self, run_id: str, epoch: int) -> None:
            self.asked += 1
            if self.asked < 3:
                raise StoreError("the database is busy")
            super().renew_run(run_id, epoch)
            self.renewed.set()

    store = Failing()
    store.create_run(RECORD)

    async def watch() -> None:
        lease = await run_lease.acquire(store, "run")
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(lease.watch)
                assert await anyio.to_thread.run_sync(store.renewed.wait, 20)
                assert lease.lost is None
                group.cancel_scope.cancel()
        lease.release()

    anyio.run(watch)


def test_a_lease_is_current_for_two_thirds_of_the_time_until_it_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(run_lease, "_monotonic", lambda: clock[0])
    lease = RunLease(MemoryStore(), "run", 1, "token")
    lease.stop()
    for now, current in ((100.0, True), (119.9, True), (120.0, False)):
        clock[0] = now
        assert lease.is_current is current


class Source:
    """A source of traces that is opened for the run."""

    endpoint = ""
    wait_seconds = 5.0

    def __init__(self) -> None:
        self.steps: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        self.steps.append("open")
        yield
        self.steps.append("closed")

    def expect(self, key: TrialKey, attempt: int) -> Source:
        return self

    async def wait(self) -> CollectedTrace:
        await anyio.sleep(0.05)
        self.steps.append("collected")
        session = Session()
        session.record(ToolInvoked("search"))
        return CollectedTrace(session.everything().envelopes, 1, None)

    def collected(self) -> CollectedTrace:
        raise AssertionError

    def close(self) -> None:
        pass


def test_traces_are_received_during_the_run_and_waiting_trials_let_others_run() -> None:
    source = Source()
    begun: list[int] = []

    async def work(given: int, ctx: TrialContext) -> int:
        begun.append(len([step for step in source.steps if step == "collected"]))
        return 2 * given

    def searched(output: int, expected: int, session: SessionView) -> bool:
        return len(session[ToolInvoked].all()) == 1

    suite = EvalSuite("s", doubles(6), work, searched, config=EvalConfig(max_concurrent=1), traces=source)
    report = suite.run_sync(store="memory:")
    assert (report.status, report.pass_rate_all) == ("finished", 1.0)
    assert source.steps == ["open", *["collected"] * 6, "closed"]
    assert begun[1] == 0  # The second trial began while the first one only waited.


def test_a_source_of_traces_is_closed_if_the_run_is_cancelled() -> None:
    source = Source()

    async def never(given: int) -> int:
        await anyio.sleep_forever()
        return given

    async def check() -> None:
        suite = EvalSuite("s", doubles(2), never, exact_match, traces=source)
        with anyio.move_on_after(0.2):
            await suite.run(store="memory:")

    anyio.run(check)
    assert source.steps == ["open", "closed"]


def test_a_run_can_be_interrupted_by_its_own_task(store: RunStore) -> None:
    interrupt = Interrupt()

    def work(given: int) -> int:
        interrupt()
        return 2 * given

    suite = EvalSuite("s", doubles(9), work, exact_match, config=EvalConfig(max_concurrent=1))
    run = anyio.run(lambda: execute_run(replace(suite.prepared(), store=store), interrupt=interrupt))
    assert (run.status, run.noted.stopped) == ("interrupted", "interrupted")
    assert 1 <= len(list(store.results(run.run_id))) < 9


def test_a_run_that_is_interrupted_before_it_starts_executes_nothing_and_can_be_resumed(store: RunStore) -> None:
    request = replace(EvalSuite("s", doubles(4), double, exact_match).prepared(), store=store)
    interrupt = Interrupt()
    interrupt()
    run = anyio.run(lambda: execute_run(request, interrupt=interrupt))
    assert (run.status, run.noted.stopped, list(store.results(run.run_id))) == ("interrupted", "interrupted", [])


def test_trials_in_flight_are_cancelled_after_the_grace_time(store: RunStore) -> None:

    async def work(given: int) -> int:
        if given == 0:
            await anyio.sleep(0.05)  # The other one is in flight.
            raise ValueError("stop")
        await anyio.sleep_forever()
        return given

    config = EvalConfig(max_concurrent=2, stop_on_error=True, grace_seconds=0.1)
    began = time.monotonic()
    report = EvalSuite("s", doubles(4), work, exact_match, config=config).run_sync(store=store)
    assert (report.status, report.total) == ("interrupted", 1)
    assert 0.1 <= time.monotonic() - began < 20


def test_an_error_of_another_signal_handler_interrupts_the_run_and_waits_for_its_end() -> None:
    steps: list[str] = []

    async def call(interrupt: Interrupt) -> RunRecord:
        main = threading.main_thread().ident
        assert main is not None
        await anyio.sleep(0.2)  # The main thread waits for the result.
        signal.pthread_kill(main, signal.SIGUSR1)
        with anyio.fail_after(20):
            while not interrupt.asked:  # noqa: ASYNC110 - it is asked by a signal handler
                await anyio.sleep(0.01)
        await anyio.sleep(0.1)
        steps.append("ended")
        return RECORD

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="kept in memory only"):
            run_interruptibly(call, durable=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps == ["ended"]


def test_the_size_of_a_result_counts_its_texts() -> None:
    result = EvalResult("s", Score(1.0), output_json="12345", snapshot=b"123")

    def size(given: Any, expected: Any = "") -> int:
        return size_of((result, 0, Sample("s", given, expected))) - 8

    assert size_of((result, 0, None)) == 8
    assert (size("four"), size("four", "six six"), size(b"four"), size(1), size(None)) == (4, 11, 4, 16, 16)
    assert size({"a": "four", "b": ["six six", 1]}) == 4 + 7 + 16
    assert size(("a", "bc")) == 3
    assert size([[[["deep"]]]]) == 4
    assert size([[[[["too deep"]]]]]) == 16
    assert size(object()) == 16


def test_a_run_is_refused_if_none_of_the_first_inputs_fits_its_prompt() -> None:
    seen: list[int] = []

    def task(given: int) -> int:
        return given

    def check(given: int, params: Any) -> None:
        seen.append(given)
        if given < least:
            raise ConfigurationError(f"{given} is too little")

    setattr(task, CHECK_INPUT, check)
    least = 3
    check_inputs(rules(task), doubles(9))
    assert seen == [0, 1, 2, 3] * 2  # Of both experiments.
    least = 5
    with pytest.raises(ConfigurationError, match="sample 's0': 0 is too little"):
        check_inputs(rules(task), doubles(9))
    assert seen[8:] == [0, 1, 2, 3, 4]
    check_inputs(rules(task), Dataset([Sample("x", 7, 7)]))


def test_every_dispatcher_among_the_observers_hears_of_events() -> None:
    heard: list[str] = []

    def dispatcher(name: str) -> ControlDispatcher:
        made = ControlDispatcher()
        made.subscribe(ToolInvoked, lambda event: heard.append(f"{name} {event.name}"))
        return made

    def record(*observers: Any) -> Sequence[str]:
        heard.clear()
        found = Observers(observers).dispatcher
        assert found is not None
        Session(dispatcher=found).record(ToolInvoked("search"))
        return heard

    assert Observers(()).dispatcher is None
    assert record(dispatcher("a")) == ["a search"]
    assert record(dispatcher("a"), dispatcher("b")) == ["a search", "b search"]


@pytest.mark.parametrize("planned", [0, 1, 7, 8, 9, 16, 23])
def test_trials_without_a_result_are_those_whose_bit_is_not_set(planned: int) -> None:
    done = bytearray([0b1111_1111, 0b0101_0010])
    expected = [place for place in (8, 10, 11, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23) if place < planned]
    assert list(missing_ordinals(planned, done)) == expected
    assert list(missing_ordinals(planned, bytearray())) == list(range(planned))
