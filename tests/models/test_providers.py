"""The adapters over the official SDKs, unpatched, against the model server."""

from __future__ import annotations

import asyncio
import base64
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.from_thread
import pytest
from pydantic import BaseModel, Field

from fairtrial import ChatMessage, ConfigurationError, OpenAIAdapter, PromptExecuted, Session, TokenUsage, ToolCall
from fairtrial.base.codec import to_json
from fairtrial.data.sample import Attachment, BlobFolder
from fairtrial.errors import (
    BudgetExceededError,
    DataError,
    InvalidCallError,
    MissingExtraError,
    ModelAuthError,
    OutputParseError,
)
from fairtrial.integrations.model_server import ModelServer, Reply, Rule, ToolCallReply, Usage
from fairtrial.models import AnthropicAdapter, MarkdownSection, OutputRepaired, PromptTemplate, ToolSpec
from fairtrial.models.sdk import SdkAdapter
from fairtrial.models.tools import UNPARSED, tool_message

type MakeAdapter = Callable[..., SdkAdapter]


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    rating: Literal["good", "poor"]
    points: Annotated[int, Field(ge=1, le=5)] = 3


class Person(BaseModel):
    name: str
    boss: Person | None


@dataclass(frozen=True, slots=True)
class Tree:
    label: str
    children: list[Tree]


@dataclass(frozen=True, slots=True)
class Plain:
    name: str
    tags: list[str]


class Member(BaseModel):
    name: str


class Team(BaseModel):
    lead: Member


WEATHER = ToolSpec(
    "weather", "The weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)
VERDICT = PromptTemplate[Verdict]("t", "v", "verdict", [MarkdownSection[None]("", "Judge $x", "j")])
GOOD = Reply(output={"reason": "r", "rating": "good", "points": 4})


def ask(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_an_answer_comes_with_its_usage_and_is_recorded(
    echo: ModelServer, adapter_for: MakeAdapter, provider: str, stream: bool
) -> None:
    session = Session()
    adapter = adapter_for(echo, stream=stream)
    completion = await adapter.complete(ask("Hello, good world"), session=session, prompt_name="p")
    assert completion.output == completion.raw == completion.message.text == "Hello, good world"
    assert completion.model == "test-model"
    assert completion.usage == TokenUsage(5, 5)
    ended = "stop" if provider == "openai" else "end_turn"
    assert session[PromptExecuted].all() == (PromptExecuted("p", provider, "test-model", TokenUsage(5, 5), ended),)


async def test_cached_tokens_are_part_of_the_input(adapter_for: MakeAdapter, stream: bool) -> None:
    with ModelServer(Reply("ok", usage=Usage(1000, 20, cached_tokens=900))) as server:
        completion = await adapter_for(server, stream=stream).complete(ask("x"))
    assert completion.usage == TokenUsage(1000, 20, 900)


async def test_known_models_have_a_price_and_unknown_ones_have_none(adapter_for: MakeAdapter, provider: str) -> None:
    model, expected = {"openai": ("gpt-4o-mini", 0.0001725), "anthropic": ("claude-sonnet-4-5", 0.00315)}[provider]
    with ModelServer(Reply("ok", usage=Usage(1000, 100, cached_tokens=500))) as server:
        known = await adapter_for(server, model=model, prices_of=provider).complete(ask("x"))
        elsewhere = await adapter_for(server, model=model).complete(ask("x"))
        unknown = await adapter_for(server, model="no-such-model", prices_of=provider).complete(ask("x"))
    assert known.usage is not None
    assert known.usage.cost_usd == pytest.approx(expected)
    assert elsewhere.usage == unknown.usage == TokenUsage(1000, 100, 500)


async def test_the_conversation_arrives_as_it_is(echo: ModelServer, adapter_for: MakeAdapter, provider: str) -> None:
    called = ToolCall("weather", {"city": "Rome"}, "id1"), ToolCall("weather", {"city": "Oslo"}, "id2")
    messages = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "How is it?"),
        ChatMessage("assistant", "", called),
        tool_message(called[0], "sun"),
        tool_message(called[1], "rain"),
        ChatMessage("user", ("in ", "parts")),
    ]
    completion = await adapter_for(echo, params={"temperature": 0.5}).complete(
        messages, tools=[WEATHER], params={"top_p": 0.9}
    )
    assert str(completion.output).endswith("in parts")
    (request,) = echo.requests()
    assert request.system == "Be brief."
    assert request.tools[0].parameters == WEATHER.parameters
    assert (request.body["temperature"], request.body["top_p"]) == (0.5, 0.9)
    if provider == "openai":
        roles = ["system", "user", "assistant", "tool", "tool", "user"]
        assert [message.role for message in request.messages] == roles
        assert [m["tool_call_id"] for m in request.body["messages"][3:5]] == ["id1", "id2"]
        assert request.body["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    else:
        sent = request.body["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "user"]
        assert [block["type"] for block in sent[2]["content"]] == ["tool_result", "tool_result", "text", "text"]
        assert [block.get("tool_use_id") for block in sent[2]["content"]] == ["id1", "id2", None, None]
        assert sent[1]["content"][1]["input"] == {"city": "Oslo"}


async def test_tool_calls_come_back_parsed(adapter_for: MakeAdapter, stream: bool) -> None:
    calls = (ToolCallReply("weather", {"city": "Rome"}, id="a"), ToolCallReply("weather", {}, id="b"))
    with ModelServer(Reply("Let me see.", tool_calls=calls)) as server:
        completion = await adapter_for(server, stream=stream).complete(ask("x"), tools=[WEATHER], output_type=Verdict)
    assert completion.output is None
    assert completion.message.text == "Let me see."
    assert completion.message.tool_calls == (ToolCall("weather", {"city": "Rome"}, "a"), ToolCall("weather", {}, "b"))


async def test_arguments_that_are_no_json_stay_as_they_came_and_can_be_sent_back(
    adapter_for: MakeAdapter, provider: str, stream: bool
) -> None:
    rules = [
        Rule("^x$", Reply(tool_calls=(ToolCallReply("weather", '{"city": ', id="a"),))),
    ]
    with ModelServer(rules) as server:
        adapter = adapter_for(server, stream=stream)
        completion = await adapter.complete(ask("x"), tools=[WEATHER])
        (call,) = completion.message.tool_calls
        again = [*ask("x"), completion.message, tool_message(call, "not JSON"), *ask("go on")]
        assert str((await adapter.complete(again)).output).endswith("go on")
        assert set(call.arguments) == {UNPARSED}
        sent = server.requests()[-1].body["messages"][1]
    if provider == "openai":
        assert sent["tool_calls"][0]["function"]["arguments"] == call.arguments[UNPARSED] == '{"city": '
    else:
        assert sent["content"][0]["input"] == dict(call.arguments)


@pytest.mark.proves("R66")
async def test_typed_outputs_are_asked_for_by_schema_and_read(adapter_for: MakeAdapter, provider: str) -> None:
    with ModelServer(GOOD) as server:
        response = await adapter_for(server).evaluate(VERDICT.bind(x="this"))
        (request,) = server.requests()
    assert response.output == Verdict("r", "good", 4)
    assert response.usage.output_tokens > 0
    assert request.output_schema is not None
    assert list(request.output_schema["properties"]) == ["reason", "rating", "points"]
    if provider == "openai":
        assert request.body["response_format"]["json_schema"]["strict"] is True
        assert request.output_schema["properties"]["points"] == {"type": "integer", "maximum": 5, "minimum": 1}
    else:
        assert request.output_schema["properties"]["points"] == {
            "type": "integer",
            "description": "minimum: 1, maximum: 5",
        }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (int, 0),
        (bool, False),
        (list[Plain], []),
        (Plain | None, Plain("", [])),
        (Literal["a", "b"], "a"),
        (Team, Team(lead=Member(name=""))),
    ],
)
async def test_any_type_the_codec_knows_can_be_asked_for(
    echo: ModelServer, adapter_for: MakeAdapter, kind: Any, expected: Any
) -> None:
    # The server answers with the smallest value that satisfies the schema it is sent.
    completion = await adapter_for(echo).complete(ask("?"), output_type=kind)
    assert completion.output == expected
    assert echo.stats().requests == 1


@pytest.mark.parametrize(
    ("kind", "said"), [(Tree, {"label": "a", "children": []}), (Person, {"name": "a", "boss": None}), (dict, {"a": 1})]
)
async def test_types_without_a_native_schema_are_requested_with_an_instruction(
    adapter_for: MakeAdapter, provider: str, kind: Any, said: Any
) -> None:
    with ModelServer(Reply(output=said)) as server:
        completion = await adapter_for(server).complete(ask("?"), output_type=kind)
        (request,) = server.requests()
    assert to_json(completion.output) == said
    assert ("JSON Schema" in request.system) == (provider == "anthropic")
    assert (request.output_schema is None) == (provider == "anthropic")


async def test_a_server_without_schemas_gets_an_instruction(adapter_for: MakeAdapter) -> None:
    with ModelServer(["```json\n5\n```", '{"value": 6}']) as server:
        adapter = adapter_for(server, structured_output="prompt")
        assert (await adapter.complete(ask("x"), output_type=int)).output == 5
        assert (await adapter.complete(ask("x"), output_type=int)).output == 6
        (request, _) = server.requests()
    assert request.output_schema is None
    assert any("JSON Schema" in message.text for message in request.messages)


async def test_an_answer_of_the_wrong_form_is_repaired_once_and_recorded(adapter_for: MakeAdapter) -> None:
    session = Session()
    with ModelServer(["It is good.", GOOD]) as server:
        response = await adapter_for(server).evaluate(VERDICT.bind(x=1), session=session, actor="judge")
    assert response.output == Verdict("r", "good", 4)
    (repair,) = session.everything()[OutputRepaired].all()
    assert (repair.raw, repair.repaired) == ("It is good.", True)
    assert len(session.everything()[PromptExecuted].all()) == 2
    assert session[PromptExecuted].all() == ()


async def test_an_answer_that_stays_of_the_wrong_form_is_an_error(adapter_for: MakeAdapter) -> None:
    with ModelServer("It is good.") as server:
        with pytest.raises(OutputParseError, match="not answer with a Verdict") as caught:
            await adapter_for(server).evaluate(VERDICT.bind(x=1))
        assert server.stats().requests == 2
    assert caught.value.raw == "It is good."


PIXEL = base64.b64decode("iVBORw0KGgo=")


async def test_images_and_documents_are_sent(
    echo: ModelServer, adapter_for: MakeAdapter, provider: str, tmp_path: Path
) -> None:
    blobs = BlobFolder(tmp_path)
    image = blobs.put(PIXEL, media_type="image/png", name="p.png")
    paper = blobs.put(b"%PDF", media_type="application/pdf")
    note = blobs.put("naïve".encode(), media_type="text/plain")
    await adapter_for(echo, blobs=blobs).complete([ChatMessage("user", ("What is it? ", image, paper, note))])
    content = echo.requests()[0].body["messages"][0]["content"]
    assert content[3] == {"type": "text", "text": "naïve"}
    if provider == "openai":
        assert content[1]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
        assert content[2]["file"] == {"filename": "document.pdf", "file_data": "data:application/pdf;base64,JVBERg=="}
    else:
        png = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
        assert content[1] == {"type": "image", "source": png}
        assert content[2]["type"] == "document"


async def test_sound_is_sent_to_openai_and_refused_for_anthropic(
    echo: ModelServer, adapter_for: MakeAdapter, provider: str, tmp_path: Path
) -> None:
    blobs = BlobFolder(tmp_path)
    message = [ChatMessage("user", (blobs.put(b"x", media_type="audio/mpeg"),))]
    adapter = adapter_for(echo, blobs=blobs)
    if provider == "openai":
        await adapter.complete(message)
        assert echo.requests()[0].body["messages"][0]["content"][0]["input_audio"] == {"data": "eA==", "format": "mp3"}
    else:
        with pytest.raises(InvalidCallError, match="not support attachments of type audio/mpeg"):
            await adapter.complete(message)
    with pytest.raises(InvalidCallError, match="not support attachments of type video/mp4"):
        await adapter.complete([ChatMessage("user", (blobs.put(b"x", media_type="video/mp4"),))])


async def test_an_attachment_needs_a_place_where_its_bytes_are(
    echo: ModelServer, adapter_for: MakeAdapter, tmp_path: Path
) -> None:
    message = [ChatMessage("user", (Attachment.of(b"x", media_type="image/png"),))]
    with pytest.raises(ConfigurationError, match="blobs="):
        await adapter_for(echo).complete(message)
    with pytest.raises(DataError, match="is not under"):
        await adapter_for(echo, blobs=BlobFolder(tmp_path)).complete(message)
    assert echo.stats().requests == 0


async def test_images_that_come_back_are_kept(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    adapter = OpenAIAdapter("m", api="chat", api_key="k", blobs=blobs)
    url = {"url": "data:image/png;base64,iVBORw0KGgo="}
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": url}, {"type": "thought"}]
    for said in ({"content": parts}, {"content": "see ", "images": [{"image_url": url}]}):
        reply = adapter._read({"choices": [{"message": said}]})
        assert isinstance(reply.message.content, tuple)
        text, image = reply.message.content
        assert text == "see "
        assert isinstance(image, Attachment)
        assert blobs.get(image) == PIXEL
    linked = {"content": [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]}
    assert adapter._read({"choices": [{"message": linked}]}).message.content == "https://example.org/x.png"
    assert OpenAIAdapter("m", api_key="k")._from_data_url(url["url"]) == Attachment.of(PIXEL, media_type="image/png")
    with pytest.raises(ValueError, match="damaged"):
        adapter._from_data_url("data:image/png;base64,!")


async def test_log_probabilities_are_kept_as_an_attachment(
    tmp_path: Path, stream: bool, make_adapter: MakeAdapter
) -> None:
    session = Session()
    blobs = BlobFolder(tmp_path)
    with ModelServer("two words") as server:
        async with make_adapter(
            "openai", server.base_url, blobs=blobs, params={"logprobs": True}, stream=stream
        ) as adapter:
            await adapter.complete(ask("x"), session=session)
    (executed,) = session[PromptExecuted].all()
    assert executed.tokens is not None
    assert b'"token": "words"' in blobs.get(executed.tokens)


async def test_half_a_surrogate_pair_does_not_end_the_conversation(echo: ModelServer, adapter_for: MakeAdapter) -> None:
    said = ChatMessage("user", ("a\ud800b",)), ChatMessage("tool", "\udfff", name="1"), ChatMessage("system", "\ud800")
    adapter = adapter_for(echo)
    await adapter.complete([*said[:1], *ask("é\ud800")])
    await adapter.complete([*ask("x"), ChatMessage("assistant", "", (ToolCall("t", {"a": "\ud800"}, "1"),)), said[1]])
    await adapter.complete([said[2], *ask("x")])
    assert echo.stats().requests == 3
    assert echo.requests()[0].last_user.endswith("é?")


@pytest.mark.proves("R66")
def test_without_a_key_it_says_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelAuthError, match="set OPENAI_API_KEY"):
        OpenAIAdapter(model="gpt-4o-mini")
    with pytest.raises(ModelAuthError, match="set ANTHROPIC_API_KEY"):
        AnthropicAdapter(model="claude-sonnet-4-5")


def test_the_key_and_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1/")
    adapter = OpenAIAdapter(model="m")
    assert adapter._base_url == "http://127.0.0.1:1/v1"
    assert repr(adapter) == "<OpenAIAdapter 'm'>"


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="model of OpenAIAdapter must be a name"):
        OpenAIAdapter("", api_key="k")
    with pytest.raises(ConfigurationError, match="timeout_seconds"):
        OpenAIAdapter("m", api_key="k", timeout_seconds=0)


def test_a_missing_sdk_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenAIAdapter, "package", "no_such_package_at_all")
    with pytest.raises(MissingExtraError, match=r"fairtrial\[models\]"):
        OpenAIAdapter("m", api_key="k")


@pytest.mark.parametrize("adapter", ["OpenAIAdapter", "AnthropicAdapter"])
def test_a_process_that_reached_no_model_ends_without_complaints_about_open_sessions(adapter: str) -> None:
    code = (
        "import aiohttp, atexit, gc\n"  # What is registered first runs last: it sees what was left open.
        "sessions = lambda: [each for each in gc.get_objects() if isinstance(each, aiohttp.ClientSession)]\n"
        "atexit.register(lambda: print('closed', [each.closed for each in sessions()]))\n"
        "from fairtrial import ChatMessage, Dataset, evaluate_sync, exact_match\n"
        f"from fairtrial.models import {adapter} as Adapter\n"
        "from fairtrial.models.limiter import NO_RETRY\n"
        "adapter = Adapter('m', base_url='http://127.0.0.1:9', api_key='none', retry=NO_RETRY)\n"
        "async def task(text):\n"
        "    return (await adapter.complete([ChatMessage('user', text)])).output\n"
        "print(evaluate_sync(Dataset.of({'a': 'b'}), task, exact_match).results[0].error)"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert "could not be reached at http://127.0.0.1:9" in ended.stdout
    assert ended.stdout.endswith("closed [True]\n")
    assert ended.stderr == ""


def test_importing_fairtrial_imports_no_sdk() -> None:
    code = (
        "import sys, fairtrial, fairtrial.models, fairtrial.models.openai, fairtrial.models.anthropic\n"
        "heavy = {'openai', 'anthropic', 'aiohttp', 'httpx2', 'genai_prices'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_under_trio_it_says_that_it_needs_asyncio() -> None:
    async def call() -> None:
        with pytest.raises(ConfigurationError, match="needs asyncio"):
            await OpenAIAdapter("m", api_key="k").complete(ask("x"))

    anyio.run(call, backend="trio")


async def test_connections_are_closed_and_open_again(
    echo: ModelServer, provider: str, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(provider, echo.base_url)
    async with adapter:
        await adapter.complete(ask("x"))
        assert echo.stats().connections == 1
    await _until(lambda: echo.stats().connections == 0)
    await adapter.complete(ask("x"))
    await adapter.aclose()
    await adapter.aclose()


def test_an_event_loop_that_ends_closes_the_connections_nobody_closed(
    echo: ModelServer, provider: str, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(provider, echo.base_url)

    async def call() -> str:
        return str((await adapter.complete(ask("x"))).output)

    assert [asyncio.run(call()), anyio.run(call)] == ["x", "x"]
    assert all(client.closed for client in adapter._clients.values())
    gc.collect()  # An open client would warn here, and warnings are errors.


def test_an_adapter_that_is_forgotten_closes_its_connections(
    echo: ModelServer, provider: str, make_adapter: MakeAdapter
) -> None:
    async def call() -> None:
        await make_adapter(provider, echo.base_url).complete(ask("x"))

    async def call_and_forget() -> None:
        await call()
        gc.collect()
        await _until(lambda: echo.stats().connections == 0)

    asyncio.run(call_and_forget())
    with anyio.from_thread.start_blocking_portal() as portal:  # And where the event loop is another thread's.
        portal.call(call)
        gc.collect()
        portal.call(_until, lambda: echo.stats().connections == 0)
    assert echo.stats().requests == 2


def test_one_adapter_works_in_several_event_loops_at_once(
    echo: ModelServer, provider: str, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(provider, echo.base_url)
    answers: list[str | None] = []

    def work() -> None:
        async def call() -> None:
            for _ in range(5):
                answers.append((await adapter.complete(ask("x"))).output)

        asyncio.run(call())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["x"] * 15


async def test_headers_are_added_and_the_key_is_sent(echo: ModelServer, adapter_for: MakeAdapter) -> None:
    await adapter_for(echo, headers={"x-team": "evals"}).complete(ask("x"))
    headers = echo.requests()[0].headers
    assert headers["x-team"] == "evals"
    assert {"authorization", "x-api-key"} & set(headers)


async def test_a_quota_that_is_used_up_is_a_budget_not_a_rate(provider: str, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(provider, "http://127.0.0.1:9")

    class Answer(Exception):
        status_code = 429
        body = {"error": {"message": "no credit", "code": "insufficient_quota"}}

    found = adapter._classified(Answer())
    assert isinstance(found, BudgetExceededError)
    assert "no credit (status 429)" in str(found)


async def test_the_address_of_a_request_is_parsed_once(provider: str, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(provider, "http://127.0.0.1:9")
    client = await adapter._client()
    assert client._prepare_url(adapter.path) is client._prepare_url(adapter.path)
    assert str(client._prepare_url(adapter.path)).startswith("http://127.0.0.1:9/")
    await adapter.aclose()


async def _until(condition: Any) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - the server has no event for it
            await anyio.sleep(0.005)
