"""MainLoops over a mailbox, and EvalLoops that score what they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalResult, EvalSuite, Experiment, Sample, Session, SessionView, TrialContext, open_store
from fairtrial.data.session import PromptExecuted, SpanClosed, TokenUsage, ToolInvoked
from fairtrial.errors import ConfigurationError, MailboxConnectionError
from fairtrial.fleet import (
    EvalLoop,
    EvalLoopConfig,
    EvalReply,
    EvalRequest,
    FolderSessionStore,
    InMemorySessionStore,
    MainLoop,
    MainLoopConfig,
    MainLoopRequest,
    MainLoopResult,
    RedisSessionStore,
    SessionStore,
    StoreSessionStore,
)
from fairtrial.mailbox import InMemoryMailbox, Mailbox, RedisConnection, RedisMailbox
from fairtrial.models import MarkdownSection, Prompt, PromptTemplate, ScriptedAdapter
from fairtrial.scoring import all_of, evaluator, exact_match, token_usage_under, tool_called
from fairtrial.store.redact import REDACTED
from tests.fleet.build import QUICK, Flaky, answers, boxes, emptied, request, sent, serving, take, two_hops

SECRET = "c0rrect-h0rse-battery-staple"


async def asked(loop_input: Any, fn: Any, **settings: Any) -> MainLoopResult:
    (answer,) = await answers(fn, MainLoopRequest(loop_input, "id"), **settings)
    return answer


class TestMainLoop:
    @pytest.mark.proves("R64", "R65", "R73")
    async def test_it_answers_with_the_output_and_the_session(self) -> None:
        async def work(input: str, ctx: TrialContext) -> str:
            ctx.session.record(PromptExecuted("p", usage=TokenUsage(3, 4)))
            return input.upper()

        result = await asked("hi", work)
        assert (result.request_id, result.output, result.error) == ("id", "HI", None)
        assert result.usage == TokenUsage(3, 4)
        assert result.session_snapshot is not None
        assert b"PromptExecuted" in result.session_snapshot

    @pytest.mark.proves("R64")
    async def test_a_subclass_serves_its_prompts_and_reads_its_own_input_type(self) -> None:
        @dataclass(frozen=True)
        class Question:
            text: str

        template = PromptTemplate[str]("qa", "a", "qa", [MarkdownSection[Question]("", "$text", "q")])

        class Answer(MainLoop[Question, str]):
            def initialize(self, input: Question) -> tuple[Prompt[str], Session]:
                return template.bind(input), Session()

        requests = InMemoryMailbox("main", MainLoopRequest)
        replies = InMemoryMailbox("replies", MainLoopResult)
        await requests.send(MainLoopRequest(Question("why"), "good"), reply_to=replies)
        await requests.send(MainLoopRequest("why", "bad"), reply_to=replies)
        loop = Answer(adapter=ScriptedAdapter(["because"]), requests=requests)
        await loop.run(until_empty=True)
        answers = {m.body.request_id: m.body for m in await replies.receive(9, wait_time_seconds=0)}
        assert answers["good"].output == "because"
        assert "does not match the input type of this MainLoop" in str(answers["bad"].error)
        assert loop.counters.outcomes == {"scored": 1, "task_error": 1}

    async def test_the_trials_context_is_there(self) -> None:
        closed: list[str] = []

        @asynccontextmanager
        async def resource() -> AsyncIterator[str]:
            yield "open"
            closed.append("closed")

        async def look(input: Any, ctx: TrialContext) -> Any:
            assert await ctx.enter(resource()) == "open"
            return [ctx.key, ctx.seed, ctx.experiment.params["a"], ctx.sample.metadata["m"], ctx.attempt]

        key = request(5).key
        told = MainLoopRequest("x", params={"a": 1}, key=key, metadata={"m": 2}, seed=9, attempt=3)
        (answer,) = await answers(look, told)
        seed = TrialContext(key, Sample("s5", "x"), Experiment(), Session(), run_seed=9).seed
        assert answer.output == [list(key), seed, 1, 2, 3]
        assert closed == ["closed"]

    async def test_whatever_the_task_raises_is_an_answer(self) -> None:
        async def fail(input: Any) -> Any:
            raise SystemExit("gone") if input else asyncio.CancelledError

        assert "gone" in str((await asked(1, fail)).error)
        assert "cancelled" in str((await asked(0, fail)).error)

    async def test_a_task_that_hangs_is_ended_and_reported(self) -> None:
        async def hang(input: Any) -> Any:
            await asyncio.sleep(3600)

        result = await asked("x", hang, config=MainLoopConfig(timeout_seconds=0.05))
        assert "did not finish within 0.05 s" in str(result.error)

        async def own(input: Any) -> Any:
            raise TimeoutError("the task's own")

        assert "the task's own" in str((await asked("x", own)).error)

    @pytest.mark.proves("R133")
    async def test_an_error_has_no_secret_and_an_output_comes_as_the_task_returned_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHOP_API_KEY", SECRET)

        async def leak(input: str) -> str:
            if input == "raise":
                raise ValueError(f"401: {SECRET} is not accepted")
            return f"the key is {SECRET}"

        # An evaluator that looks for leaks must find this one; the result of the trial is redacted when it is sent.
        told, raised = await answers(leak, MainLoopRequest("tell", "a"), MainLoopRequest("raise", "b"))
        assert told.output == f"the key is {SECRET}"
        assert (raised.output, raised.error) == (None, f"ValueError: 401: {REDACTED} is not accepted")

    @pytest.mark.proves("R133")
    async def test_a_dead_letter_does_not_tell_the_secrets_of_its_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOP_API_KEY", SECRET)

        class Broken(InMemorySessionStore):
            async def save(self, session_id: str, session: Session | bytes) -> None:
                raise ValueError(f"denied for {SECRET}")

        async def look(input: str, ctx: TrialContext) -> str:
            ctx.session.record(ToolInvoked("look"))
            return input

        requests = InMemoryMailbox("main", MainLoopRequest)
        await requests.send(MainLoopRequest("x", "a"))
        await MainLoop(look, requests=requests, sessions=Broken(), config=MainLoopConfig(dlq=QUICK)).run(
            until_empty=True
        )
        (letter,) = await requests.dead_letters.page()
        assert letter.reason == f"denied for {REDACTED}"

    async def test_an_output_that_cannot_be_sent_is_an_error(self) -> None:
        async def odd(input: Any) -> Any:
            return object()

        assert "cannot be sent" in str((await asked("x", odd)).error)

    @pytest.mark.proves("R80")
    async def test_an_answer_that_cannot_be_delivered_is_logged_and_the_worker_continues(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests = InMemoryMailbox("main", MainLoopRequest)
        gone = InMemoryMailbox("gone", MainLoopResult)
        replies = InMemoryMailbox("replies", MainLoopResult)
        await requests.send(MainLoopRequest(1, "a"), reply_to=gone)
        await requests.send(MainLoopRequest(2, "b"))
        await requests.send(MainLoopRequest(3, "c"), reply_to=replies)
        await gone.close()
        await MainLoop(lambda input: input, requests=requests).run(until_empty=True)
        (message,) = await replies.receive(9, wait_time_seconds=0)
        assert message.body.output == 3
        assert await requests.approximate_count() == 0
        assert sum("could not be delivered" in record.message for record in caplog.records) == 2

    async def test_without_a_mailbox_it_does_not_run(self) -> None:
        loop = MainLoop(str.upper)
        assert (loop.ready, loop.running, loop.beat) == (False, False, 0.0)
        loop.stop()
        with pytest.raises(ConfigurationError, match="requests="):
            await loop.run()

    @pytest.mark.proves("R76")
    def test_it_may_hold_a_message_for_as_long_as_an_input_can_take(self) -> None:
        requests = InMemoryMailbox("main", MainLoopRequest)
        with pytest.raises(ConfigurationError, match="at least 340"):
            MainLoop(str.upper, requests=requests, config=MainLoopConfig(visibility_seconds=339))

    def test_it_runs_without_an_event_loop(self) -> None:
        requests = InMemoryMailbox("main", MainLoopRequest)
        loop = MainLoop(str.upper, requests=requests, config=MainLoopConfig(wait_seconds=0))
        loop.run_sync(max_iterations=1)
        assert loop.counters.received == 0
        assert loop.name == "upper"


class TestTwoHops:
    @pytest.mark.proves("R49", "R53", "R81")
    async def test_answers_come_in_any_order_and_find_their_trial(self) -> None:
        async def later_first(input: int) -> int:
            await asyncio.sleep((20 - input) * 0.005)
            return input

        twenty = [request(number, number, number) for number in range(20)]
        served = {"config": MainLoopConfig(concurrency=20)}
        _, _, found = await two_hops(later_first, *twenty, served=served, config=EvalLoopConfig(concurrency=20))
        assert [result.output for result in found] == list(range(20))
        assert all(result.passed for result in found)

    @pytest.mark.proves("R78")
    async def test_an_error_of_the_main_loop_is_the_trials_error(self) -> None:
        def fail(input: str) -> str:
            raise ValueError("the agent fell over")

        _, _, (result,) = await two_hops(fail, request())
        assert result.outcome == "task_error"
        assert "the agent fell over" in str(result.error)

    @pytest.mark.proves("R50", "R77")
    async def test_a_main_loop_that_does_not_answer_is_asked_again_and_then_given_up(self) -> None:
        requests, results = await sent(request())
        main = InMemoryMailbox("main", MainLoopRequest)
        config = EvalLoopConfig(mainloop_timeout=0.05, dlq=replace(QUICK, max_deliveries=3))
        began = time.monotonic()
        loop = await emptied(requests, results, evaluator=exact_match, mainloop_requests=main, config=config)
        assert time.monotonic() - began < 15
        (result,) = await take(results)
        assert result.outcome == "dead_letter"
        assert "did not answer within 0.05 s" in str(result.error)
        (letter,) = await requests.dead_letters.page()
        assert (letter.error, letter.delivery_count) == ("NoAnswerError", 3)
        assert loop.counters.retried == 2

    @pytest.mark.proves("R79")
    async def test_a_main_loops_mailbox_that_is_away_costs_no_trial(self) -> None:
        errors = [MailboxConnectionError("partition")] * 7  # More than a policy would forgive a trial's own error.
        main = Flaky(MainLoopRequest, *errors, on="send")
        loop, _, (result,) = await two_hops(
            str.upper, request(0, "q", "Q"), main=main, config=EvalLoopConfig(dlq=QUICK)
        )
        assert result.passed
        assert loop.counters.retried == 7

    async def test_late_and_duplicate_answers_are_ignored(self) -> None:
        replies = InMemoryMailbox("replies", MainLoopResult)
        await replies.send(MainLoopResult("nobody asked", "x"))
        _, _, (result,) = await two_hops(str.upper, request(0, "q", "Q"), replies=replies)
        assert result.passed
        assert await replies.approximate_count() == 0

    async def test_a_reply_mailbox_that_fails_for_a_while_is_listened_to_again(self) -> None:
        replies = Flaky(MainLoopResult, *[MailboxConnectionError("away")] * 2, name="replies")
        _, _, (result,) = await two_hops(str.upper, request(0, "q", "Q"), replies=replies)
        assert result.passed

    async def test_an_input_that_cannot_be_sent_is_an_error_of_its_trial(self) -> None:
        main = InMemoryMailbox("main", MainLoopRequest, max_body_bytes=100)
        requests, results = await sent(request(0, "q" * 1000))
        await emptied(requests, results, evaluator=exact_match, mainloop_requests=main)
        assert (await take(results))[0].outcome == "task_error"

    def test_a_mailbox_that_cannot_make_another_needs_one_for_answers(self) -> None:
        class Plain:
            name = "plain"

        mailbox: Any = Plain()
        with pytest.raises(ConfigurationError, match="replies="):
            EvalLoop(requests=boxes()[0], evaluator=exact_match, mainloop_requests=mailbox)

    @pytest.mark.proves("R75")
    async def test_each_layer_keeps_its_own_lease(self) -> None:
        """A trial of three leases' length, through two mailboxes, is delivered once by each."""

        async def slow(input: str) -> str:
            await asyncio.sleep(4.5)
            return input

        config = {"config": MainLoopConfig(lease_seconds=1.5)}
        loop, served, (result,) = await two_hops(
            slow, request(), served=config, config=EvalLoopConfig(lease_seconds=1.5)
        )
        assert result.passed
        assert (loop.counters.received, served.counters.received) == (1, 1)
        assert loop.counters.lease_losses == served.counters.lease_losses == 0


@evaluator
def spoke_first(output: str, expected: str, session: SessionView) -> float:
    tools = [event.name for event in session[ToolInvoked].all()]
    spans = [event.name for event in session[SpanClosed].all()]
    return (0.25 * len(tools) + 0.1 * len(spans)) if tools[:1] == ["plan"] else 0.0


SCORER = all_of(exact_match, tool_called("search"), token_usage_under(60), spoke_first)


async def agent(input: str, ctx: TrialContext) -> str:
    with ctx.session.span("thinking"):
        ctx.session.record(ToolInvoked("plan"))
        if "hard" in input:
            ctx.session.record(ToolInvoked("search", {"q": input, "bytes": b"\x00\xff"}, result={"ok": True}))
    ctx.session.record(PromptExecuted("p", usage=TokenUsage(len(input), 40)))
    if input == "broken":
        raise ValueError("no answer")
    return input + f" {ctx.seed % 7} {ctx.experiment.params['style']}"


SAMPLES: list[Sample[str, Any]] = [
    Sample(f"s{n}", text, "an answer") for n, text in enumerate(["hard", "easy", "hard and very long" * 4, "broken"])
]


TERSE = Experiment("terse", {"style": "short"})


def facts(results: list[EvalResult]) -> list[Any]:
    return [(r.key.sample_id, r.outcome, r.score, r.output, r.usage, r.error) for r in results]


async def over_the_fleet(
    requests: Mailbox[EvalRequest], results: Mailbox[EvalReply], loop: EvalLoop, *helpers: MainLoop[Any, Any]
) -> list[Any]:
    for number, sample in enumerate(SAMPLES):
        await requests.send(
            EvalRequest(request(number, experiment="terse").key, sample, number, number, params=TERSE.params)
        )
    async with serving(*helpers):
        await loop.run(until_empty=True)
    found = list(await take(results))
    return [(key, outcome, score, out, usage, _said(error)) for key, outcome, score, out, usage, error in facts(found)]


def _said(error: str | None) -> str | None:
    return None if error is None else error.rpartition("MainLoopError: ")[2]


@pytest.mark.proves("R13", "R73", "R74", "R111")
@pytest.mark.parametrize("way", ["one hop", "snapshot", "memory store", "folder store", "redis store", "database"])
async def test_session_aware_evaluators_give_the_same_scores_whichever_way_the_session_came(
    redis_url: str, way: str, tmp_path: Path
) -> None:
    suite = EvalSuite("s", Dataset(SAMPLES), agent, SCORER, experiments=[TERSE])
    report = await suite.run(store="memory:")
    here = facts(list(report.results))
    assert {outcome for _, outcome, *_ in here} == {"scored", "task_error"}
    async with (
        RedisConnection(redis_url) as connection,
        RedisMailbox("requests", EvalRequest, connection) as requests,
        RedisMailbox("results", EvalReply, connection) as results,
        RedisMailbox("main", MainLoopRequest, connection) as main,
    ):
        if way == "one hop":
            loop = EvalLoop(requests=requests, evaluator=SCORER, loop=agent, results=results)
            assert await over_the_fleet(requests, results, loop) == here
            return
        stores: dict[str, SessionStore | None] = {
            "snapshot": None,
            "memory store": InMemorySessionStore(),
            "folder store": FolderSessionStore(tmp_path / "sessions"),
            "redis store": RedisSessionStore(connection),
            "database": StoreSessionStore(open_store(tmp_path / "runs.db")),
        }
        sessions = stores[way]
        loop = EvalLoop(requests=requests, evaluator=SCORER, mainloop_requests=main, results=results, sessions=sessions)
        served = MainLoop(agent, requests=main, sessions=sessions)
        assert await over_the_fleet(requests, results, loop, served) == here
