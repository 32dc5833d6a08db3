"""Tools that run at the provider: what they did is sent back, their cost is not left out, pauses are continued."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import ContentBlockParam
from pydantic import TypeAdapter

from fairtrial import AnthropicAdapter, ChatMessage, Dataset, EvalSuite, OpenAIAdapter, Sample, agent_task, contains
from fairtrial.integrations.model_server import FaultRule, ModelServer, ParsedRequest, Reply, ToolCallReply, WrongShape
from fairtrial.models import Prices
from fairtrial.models.gemini import GeminiAdapter
from fairtrial.models.limiter import NO_RETRY, Unlimited

SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CITED = {"type": "web_search_result_location", "cited_text": "Paris is", "encrypted_index": "e1", "title": "Atlas",
         "url": "https://example.org/atlas"}  # fmt: skip
FOUND = {"type": "web_search_result", "encrypted_content": "c1", "title": "Atlas", "url": "https://example.org/atlas"}
BLOCKS: tuple[dict[str, Any], ...] = (
    {"type": "text", "text": "Let me look. ", "citations": []},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "capital of France"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [FOUND]},
    {"type": "text", "text": "It is Paris. ", "citations": [CITED]},
)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def claude(server: ModelServer, **more: Any) -> AnthropicAdapter:
    given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited(), "params": {"tools": [SEARCH]}}
    return AnthropicAdapter("claude-opus-4-5", base_url=server.base_url, **{**given, **more})


def content_sent(request: ParsedRequest, place: int) -> Any:
    """The content of a message, valid by the types of the SDK; without the marks for the cache."""
    kind: TypeAdapter[Any] = TypeAdapter(ContentBlockParam)
    sent = request.body["messages"][place]["content"]
    for block in sent:
        kind.validate_python(block)
    return [{key: value for key, value in block.items() if key != "cache_control"} for block in sent]


def look(city: str) -> str:
    """Look at a city."""
    return f"{city} is large."


async def test_what_a_hosted_tool_did_is_sent_back_beside_own_calls(stream: bool) -> None:
    own = ToolCallReply("look", {"city": "Paris"}, id="toolu_1")
    with ModelServer([Reply("", (own,), hosted=BLOCKS), Reply("Paris is large.")]) as server:
        model = claude(server, stream=stream)
        data = Dataset([Sample("1", "The capital of France?", "Paris")], name="d")
        report = await EvalSuite("hosted", data, agent_task(model, tools=[look]), contains).run(store="memory:")
        _, second = server.requests()
    assert report.pass_rate == 1.0
    sent = content_sent(second, 1)
    assert sent == [*BLOCKS, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Paris"}}]
    assert [result["tool_use_id"] for result in second.body["messages"][2]["content"]] == ["toolu_1"]


async def test_a_pause_in_the_work_of_a_hosted_tool_is_continued(stream: bool) -> None:
    turns = [
        Reply("", hosted=BLOCKS[:2], finish_reason="pause_turn"),
        Reply("", hosted=BLOCKS[2:3], finish_reason="pause_turn"),
        Reply("", hosted=BLOCKS[3:]),
    ]
    with ModelServer([*turns, Reply("Yes.")]) as server:
        async with claude(server, stream=stream) as model:
            found = await model.complete("The capital of France?")
            said = [ChatMessage("user", "The capital of France?"), found.message, ChatMessage("user", "Sure?")]
            await model.complete(said)
        requests = server.requests()
    assert found.text == "Let me look. It is Paris. "
    assert found.finish_reason == "end_turn"
    assert content_sent(requests[1], 1) == [*BLOCKS[:2]]
    assert content_sent(requests[2], 1) == [*BLOCKS[:3]]
    assert content_sent(requests[3], 1) == [*BLOCKS]


async def test_searches_have_a_price_or_the_cost_is_unknown(stream: bool) -> None:
    with ModelServer(Reply("", hosted=BLOCKS)) as server:
        async with claude(server, stream=stream, prices_of="anthropic") as model:
            listed = (await model.complete("q")).usage
        async with claude(server, stream=stream, prices=Prices(5, 25)) as model:
            given = (await model.complete("q")).usage
    assert listed is not None
    assert given is not None
    tokens = (listed.input_tokens * 5 + listed.output_tokens * 25) / 1e6
    assert listed.cost_usd == pytest.approx(tokens + 0.01)  # $10 for 1,000 searches.
    assert given.cost_usd is None


async def test_a_search_of_responses_is_sent_back_with_its_reasoning() -> None:
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Paris."}]},
    ]
    body = {"model": "m", "status": "completed", "output": items}
    with ModelServer("Yes.", faults=FaultRule(WrongShape(body), numbers=(1,))) as server:
        given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited()}
        async with OpenAIAdapter("gpt-6", api="responses", base_url=f"{server.base_url}/v1", **given) as model:
            first = await model.complete("q", params={"tools": [{"type": "web_search"}]})
            await model.complete([ChatMessage("user", "q"), first.message, ChatMessage("user", "Sure?")])
        sent = server.requests()[1].body["input"]
    assert first.text == "Paris."
    assert sent[1:-1] == items


async def test_code_that_google_ran_is_sent_back() -> None:
    parts = [
        {"executableCode": {"language": "PYTHON", "code": "print(6 * 7)"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "42\n"}},
        {"text": "It is 42."},
    ]
    body = {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}]}
    with ModelServer("Yes.", faults=FaultRule(WrongShape(body), numbers=(1,))) as server:
        given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited()}
        async with GeminiAdapter("g", base_url=f"{server.base_url}/v1beta", **given) as model:
            first = await model.complete("6 * 7?", params={"tools": [{"codeExecution": {}}]})
            await model.complete([ChatMessage("user", "6 * 7?"), first.message, ChatMessage("user", "Sure?")])
        sent = server.requests()[1].body["contents"]
    assert first.text == "It is 42."
    assert sent[1]["parts"] == parts
