"""Results as a stream, and streams that are left early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from fairtrial import EvalConfig, EvalReport, EvalSuite, exact_match, open_store
from fairtrial.errors import RunMismatchError
from fairtrial.store import RunRecord, RunStore
from tests.runs.doubles import double, doubles


@pytest.mark.proves("R112", "R100")
async def test_results_stream_out_as_they_come() -> None:
    suite = EvalSuite("s", doubles(6), double, exact_match)
    async with aclosing(suite.stream(store="memory:")) as results:
        seen = [result.sample_id async for result in results]
    assert sorted(seen) == ["s0", "s1", "s2", "s3", "s4", "s5"]


async def test_what_keeps_a_run_from_starting_comes_out_of_its_stream_as_it_is(store: RunStore) -> None:
    broken = EvalSuite("s", doubles(3), double, lambda output, expected: 1 / 0)
    assert (await broken.run(store=store)).status == "unscored"
    async with aclosing(EvalSuite("s", doubles(3), double, exact_match).stream(store=store)) as results:
        with pytest.raises(RunMismatchError):
            await anext(results)


async def left_early() -> tuple[RunStore, EvalSuite, RunRecord]:
    """A store, a suite of 50 samples, and its run, whose stream was left after the first result."""
    store = open_store("memory:")
    suite = EvalSuite("s", doubles(50), double, exact_match, config=EvalConfig(max_concurrent=2))
    async with aclosing(suite.stream(store=store)) as results:
        async for _ in results:
            break
    (run,) = store.runs(suite="s")
    return store, suite, run


@pytest.mark.proves("R112")
async def test_a_stream_that_is_left_early_leaves_a_run_that_can_be_resumed() -> None:
    store, suite, run = await left_early()
    assert run.status == "interrupted"
    report = await suite.run(store=store)
    assert (report.run_id, report.total, report.status) == (run.run_id, 50, "finished")


async def test_a_stream_after_one_that_was_left_early_yields_the_rest_and_the_report_has_all_results() -> None:
    store, suite, run = await left_early()
    stored = {result.sample_id for result in store.results(run.run_id)}
    async with aclosing(suite.stream(store=store)) as results:
        rest = {result.sample_id async for result in results}
    assert not stored & rest
    assert {result.sample_id for result in EvalReport.load(store, "s").results} == stored | rest
    assert len(stored | rest) == 50


async def test_a_run_that_was_cancelled_says_so(store: RunStore) -> None:

    with anyio.CancelScope() as scope:

        async def endless(given: int) -> int:
            scope.cancel()
            await anyio.sleep(60)
            return given

        await EvalSuite("s", doubles(2), endless, exact_match).run(store=store)
    (run,) = store.runs(suite="s")
    assert (run.status, run.noted.stopped) == ("interrupted", "cancelled")


@pytest.mark.proves("R112")
@pytest.mark.filterwarnings("ignore:.*trials have changed")  # They count their calls.
@pytest.mark.parametrize("how", ["break", "error", "cancelled"])
async def test_a_stream_that_is_dropped_hurts_nobody_and_leaves_a_run_that_can_be_resumed(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `aclosing`: as people write it. The caller must not be cancelled."""
    store = open_store("memory:")
    calls: list[int] = []

    ending = overlaps = 0

    async def count(given: int) -> int:
        nonlocal ending, overlaps
        calls.append(given)
        overlaps += ending
        try:
            await anyio.sleep(0.01)
        except anyio.get_cancelled_exc_class():
            ending += 1
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.5)  # Longer than the next run takes to begin.
            ending -= 1
            raise
        return 2 * given

    suite = EvalSuite("s", doubles(50), count, exact_match, config=EvalConfig(max_concurrent=2))

    async def leave() -> None:
        async for _ in suite.stream(store=store):
            if how == "error":
                raise LookupError("a mistake of the caller")
            if how == "break":
                break
            await anyio.sleep(30)

    if how == "error":
        with pytest.raises(LookupError):
            await leave()
    elif how == "break":
        await leave()
    else:
        with anyio.move_on_after(0.2):
            await leave()
    report = await suite.run(store=store)  # At once: it waits for the other to have stopped.
    assert (len(store.runs(suite="s")), report.total, report.status) == (1, 50, "finished")
    assert len(calls) <= 50 + 2  # What was in flight is executed again, nothing else.
    assert overlaps == 0
    assert "was being executed by" not in caplog.text  # The stream was this process's own: nobody else is suspected.
    await anyio.sleep(0.05)  # A late cancellation would come now.


@pytest.mark.proves("R112")
async def test_a_dropped_stream_stops_its_run_by_itself(store: RunStore) -> None:
    suite = EvalSuite("s", doubles(50), double, exact_match, config=EvalConfig(max_concurrent=2))
    async for _ in suite.stream(store=store):
        break
    with anyio.fail_after(10):
        while store.runs(suite="s")[0].status == "running":
            await anyio.lowlevel.checkpoint()
    assert store.runs(suite="s")[0].status == "interrupted"


def test_a_program_that_ends_after_leaving_a_stream_ends_cleanly(child: Callable[..., str], tmp_path: Path) -> None:
    code = """
import anyio, sys
from fairtrial import Dataset, EvalSuite, Sample, exact_match, open_store

async def slow(given):
    await anyio.sleep(0.01)
    return given

async def main():
    suite = EvalSuite("s", Dataset([Sample(f"s{i}", i, i) for i in range(200)]), slow, exact_match)
    async for result in suite.stream(store="runs.db"):
        break

anyio.run(main, backend=sys.argv[1])
(run,) = open_store("runs.db").runs()
print(run.status)
"""
    for backend in ("asyncio", "trio"):
        folder = tmp_path / backend
        folder.mkdir()
        assert child(code, backend, cwd=folder, PYTHONWARNINGS="error") == "interrupted"
