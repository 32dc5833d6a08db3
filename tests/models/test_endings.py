"""Answers that are no answers: what each ending of each protocol becomes in a trial, a cache and a report.

The reasons come from the SDKs' types and from the documentation of the providers, with these exceptions: that Gemini's
compatible endpoint spells `malformed_function_call` in this way, and that vLLM and SGLang send `abort`, is assumed.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from fairtrial import AnthropicAdapter, Dataset, EvalReport, EvalSuite, OpenAIAdapter, Sample, contains, exact_match
from fairtrial.data.session.events import ANTHROPIC_ENDINGS, CHAT_ENDINGS, RESPONSES_ENDINGS, Ending, ending_of
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import InvalidCallError, ModelRefusedError, RateLimitedError
from fairtrial.integrations.model_server import ContextTooLong, FaultRule, Refused, Reply, ToolCallReply, WrongShape
from fairtrial.integrations.model_server.server import ModelServer
from fairtrial.models import AgentEnded, ModelReply, ResponseCache, RetryPolicy, ScriptedAdapter, Unlimited, agent_task
from fairtrial.models.sdk import SdkAdapter
from fairtrial.trials import EvalConfig, task

type Wire = Literal["chat", "responses", "anthropic"]
WIRES: tuple[Wire, ...] = get_args(Wire.__value__)
TABLES: Mapping[Wire, Mapping[str, Ending]] = {
    "chat": CHAT_ENDINGS,
    "responses": RESPONSES_ENDINGS,
    "anthropic": ANTHROPIC_ENDINGS,
}
FAST = RetryPolicy(attempts=3, rate_limited_attempts=3, base_seconds=0.001, max_seconds=0.002)


def adapter(wire: Wire, server: ModelServer, **options: Any) -> SdkAdapter:
    given = {"api_key": "k", "retry": FAST, "limiter": Unlimited(), **options}
    model = given.pop("model", "m")
    if wire == "anthropic":
        return AnthropicAdapter(model, base_url=server.base_url, **given)
    return OpenAIAdapter(model, base_url=f"{server.base_url}/v1", api=wire, **given)


async def run(model: Any, *, config: EvalConfig | None = None, samples: int = 1, agent: Any = None) -> EvalReport:
    data = Dataset([Sample(f"s{n}", "The capital of France?", "Paris") for n in range(samples)], name="capitals")
    suite = EvalSuite("capitals", data, agent or agent_task(model), contains, config=config or EvalConfig())
    return await suite.run(store="memory:")


CASES = [
    (wire, reason, ending, stream)
    for wire, table in TABLES.items()
    for reason, ending in {**table, "weird": "unknown"}.items()
    for stream in (False, True)
    # A stream of Responses ends with an event for each status, of which only two exist.
    if not (wire == "responses" and stream and ending in ("failed", "unknown"))
]


@pytest.mark.parametrize(("wire", "reason", "ending", "stream"), CASES)
async def test_each_ending_of_each_protocol_has_its_place(
    wire: Wire, reason: str, ending: Ending, stream: bool
) -> None:
    told = "length" if reason == "max_output_tokens" else "stop" if reason == "completed" else reason
    calls = (ToolCallReply("look", {}),) if ending == "complete" and "tool" in reason else ()

    def look() -> str:
        """Look it up."""
        return "It is Paris."

    first = Reply(refusal="No") if told == "refusal" else Reply("Paris", calls, finish_reason=told)
    with ModelServer([first, *[Reply("Paris")] * 3]) as server:
        model = adapter(wire, server, stream=stream)
        report = await run(model, agent=agent_task(model, tools=[look]))
        requests = server.stats().requests
    (result,) = report.results
    assert (report.cut_off_calls, report.refused_calls) == (
        int(ending in ("cut off", "context full")),
        int(ending == "refused"),
    )
    assert dict(report.unknown_endings) == ({"weird": 1} if ending == "unknown" else {})
    if ending == "refused":
        assert result.outcome == "task_error"
        assert "ModelRefusedError" in str(result.error)
        return
    assert result.outcome == "scored"
    assert requests == (2 if ending in ("failed", "paused") or calls else 1)
    if ending == "paused":
        assert result.output == "ParisParis"
        return
    assert result.output == "Paris"
    ended = result.session[AgentEnded].latest()
    assert ended is not None
    assert ended.reason == ("truncated" if ending in ("cut off", "context full") else "terminated")


@pytest.mark.parametrize("wire", WIRES)
async def test_a_failure_that_stays_is_an_error_and_never_a_score(wire: Wire) -> None:
    reason = next(name for name, ending in TABLES[wire].items() if ending == "failed") if wire != "anthropic" else ""
    faults = () if reason else WrongShape({"type": "message", "role": "assistant", "content": [], "model": "m",
                                           "stop_reason": "end_turn", "usage": {}})  # fmt: skip
    with ModelServer(Reply("The capital is", finish_reason=reason or None), faults=faults) as server:
        report = await run(adapter(wire, server))
        assert server.stats().requests == FAST.attempts
    assert report.results[0].outcome == "task_error"
    assert report.pass_rate is None
    assert report.unpriced_calls == FAST.attempts  # Each may have to be paid for.


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ending", ["failed", "cut off", "paused", "unknown", "refused", "context full"])
async def test_only_complete_answers_are_cached(tmp_path: Path, wire: Wire, ending: Ending) -> None:
    reasons = [name for name, found in TABLES[wire].items() if found == ending]
    if ending == "unknown":
        reasons = ["weird"]
    for place, reason in enumerate(reasons):
        told = "length" if reason == "max_output_tokens" else reason
        cache = ResponseCache(tmp_path / f"{place}.db")
        broken = Reply(refusal="No") if told == "refusal" else Reply("The capital is", finish_reason=told)
        with ModelServer([broken, *[Reply("Paris")] * 3]) as server:
            first = await run(adapter(wire, server, cache=cache, retry=RetryPolicy(attempts=1)))
            # The server has recovered: a second run must ask it again, and a third must not.
            second = await run(adapter(wire, server, cache=cache))
            asked = server.stats().requests
            third = await run(adapter(wire, server, cache=cache))
            assert server.stats().requests == asked
        assert (first.cache_hits, second.cache_hits, third.cache_hits) == (0, 0, 1)
        assert second.pass_rate == third.pass_rate == 1.0


def test_a_cache_of_an_earlier_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE responses (key TEXT PRIMARY KEY, created REAL, size INTEGER, reply TEXT)")
        database.execute("INSERT INTO responses VALUES ('k', 0, 2, '{}')")
        database.execute("PRAGMA user_version=1")
    cache = ResponseCache(path)
    assert len(cache) == 0
    cache.close()


async def test_equal_prompts_of_different_samples_are_independent_draws(tmp_path: Path) -> None:
    """A coin over 100 samples: the interval must hold one half, and a second run must not ask again."""
    rng, asked = random.Random(3), []

    def toss(messages: Any) -> str:
        asked.append(1)
        return rng.choice(["heads", "tails"])

    model = ScriptedAdapter(toss, cache=ResponseCache(tmp_path / "cache.db"))
    coins = Dataset([Sample(f"toss-{n}", "Toss a coin.", "heads") for n in range(100)], name="coins")
    suite = EvalSuite("coin", coins, agent_task(model), exact_match)
    first = await suite.run(store="memory:")
    assert len(asked) == 100
    rate = next(one for one in first["baseline"].figures.estimates if one.name == "pass_rate")
    assert rate.low is not None
    assert rate.high is not None
    assert rate.low < 0.5 < rate.high
    second = await suite.run(store="memory:")
    assert len(asked) == 100
    assert [one.output for one in second.results] == [one.output for one in first.results]


async def test_answers_to_other_headers_are_not_shared(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "cache.db")
    with ModelServer(lambda request: request.headers.get("anthropic-beta", "none")) as server:
        said = []
        for headers in ({}, {"anthropic-beta": "a"}, {"Anthropic-Beta": "b"}, {"anthropic-beta": "a"}):
            model = adapter("anthropic", server, cache=cache, headers=headers)
            said.append((await model.complete("Say hello.")).text)
        assert said == ["none", "a", "b", "a"]
        assert server.stats().requests == 3
        keys = [
            adapter("anthropic", server, headers={"x-api-key": key})._cache_salt() for key in ("secret-1", "secret-2")
        ]
    assert keys[0] == keys[1]  # A new key does not change an answer.


@pytest.mark.parametrize("wire", WIRES)
async def test_a_refusal_can_be_scored(wire: Wire) -> None:
    with ModelServer("no", faults=Refused("Paris is a secret.")) as server:
        model = adapter(wire, server)
        kept = await run(model)
        scored = await run(model, config=EvalConfig(refusals="score"))
    assert kept.results[0].outcome == "task_error"
    assert (scored.results[0].outcome, scored.results[0].output) == ("scored", "Paris is a secret.")
    assert kept.refused_calls == scored.refused_calls == 1
    assert "1 call was declined by the model or a filter." in str(scored)


@task(isolate=True)
def refusing(question: str) -> str:
    raise ModelRefusedError("m declined to answer", refusal="Paris is a secret.")


async def test_a_refusal_in_a_child_process_can_be_scored() -> None:
    report = await run(None, config=EvalConfig(refusals="score"), agent=refusing)
    assert (report.results[0].outcome, report.results[0].output) == ("scored", "Paris is a secret.")


async def test_unknown_endings_are_in_the_report_by_name() -> None:
    with ModelServer(Reply("Paris", finish_reason="weird")) as server:
        report = await run(adapter("chat", server), samples=2)
    assert "2 answers ended with the unknown reason 'weird': counted as complete." in str(report)
    assert report.pass_rate == 1.0


@pytest.mark.parametrize("wire", WIRES)
async def test_a_full_context_ends_an_agent_as_truncated_and_a_first_prompt_is_an_error(wire: Wire) -> None:
    def look() -> str:
        """Look."""
        return "It is Paris."

    turns = [Reply("Paris, I think.", (ToolCallReply("look", {}),)), Reply("never")]
    with ModelServer(turns, faults=FaultRule(ContextTooLong(), numbers=(2, 3))) as server:
        model = adapter(wire, server)
        report = await run(model, agent=agent_task(model, tools=[look]))
        again = await run(model)
    ended = report.results[0].session[AgentEnded].latest()
    assert report.results[0].outcome == "scored"
    assert report.results[0].output == "Paris, I think."
    assert ended is not None
    assert (ended.reason, ended.detail) == ("truncated", "the context of the model is full")
    assert "ContextLengthError" in str(again.results[0].error)


async def test_a_paused_turn_is_sent_back_with_its_blocks() -> None:
    blocks = [
        {"type": "text", "text": "Let me look. "},
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "capital"}},
    ]
    paused = {"type": "message", "role": "assistant", "model": "m", "content": blocks, "stop_reason": "pause_turn",
              "usage": {"input_tokens": 3, "output_tokens": 4}}  # fmt: skip
    with ModelServer(Reply("Paris"), faults=FaultRule(WrongShape(paused), numbers=(1,))) as server:
        found = await adapter("anthropic", server).complete("q")
        sent = server.requests()[1].body["messages"]
    assert found.text == "Let me look. Paris"
    assert found.usage is not None
    assert found.usage.output_tokens > 4
    assert sent[-1] == {"role": "assistant", "content": blocks}


async def test_items_that_wait_for_the_client_are_refused() -> None:
    item = {"type": "custom_tool_call", "id": "ct", "call_id": "c9", "name": "code", "input": "print(1)"}
    with ModelServer("x", faults=WrongShape({"status": "completed", "output": [item], "model": "m"})) as server:
        with pytest.raises(InvalidCallError, match="custom_tool_call"):
            await adapter("responses", server).complete("q")
        assert server.stats().requests == 1


@pytest.mark.parametrize(
    ("error", "expected", "requests"),
    [
        ({"code": "rate_limit_exceeded", "message": "slow down"}, RateLimitedError, 3),
        ({"code": "invalid_prompt", "message": "flagged as violating our usage policy"}, ModelRefusedError, 1),
        ({"code": "invalid_image", "message": "bad image"}, InvalidCallError, 1),
    ],
)
async def test_an_error_with_status_200_is_classified_by_its_code(
    error: dict[str, str], expected: type[Exception], requests: int
) -> None:
    body = {"id": "r", "status": "failed", "error": error, "output": [], "model": "m"}
    for stream in (False, True):
        # The server names every event of a wrong shape "response.completed"; the adapter reads the type inside.
        shape = {"type": "response.failed", "response": body} if stream else body
        with ModelServer("x", faults=WrongShape(shape)) as server:
            with pytest.raises(expected):
                await adapter("responses", server, stream=stream).complete("q")
            assert server.stats().requests == requests


async def test_the_error_of_a_choice_is_classified_by_its_code() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "The capital"}, "finish_reason": "error",
              "error": {"code": 429, "message": "Upstream is busy"}}  # fmt: skip
    with (
        ModelServer("x", faults=WrongShape({"model": "m", "choices": [choice]})) as server,
        pytest.raises(RateLimitedError, match="Upstream is busy"),
    ):
        await adapter("chat", server).complete("q")


def test_a_reply_of_any_adapter_is_read_by_the_tables() -> None:
    assert ending_of(None) == "complete"
    assert ending_of("STOP") == "complete"
    assert ending_of("MALFORMED_FUNCTION_CALL") == "failed"
    assert ending_of("weird") == "unknown"
    reply = ModelReply(ChatMessage("assistant", "x", (ToolCall("a"),)), finish_reason="tool_calls")
    assert ending_of(reply.finish_reason) == "complete"
