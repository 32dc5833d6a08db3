"""The official Anthropic SDK, unpatched, against the model server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam
from pydantic import BaseModel

from fairtrial.integrations.model_server import ModelServer, Reply, Rule, ToolCallReply, Usage

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello, good world"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
RULES = [
    Rule(
        "weather",
        Reply("Looking.", tool_calls=(ToolCallReply("weather", {"city": "Oslo"}), ToolCallReply("weather", {}))),
    ),
    Rule("quiet", Reply(tool_calls=(ToolCallReply("weather", '{"city": "Rome"}', id="mine"),))),
    Rule("broken", Reply(tool_calls=(ToolCallReply("weather", '{"city": '),))),
    Rule("cheap", Reply("ok", usage=Usage(1000, 20, cached_tokens=900))),
    Rule("long", Reply("only the beg", finish_reason="length")),
    Rule("odd", Reply("", finish_reason="pause_turn")),
]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(RULES, models=("small", "large")) as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="test", max_retries=0) as opened:
        yield opened


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def async_client(server: ModelServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.base_url, api_key="test", max_retries=0) as opened:
        yield opened


def ask(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


def texts(message: anthropic.types.Message) -> list[str]:
    return [block.text for block in message.content if block.type == "text"]


def test_without_a_rule_the_last_user_message_is_echoed(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="small", max_tokens=50, messages=HELLO, system="Be brief.", extra_body={"temperature": 0.1}
    )
    assert texts(answer) == ["Hello, good world"]
    assert (answer.stop_reason, answer.stop_details) == ("end_turn", None)
    # The system prompt counts as input: 9 characters are 3 tokens, 17 are 5.
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (8, 5)


def test_cached_tokens_are_apart_from_the_input_tokens(client: anthropic.Anthropic) -> None:
    usage = client.messages.create(model="small", max_tokens=50, messages=ask("cheap")).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (100, 900, 20)


async def test_the_async_client_gets_the_same_answer(
    async_client: anthropic.AsyncAnthropic, client: anthropic.Anthropic
) -> None:
    from_async = await async_client.messages.create(model="small", max_tokens=50, messages=HELLO)
    from_sync = client.messages.create(model="small", max_tokens=50, messages=HELLO)
    assert from_async.model_dump(exclude={"id"}) == from_sync.model_dump(exclude={"id"})


def test_tool_use_blocks_follow_the_text(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="small", max_tokens=50, messages=ask("weather"), tools=[WEATHER])
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{"city": "Oslo"}, {}]
    assert answer.stop_reason == "tool_use"


def test_arguments_given_as_text_become_an_object_if_they_are_one(client: anthropic.Anthropic) -> None:
    (good,) = client.messages.create(model="small", max_tokens=50, messages=ask("quiet")).content
    (bad,) = client.messages.create(model="small", max_tokens=50, messages=ask("broken")).content
    assert good.type == "tool_use"
    assert bad.type == "tool_use"
    assert (good.id, good.input) == ("mine", {"city": "Rome"})
    assert not isinstance(bad.input, dict)


def test_a_tool_result_is_not_what_the_user_said(client: anthropic.Anthropic) -> None:
    messages: list[MessageParam] = [
        {"role": "user", "content": "say weather again"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": " and sun"},
            ],
        },
    ]
    with ModelServer(lambda request: f"{request.last_user} -> {request.messages[-1].text}") as own:
        answer = client.with_options(base_url=own.base_url).messages.create(
            model="small", max_tokens=50, messages=messages
        )
        assert [message.role for message in own.requests()[0].messages] == ["user", "assistant", "tool"]
    assert texts(answer) == ["say weather again -> rain and sun"]


def test_a_tool_the_client_insists_on_is_called_with_the_least_arguments(client: anthropic.Anthropic) -> None:
    any_tool = client.messages.create(
        model="small", max_tokens=50, messages=HELLO, tools=[WEATHER], tool_choice={"type": "any"}
    )
    this_tool = client.messages.create(
        model="small", max_tokens=50, messages=HELLO, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}
    )
    no_tool = client.messages.create(
        model="small", max_tokens=50, messages=HELLO, tools=[WEATHER], tool_choice={"type": "auto"}
    )
    assert [block.input for block in any_tool.content if block.type == "tool_use"] == [{"city": ""}]
    assert [block.input for block in this_tool.content if block.type == "tool_use"] == [{"city": ""}]
    assert [block.type for block in no_tool.content] == ["text"]


def test_parse_without_a_rule_gives_the_least_instance_of_the_schema(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(model="small", max_tokens=50, messages=HELLO, output_format=Person)
    assert answer.parsed_output == Person(name="", age=0)


def test_stop_reasons_are_in_the_words_of_the_protocol(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model="small", max_tokens=50, messages=ask("long"))
    odd = client.messages.create(model="small", max_tokens=50, messages=ask("odd"))
    assert (cut.stop_reason, odd.stop_reason) == ("max_tokens", "pause_turn")


def test_a_stream_has_the_event_sequence_of_the_protocol(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model="small", max_tokens=50, messages=ask("weather"), stream=True))
    assert [event.type for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]


def test_the_streaming_helper_rebuilds_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="small", max_tokens=50, messages=ask("weather"))
    with client.messages.stream(model="small", max_tokens=50, messages=ask("weather")) as stream:
        rebuilt = stream.get_final_message()
    assert [block.model_dump(exclude={"id", "parsed_output"}) for block in rebuilt.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert rebuilt.stop_reason == whole.stop_reason
    assert rebuilt.usage.output_tokens == whole.usage.output_tokens


async def test_an_async_stream_comes_in_pieces(async_client: anthropic.AsyncAnthropic) -> None:
    async with async_client.messages.stream(model="small", max_tokens=50, messages=HELLO) as stream:
        assert [text async for text in stream.text_stream] == ["Hello, ", "good ", "world"]


def test_the_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [(model.id, model.type) for model in client.models.list()] == [("small", "model"), ("large", "model")]


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"max_tokens": None}, "max_tokens: a value of type int"),
        ({"max_tokens": True}, "max_tokens: a value of type int"),
        ({"messages": []}, "at least one"),
        ({"system": 5}, "a string or a list"),
        ({"tools": "x"}, "tools: must be a list"),
        ({"tools": [{}]}, "an object with a name"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "json_schema with a schema"),
    ],
)
async def test_a_request_no_provider_would_take_is_refused_with_a_reason(
    extra: dict[str, object], problem: str
) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **extra}
    async with (
        ModelServer() as own,
        aiohttp.ClientSession() as session,
        session.post(own.base_url + "/v1/messages", json=body) as answer,
    ):
        assert answer.status == 400
        error = (await answer.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert problem in error["message"]
