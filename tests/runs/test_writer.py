"""The writer of results: waiting for the store, backpressure, and results that the store refuses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from fairtrial import Dataset, EvalConfig, EvalReport, EvalResult, EvalSuite, Sample, Score, TrialKey, exact_match
from fairtrial.errors import StoreError, StoreUnavailableError
from fairtrial.runs.writer import Writer, split_batches
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import Committed, RunRecord


def doubles(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", i, 2 * i) for i in range(count)], name="doubles")


async def double(given: int) -> int:
    return 2 * given


class Moody(MemoryStore):
    """A store whose commits do first what they are told to."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__()
        self.before = before
        self.sizes: list[int] = []

    def commit(
        self, run_id: str, results: Sequence[EvalResult], samples: Mapping[int, Sample[Any, Any]] = {}, **rest: Any
    ) -> Committed:
        self.before(len(self.sizes))
        self.sizes.append(len(results))
        return super().commit(run_id, results, samples, **rest)


async def test_a_store_that_cannot_be_reached_for_a_while_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([StoreUnavailableError(f"the store cannot be reached just now: {why}") for why in ("a", "b")])

    def before(batch: int) -> None:
        error = next(failures, None)
        if error is not None:
            raise error

    with caplog.at_level(logging.WARNING):
        report = await EvalSuite("s", doubles(20), double, exact_match).run(store=Moody(before))
    assert (report.total, report.status) == (20, "finished")
    assert caplog.text.count("just now: a; trying again") == 1


async def test_a_store_that_refuses_ends_the_run_with_its_own_error() -> None:
    def before(batch: int) -> None:
        raise StoreError("the disk is full")

    store = Moody(before)
    with pytest.raises(StoreError, match="the disk is full"):
        await EvalSuite("s", doubles(3000), double, exact_match).run(store=store)
    assert store.runs()[0].status in ("interrupted", "running")


async def test_after_a_full_batch_the_writer_waits_for_the_next_one() -> None:
    store = Moody(lambda _: None)
    run = store.create_run(RunRecord("r", "s", "doubles", "1", "f", 9, ("baseline",), 1))
    samples = list(doubles(9))
    writer = Writer(store, run.run_id, batch=3, wait_seconds=60.0)
    for place, sample in enumerate(samples):
        await anyio.sleep(0.02)  # Longer than a thread takes that does not wait.
        await writer.put(
            EvalResult(key=TrialKey("r", "baseline", sample.id), ordinal=place, score=Score(1.0)), place, sample
        )
    await writer.close()
    assert (store.sizes, writer.new, writer.duplicate) == ([3, 3, 3], 9, 0)


async def test_patience_with_a_store_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0")

    def before(batch: int) -> None:
        raise StoreUnavailableError("gone")

    with pytest.raises(StoreUnavailableError, match="gone"):
        await EvalSuite("s", doubles(3), double, exact_match).run(store=Moody(before))


async def test_trials_wait_for_a_store_that_falls_behind_and_none_is_lost() -> None:
    release = threading.Event()
    most = 0

    def before(batch: int) -> None:
        if batch == 0:
            release.wait(30)

    store = Moody(before)
    store.create_run(_run())
    writer = Writer(store, "r", batch=10, wait_seconds=0.01)
    handed = 0

    async def hand_over() -> None:
        nonlocal handed
        for ordinal in range(100):
            await writer.put(_result(ordinal), ordinal, Sample(f"s{ordinal}", 1))
            handed += 1

    async with anyio.create_task_group() as group:
        group.start_soon(hand_over)
        await anyio.sleep(0.2)
        most = handed
        release.set()
    await writer.close()
    assert most <= 20
    assert (handed, writer.new, writer.duplicate) == (100, 100, 0)
    assert max(store.sizes) <= 10


async def test_a_result_the_store_refuses_is_said_and_the_others_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(MemoryStore):
        def commit(
            self, run_id: str, results: Sequence[EvalResult], samples: Mapping[int, Sample[Any, Any]] = {}, **rest: Any
        ) -> Committed:
            bad = [result for result in results if result.sample_id == "s1"]
            kept = super().commit(run_id, [result for result in results if result.sample_id != "s1"], samples, **rest)
            return Committed(kept.new, kept.duplicate, tuple((result.key, "too odd") for result in bad))

    store = Picky()
    with caplog.at_level(logging.ERROR):
        report = await EvalSuite("s", doubles(3), double, exact_match).run(store=store)
    assert "could not be stored: too odd" in caplog.text
    assert (report.status, report.total, report.not_run) == ("incomplete", 2, 1)


async def test_results_are_a_sequence_that_streams() -> None:
    report = await EvalSuite("s", doubles(6), double, exact_match, config=EvalConfig()).run(store="memory:")
    results = report.results
    assert [result.sample_id for result in results[1:4]] == ["s1", "s2", "s3"]
    assert [result.sample_id for result in results[::-2]] == ["s5", "s3", "s1"]
    assert results[-1].sample_id == "s5"
    with pytest.raises(IndexError):
        results[6]
    assert repr(results) == f"<6 results of run {report.run_id}>"
    part = report["baseline"]
    assert (part.name, part.mean_score_all, part.cost_usd) == ("baseline", 1.0, None)
    assert len(part.failed_samples()) == 0
    assert isinstance(report, EvalReport)
    assert report.__rich__() is not None


def _run() -> Any:
    from fairtrial.store.protocol import RunRecord

    return RunRecord("r", "s", "d", "1.0", "f", 100, ("baseline",), 1)


def _result(ordinal: int) -> EvalResult:
    return EvalResult(
        key=TrialKey("r", "baseline", f"s{ordinal}"),
        ordinal=ordinal,
        outcome="task_error",
        error="x",
        execution=ordinal,
    )


async def test_handing_over_raises_when_the_thread_failed_just_before(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def before(batch: int) -> None:
        release.wait(30)
        raise StoreError("the disk is full")

    store = Moody(before)
    store.create_run(_run())
    writer = Writer(store, "r", batch=1, wait_seconds=0.01)
    for ordinal in range(2):
        await writer.put(_result(ordinal), ordinal, Sample(f"s{ordinal}", 1))
    real, caller = writer._lock, threading.current_thread()

    class FailsFirst:
        """A lock that lets the writer's thread fail before the caller gets it."""

        def __enter__(self) -> None:
            if threading.current_thread() is caller:
                release.set()
                writer._thread.join(30)
            real.acquire()

        def __exit__(self, *error: object) -> None:
            real.release()

    writer._lock = FailsFirst()  # type: ignore[assignment]
    with anyio.fail_after(5), pytest.raises(StoreError, match="the disk is full"):
        await writer.put(_result(2), 2, Sample("s2", 1))


async def test_batches_are_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.runs.writer.BATCH_BYTES", 1000)
    release = threading.Event()

    def before(batch: int) -> None:
        release.wait(30)

    store = Moody(before)
    store.create_run(_run())
    writer = Writer(store, "r", wait_seconds=0.01)
    handed = 0

    async def hand_over() -> None:
        nonlocal handed
        for ordinal in range(40):
            large = replace(_result(ordinal), output_json='"' + "x" * 300 + '"')
            await writer.put(large, ordinal, Sample(f"s{ordinal}", "y" * 100))
            handed += 1

    async with anyio.create_task_group() as group:
        group.start_soon(hand_over)
        await anyio.sleep(0.2)
        assert handed <= 8  # Two batches, and the results that were too many.
        release.set()
    await writer.close()
    assert (handed, writer.new, max(store.sizes)) == (40, 40, 2)


def test_an_item_larger_than_a_batch_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.runs.writer.BATCH_BYTES", 10)
    assert list(split_batches([3, 4, 30, 5, 5, 1], lambda size: size)) == [[3, 4], [30], [5, 5], [1]]
    assert list(split_batches([1, 1, 1], lambda size: size, 2)) == [[1, 1], [1]]


async def test_a_commit_that_takes_long_is_logged_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fairtrial.runs.writer.SLOW_COMMIT_SECONDS", 0.05)

    def before(batch: int) -> None:
        end = time.monotonic() + 30
        while "has taken more than" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)

    await EvalSuite("s", doubles(3), double, exact_match).run(store=Moody(before))
    assert "committing 3 results of run" in caplog.text
