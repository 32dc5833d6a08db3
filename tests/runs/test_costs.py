"""The cost of a run: judges count, unknown prices are reported, and earlier costs of a resumed run count."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalConfig, EvalReport, EvalSuite, Sample, TrialContext, agent_task
from fairtrial.data.session import PromptExecuted, TokenUsage
from fairtrial.models import MarkdownSection, Prices, PromptTemplate, ResponseCache, ScriptedAdapter, prompt_task
from fairtrial.models.judges import llm_judge
from fairtrial.scoring import all_of, exact_match
from fairtrial.store import RunStore

GOOD = {"reason": "r", "rating": "good"}
ASK = PromptTemplate[str](key="ask", sections=[MarkdownSection[None]("", "$question")])


def judge(cost: float | None = 1.0, **options: Any) -> Any:
    return llm_judge(ScriptedAdapter([GOOD], repeat=True, usage=TokenUsage(10, 1, cost_usd=cost), **options), "Right.")


def same(given: str) -> str:
    return given


async def paid(given: str, ctx: TrialContext) -> str:
    ctx.session.record(PromptExecuted(usage=TokenUsage(10, 5, cost_usd=0.5)))
    return given


def suite(task: Any, evaluator: Any, cap: float | None = None, *, size: int = 10, **config: Any) -> EvalSuite:
    samples = Dataset([Sample(str(n), "a", "a") for n in range(size)])
    chosen = EvalConfig(max_cost_usd=cap, max_concurrent=1, **config)
    return EvalSuite("s", samples, task, evaluator, config=chosen, version="1")


async def run(made: EvalSuite, store: RunStore | str = "memory:", **options: Any) -> EvalReport:
    return await made.run(store=store, **options)


@pytest.mark.proves("R147")
async def test_the_cost_cap_counts_what_judges_cost() -> None:
    report = await run(suite(same, judge(), 2.0))
    assert (report.status, report.total) == ("interrupted", 2)
    assert (report.cost_usd, report.judge_cost_usd) == (None, 2.0)
    text = " ".join(str(report).split())
    assert "the cost reached $2.00 of $2.00. Raise max_cost_usd (--max-cost) to resume" in text


async def test_task_and_judge_cost_are_apart_and_count_together() -> None:
    report = await run(suite(paid, all_of(exact_match, judge(), judge(0.25)), 3.0))
    assert (report.total, report.cost_usd, report.judge_cost_usd) == (2, 1.0, 2.5)
    assert report.results[0].usage.cost_usd == 0.5
    assert report.results[0].judge_cost_usd == 1.25
    assert report.results[0].total_cost_usd == 1.75


async def test_a_resumed_run_counts_what_its_judges_cost_before(store: RunStore) -> None:
    for cap, total in ((2.0, 2), (2.0, 2), (3.5, 4), (99.0, 10)):
        report = await run(suite(same, judge(), cap), store)
        assert (report.total, report.judge_cost_usd) == (total, float(total))
        assert (report.status == "finished") is (total == 10)


async def test_scoring_again_in_the_same_run_counts_each_call_once(store: RunStore) -> None:
    broken = threading.Event()
    broken.set()

    def sometimes(output: str, expected: str) -> bool:
        if broken.is_set():
            raise ValueError("not today")
        return output == expected

    evaluator = all_of(sometimes, judge())
    first = await run(suite(paid, evaluator, size=3), store)
    assert (first.status, first.cost_usd, first.judge_cost_usd) == ("unscored", 1.5, 3.0)
    broken.clear()
    # 4.5 were spent, and scoring again costs 1 for each trial: the second reaches the cap.
    again = await run(suite(paid, evaluator, 6.5, size=3), store)
    assert (again.cost_usd, again.judge_cost_usd) == (1.5, 5.0)
    assert again.status == "interrupted"


async def test_a_retried_trial_keeps_the_cost_of_its_failed_execution(store: RunStore) -> None:
    broken = [True]

    async def task(given: str, ctx: TrialContext) -> str:
        ctx.session.record(PromptExecuted(usage=TokenUsage(10, 5, cost_usd=0.5)))
        if broken[0]:
            raise ValueError("not today")
        return given

    first = await run(suite(task, judge(), size=2), store)
    assert (first.cost_usd, first.judge_cost_usd) == (1.0, None)
    broken[0] = False
    again = await run(suite(task, judge(), 99.0, size=2), store, resume="errors")
    assert (again.run_id, again.status) == (first.run_id, "finished")
    assert (again.cost_usd, again.judge_cost_usd, again.total_tokens) == (2.0, 2.0, 60)


async def test_rescoring_counts_its_own_judges_under_the_cap(store: RunStore) -> None:
    first = await run(suite(paid, judge()), store)
    assert (first.cost_usd, first.judge_cost_usd) == (5.0, 10.0)
    whole = await suite(paid, judge(0.5)).rescore(first.run_id, store=store)
    assert (whole.status, whole.cost_usd, whole.judge_cost_usd) == ("finished", 5.0, 5.0)
    capped = await suite(paid, judge(0.5), 2.0).rescore(first.run_id, store=store)
    assert (capped.status, capped.total, capped.judge_cost_usd) == ("interrupted", 4, 2.0)
    assert "the cost reached $2.00 of $2.00" in str(capped)


@pytest.mark.proves("R147")
@pytest.mark.parametrize("place", ["judge", "member", "prompt_task", "agent_task", "adapter"])
async def test_an_unknown_price_is_said_before_the_first_trial_and_refused_if_strict(
    place: str, caplog: pytest.LogCaptureFixture, store: RunStore
) -> None:
    adapter = ScriptedAdapter(lambda messages: "a", model="tiny")
    task: Any = same
    evaluator: Any = exact_match
    if place == "judge":
        evaluator = judge(None, model="tiny")
    elif place == "member":
        evaluator = all_of(exact_match, all_of(judge(None, model="tiny")))
    elif place == "prompt_task":
        task = prompt_task(ASK, adapter)
    elif place == "agent_task":
        task = agent_task(adapter)
    made = suite(task, evaluator, 1.0, size=1)
    strict = suite(task, evaluator, size=1, strict_cost=True)
    if place == "adapter":
        made.adapter = strict.adapter = adapter
    with caplog.at_level(logging.WARNING, "fairtrial"):
        await run(made)
    assert "the price of 'tiny' is unknown" in caplog.messages[0]
    assert "prices=Prices(input=..., output=...)" in caplog.messages[0]
    with pytest.raises(ConfigurationError, match=r"strict_cost: the price of 'tiny' is unknown\nGive the adapter"):
        await run(strict, store)
    assert store.runs() == []
    assert len(adapter.calls) <= 1  # By the run that only warned.


async def test_a_call_nobody_could_foresee_is_said_once_and_ends_a_strict_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def surprising(given: str, ctx: TrialContext) -> str:
        ctx.session.record(PromptExecuted(usage=TokenUsage(10, 5)))
        return given

    with caplog.at_level(logging.WARNING, "fairtrial"):
        report = await run(suite(surprising, exact_match, 1.0))
    assert (report.status, report.total, report.unpriced_calls) == ("finished", 10, 10)
    assert [message for message in caplog.messages if "has no known price" in message] == caplog.messages
    assert len(caplog.messages) == 1
    report = await run(suite(surprising, exact_match, strict_cost=True))
    assert (report.status, report.total) == ("interrupted", 1)
    assert "strict_cost: a model call of trial" in str(report)


async def test_prices_that_are_given_make_the_cap_count(caplog: pytest.LogCaptureFixture) -> None:
    adapter = ScriptedAdapter(
        lambda messages: "a", usage=TokenUsage(1_000, 100, 400), prices=Prices(input=2.0, output=10.0, cached=0.5)
    )
    report = await run(suite(prompt_task(ASK, adapter), exact_match, 0.005))
    # 600 * 2 + 400 * 0.5 + 100 * 10 = 2,400 dollars per million calls.
    assert report.total == 3
    assert report.cost_usd == pytest.approx(0.0072)
    assert "the cost reached $0.0072 of $0.0050" in str(report)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("evaluator", "shown"),
    [
        (judge(0.00001), ["task\ncost", "judge\ncost", "-", "$0.00010"]),
        (judge(None), ["judge\ncost", "unknown"]),
        (all_of(judge(None), judge(0.5)), ["judge\ncost", "at least $5.00"]),
        (exact_match, ["cost", "-"]),
    ],
)
async def test_reports_show_task_and_judge_cost_apart_and_unknown_as_unknown(evaluator: Any, shown: list[str]) -> None:
    report = await run(suite(same, evaluator))
    texts = (str(report.in_detail()), report.to_markdown().replace("\\", ""), report.to_html())
    for part in shown:
        assert all(word in text for text in texts for word in part.split("\n"))
    assert all("judge" in text for text in texts[:1]) is (evaluator is not exact_match)


async def test_reports_say_how_many_answers_came_from_the_cache(tmp_path: Any) -> None:
    with contextlib.closing(ResponseCache(tmp_path / "cache.db", "read-write")) as cache:
        adapter = ScriptedAdapter(lambda messages: "a", cache=cache, usage=TokenUsage(1, 1, cost_usd=0.5))
        for hits, cost in ((0, 5.0), (10, 0.0)):  # All samples ask the same, and each gets an answer of its own.
            report = await run(suite(prompt_task(ASK, adapter), exact_match))
            assert (report.cache_hits, report.cost_usd) == (hits, cost)
            assert (f"{hits} calls" in str(report.in_detail())) is (hits > 0)
            facts: Any = report.to_json()
            (part,) = facts["experiments"]
            assert (part["cache_hits"], part["unpriced_calls"], part["judge_cost_usd"]) == (hits, 0, None)
