"""Calls in batches of a provider: replies, costs, time limits, and what may go wrong with lines and batches."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, agent_task, llm_judge, open_store, plan
from fairtrial.errors import ConfigurationError
from fairtrial.integrations.model_server import BatchOptions, ModelServer, ParsedRequest, Reply, ToolCallReply
from fairtrial.integrations.model_server.reply import InvalidRequestError
from fairtrial.models import Batching
from fairtrial.models.batches.openai_wire import OpenAIBatches
from fairtrial.runs.events import BatchesProgressed, RunEvent
from fairtrial.store.batches import BatchIntent, batch_table
from fairtrial.store.protocol import RunStore
from tests.models.batches.build import PRICES, QUICK, adapter, charged, evaluate_turns, passes, samples, server

pytestmark = pytest.mark.anyio


@pytest.fixture
def store(tmp_path: Any) -> RunStore:
    return open_store(f"sqlite:///{tmp_path}/runs.db")


async def test_trials_are_answered_by_batches_at_half_price(provider: str, store: RunStore) -> None:
    with server() as running:
        report = await evaluate_turns(adapter(provider, running), store, count=25, turns=2)
        ledger = running.batches()
    assert report.status == "finished"
    assert [result.outcome for result in report.results] == ["scored"] * 25
    assert len(ledger.executed) == 50
    assert [one.requests for one in ledger.created] == [25, 25]
    assert ledger.files == ()
    paid = charged(ledger)
    assert report.run.noted.batches is not None
    assert report.run.noted.batches.cost_usd == pytest.approx(paid)
    assert sum(result.usage.cost_usd or 0 for result in report.results) == pytest.approx(paid)
    assert {one.state for one in batch_table(store).intents(report.run_id)} == {"collected"}


def two_turns(request: ParsedRequest) -> Reply:
    """A turn with a tool, and an answer."""
    if request.turn:
        return Reply("It snows.")
    return Reply("", tool_calls=(ToolCallReply("weather", {"city": "Oslo"}),))


def weather(city: str) -> str:
    """The weather of a city."""
    return f"snow in {city}"


@pytest.mark.parametrize("style", ["chat", "responses", "anthropic"])
async def test_an_agent_waits_for_one_batch_per_turn_with_every_protocol(style: str, store: RunStore) -> None:
    with ModelServer(two_turns, batches=BatchOptions(0.1)) as running:
        model = adapter("anthropic", running) if style == "anthropic" else adapter("openai", running, api=style)
        suite = EvalSuite("agent", Dataset(samples(4)), agent_task(model, tools=[weather]), passes)
        report = await suite.run(store=store)
        ledger = running.batches()
    assert [(result.outcome, result.output) for result in report.results] == [("scored", "It snows.")] * 4
    assert [one.requests for one in ledger.created] == [4, 4]
    assert report.cost_usd == pytest.approx(charged(ledger), abs=1e-9)


async def test_an_adapter_that_streams_sends_no_options_of_streams(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI refuses `stream_options` in requests that are not streamed, as none is in a batch."""
    bodies: list[dict[str, Any]] = []
    upload = OpenAIBatches.upload

    async def noted(wire: OpenAIBatches, client: Any, intent: BatchIntent, lines: Sequence[str]) -> str | None:
        bodies.extend(json.loads(line)["body"] for line in lines)
        return await upload(wire, client, intent, lines)

    monkeypatch.setattr(OpenAIBatches, "upload", noted)
    with server() as running:
        report = await evaluate_turns(adapter("openai", running, stream=True), store, count=2)
    assert [result.outcome for result in report.results] == ["scored"] * 2
    assert [body.keys() & {"stream", "stream_options"} for body in bodies] == [set(), set()]


async def test_a_model_that_refuses_encrypted_reasoning_is_asked_without_it_in_the_next_batch(store: RunStore) -> None:
    def refuse(request: ParsedRequest) -> Reply:
        if "include" in request.body:
            raise InvalidRequestError("Encrypted content is not supported with this model.")
        return Reply("fine")

    with ModelServer(refuse, batches=BatchOptions(0.1)) as running:
        report = await evaluate_turns(adapter("openai", running, api="responses"), store, count=3, turns=2)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert [one.requests for one in ledger.created] == [3, 3, 3]
    assert len(ledger.executed) == 6


async def test_waiting_counts_neither_for_the_time_limit_nor_for_the_latency(provider: str, store: RunStore) -> None:
    with server(seconds=1.5) as running:
        config = EvalConfig(timeout_seconds=0.5, max_concurrent=2)
        report = await evaluate_turns(adapter(provider, running), store, count=7, config=config)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 7
    assert all(result.latency_ms < 500 for result in report.results)
    assert [one.requests for one in ledger.created] == [7], "all trials wait in one batch, although two run at once"


async def test_the_first_batch_does_not_wait_for_trials_that_are_at_work(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.models.batches.batch_queue._FIRST_SECONDS", 0.3)
    with server() as running:
        model = adapter("openai", running)

        async def ask(question: str) -> str:
            await asyncio.sleep(2.5 if question.endswith("0") else 0)
            return (await model.complete(question)).text

        await EvalSuite("first", Dataset(samples(4)), ask, passes).run(store=store)
        ledger = running.batches()
    assert [one.requests for one in ledger.created] == [3, 1]


async def test_a_plan_says_how_many_batches_a_trial_waits_for(store: RunStore) -> None:
    with server() as running:
        report = await evaluate_turns(adapter("openai", running), store, count=2, turns=3)
    calls = "up to 3 calls, each after the one before,"
    assert (
        f"These costs are of batches: trials of {calls} wait for 3 batches, at most 3 days." in plan(report).assumptions
    )


@pytest.mark.parametrize("batched", [True, False])
async def test_a_plan_counts_calls_at_the_same_time_as_one_turn(store: RunStore, batched: bool) -> None:
    with server() as running:
        model = adapter("openai", running, batch=Batching(**QUICK) if batched else None)

        async def ask(question: str) -> list[str]:
            together = await asyncio.gather(*(model.complete(f"{question} {number}") for number in range(3)))
            return [one.text for one in (*together, await model.complete(question))]

        report = await EvalSuite("parallel", Dataset(samples(2)), ask, passes).run(store=store)
    said = " ".join(plan(report).assumptions)
    assert "wait for 2 batches" in said
    assert ("half the price" in said) is not batched, "what was measured in batches has half the price already"


async def test_a_run_that_was_stopped_can_be_planned_from(store: RunStore) -> None:
    def broken(question: str) -> str:
        if len(asked) == 5:
            raise ValueError(question)
        asked.append(question)
        return question

    asked: list[str] = []

    config = EvalConfig(stop_on_error=True, max_concurrent=1)
    report = await EvalSuite("stopped", Dataset(samples(9)), broken, passes, config=config).run(store=store)
    assert 0 < len(report.results) < 9
    assert plan(report).assumptions


async def test_the_report_says_what_was_answered_in_batches(store: RunStore) -> None:
    with server() as running:
        report = await evaluate_turns(adapter("openai", running), store, count=3)
        cost = charged(running.batches())
    assert report.run.noted.batches is not None
    assert report.run.noted.batches.cost_usd == pytest.approx(cost)
    assert "3 model calls were answered in batches at half price" in report.to_markdown()


async def test_a_cost_cap_counts_what_is_sent_and_stops_before_a_batch_that_would_exceed_it(store: RunStore) -> None:
    with server() as running:
        model = adapter("openai", running, batch=Batching(**QUICK, max_requests=2))
        first = await evaluate_turns(model, store, count=2)
        cap = 5.2 * charged(running.batches()) / 2
        report = await evaluate_turns(
            model,
            store,
            count=9,
            config=EvalConfig(max_cost_usd=cap, max_concurrent=1, grace_seconds=0.1),
            resume="never",
        )
        ledger = running.batches()
    assert first.status == "finished"
    assert report.status == "interrupted"
    assert "cost cap" in str(report.run.noted.stopped) or "the cost reached" in str(report.run.noted.stopped)
    assert charged(ledger) - charged_of(first) <= cap


def charged_of(report: Any) -> float:
    return float(report.cost_usd)


async def test_the_cost_cap_counts_replies_that_a_trial_did_not_wait_for_also_in_the_next_process(
    store: RunStore,
) -> None:
    turn, cap = asyncio.Lock(), 1.2
    with ModelServer("word " * 400, batches=BatchOptions(0.3)) as running:
        model = adapter("openai", running)

        async def ask(question: str) -> str:
            async with turn:
                call = asyncio.create_task(model.complete(question))
                if not running.batches().created:
                    while not running.batches().created:  # noqa: ASYNC110 - the server is a thread
                        await asyncio.sleep(0.02)
                    call.cancel()  # Too late: it is paid.
                    return "it took too long"
                return (await call).text

        suite = EvalSuite(
            "impatient", Dataset(samples(2)), ask, passes, config=EvalConfig(max_cost_usd=cap, grace_seconds=0.1)
        )
        first = await suite.run(store=store)
        second = await suite.run(store=store, resume=first.run_id)
        ledger = running.batches()
    assert 0.7 < charged(ledger) <= cap, "room for one call, which costs more than half of the cap"
    for report in (first, second):
        assert report.status == "interrupted"
        assert "more than the cost cap leaves" in str(report.run.noted.stopped)


async def test_the_cost_cap_bounds_what_is_under_way_at_once(store: RunStore) -> None:
    with server(seconds=1.0) as running:
        model = adapter("openai", running, batch=Batching(**QUICK, max_requests=2))
        cap = 4.5 * 500 * PRICES.output / 2e6  # Room for four answers of 500 tokens, as is estimated before the first.
        report = await evaluate_turns(model, store, count=9, config=EvalConfig(max_cost_usd=cap))
        ledger = running.batches()
    assert report.status == "finished"
    times = sorted(one.created_at for one in ledger.created)
    assert [one.requests for one in ledger.created[:2]] == [2, 2]
    assert times[2] >= times[0] + 1.0, "the third batch was sent before the first one had been paid for"


async def test_tasks_and_judges_share_the_batches_of_a_model(store: RunStore) -> None:
    with server() as running:
        model = adapter("openai", running)

        async def ask(question: str) -> str:
            return (await model.complete(question)).text

        judge = llm_judge(model, "Is it good?")
        suite = EvalSuite("judged", Dataset(samples(4)), ask, judge, config=EvalConfig(max_same_errors=0))
        report = await suite.run(store=store)
        ledger = running.batches()
    assert report.run.noted.batches is not None
    assert len(ledger.executed) >= 8
    assert len(ledger.created) < 8


async def test_what_the_provider_charges_is_in_the_report_to_the_cent(provider: str, store: RunStore) -> None:
    """Tasks of two turns with a judge; a judge's call for the repair of its answer costs as well."""
    with server() as running:
        model = adapter(provider, running)

        async def ask(question: str) -> str:
            draft = (await model.complete(question)).text
            return (await model.complete(f"Shorten: {draft}")).text

        suite = EvalSuite("charged", Dataset(samples(7)), ask, llm_judge(model, "Is it good?"))
        report = await suite.run(store=store)
        paid = charged(running.batches())
    assert report.run.noted.batches is not None
    assert [result.outcome for result in report.results] == ["scored"] * 7
    assert report.cost_usd is not None
    assert report.judge_cost_usd is not None
    assert report.judge_cost_usd > 0
    assert report.cost_usd + report.judge_cost_usd == pytest.approx(paid, abs=1e-9)
    assert report.run.noted.batches.cost_usd == pytest.approx(paid, abs=1e-9)
    assert f"answered in batches at half price, for \\${paid:.2f}" in report.to_markdown()


async def test_the_line_of_progress_says_what_the_provider_reports(provider: str, store: RunStore) -> None:
    lines: list[str] = []

    class Heard:
        def publish(self, event: RunEvent) -> None:
            if isinstance(event, BatchesProgressed):
                lines.append(event.line)

    with server() as running:
        await evaluate_turns(adapter(provider, running), store, count=3, bus=Heard())
    done = (
        r"\d of 3 requests done"
        if provider == "openai"
        else r"3 requests \(no progress is reported before a batch ends\)"
    )
    assert re.fullmatch(rf"1 batch, {done}, oldest \d+ s, next look in \d+ s", lines[-2])
    assert lines[-1] == "", "nothing is under way at the end"


async def test_replies_that_a_task_no_longer_asks_for_are_counted_and_explained(
    store: RunStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server() as running:
        model = adapter("openai", running)

        async def ask(question: str) -> str:
            return (await model.complete(f"{question} at {time.monotonic_ns()}")).text

        suite = EvalSuite("moody", Dataset(samples(2)), ask, passes)
        table = type(batch_table(store))
        settle = table.settle
        lost: list[int] = []

        def lose(*given: Any, **named: Any) -> None:  # The process dies after the replies are stored.
            settle(*given, **named)
            if not lost:
                lost.append(1)
                raise RuntimeError("the process dies")

        monkeypatch.setattr(table, "settle", lose)
        with pytest.raises(RuntimeError, match="the process dies"):
            await suite.run(store=store)
        report = await suite.run(store=store)
    assert report.status == "finished"
    note = report.run.noted.batches
    assert note is not None
    assert (note.requests, note.unused) == (4, 2)
    assert "2 replies of batches were paid and not used" in report.to_markdown()
    assert "were paid and not used" in caplog.text


async def test_a_task_that_is_not_async_waits_in_its_thread(store: RunStore) -> None:
    with server() as running:
        model = adapter("openai", running)

        def ask(question: str) -> str:
            return model.complete_sync(question).text

        config = EvalConfig(timeout_seconds=0.25, max_concurrent=4)
        report = await EvalSuite("threads", Dataset(samples(4)), ask, passes, config=config).run(store=store)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 4
    assert [one.requests for one in ledger.created] == [4]


async def test_calls_outside_of_a_run_are_refused() -> None:
    with server() as running:
        model = adapter("openai", running)
        with pytest.raises(ConfigurationError, match="must be those of a run's trials"):
            await model.complete("hello")
        await model.aclose()


@pytest.mark.parametrize("wrong", [{"max_requests": 0}, {"poll_seconds": -1}, {"fallback": "none"}, {"window": 1.5}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"Batching.{next(iter(wrong))} must be"):
        Batching(**wrong)
