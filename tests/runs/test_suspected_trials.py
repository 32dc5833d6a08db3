"""Suspected trials: who is suspected after which crashes, and how a suspect is executed."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from typing import Any

import anyio
import pytest

from fairtrial import EvalConfig, EvalResult, EvalSuite, Score, TrialKey, exact_match
from fairtrial.runs import run_lease
from fairtrial.runs.plan import PlannedTrial
from fairtrial.runs.suspects import SuspectedTrials
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import CrashNote, write_notes
from fairtrial.store.protocol import RunRecord
from tests.runs.doubles import double, doubles


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # Child processes and the store are the same under trio.


class Crashed:
    """A run of ten trials that crashed, with notes and results as its last process left them."""

    def __init__(self, note: CrashNote, done: set[int], task: Any = double, **config: Any) -> None:
        self.store = MemoryStore()
        suite = EvalSuite("s", doubles(10), task, exact_match, config=EvalConfig(max_concurrent=2, **config))
        self.request = replace(suite.prepared(), store=self.store)
        self.done = bytearray(2)
        for ordinal in done:
            self.done[ordinal >> 3] |= 1 << (ordinal & 7)
        record = RunRecord("run", "s", "doubles", "", "f", 10, ("baseline",), 1, notes=write_notes(crashes=note))
        self.run = self.store.create_run(record)

    async def suspects(self, *, died: bool = True) -> tuple[SuspectedTrials, bool]:
        lease = replace(await run_lease.acquire(self.store, "run"), replaced_owner=died)
        found = SuspectedTrials(self.request, self.run, lease, self.request.rules)
        began = await found.begin(self.done)
        return found, began

    @property
    def note(self) -> CrashNote:
        return self.store.get_run("run").noted.crashes


def trial(ordinal: int, **changes: Any) -> PlannedTrial:
    sample = doubles(10)[ordinal]
    return PlannedTrial(TrialKey("run", "baseline", sample.id), ordinal, ordinal, 0, sample, **changes)


async def test_nothing_is_suspected_or_written_while_a_run_never_crashed() -> None:
    crashed = Crashed(CrashNote(), set())
    found, began = await crashed.suspects(died=False)
    assert (began, found.ordinals, crashed.run.notes) == (False, (), crashed.store.get_run("run").notes)

    async def execute(trial: PlannedTrial) -> EvalResult:
        raise AssertionError

    assert found.noting(execute) is execute


async def test_after_the_first_crash_the_run_notes_how_far_trials_have_started() -> None:
    crashed = Crashed(CrashNote(), {0})
    found, began = await crashed.suspects()
    assert (began, found.ordinals, crashed.note) == (False, (), CrashNote(1, -1))
    seen: list[tuple[int, CrashNote]] = []

    async def execute(trial: PlannedTrial) -> EvalResult:
        seen.append((trial.ordinal, crashed.note))
        return EvalResult(key=trial.key, ordinal=trial.ordinal, score=Score(1.0))

    noted = found.noting(execute)
    for ordinal in (1, 2, 3, 4):
        await noted(trial(ordinal))
    rescored = EvalResult(key=trial(9).key, ordinal=9, outcome="scorer_error")
    await noted(trial(9, stored=rescored))
    # Once per batch of concurrent trials; a trial that is only scored crashes nothing.
    assert seen == [
        (1, CrashNote(1, 3)),
        (2, CrashNote(1, 3)),
        (3, CrashNote(1, 3)),
        (4, CrashNote(1, 6)),
        (9, CrashNote(1, 6)),
    ]


async def test_after_the_second_crash_the_trials_in_flight_are_suspected(caplog: pytest.LogCaptureFixture) -> None:
    crashed = Crashed(CrashNote(1, 5), {0, 1, 3})
    found, began = await crashed.suspects()
    assert (began, found.ordinals, crashed.note) == (True, (2, 4, 5), CrashNote(2, 5))
    assert "has crashed 2 times: the 3 trials that were in flight" in caplog.text
    assert [each.ordinal for each in found.trials(crashed.done)] == [2, 4, 5]
    assert found.workers == 2
    await found.end(crashed.done)
    assert (bytes(crashed.done), crashed.note) == (bytes([0b111111, 0]), CrashNote())


@pytest.mark.parametrize(
    ("note", "died"), [(CrashNote(1, 5), False), (CrashNote(1, -1), True), (CrashNote(0, 5), True)]
)
async def test_nobody_is_suspected_without_a_second_crash_or_a_trial_in_flight(note: CrashNote, died: bool) -> None:
    crashed = Crashed(note, {0})
    found, began = await crashed.suspects(died=died)
    assert (began, found.ordinals) == (False, ())
    assert crashed.note.count == note.count + died


async def test_a_run_that_crashed_before_its_end_suspects_no_trial_beyond_it() -> None:
    found, _ = await Crashed(CrashNote(3, 40), set(range(8))).suspects()
    assert found.ordinals == (8, 9)


async def test_a_suspect_that_works_keeps_the_result_of_its_child_process() -> None:
    found, _ = await Crashed(CrashNote(1, 5), {0}, sends_its_process).suspects()
    result = await found.execute(trial(1, attempt=3))
    assert (result.outcome, result.attempt, result.ordinal) == ("scored", 3, 1)
    assert result.output != os.getpid()


def sends_its_process(given: int) -> int:
    return os.getpid()


def kills_its_process(given: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return given


def fails_elsewhere() -> Any:
    here = os.getpid()

    def task(given: int) -> int:
        if os.getpid() != here:
            raise RuntimeError("not in this process")
        return 2 * given

    return task


def cannot_be_sent() -> Any:
    factors = itertools.repeat(2)
    generated = (factor for factor in factors)  # A generator belongs to its process.

    def task(given: int) -> int:
        return next(generated) * given

    return task


async def test_a_suspect_that_crashes_its_child_is_an_error_of_its_task(caplog: pytest.LogCaptureFixture) -> None:
    crashed = Crashed(CrashNote(1, 5), {0}, kills_its_process)
    found, _ = await crashed.suspects()
    result = await found.execute(trial(1, attempt=2))
    assert (result.outcome, result.stage, result.attempt) == ("task_error", "task", 2)
    assert str(result.error).startswith("the trial crashes its process: ")
    assert "crashes its process" in caplog.text


async def test_a_suspect_that_its_child_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*args: Any, **named: Any) -> EvalResult:
        await anyio.lowlevel.checkpoint()
        raise TimeoutError

    monkeypatch.setattr("fairtrial.runs.suspects.run_trial_in_child", late)
    found, _ = await Crashed(CrashNote(1, 5), {0}).suspects()
    result = await found.execute(trial(1))
    assert (result.outcome, result.error) == (
        "timeout",
        "the trial exceeded its time limit in a child process and was killed",
    )


@pytest.mark.parametrize("make_task", [fails_elsewhere, cannot_be_sent])
async def test_a_suspect_that_a_child_cannot_execute_is_executed_alone_and_noted_meanwhile(make_task: Any) -> None:
    crashed = Crashed(CrashNote(1, 5), {0}, make_task())
    notes: list[CrashNote] = []
    update = crashed.store.update_run

    def noting(*args: Any, **named: Any) -> Any:
        done = update(*args, **named)
        notes.append(crashed.note)
        return done

    found, _ = await crashed.suspects()
    crashed.store.update_run = noting  # type: ignore[method-assign]
    result = await found.execute(trial(3))
    assert (result.outcome, result.output) == ("scored", 6)
    assert notes == [CrashNote(2, 5, 3, 0), CrashNote(2, 5)]


@pytest.mark.parametrize(("deaths", "outcome"), [(1, "scored"), (2, "task_error")])
async def test_a_suspect_is_blamed_after_three_crashes_alone(deaths: int, outcome: str) -> None:
    crashed = Crashed(CrashNote(4, 5, 3, deaths), {0}, cannot_be_sent())
    found, _ = await crashed.suspects()
    assert crashed.note == CrashNote(5, 5, 3, deaths + 1)
    result = await found.execute(trial(3))
    assert result.outcome == outcome
    if outcome == "task_error":
        assert result.error == "the trial crashed its process, in which nothing else was executed"
    else:
        assert crashed.note == CrashNote(5, 5)
    assert (await found.execute(trial(4))).outcome == "scored"  # Another one is not blamed.


async def test_a_trial_alone_is_not_counted_if_its_process_ended_in_order() -> None:
    crashed = Crashed(CrashNote(4, 5, 3, 1), {0})
    await crashed.suspects(died=False)
    assert crashed.note == CrashNote(4, 5)
    stored = Crashed(CrashNote(4, 5, 3, 1), {0, 3})
    await stored.suspects()
    assert stored.note == CrashNote(5, 5)
