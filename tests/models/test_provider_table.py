"""Cells of the table of providers (docs/reference/providers.md) for all protocols alike: what is sent, and refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel, Field, TypeAdapter

from fairtrial import AnthropicAdapter, ChatMessage, Dataset, EvalSuite, OpenAIAdapter, Sample, agent_task, contains
from fairtrial.data.attachment import BlobFolder
from fairtrial.errors import (
    ContextLengthError,
    InvalidCallError,
    ModelAuthError,
    ModelRefusedError,
    ModelUnavailableError,
    RateLimitedError,
)
from fairtrial.integrations.model_server import (
    ContentFiltered,
    ContextTooLong,
    Fault,
    FaultRule,
    ModelServer,
    NotAuthorised,
    RateLimited,
    Refused,
    Reply,
    ServerFailed,
    StreamFailed,
    ToolCallReply,
)
from fairtrial.models import AgentEnded, ToolSpec
from fairtrial.models.bedrock import ConverseAdapter
from fairtrial.models.gemini import GeminiAdapter
from fairtrial.models.limiter import NO_RETRY, Unlimited
from fairtrial.models.sdk import SdkAdapter

WEATHER = ToolSpec("weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
TYPES: Mapping[str, Any] = {
    "responses": ResponseCreateParamsNonStreaming,
    "chat": CompletionCreateParamsNonStreaming,
    "anthropic": MessageCreateParamsNonStreaming,
}
every_protocol = pytest.mark.parametrize("protocol", ["responses", "chat", "anthropic", "gemini", "bedrock"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def adapter(protocol: str, server: ModelServer, **more: Any) -> SdkAdapter:
    given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited(), **more}
    match protocol:
        case "anthropic":
            return AnthropicAdapter("claude", base_url=server.base_url, **given)
        case "gemini":
            return GeminiAdapter("gemini-3.8-flash", base_url=f"{server.base_url}/v1beta", **given)
        case "bedrock":
            return ConverseAdapter("eu.anthropic.claude-opus-5-v1:0", base_url=server.base_url, **given)
    return OpenAIAdapter("gpt-6", base_url=f"{server.base_url}/v1", api=protocol, **given)  # type: ignore[arg-type]


def exhaust(value: object) -> None:
    """Validate what pydantic validates only when it is read: the items of an `Iterable`."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, str | bytes | int | float | bool | None):
        for item in value:  # type: ignore[attr-defined]
            exhaust(item)


class Author(BaseModel):
    name: str


class Book(BaseModel):
    author: Author = Field(description="Who wrote it")


@pytest.mark.parametrize("protocol", TYPES)
async def test_requests_are_valid_by_the_vendors_types(protocol: str, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    picture = blobs.put(b"\x89PNG", media_type="image/png")
    call = ToolCallReply("weather", {"city": "Oslo"})
    with ModelServer([Reply("", (call,), reasoning="Look."), Reply(output={"author": {"name": "Ada"}})]) as server:
        # The types of Anthropic's SDK have no temperature any more.
        params = {"max_tokens": 99} if protocol == "anthropic" else {"max_tokens": 99, "temperature": 0.5}
        model = adapter(protocol, server, blobs=blobs, params=params)
        said = [ChatMessage("system", "Be brief."), ChatMessage("user", ("Who?", picture))]
        said.append((await model.complete(said, tools=[WEATHER])).message)
        said.append(ChatMessage("tool", "snow", name=said[-1].tool_calls[0].id, failed=True))
        found = await model.complete(said, tools=[WEATHER], output_type=Book)
        bodies = [request.body for request in server.requests()]
    assert found.output == Book(author=Author(name="Ada"))
    kind: TypeAdapter[Any] = TypeAdapter(TYPES[protocol])
    for body in bodies:
        assert body.keys() <= TYPES[protocol].__annotations__.keys() | {"stream"}
        exhaust(kind.validate_python(dict(body)))


@every_protocol
async def test_described_nested_models_are_asked_for_and_read(protocol: str) -> None:
    with ModelServer(Reply(output={"author": {"name": "Ada"}})) as server:
        found = await adapter(protocol, server).complete("Who?", output_type=Book)
        (request,) = server.requests()
    assert found.output == Book(author=Author(name="Ada"))
    assert request.output_schema is not None
    author = request.output_schema["properties"]["author"]
    assert (author["description"], list(author["properties"])) == ("Who wrote it", ["name"])


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        ("responses", {"temperature": 0.5, "max_output_tokens": 99}),
        ("chat", {"temperature": 0.5, "max_tokens": 99}),
        ("anthropic", {"temperature": 0.5, "max_tokens": 99}),
    ],
)
async def test_temperature_and_limits_are_sent_under_the_names_of_the_protocol(protocol: str, expected: Any) -> None:
    with ModelServer("hi") as server:
        await adapter(protocol, server, params={"temperature": 0.5}).complete("q", params={"max_tokens": 99})
        body = server.requests()[0].body
    assert {name: value for name, value in body.items() if name == "temperature" or "max" in name} == expected


@pytest.mark.parametrize("protocol", ["responses", "chat", "anthropic", "bedrock"])
async def test_tools_are_not_sent_as_strict(protocol: str) -> None:
    with ModelServer("hi") as server:
        await adapter(protocol, server).complete("q", tools=[WEATHER])
        body = server.requests()[0].body
    sent = body["toolConfig"]["tools"][0]["toolSpec"] if protocol == "bedrock" else body["tools"][0]
    assert (sent["function"] if protocol == "chat" else sent)["name"] == "weather"
    assert not (sent["function"] if protocol == "chat" else sent).get("strict")


@pytest.mark.parametrize(
    ("protocol", "hosted"),
    [
        ("responses", {"type": "web_search"}),
        ("anthropic", {"type": "web_search_20250305", "name": "web_search"}),
    ],
)
async def test_hosted_tools_stand_beside_own_tools(protocol: str, hosted: Any) -> None:
    with ModelServer("hi") as server:
        await adapter(protocol, server, params={"tools": [hosted]}).complete("q", tools=[WEATHER])
        own, given = server.requests()[0].body["tools"]
    assert (own["name"], given) == ("weather", hosted)


async def test_log_probabilities_of_responses_are_refused() -> None:
    with ModelServer("hi") as server:
        with pytest.raises(InvalidCallError, match=r'only supported by chat completions: use .*api="chat"'):
            await adapter("responses", server, params={"logprobs": True}).complete("q")
        assert server.stats().requests == 0


@pytest.mark.parametrize("protocol", ["responses", "anthropic", "bedrock"])
async def test_sound_is_refused_where_the_protocol_has_none(protocol: str, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    sound = ChatMessage("user", (blobs.put(b"x", media_type="audio/mpeg"),))
    with ModelServer("hi") as server:
        with pytest.raises(InvalidCallError, match="audio/mpeg"):
            await adapter(protocol, server, blobs=blobs).complete([sound])
        assert server.stats().requests == 0


@pytest.mark.parametrize(
    ("protocol", "name"), [("chat", "n"), ("gemini", "candidateCount"), ("gemini", "candidate_count")]
)
async def test_several_answers_to_one_request_are_refused(protocol: str, name: str) -> None:
    with ModelServer("hi") as server:
        model = adapter(protocol, server)
        assert (await model.complete("q", params={name: 1})).text == "hi"
        with pytest.raises(InvalidCallError, match=r"(n|candidateCount) must be 1 \(got 2\)(.|\n)*repeats"):
            await model.complete("q", params={name: 2})
        assert server.stats().requests == 1


SENT: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "responses": ({"tool_choice": "required", "parallel_tool_calls": False, "service_tier": "flex"},
                  {"prompt_cache_key": "k"}),
    "chat": ({"tool_choice": "required", "parallel_tool_calls": False, "service_tier": "flex"},
             {"prompt_cache_key": "k", "seed": 7}),
    "anthropic": ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "service_tier": "auto"}, {}),
    "gemini": ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}, "serviceTier": "flex"},
               {"cachedContent": "cachedContents/1"}),
    "bedrock": ({"serviceTier": {"type": "flex"}}, {}),
}  # fmt: skip


@every_protocol
async def test_choices_of_tools_tiers_and_caches_are_sent_as_given(protocol: str) -> None:
    choices, others = SENT[protocol]
    with ModelServer("hi") as server:
        await adapter(protocol, server, params=others).complete("q", params=choices, tools=[WEATHER])
        if protocol == "bedrock":
            forced: dict[str, Any] = {"toolConfig": {"toolChoice": {"any": {}}}}
            await adapter(protocol, server).complete("q", params=forced, tools=[WEATHER])
        first, *forced_call = (request.body for request in server.requests())
    assert {name: first.get(name) for name in (*choices, *others)} == {**choices, **others}
    for body in forced_call:
        assert body["toolConfig"]["toolChoice"] == {"any": {}}
        assert body["toolConfig"]["tools"][0]["toolSpec"]["name"] == "weather"


@every_protocol
async def test_instructions_are_sent_as_the_protocol_has_them(protocol: str) -> None:
    said = [("system", "Be brief."), ("developer", "Use English."), ("user", "q"), ("assistant", "a"), ("user", "r")]
    said.insert(4, ("system", "Use French."))
    with ModelServer("hi") as server:
        await adapter(protocol, server).complete([ChatMessage(role, text) for role, text in said])
        (request,) = server.requests()
    found = [(message.role, message.text) for message in request.messages]
    if protocol in ("responses", "chat"):
        assert found == said
        return
    *first, third = "Be brief.", "Use English.", "Use French."
    top = first if protocol == "anthropic" else [*first, third]
    assert found[0][0] == "system"
    assert [text for text in (*first, third) if text in found[0][1]] == top
    assert found[1:] == [one for one in said[2:] if one[1] not in top]


@every_protocol
async def test_images_and_documents_are_sent(protocol: str, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    picture, paper = blobs.put(b"\x89PNG", media_type="image/png"), blobs.put(b"%PDF-1", media_type="application/pdf")
    with ModelServer("hi") as server:
        await adapter(protocol, server, blobs=blobs).complete([ChatMessage("user", ("Look:", picture, paper))])
        sent = json.dumps(server.requests()[0].body)
    assert (sent.count("iVBORw=="), sent.count("JVBERi0x")) == (1, 1)


@every_protocol
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_errors_have_their_types(protocol: str, stream: bool) -> None:
    expected: list[tuple[Fault, type[Exception]]] = [
        (RateLimited(2.0), RateLimitedError),
        (ServerFailed(503), ModelUnavailableError),
        (NotAuthorised(401), ModelAuthError),
        (ContextTooLong(), ContextLengthError),
        (Refused("No."), ModelRefusedError),
        (ContentFiltered(), ModelRefusedError),
        (StreamFailed(), ModelUnavailableError),
    ]
    faults = [FaultRule(fault, numbers=(number,)) for number, (fault, _) in enumerate(expected, 1)]
    with ModelServer("hi", faults=faults) as server:
        async with adapter(protocol, server, stream=stream) as model:
            for fault, kind in expected:
                with pytest.raises(kind):
                    await model.complete("q")
                assert fault.kind in server.stats().by_fault
            assert (await model.complete("q")).text == "hi"


@every_protocol
async def test_a_full_context_ends_an_agent_as_truncated(protocol: str) -> None:
    def weather(city: str) -> str:
        """The weather."""
        return f"snow in {city}"

    turns = [Reply("Snow, I think.", (ToolCallReply("weather", {"city": "Oslo"}),)), Reply("never")]
    with ModelServer(turns, faults=FaultRule(ContextTooLong(), numbers=(2,))) as server:
        agent = agent_task(adapter(protocol, server), tools=[weather])
        data = Dataset([Sample("1", "Weather?", "Snow")], name="d")
        (result,) = (await EvalSuite("full", data, agent, contains).run(store="memory:")).results
    ended = result.session[AgentEnded].latest()
    assert (result.outcome, result.output) == ("scored", "Snow, I think.")
    assert ended is not None
    assert (ended.reason, ended.detail) == ("truncated", "the context of the model is full")
