"""The official OpenAI SDK, unpatched, against the model server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from pydantic import BaseModel

from fairtrial.integrations.model_server import ModelServer, Reply, Rule, ToolCallReply, Usage

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello, good world"}]
WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 2}},
            "required": ["city"],
        },
    },
}
RULES = [
    Rule(
        "weather",
        Reply(tool_calls=(ToolCallReply("weather", {"city": "Oslo"}), ToolCallReply("weather", {"city": "Rome"}))),
    ),
    Rule("^broken call", Reply(tool_calls=(ToolCallReply("weather", '{"city": ', id="mine"),))),
    Rule("both", Reply("Let me see.", tool_calls=(ToolCallReply("weather", {}),))),
    Rule("person", Reply(output={"name": "Ada", "age": 36})),
    Rule("cheap", Reply("ok", usage=Usage(1000, 20, cached_tokens=900))),
    Rule("cut short", Reply("only the beg", finish_reason="length")),
    Rule("unicode", Reply("naïve 😀 \ud800 \x00 line\u2028end\n")),
]


class Person(BaseModel):
    name: str
    age: int


class Verdict(BaseModel):
    reason: str
    rating: Literal["excellent", "poor"]
    related: list[Person]
    note: str | None


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(RULES, models=("small", "large")) as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url + "/v1", api_key="test", max_retries=0) as opened:
        yield opened


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def async_client(server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.base_url + "/v1", api_key="test", max_retries=0) as opened:
        yield opened


def ask(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_without_a_rule_the_last_user_message_is_echoed(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": [{"type": "text", "text": "second, "}, {"type": "text", "text": "in parts"}]},
    ]
    answer = client.chat.completions.create(model="small", messages=messages, temperature=0.2, seed=5)
    assert answer.choices[0].message.content == "second, in parts"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "small"


def test_usage_is_a_quarter_of_the_characters(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model="small", messages=HELLO).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 5, 10)


def test_a_reply_may_claim_any_usage(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model="small", messages=ask("cheap please")).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    claimed = (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens)
    assert claimed == (1000, 20, 900)


async def test_the_async_client_gets_the_same_answer(async_client: openai.AsyncOpenAI, client: openai.OpenAI) -> None:
    from_async = await async_client.chat.completions.create(model="small", messages=HELLO)
    from_sync = client.chat.completions.create(model="small", messages=HELLO)
    assert from_async.model_dump(exclude={"id"}) == from_sync.model_dump(exclude={"id"})


async def test_the_sdk_works_over_its_aiohttp_transport(server: ModelServer) -> None:
    http = openai.DefaultAioHttpClient()
    async with openai.AsyncOpenAI(
        base_url=server.base_url + "/v1", api_key="test", max_retries=0, http_client=http
    ) as over_aiohttp:
        answer = await over_aiohttp.chat.completions.create(model="small", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, good world"


def test_tool_calls_carry_their_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=ask("the weather?"), tools=[WEATHER])
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls if call.type == "function"] == [
        {"city": "Oslo"},
        {"city": "Rome"},
    ]
    assert len({call.id for call in calls}) == 2
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


def test_arguments_given_as_text_are_sent_as_they_are(client: openai.OpenAI) -> None:
    calls = client.chat.completions.create(model="small", messages=ask("broken call")).choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert (calls[0].id, calls[0].function.arguments) == ("mine", '{"city": ')


def test_text_may_come_with_tool_calls(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model="small", messages=ask("both")).choices[0].message
    assert message.content == "Let me see."
    assert message.tool_calls is not None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_the_client_insists_on_is_called_with_the_least_arguments(
    client: openai.OpenAI, choice: Literal["required"]
) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, tools=[WEATHER], tool_choice=choice)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert (calls[0].function.name, calls[0].function.arguments) == ("weather", '{"city": "aa"}')


def test_a_tool_loop_ends_when_the_rule_sees_the_result(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    with ModelServer(lambda request: f"{request.turn}: {request.messages[-1].text}") as own:
        again = client.with_options(base_url=own.base_url + "/v1")
        answer = again.chat.completions.create(model="small", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "1: rain"


def test_parse_gives_the_output_of_a_rule_as_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="small", messages=ask("a person"), response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


def test_parse_without_a_rule_gives_the_least_instance_of_the_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="small", messages=HELLO, response_format=Verdict)
    assert answer.choices[0].message.parsed == Verdict(reason="", rating="excellent", related=[], note="")


def test_a_json_object_is_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, response_format={"type": "json_object"})
    assert answer.choices[0].message.content == "{}"


def test_the_text_format_is_no_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, response_format={"type": "text"})
    assert answer.choices[0].message.content == "Hello, good world"


def test_a_reply_cut_short_makes_parse_raise(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="small", messages=ask("cut short"), response_format=Person)


def test_a_stream_comes_in_pieces_that_join_to_the_text(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="small", messages=HELLO, stream=True))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert texts == ["Hello, ", "good ", "world"]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_with_usage_ends_with_it(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="small", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_streaming_helper_puts_tool_calls_together(async_client: openai.AsyncOpenAI) -> None:
    async with async_client.chat.completions.stream(
        model="small", messages=ask("the weather?"), tools=[WEATHER]
    ) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.arguments for call in calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert final.choices[0].finish_reason == "tool_calls"


async def test_an_interval_between_events_keeps_their_order(async_client: openai.AsyncOpenAI) -> None:
    async with ModelServer("a b c", stream_interval=0.001) as own:
        client = async_client.with_options(base_url=own.base_url + "/v1")
        stream = await client.chat.completions.create(model="small", messages=HELLO, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "a b c"


@pytest.mark.parametrize("stream", [False, True])
def test_any_text_survives_the_way(client: openai.OpenAI, stream: bool) -> None:
    messages = ask("unicode")
    if stream:
        chunks = client.chat.completions.create(model="small", messages=messages, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(model="small", messages=messages).choices[0].message.content or ""
    assert text == "naïve 😀 \ud800 \x00 line\u2028end\n"


def test_logprobs_are_the_same_for_the_same_text(client: openai.OpenAI) -> None:
    def logprobs() -> list[tuple[str, float, int]]:
        answer = client.chat.completions.create(model="small", messages=HELLO, logprobs=True, top_logprobs=1)
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.content is not None
        return [(one.token, one.logprob, len(one.top_logprobs)) for one in found.content]

    first = logprobs()
    assert [token for token, _, _ in first] == ["Hello, ", "good ", "world"]
    assert all(-1 < value <= 0 and shown == 1 for _, value, shown in first)
    assert logprobs() == first


def test_a_stream_carries_logprobs(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model="small", messages=HELLO, logprobs=True, stream=True)
    tokens = [one.token for chunk in chunks if (found := chunk.choices[0].logprobs) for one in found.content or ()]
    assert tokens == ["Hello, ", "good ", "world"]


def test_several_choices_are_all_the_same(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (index, "Hello, good world") for index in range(3)
    ]


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small", "large"]


def test_an_unknown_address_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing is served at POST /v1/moderations"):
        client.moderations.create(model="small", input="x")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "model: a value of type str"),
        (b'{"model": "m"}', "messages: a value of type list"),
        (b'{"model": "m", "messages": []}', "at least one"),
        (b'{"model": "m", "messages": [1]}', "an object with a role"),
        (b'{"model": "m", "messages": [{"role": "user", "content": 1}]}', "a string or a list"),
        (b'{"model": "m", "messages": [{"role": "user", "content": [1]}]}', "each part"),
        (b'{"model": "m", "messages": [{"role": "user"}], "tools": 1}', "tools: must be a list"),
        (b'{"model": "m", "messages": [{"role": "user"}], "tools": [{}]}', "a function that has a name"),
        (b'{"model": "m", "messages": [{"role": "user"}], "response_format": 1}', "response_format: must"),
        (b'{"model": "m", "messages": [{"role": "user"}], "response_format": {"type": "x"}}', "json_object or"),
        (b'{"model": "m", "messages": [{"role": "user"}], "response_format": {"type": "json_schema"}}', "a schema"),
    ],
)
async def test_a_request_no_provider_would_take_is_refused_with_a_reason(body: bytes, problem: str) -> None:
    async with ModelServer() as own, aiohttp.ClientSession() as session:
        async with session.post(own.base_url + "/v1/chat/completions", data=body) as answer:
            assert answer.status == 400
            assert problem in (await answer.json())["error"]["message"]
        assert own.stats().by_fault == {"invalid_request": 1}


def test_a_schema_the_server_cannot_satisfy_asks_for_a_rule(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="add a rule to the server"):
        client.chat.completions.create(
            model="small",
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^never-guessed$"}},
            },
        )
