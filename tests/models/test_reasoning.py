"""Reasoning is given back as its provider sent it: through the official SDKs, to a server that checks every byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalSuite, OpenAIAdapter, PromptExecuted, TokenUsage, ToolInvoked, agent_task, contains
from fairtrial.base.codec import dumps
from fairtrial.data.session.session import Session, restore_session
from fairtrial.data.session.trajectory import ChatMessage, Echo, ToolCall
from fairtrial.errors import ConfigurationError, InvalidCallError
from fairtrial.integrations.model_server import CutOff, ModelServer, ParsedRequest, Reply, Script, ToolCallReply, Usage
from fairtrial.integrations.model_server.faults import ReasoningNotReturned, TemperatureRefused, ToolsNeedResponses
from fairtrial.models import AgentEnded, AnthropicAdapter, ResponseCache, Unlimited
from fairtrial.models.limiter import NO_RETRY
from fairtrial.models.sdk import SdkAdapter
from fairtrial.models.tools import Tool, tool_message

STYLES = ("chat", "responses", "anthropic")
TURNS = 10

type MakeModel = Callable[..., SdkAdapter]


def weather(city: str) -> str:
    """The weather of a city."""
    return f"snow in {city}"


WEATHER = Tool(weather, inline=True)


def conversation(request: ParsedRequest) -> Reply:
    """Ten turns with reasoning and two tool calls each, then an answer."""
    turn = request.turn
    if turn >= TURNS:
        return Reply("It snows everywhere.", reasoning="That was all.")
    calls = tuple(
        ToolCallReply("weather", {"city": f"{name} {turn}"}, thought_signature=f"c2ln{turn}{name}")
        for name in ("Oslo", "Z\u00fcrich \u2744")
    )
    return Reply(
        f"Turn {turn}. " if turn % 2 else "",
        tool_calls=calls,
        reasoning=f'Step {turn}: \u201clook\u201d at \\u00e9 and "both".',
        redacted_reasoning="b3BhcXVl" if turn % 3 == 0 else "",
    )


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def make(style: str, base_url: str, model: str = "test-model", **options: Any) -> SdkAdapter:
    given = {"api_key": "test", "retry": NO_RETRY, "limiter": Unlimited(), **options}
    if style == "anthropic":
        return AnthropicAdapter(model, base_url=base_url, **given)
    return OpenAIAdapter(model, base_url=base_url + "/v1", **{"api": style, **given})


@pytest.fixture
async def model_for() -> AsyncIterator[MakeModel]:
    async with AsyncExitStack() as stack:

        def made(style: str, server: ModelServer, **options: Any) -> SdkAdapter:
            adapter = make(style, server.base_url, **options)
            stack.push_async_callback(adapter.aclose)
            return adapter

        yield made


async def talk(adapter: SdkAdapter, messages: list[ChatMessage]) -> ChatMessage:
    """Call the model until it answers without tools, as an agent does."""
    while True:
        completion = await adapter.complete(messages, tools=[WEATHER.spec])
        messages.append(completion.message)
        if not completion.message.tool_calls:
            return completion.message
        messages.extend(tool_message(call, weather(**call.arguments)) for call in completion.message.tool_calls)


@pytest.mark.proves("R141")
async def test_ten_turns_with_tools_are_accepted_by_a_server_that_checks_every_echo(
    style: str, stream: bool, model_for: MakeModel
) -> None:
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "Where does it snow?")]
        last = await talk(model_for(style, server, stream=stream), messages)
        stats = server.stats()
    assert (stats.requests, stats.by_status, stats.by_fault) == (TURNS + 1, {200: TURNS + 1}, {})
    assert (last.text, last.reasoning) == ("It snows everywhere.", "That was all.")
    assert [m.reasoning[:7] for m in messages if m.tool_calls] == [f"Step {turn}:" for turn in range(TURNS)]


async def test_without_its_echo_a_tool_call_is_refused(style: str, stream: bool, model_for: MakeModel) -> None:
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        adapter = model_for(style, server, stream=stream)
        asked = ChatMessage("user", "Where does it snow?")
        first = (await adapter.complete([asked], tools=[WEATHER.spec])).message
        results = [tool_message(call, "snow") for call in first.tool_calls]
        dropped = replace(first, echo=None, tool_calls=tuple(replace(call, echo=None) for call in first.tool_calls))
        assert dropped == first  # An echo is no part of what was said.
        refused = {
            "chat": "must be passed back to the API",
            "responses": "without its required 'reasoning' item",
            "anthropic": "Expected `thinking`",
        }[style]
        with pytest.raises(InvalidCallError, match=refused):
            await adapter.complete([asked, dropped, *results], tools=[WEATHER.spec])
        if style == "chat":
            unsigned = replace(first, tool_calls=dropped.tool_calls)
            with pytest.raises(InvalidCallError, match="missing a thought_signature"):
                await adapter.complete([asked, unsigned, *results], tools=[WEATHER.spec])
        assert (await adapter.complete([asked, first, *results], tools=[WEATHER.spec])).message.tool_calls


async def test_an_echo_survives_snapshots_and_never_stands_in_the_message_as_json(
    style: str, model_for: MakeModel
) -> None:
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        adapter = model_for(style, server)
        session = Session()
        asked = ChatMessage("user", "Where does it snow?")
        first = (await adapter.complete([asked], tools=[WEATHER.spec])).message
        session.record(asked)
        session.record(first)
        for call in first.tool_calls:
            session.record(tool_message(call, "snow"))
        restored = restore_session(session.snapshot()).trajectory.messages
        assert (restored[1].reasoning, restored[1].echo) == (first.reasoning, first.echo)
        assert [call.echo for call in restored[1].tool_calls] == [call.echo for call in first.tool_calls]
        assert (await adapter.complete(restored, tools=[WEATHER.spec])).message.tool_calls
    assert first.reasoning.startswith("Step 0")
    assert "Step 0" not in dumps(first) + repr(first) + first.text + dumps([first, {"m": first}])


async def test_an_echo_goes_back_to_the_same_provider_and_family_only(stream: bool, model_for: MakeModel) -> None:
    with ModelServer(conversation) as server:
        messages = {}
        for style in STYLES:
            asked = [ChatMessage("user", "Where does it snow?")]
            adapter = model_for(style, server, model="claude-x" if style == "anthropic" else "gpt-x", stream=stream)
            first = (await adapter.complete(asked, tools=[WEATHER.spec])).message
            messages[style] = [*asked, first, *(tool_message(call, "snow") for call in first.tool_calls)]
        server.reset()
        for style in STYLES:
            for source in STYLES:
                family = "gemini-x" if source == style else "gpt-x"
                await model_for(style, server, model=family).complete(messages[source], tools=[WEATHER.spec])
        sent = [json.dumps(request.body) for request in server.requests()]
    assert len(sent) == 9
    for secret in ("thinking", "reasoning_content", "Step 0", "thought_signature", "rs_", 'encrypted_content":'):
        assert not [body for body in sent if secret in body], secret


async def test_an_edited_message_is_sent_as_it_reads(style: str, model_for: MakeModel) -> None:
    with ModelServer(conversation) as server:
        adapter = model_for(style, server)
        asked = ChatMessage("user", "Where does it snow?")
        first = (await adapter.complete([asked], tools=[WEATHER.spec])).message
        edited = replace(first, content="I was edited.", tool_calls=())
        await adapter.complete([asked, edited, asked], tools=[WEATHER.spec])
        last = server.requests()[-1]
    assert "I was edited." in [message.text for message in last.messages]
    assert "tool_use" not in json.dumps(last.body["messages"]) if style == "anthropic" else True


@pytest.mark.parametrize("kept", [True, False], ids=["cached", "uncached"])
async def test_cached_answers_come_with_their_echoes(
    style: str, model_for: MakeModel, tmp_path: Path, kept: bool
) -> None:
    cache = ResponseCache(tmp_path / "cache.db", "read-write" if kept else "off")
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        for _ in range(2):
            adapter = model_for(style, server, cache=cache)
            await talk(adapter, [ChatMessage("user", "Where does it snow?")])
        stats = server.stats()
    cache.close()
    assert stats.by_fault == {}
    assert stats.requests == (TURNS + 1) * (1 if kept else 2)


async def test_answers_that_differ_in_their_echo_only_are_cached_apart(model_for: MakeModel, tmp_path: Path) -> None:
    with ModelServer("ok") as server, ResponseCacheFile(tmp_path) as cache:
        adapter = model_for("anthropic", server, cache=cache)
        calls = (ToolCall("weather", {"city": "Oslo"}, "id1"),)
        for signature in ("one", "two"):
            block = {"type": "thinking", "thinking": "t", "signature": signature}
            use = {"type": "tool_use", "id": "id1", "name": "weather", "input": {"city": "Oslo"}}
            said = ChatMessage("assistant", "", calls, echo=adapter._echo([block, use]))
            await adapter.complete([ChatMessage("user", "x"), said, tool_message(calls[0], "snow")])
        assert (cache.hits, cache.misses) == (0, 2)


class ResponseCacheFile:
    def __init__(self, folder: Path) -> None:
        self._cache = ResponseCache(folder / "cache.db")

    def __enter__(self) -> ResponseCache:
        return self._cache

    def __exit__(self, *problem: object) -> None:
        self._cache.close()


@pytest.mark.proves("R141")
async def test_the_same_agent_gets_the_same_scores_tokens_and_calls_through_every_api(stream: bool) -> None:
    found = {}
    for style in STYLES:
        with ModelServer(conversation, faults=[ReasoningNotReturned()]) as server:
            adapter = make(style, server.base_url, stream=stream)
            agent = agent_task(adapter, tools=[WEATHER], system="Be brief.")
            data = Dataset.of([("Where does it snow?", "everywhere"), ("Where does it rain?", "nowhere")])
            report = await EvalSuite("snow", data, agent, contains).run(store="memory:")
            results = list(report.results)
            await adapter.aclose()
            calls = [[(c.name, dict(c.params), c.result) for c in r.session[ToolInvoked].all()] for r in results]
            found[style] = (
                [(r.sample_id, r.outcome, r.score.value if r.score else None, r.output) for r in results],
                [r.usage for r in results],
                calls,
                [r.session[AgentEnded].all() for r in results],
            )
    assert found["chat"] == found["responses"] == found["anthropic"]
    assert [value for _, _, value, _ in found["chat"][0]] == [1.0, 0.0]
    assert all(usage.reasoning_tokens > 0 for usage in found["chat"][1])


async def test_tools_with_reasoning_are_refused_on_chat_completions_and_work_through_responses(
    stream: bool, model_for: MakeModel
) -> None:
    script = Script(
        (Reply(tool_calls=(ToolCallReply("weather", {"city": "Oslo"}),), reasoning="Look."), "Snow."), "turn"
    )
    with ModelServer(script, faults=[ToolsNeedResponses(), ReasoningNotReturned()]) as server:
        asked = ChatMessage("user", "Weather?")
        with pytest.raises(
            InvalidCallError, match=r'use /v1/responses(.|\n)*Use OpenAIAdapter\(..., api="responses"\)'
        ):
            await model_for("chat", server, stream=stream).complete([asked], tools=[WEATHER.spec])
        assert (await talk(model_for("responses", server, stream=stream), [asked])).text == "Snow."


async def test_a_refused_temperature_is_explained(style: str, stream: bool, model_for: MakeModel) -> None:
    with ModelServer("ok", faults=TemperatureRefused()) as server:
        with pytest.raises(InvalidCallError, match="Reasoning models do not support sampling parameters: remove them"):
            await model_for(style, server, stream=stream, params={"temperature": 0}).complete(
                [ChatMessage("user", "x")]
            )
        assert (await model_for(style, server, stream=stream).complete([ChatMessage("user", "x")])).output == "ok"


async def test_an_answer_cut_off_says_so(style: str, stream: bool, model_for: MakeModel) -> None:
    reply = Reply("An answer of many words.", reasoning="Thinking of it.")
    with ModelServer(reply, faults=CutOff()) as server:
        session = Session()
        adapter = model_for(style, server, stream=stream)
        completion = await adapter.complete([ChatMessage("user", "x")], params={"max_tokens": 6}, session=session)
        assert completion.output == "An answe"
        assert completion.finish_reason in ("length", "max_tokens")
        assert session[PromptExecuted].all()[0].cut_off
        whole = await adapter.complete([ChatMessage("user", "x")], session=session)
        assert whole.output == reply.text
        assert not session[PromptExecuted].all()[1].cut_off


async def test_usage_counts_reasoning_and_cache_writes_separately(
    style: str, stream: bool, model_for: MakeModel
) -> None:
    used = Usage(1000, 50, cached_tokens=800, reasoning_tokens=30, cache_write_tokens=100)
    with ModelServer(Reply("ok", usage=used)) as server:
        completion = await model_for(style, server, stream=stream).complete([ChatMessage("user", "x")])
    assert completion.usage == TokenUsage(1000, 50, 800, reasoning_tokens=30, cache_write_tokens=100)


async def test_responses_are_stateless_and_ask_reasoning_models_for_encrypted_reasoning(model_for: MakeModel) -> None:
    with ModelServer("ok") as server:
        params = {"max_tokens": 100, "reasoning_effort": "low", "verbosity": "low", "logprobs": None}
        for model in ("gpt-6-astra", "gpt-4o-mini"):
            await model_for("responses", server, model=model, params=params).complete([ChatMessage("user", "x")])
        first, second = (request.body for request in server.requests())
        assert (first["store"], first["include"]) == (False, ["reasoning.encrypted_content"])
        assert (first["max_output_tokens"], first["reasoning"]) == (100, {"effort": "low"})
        assert first["text"] == {"verbosity": "low"}
        assert not {"max_tokens", "reasoning_effort", "verbosity", "logprobs"} & first.keys()
        assert "include" not in second
        with pytest.raises(InvalidCallError, match='api="chat"'):
            await model_for("responses", server).complete([ChatMessage("user", "x")], params={"logprobs": True})


@pytest.mark.parametrize(
    ("base_url", "api"),
    [
        (None, "responses"),
        ("https://eu.api.openai.com/v1", "responses"),
        ("https://mine.openai.azure.com/openai/v1", "responses"),
        ("https://mine.services.ai.azure.com/openai/v1", "responses"),
        ("http://localhost:8000/v1", "chat"),
        ("https://api.openai.com.example/v1", "chat"),
    ],
)
def test_the_address_decides_the_api_unless_it_is_given(base_url: str | None, api: str) -> None:
    assert OpenAIAdapter("m", base_url=base_url, api_key="k").api == api
    assert OpenAIAdapter("m", base_url=base_url, api_key="k", api="chat").api == "chat"
    with pytest.raises(ConfigurationError, match='api must be "responses", "chat" or None'):
        OpenAIAdapter("m", base_url=base_url, api_key="k", api="completions")  # type: ignore[arg-type]


async def test_calls_with_tools_mark_their_prefix_for_anthropics_cache(model_for: MakeModel) -> None:
    with ModelServer(conversation, faults=ReasoningNotReturned()) as server:
        messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "Where does it snow?")]
        await talk(model_for("anthropic", server), messages)
        bodies = [request.body for request in server.requests()]
        server.reset()
        await model_for("anthropic", server).complete(messages[:2])
        await model_for("anthropic", server, prompt_cache=True).complete(messages[:2])
        await model_for("anthropic", server, prompt_cache=False).complete(messages[:2], tools=[WEATHER.spec])
        marks = [json.dumps(request.body).count("cache_control") for request in server.requests()]
    assert marks == [0, 2, 0]
    for body in bodies:
        assert json.dumps(body).count("cache_control") == 3  # At most four are allowed.
        assert body["tools"][-1]["cache_control"] == body["system"][-1]["cache_control"] == {"type": "ephemeral"}
        assert body["messages"][-1]["content"][-1]["cache_control"] == {"type": "ephemeral"}
        assert body["max_tokens"] == 32_000


async def test_other_servers_fields_of_reasoning_are_kept_and_given_back(stream: bool, model_for: MakeModel) -> None:
    adapter = OpenAIAdapter("m", base_url="http://127.0.0.1:1/v1", api_key="k", stream=stream)
    details = [{"type": "reasoning.text", "text": "Because.", "signature": "s", "index": 0}]
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "Yes."}]
    for said, reasoning in (
        ({"content": "Yes.", "reasoning": "Because.", "reasoning_details": details}, "Because."),
        ({"content": "Yes.", "extra_content": {"google": {"thought_signature": "s"}}}, ""),
        ({"content": parts}, "Hm."),
    ):
        tree = {"choices": [{"message": {"role": "assistant", **said}, "finish_reason": "stop"}], "model": "m"}
        if stream:
            tree = dict(await adapter._gather(_pieces(said)))
        message = adapter._read(tree).message
        assert (message.text, message.reasoning) == ("Yes.", reasoning)
        assert adapter._sent(message) == {"role": "assistant", **said}
    assert adapter._echoed(Echo("other", "m", "{}")) is None


async def _pieces(said: dict[str, Any]) -> AsyncIterator[Any]:
    """A message in chunks: its text split, each list sent part by part."""
    deltas: list[dict[str, Any]] = []
    for name, value in said.items():
        if isinstance(value, str):
            deltas += [{name: value[:2]}, {name: value[2:]}]
        elif isinstance(value, list):
            for part in value:
                grown = {**part, "text": part["text"][:3]} if "text" in part else part
                rest = {key: part[key] for key in ("type", "index") if key in part}
                deltas += [{name: [grown]}]
                if "text" in part:
                    deltas += [{name: [{**rest, "text": part["text"][3:]}]}]
        else:
            deltas += [{name: value}]
    for delta in deltas:
        yield {"model": "m", "choices": [{"index": 0, "delta": delta}]}
    yield {"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


async def test_calls_say_how_long_they_took_and_waited(model_for: MakeModel) -> None:
    with ModelServer("ok", latency=0.03) as server:
        session = Session()
        await model_for("chat", server).complete([ChatMessage("user", "x")], session=session)
    (executed,) = session[PromptExecuted].all()
    assert executed.duration_ms is not None
    assert executed.duration_ms >= 30
    assert executed.waited_ms is not None
    assert executed.waited_ms >= 0
