"""A run is finished when the store holds a result for every trial of its plan, and not before."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fairtrial import (
    ChatMessage,
    Dataset,
    EvalSuite,
    Metric,
    PromptExecuted,
    Sample,
    Score,
    TokenUsage,
    TrialContext,
    exact_match,
)

pytestmark = pytest.mark.anyio


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
    reports = [await suite.run(store=str(path), retry_errors=True) for _ in range(3)]
    assert reports[-1].results[0].attempt == 3
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM details").fetchone() == (1,)
    connection.close()
