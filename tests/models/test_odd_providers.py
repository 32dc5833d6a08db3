"""What providers do beside the documented path: costs, streams, refusals of parameters, pauses, pictures.

Shapes from public reports of errors: streams of Gemini, Mistral's `stream_options`, encrypted reasoning at Azure,
`$ref` with a description. Google's `retryDelay` and the reset headers are assumed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import AnyUrl, BaseModel, Field

from fairtrial import ConfigurationError, Dataset, EvalSuite, OpenAIAdapter, Sample, TokenUsage, agent_task, exact_match
from fairtrial.data.sample import BlobFolder
from fairtrial.data.session import ChatMessage, Session, ToolCall
from fairtrial.errors import (
    BudgetExceededError,
    InvalidCallError,
    MalformedReplyError,
    ModelUnavailableError,
    RateLimitedError,
)
from fairtrial.integrations.model_server import EncryptedRefused, FaultRule, HalfSent, Hang, ModelServer, StreamFailed
from fairtrial.integrations.model_server.faults import ConnectionReset, MalformedJson, RateLimited, StreamOptionsRefused
from fairtrial.integrations.model_server.reply import Reply, ToolCallReply, Usage
from fairtrial.models import AnthropicAdapter, Budget, Prices, RetryPolicy, ScriptedAdapter, ToolSpec, model_from_name
from fairtrial.models.bedrock import ConverseAdapter
from fairtrial.models.gemini import VertexAdapter
from fairtrial.models.judges import llm_judge, panel
from fairtrial.models.judges.fence import read_fences
from fairtrial.models.limiter import NO_RETRY, Unlimited, spent_in
from fairtrial.models.pricing import UsageExtras, read_prices
from fairtrial.models.schema import output_schema
from fairtrial.models.sdk import SdkAdapter

FAST = RetryPolicy(attempts=3, rate_limited_attempts=1, base_seconds=0.001, max_seconds=0.002)
WEATHER = ToolSpec("weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CITIES = Reply("", (ToolCallReply("weather", {"city": "Oslo"}), ToolCallReply("weather", {"city": "Rome"})))


def options(server: ModelServer, **more: Any) -> dict[str, Any]:
    return {"base_url": f"{server.base_url}/v1", "api_key": "k", "retry": FAST, "limiter": Unlimited(), **more}


@pytest.mark.parametrize("index", ["counted", "missing", "zero"])
async def test_streamed_calls_are_told_apart_by_index_or_id(index: Any) -> None:
    reply = Reply("", CITIES.tool_calls, stream_index=index)
    with ModelServer(reply) as server:
        found = await model_from_name("google:g", **options(server, stream=True)).complete("q", tools=[WEATHER])
    assert [(call.name, dict(call.arguments)) for call in found.message.tool_calls] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]


async def test_mistral_streams_without_stream_options() -> None:
    with ModelServer("hi", faults=StreamOptionsRefused()) as server:
        assert (await model_from_name("mistral:large", **options(server, stream=True)).complete("q")).text == "hi"
        with pytest.raises(InvalidCallError, match="Extra inputs"):
            await model_from_name("openrouter:m", **options(server, stream=True)).complete("q")


async def test_a_model_without_encrypted_reasoning_is_asked_once_and_remembered() -> None:
    with ModelServer("hi", faults=EncryptedRefused()) as server:
        model = model_from_name("azure:support-bot", **options(server))
        assert [(await model.complete("q")).text for _ in range(3)] == ["hi"] * 3
        assert server.stats().requests == 4


async def test_lists_in_params_are_joined_with_our_own() -> None:
    params = {"tools": [{"type": "web_search"}], "include": ["message.output_text.logprobs"]}
    with ModelServer("hi") as server:
        await OpenAIAdapter("gpt-6", api="responses", **options(server, params=params)).complete("q", tools=[WEATHER])
        body = server.requests()[0].body
    assert [tool["type"] for tool in body["tools"]] == ["function", "web_search"]
    assert body["include"] == ["reasoning.encrypted_content", "message.output_text.logprobs"]


@pytest.mark.parametrize("form", ["reset", "body"])
async def test_the_pause_that_a_provider_asks_for_is_read(form: Any) -> None:
    with ModelServer("hi", faults=RateLimited(2.0, form)) as server:
        models = [
            OpenAIAdapter("m", **options(server)),
            AnthropicAdapter("m", **options(server, base_url=server.base_url)),
        ]
        for model in models:
            with pytest.raises(RateLimitedError) as caught:
                await model.complete("q")
            assert caught.value.retry_after == pytest.approx(2.0, abs=0.5)


async def test_identifiers_of_openai_are_sent_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    with ModelServer("hi") as server:
        await model_from_name("mistral:large", **options(server)).complete("q")
        headers = server.requests()[0].headers
    assert not [name for name in headers if name.startswith("openai-")]
    client: Any = OpenAIAdapter("gpt-6", api_key="k")._make_client()
    assert client.organization == "org-1"


async def test_calls_without_ids_get_some() -> None:
    def look() -> str:
        """Look."""
        return "snow"

    replies = [Reply("", (ToolCallReply("look", {}, id="c"), ToolCallReply("look", {}, id="c"))), Reply("ok")]
    with ModelServer(replies) as server:
        model = OpenAIAdapter("m", **options(server))
        suite = EvalSuite(
            "a", Dataset([Sample("1", "q", "ok")], name="d"), agent_task(model, tools=[look]), exact_match
        )
        await suite.run(store="memory:")
        messages = server.requests()[1].body["messages"]
    called = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    assert len(set(called)) == 2
    assert called == [message["tool_call_id"] for message in messages if message["role"] == "tool"]


async def test_pictures_of_tools_are_sent_or_refused(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    picture = blobs.put(b"\x89PNG", media_type="image/png", name="s.png")
    talk = [
        ChatMessage("user", "Look."),
        ChatMessage("assistant", "", (ToolCall("look", {}, "c1"),)),
        ChatMessage("tool", ("The screen:", picture), name="c1", failed=True),
    ]
    with ModelServer("hi") as server:
        await OpenAIAdapter("m", api="responses", **options(server, blobs=blobs)).complete(talk)
        await AnthropicAdapter("m", **options(server, blobs=blobs, base_url=server.base_url)).complete(talk)
        responses, anthropic = (request.body for request in server.requests())
        with pytest.raises(InvalidCallError, match="must be text in chat completions"):
            await OpenAIAdapter("m", api="chat", **options(server, blobs=blobs)).complete(talk)
        spoken = [ChatMessage("user", "x"), ChatMessage("assistant", ("y", picture)), ChatMessage("user", "z")]
        with pytest.raises(InvalidCallError, match="message of the assistant must be text"):
            await OpenAIAdapter("m", api="responses", **options(server, blobs=blobs)).complete(spoken)
    assert [part["type"] for part in responses["input"][-1]["output"]] == ["input_text", "input_image"]
    result = anthropic["messages"][-1]["content"][0]
    assert [part["type"] for part in result["content"]] == ["text", "image"]
    assert result["is_error"] is True


async def test_a_tool_can_return_a_picture(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    picture = blobs.put(b"\x89PNG", media_type="image/png", name="s.png")

    def screenshot() -> Any:
        """A picture of the screen."""
        return ["The screen:", picture]

    with ModelServer([Reply("", (ToolCallReply("screenshot", {}),)), Reply("ok")]) as server:
        model = OpenAIAdapter("m", api="responses", **options(server, blobs=blobs))
        data = Dataset([Sample("1", "q", "ok")], name="d")
        await EvalSuite("a", data, agent_task(model, tools=[screenshot]), exact_match).run(store="memory:")
        output = server.requests()[1].body["input"][-1]["output"]
    assert [part["type"] for part in output] == ["input_text", "input_image"]


async def test_a_system_message_in_the_middle_stays_there_with_anthropic() -> None:
    talk = [ChatMessage("system", "a"), ChatMessage("user", "b"), ChatMessage("system", "c"), ChatMessage("user", "d")]
    with ModelServer("hi") as server:
        await AnthropicAdapter("m", **options(server, base_url=server.base_url)).complete(talk)
        body = server.requests()[0].body
    assert body["system"] == "a"
    assert [message["role"] for message in body["messages"]] == ["user", "system", "user"]


class Author(BaseModel):
    name: str


class Book(BaseModel):
    author: Author = Field(description="Who wrote it")


class Link(BaseModel):
    link: AnyUrl


class Mail(BaseModel):
    to: str = Field(json_schema_extra={"examples": ["a@b.c"]})


def test_references_with_a_description_are_inlined_and_unknown_keywords_are_not_strict() -> None:
    book = output_schema(Book)
    assert book is not None
    assert book.strict
    assert "$ref" not in json.dumps(book.schema)
    assert book.schema["properties"]["author"]["description"] == "Who wrote it"
    for kind in (Link, Mail):
        found = output_schema(kind)
        assert found is not None
        assert not found.strict


# Costs.


def audio_model(server: ModelServer, name: str = "gpt-audio", **more: Any) -> OpenAIAdapter:
    return OpenAIAdapter(name, api="chat", **options(server, prices_of="openai", **more))


@pytest.mark.parametrize("stream", [False, True])
async def test_audio_has_its_own_price_or_the_cost_is_unknown(stream: bool) -> None:
    usage = Usage(100_000, 50_000, audio_input_tokens=90_000, audio_output_tokens=45_000)
    with ModelServer(Reply("ok", usage=usage)) as server:
        listed = (await audio_model(server, stream=stream).complete("q")).usage
        unlisted = (await audio_model(server, "gpt-4o-audio-preview").complete("q")).usage
        given = Prices(2.5, 10, audio_input=32, audio_output=64)
        own = (await audio_model(server, prices=given).complete("q")).usage
        partial = (await audio_model(server, prices=Prices(2.5, 10)).complete("q")).usage
    assert listed is not None
    assert own is not None
    assert (
        listed.cost_usd == own.cost_usd == pytest.approx((10_000 * 2.5 + 90_000 * 32 + 5_000 * 10 + 45_000 * 64) / 1e6)
    )
    assert unlisted is not None
    assert partial is not None
    assert unlisted.cost_usd is partial.cost_usd is None


@pytest.mark.parametrize(("tier", "known"), [("", True), ("default", True), ("flex", False), ("priority", False)])
async def test_the_cost_of_another_service_tier_is_unknown(tier: str, known: bool) -> None:
    with ModelServer(Reply("ok", usage=Usage(1000, 100, service_tier=tier))) as server:
        model = OpenAIAdapter("gpt-5", api="responses", **options(server, prices_of="openai"))
        found = (await model.complete("q")).usage
    assert found is not None
    assert (found.cost_usd is not None) is known


async def test_a_cache_of_one_hour_costs_more() -> None:
    costs = []
    for hour in (0, 100_000):
        usage = Usage(100_010, 10, cache_write_tokens=100_000, hour_write_tokens=hour)
        with ModelServer(Reply("ok", usage=usage)) as server:
            given = options(server, prices_of="anthropic", base_url=server.base_url)
            found = (await AnthropicAdapter("claude-opus-4-5", **given).complete("q")).usage
        assert found is not None
        costs.append(found.cost_usd)
    assert costs == [pytest.approx(0.6253), pytest.approx(1.0003)]


async def test_the_cost_that_a_provider_reports_is_taken() -> None:
    with ModelServer(Reply("ok", usage=Usage(10, 5, cost=0.0123))) as server:
        found = (await model_from_name("openrouter:some/new-model", **options(server)).complete("q")).usage
    assert found is not None
    assert found.cost_usd == 0.0123


async def test_requests_that_time_out_count_and_are_retried_once() -> None:
    session = Session()
    with ModelServer("hi", faults=Hang(5)) as server:
        patient = RetryPolicy(attempts=5, base_seconds=0.001, max_seconds=0.002)
        model = OpenAIAdapter(
            "m", **options(server, retry=patient, timeout_seconds=0.2, trial_budget=Budget(requests=3))
        )
        with pytest.raises(ModelUnavailableError):
            await model.complete("q", session=session)
        assert server.stats().requests == 2
        with pytest.raises(BudgetExceededError):
            await model.complete("q", session=session)
        assert server.stats().requests == 3
    totals = session.call_totals()
    assert totals.unpriced_calls == 3


PRICES = Prices(1, 2, cached=0.5, cache_write=1.5, reasoning=3, audio_input=10, audio_output=20, cache_write_hour=4,
                tiers={"flex": 0.5, "priority": 2})  # fmt: skip
KINDS = ("chat", "responses", "anthropic", "gemini", "bedrock")
AUDIO, WRITES, HOURS = ("chat", "gemini"), ("chat", "responses", "anthropic", "bedrock"), ("anthropic", "bedrock")


def any_model(kind: str, server: ModelServer, **more: Any) -> SdkAdapter:
    given = options(server, **{"retry": NO_RETRY, **more})
    match kind:
        case "anthropic":
            return AnthropicAdapter("m", **{**given, "base_url": server.base_url})
        case "gemini":
            return VertexAdapter("m", **{**given, "base_url": f"{server.base_url}/v1beta"})
        case "bedrock":
            return ConverseAdapter("m", **{**given, "base_url": server.base_url})
        case "chat":
            return OpenAIAdapter("m", api="chat", **given)
        case _:
            return OpenAIAdapter("m", api="responses", **given)


def usages_of(kind: str) -> list[Usage]:
    """Answers with each part that a protocol can report, alone and together, in each tier."""
    rng = random.Random(kind)
    found = []
    for number in range(12):
        audio = (rng.randrange(300), rng.randrange(90)) if kind in AUDIO and number % 2 else (0, 0)
        written = rng.randrange(1, 200) if kind in WRITES and number % 3 else 0
        hour = rng.randrange(written) if kind in HOURS and written else 0
        tier = ("", "flex", "priority")[number % 3]
        reasoned = rng.randrange(50) if kind != "bedrock" else 0  # Converse does not tell.
        found.append(Usage(1000 + number, 200, rng.randrange(100), reasoned, written, *audio, hour, tier))
    return found


def charged(usage: Usage) -> float:
    """What the provider charges for an answer, counted anew from its own ledger."""
    plain = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens - usage.audio_input_tokens
    said = usage.output_tokens - usage.reasoning_tokens - usage.audio_output_tokens
    dollars = plain * 1 + usage.cached_tokens * 0.5 + usage.audio_input_tokens * 10
    dollars += (usage.cache_write_tokens - usage.hour_write_tokens) * 1.5 + usage.hour_write_tokens * 4
    dollars += said * 2 + usage.reasoning_tokens * 3 + usage.audio_output_tokens * 20
    return dollars * {"": 1, "flex": 0.5, "priority": 2}[usage.service_tier] / 1e6


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_budget_is_exact_against_the_servers_ledger(kind: str, stream: bool) -> None:
    usages = usages_of(kind)
    expected = sum(charged(usage) for usage in usages)
    session = Session()
    budget = Budget(cost_usd=expected * 0.999)
    with ModelServer([Reply("ok", usage=usage) for usage in usages]) as server:
        async with any_model(kind, server, prices=PRICES, trial_budget=budget, stream=stream) as model:
            for usage in usages:
                found = (await model.complete("q", session=session)).usage
                assert found is not None
                assert found.cost_usd == pytest.approx(charged(usage)), usage
            with pytest.raises(BudgetExceededError):
                await model.complete("q", session=session)
        stats = server.stats()
    used = session.usage()
    assert used.cost_usd == pytest.approx(expected)
    assert (used.input_tokens, used.output_tokens) == (stats.input_tokens, stats.output_tokens)
    assert stats.requests == len(usages)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_budget_is_never_below_the_ledger_when_requests_are_lost(kind: str, stream: bool) -> None:
    """Requests without a usable answer count; their cost is unknown, so that a strict budget ends the work."""
    lost = (Hang(5), HalfSent(), MalformedJson(), ConnectionReset(), *((StreamFailed(),) if stream else ()))
    faults = [FaultRule(fault, numbers=(number,)) for number, fault in enumerate(lost, 1)]
    session = Session()
    with ModelServer("hi", faults=faults) as server:
        given = {"prices": PRICES, "timeout_seconds": 1.5, "stream": stream}  # A busy machine has to answer within it.
        async with any_model(kind, server, trial_budget=Budget(requests=len(lost) + 1), **given) as model:
            for fault in lost:
                with pytest.raises((ModelUnavailableError, MalformedReplyError)):
                    await model.complete("q", session=session)
                counted = spent_in(session, "task")[1]
                assert counted == server.stats().requests, fault
            await model.complete("q", session=session)
            with pytest.raises(BudgetExceededError):
                await model.complete("q", session=session)
        assert server.stats().requests == len(lost) + 1
        server.reset()
        strict = Budget(cost_usd=1, strict=True)
        async with any_model(kind, server, trial_budget=strict, **given) as model:
            with pytest.raises(ModelUnavailableError):
                await model.complete("q", session=Session())
            with pytest.raises(BudgetExceededError, match="is not known"):
                await model.complete("q", session=Session())
    assert session.call_totals().unpriced_calls == len(lost)


async def test_given_prices_do_not_hold_for_a_tier_that_they_do_not_name() -> None:
    with ModelServer(Reply("ok", usage=Usage(1000, 100, service_tier="priority"))) as server:
        found = (await OpenAIAdapter("m", **options(server, prices=Prices(1, 2))).complete("q")).usage
    assert found is not None
    assert found.cost_usd is None
    assert Prices(1, 2, tiers={"flex": 0.5}).cost(TokenUsage(10, 10), UsageExtras(tier="flex")) == 15 / 1e6
    assert read_prices({"m": {"input": 1, "output": 2, "tiers": {"flex": 0.5}}})["m"].tiers == {"flex": 0.5}
    with pytest.raises(ConfigurationError, match="factors by service tier"):
        Prices(1, 2, tiers={"flex": -1})


# Judges.

EXCELLENT = json.dumps({"reason": "r", "rating": "excellent"})


async def test_a_judge_sees_pictures_and_not_their_names(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    picture = blobs.put(b"\x89PNG", media_type="image/png", name="cat.png")
    output = {"reason": "r", "rating": "excellent"}
    with ModelServer(Reply(output=output)) as server:
        judge = llm_judge(OpenAIAdapter("m", **options(server, blobs=blobs)), "The picture shows a cat.")
        blind = llm_judge(OpenAIAdapter("m", **options(server)), "The picture shows a cat.")
        data: Dataset[Any, Any] = Dataset([Sample("1", picture, None)], name="d")
        report = await EvalSuite("j", data, lambda given: picture, judge).run(store="memory:")
        refused = await EvalSuite("b", data, lambda given: picture, blind).run(store="memory:")
        asked = server.requests()[0].body["messages"][-1]["content"]
        assert server.stats().requests == 1
    assert [part["type"] for part in asked].count("image_url") == 2
    assert "cat.png" not in json.dumps(asked)
    assert report.results[0].outcome == "scored"
    assert refused.results[0].outcome == "scorer_error"


async def test_judges_read_every_script_and_see_hidden_characters() -> None:
    heard: list[str] = []

    def spy(messages: Any) -> str:
        heard.append(messages[-1].text)
        return EXCELLENT

    text = "東京は日本の首都です。 \u202eabc\u200b\u2028 \U000e0041 Привет \x1b"
    data: Dataset[Any, Any] = Dataset([Sample("1", "q", None)], name="d")
    await EvalSuite("j", data, lambda given: text, llm_judge(ScriptedAdapter(spy), "Polite.")).run(store="memory:")
    assert "東京は日本の首都です。" in heard[0]
    assert "Привет" in heard[0]
    for hidden, shown in (("\u202e", "\\u202e"), ("\u200b", "\\u200b"), ("\u2028", "\\u2028"), ("\x1b", "\\u001b")):
        assert hidden not in heard[0]
        assert shown in heard[0]
    assert "\U000e0041" not in heard[0]
    assert {name: piece for _, name, piece in read_fences(heard[0])}["output_to_assess"] == text


async def test_a_panel_with_a_quorum_tolerates_a_broken_member() -> None:
    def members() -> list[Any]:
        said = (("a", EXCELLENT), ("b", EXCELLENT), ("c", "garbage"))
        return [llm_judge(ScriptedAdapter([text] * 4), "It is correct.", name=name) for name, text in said]

    data = Dataset([Sample("1", "q", "x")], name="d")
    for quorum, outcome in ((2, "scored"), (3, "scorer_error"), (None, "scorer_error")):
        judge = panel(*members(), quorum=quorum)
        report = await EvalSuite("p", data, lambda given: "x", judge).run(store="memory:")
        assert report.results[0].outcome == outcome


async def test_a_verdict_with_a_key_twice_is_refused() -> None:
    twice = '{"reason": "r", "rating": "good", "rating": "wrong"}'
    data = Dataset([Sample("1", "q", "x")], name="d")
    judge = llm_judge(ScriptedAdapter([twice] * 4), "It is correct.")
    report = await EvalSuite("p", data, lambda given: "x", judge).run(store="memory:")
    assert report.results[0].outcome == "scorer_error"
