"""A run is finished only when the store has a result for every planned trial."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, Dataset, EvalSuite, Metric, PromptExecuted, Sample, Score, TokenUsage, exact_match
from fairtrial.cli.running import exit_status
from fairtrial.cli.user_errors import ExitCode
from fairtrial.errors import StoreError
from fairtrial.store import Committed, open_store
from fairtrial.store.column_cache import cached_columns
from fairtrial.store.memory import MemoryStore
from fairtrial.trials import EvalConfig, EvalResult, TrialContext


def numbers(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", i, i) for i in range(count)], name="numbers")


@pytest.fixture(params=["memory:", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory:" else f"sqlite:///{tmp_path / 'runs.db'}"


class TestOddEvents:
    @pytest.mark.parametrize("usage", [(None, 5), (3.0, 5), (3, 5, None)])
    async def test_usage_with_gaps_is_stored(self, store: str, usage: Any) -> None:
        async def task(given: int, ctx: TrialContext) -> int:
            ctx.session.record(PromptExecuted(usage=TokenUsage(*usage)))
            return given

        report = await EvalSuite("s", numbers(3), task, exact_match).run(store=store)
        assert (report.status, report.successful) == ("finished", 3)

    @pytest.mark.parametrize("odd", [{"input_tokens": 1.5}, {"input_tokens": 2**31}, {"cost_usd": float("nan")}])
    async def test_usage_that_cannot_be_is_the_error_of_its_trial(self, store: str, odd: dict[str, Any]) -> None:
        async def task(given: int, ctx: TrialContext) -> int:
            ctx.session.record(PromptExecuted(usage=TokenUsage(**(odd if given == 1 else {}))))
            return given

        report = await EvalSuite("s", numbers(3), task, exact_match).run(store=store)
        assert (report.status, report.total, dict(report.errors)) == ("finished", 3, {"task_error": 1})
        (failed,) = [result for result in report.results if not result.success]
        assert "must be" in str(failed.error)

    async def test_a_message_without_content_is_read_back(self, store: str) -> None:
        async def task(given: int, ctx: TrialContext) -> int:
            ctx.session.record(ChatMessage("assistant", None))  # type: ignore[arg-type]
            return given

        report = await EvalSuite("s", numbers(1), task, exact_match).run(store=store)
        assert [message.content for message in report.results[0].trajectory.messages] == [""]

    @pytest.mark.parametrize("odd", [ValueError("x"), re.match("a", "a"), lambda: None, 3j])
    async def test_metric_metadata_that_cannot_be_stored_is_an_error_of_scoring(self, store: str, odd: Any) -> None:
        def judge(output: int, expected: int) -> Score:
            return Score(1.0, metrics=[Metric("m", 1.0, metadata={"odd": odd})] if output == 1 else [])

        report = await EvalSuite("s", numbers(3), lambda given: given, judge).run(store=store)
        assert (report.status, report.total, dict(report.errors)) == ("unscored", 3, {"scorer_error": 1})
        (failed,) = [result for result in report.results if not result.success]
        assert "the metadata of metric 'm' must be a mapping of JSON values" in str(failed.error)


async def test_a_replaced_result_leaves_no_details_behind(tmp_path: Path) -> None:
    async def fails(given: int, ctx: TrialContext) -> int:
        ctx.session.record(ChatMessage("assistant", "x" * 1000))
        raise RuntimeError("no")

    path = tmp_path / "runs.db"
    suite = EvalSuite("s", numbers(1), fails, exact_match)
    reports = [await suite.run(store=str(path), resume="errors") for _ in range(3)]
    assert reports[-1].results[0].attempt == 3
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("SELECT count(*) FROM details").fetchone() == (1,)
    connection.close()


async def test_a_large_run_that_has_ended_has_a_column_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.store.column_cache.WRITTEN_AT_THE_END", 3)

    async def fails(given: int) -> int:
        raise ValueError

    stopping = EvalConfig(stop_on_error=True)
    with closing(open_store(f"sqlite:///{tmp_path / 'runs.db'}")) as store:
        small = await EvalSuite("small", numbers(2), lambda given: given, exact_match).run(store=store)
        large = await EvalSuite("large", numbers(3), lambda given: given, exact_match).run(store=store)
        stopped = await EvalSuite("stopped", numbers(3), fails, exact_match, config=stopping).run(store=store)
        cached = {one.run_id for one in cached_columns(store.identity)}  # type: ignore[attr-defined]
    assert (small.status, large.status, stopped.status) == ("finished", "finished", "interrupted")
    assert cached == {large.run_id}


class Forgetful(MemoryStore):
    """A database that fails over to an older copy: at some commit, the results stored before it are gone."""

    def __init__(self, *forgets: int) -> None:
        super().__init__()
        self.forgets = set(forgets)
        self.commits = 0
        self.lost = 0

    def commit(self, run_id: str, *given: Any, **rest: Any) -> Committed:
        self.commits += 1
        if self.commits in self.forgets:
            self.lost += len(self._runs[run_id].entries)
            self._runs[run_id].entries.clear()
        return super().commit(run_id, *given, **rest)


class Picky(MemoryStore):
    """A store that takes nothing for one trial."""

    picky = True

    def commit(self, run_id: str, results: Sequence[EvalResult], *given: Any, **rest: Any) -> Committed:
        bad = [result for result in results if self.picky and result.sample_id == "s1"]
        kept = super().commit(run_id, [result for result in results if result not in bad], *given, **rest)
        return Committed(kept.new, kept.duplicate, tuple((result.key, "no") for result in bad))


class Echo:
    """A task that notes what it was given."""

    def __init__(self) -> None:
        self.executed: list[int] = []

    async def __call__(self, given: int) -> int:
        self.executed.append(given)
        return given


class TestTheStoreDecides:
    async def test_results_that_a_failover_lost_are_executed_again(self, caplog: pytest.LogCaptureFixture) -> None:
        store, task = Forgetful(3), Echo()
        suite = EvalSuite("s", numbers(2000), task, exact_match, config=EvalConfig(max_concurrent=100))
        report = await suite.run(store=store)
        assert (report.status, report.successful) == ("finished", 2000)
        assert store.lost > 0
        assert len(task.executed) == 2000 + store.lost
        assert "are missing from the store: executing these trials again" in caplog.text

    async def test_a_store_that_keeps_losing_results_makes_the_run_incomplete(self) -> None:
        class Leaky(MemoryStore):
            def done(self, run_id: str) -> bytearray:
                self._runs[run_id].entries.pop(0, None)
                return super().done(run_id)

        store, task = Leaky(), Echo()
        report = await EvalSuite("s", numbers(5), task, exact_match).run(store=store)
        assert (report.status, report.total, report.not_run) == ("incomplete", 4, 1)
        assert report.run.notes["stopped"] == "1 of 5 trials have no stored result"
        assert report.run.finished_at is None
        assert task.executed.count(0) == 3

    @pytest.mark.filterwarnings("ignore:.*trials have changed")  # They count their calls.
    async def test_a_run_is_incomplete_when_a_result_is_refused_and_the_same_command_continues_it(self) -> None:
        store, task = Picky(), Echo()
        suite = EvalSuite("s", numbers(3), task, exact_match)
        report = await suite.run(store=store)
        assert (report.status, report.total, report.not_run, task.executed) == ("incomplete", 2, 1, [0, 1, 2])
        assert exit_status(report, fail_under=None, max_error_share=1.0) == (
            ExitCode.ERRORED,
            "1 of 3 trials have no stored result; run the same command to execute them",
        )
        store.picky = False
        again = await suite.run(store=store)
        assert (again.run_id, again.status, again.total) == (report.run_id, "finished", 3)
        assert task.executed == [0, 1, 2, 1]

    async def test_tokens_that_add_up_to_more_than_a_column_holds_are_stored_as_an_error(self, store: str) -> None:
        async def task(given: int, ctx: TrialContext) -> int:
            for _ in range(3):
                ctx.session.record(PromptExecuted(usage=TokenUsage(2**30 if given == 1 else 1, 2)))
            return given

        report = await EvalSuite("s", numbers(3), task, exact_match).run(store=store)
        assert (report.status, report.total, dict(report.errors)) == ("finished", 3, {"task_error": 1})
        (failed,) = [result for result in report.results if not result.success]
        assert (failed.stage, failed.sample_id) == ("store", "s1")
        assert str(failed.error).startswith("the result could not be stored: ")

    @pytest.mark.parametrize("replaced", [False, True])
    async def test_a_database_file_that_vanishes_is_noticed(self, tmp_path: Path, replaced: bool) -> None:
        path = tmp_path / "runs.db"

        async def task(given: int) -> int:
            if given == 5:
                path.rename(tmp_path / "away.db")
                if replaced:
                    path.write_bytes(b"")
            return given

        suite = EvalSuite("s", numbers(20), task, exact_match, config=EvalConfig(max_concurrent=1))
        with pytest.raises(StoreError, match="was deleted or replaced while it was in use"):
            await suite.run(store=str(path))
