"""Cells of the table of providers (docs/reference/providers.md) for all protocols: what is sent, and refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel, Field, TypeAdapter

import fairtrial
from fairtrial import AnthropicAdapter, ChatMessage, Dataset, EvalSuite, OpenAIAdapter, Sample, agent_task, contains
from fairtrial.data.sample import BlobFolder
from fairtrial.errors import (
    ContextLengthError,
    InvalidCallError,
    ModelAuthError,
    ModelError,
    ModelRefusedError,
    ModelUnavailableError,
    RateLimitedError,
)
from fairtrial.integrations.model_server import ContentFiltered, Fault, ModelServer, ReasoningNotReturned, ServerFailed
from fairtrial.integrations.model_server.config import FaultRule
from fairtrial.integrations.model_server.faults import ContextTooLong, NotAuthorised, RateLimited, Refused, StreamFailed
from fairtrial.integrations.model_server.reply import Reply, ToolCallReply
from fairtrial.integrations.model_server.rules import Script
from fairtrial.models import AgentEnded, RetryPolicy, ToolSpec
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


# docs/reference/providers.md: every feature that works has a test that exists (features.toml).


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "providers.md"
TESTS = tomllib.loads(Path(__file__).with_name("features.toml").read_text(encoding="utf-8"))
PROTOCOLS = "RCAGB"
PLAIN = {"yes", "parameter", "refused", "n/a"}


def rows() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    everywhere = [[feature, *["yes"] * len(PROTOCOLS)] for feature in re.findall(r"^- (.*)$", text, re.M)]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return everywhere + [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_cell_has_its_test_or_a_reason(row: list[str]) -> None:
    feature, *cells = row
    covered: dict[str, str] = {}
    for letters, reference in re.findall(r"((?:[RCAGB] ?)+): ([^;]+)", TESTS.get(feature, "")):
        path, _, name = reference.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"def {re.escape(name)}\(", text), f"{feature}: there is no test {reference}"
        covered |= dict.fromkeys(letters.split(), reference)
    page = PAGE.read_text(encoding="utf-8")
    assert len(cells) == len(PROTOCOLS)
    for protocol, cell in zip(PROTOCOLS, cells, strict=True):
        note = re.fullmatch(r"(no|later|yes|refused) \((\d+)\)", cell)
        assert cell in PLAIN or note, f"{feature}, {protocol}: {cell!r} is not a value of the table"
        if note:
            assert re.search(rf"^{note[2]}\. ", page, re.M), f"{feature}, {protocol}: note {note[2]} is missing"
        if cell != "n/a" and not (note and note[1] in ("no", "later")):
            assert protocol in covered, f"{feature}, {protocol}: no test is named"


def test_the_table_is_there() -> None:
    assert len(rows()) > 20
    assert set(TESTS) <= {feature for feature, *_ in rows()}


# The adapter over the oldest and the newest SDKs that are allowed, each in an environment of its own.


SOURCE = Path(fairtrial.__file__).parents[1]
OLDEST = "1.109.1"
OTHERS = ("httpx", "httpx-aiohttp", "httpcore", "h11", "sniffio", "tqdm", "distro", "jiter")
PROGRAM = """
import asyncio, importlib.metadata, sys
from fairtrial.models.agent import agent_task
from fairtrial.models.openai import OpenAIAdapter
from fairtrial.models.tools import Tool, tool_message
from fairtrial.data.session.trajectory import ChatMessage

def look() -> str:
    return "snow"

async def main(url):
    spec = Tool(look).spec
    for api in ("chat", "responses"):
        for stream in (False, True):
            async with OpenAIAdapter("m", base_url=url, api_key="k", api=api, stream=stream) as adapter:
                asked = ChatMessage("user", "Weather?")
                first = (await adapter.complete([asked], tools=[spec])).message
                results = [tool_message(call, "snow") for call in first.tool_calls]
                last = await adapter.complete([asked, first, *results], tools=[spec])
                assert (first.reasoning, last.output) == ("Look.", "Snow."), (api, stream, first, last)
    print(importlib.metadata.version("openai"))

asyncio.run(main(sys.argv[1]))
"""


def test_the_oldest_sdk_tried_is_the_oldest_allowed() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["optional-dependencies"]["models"][-1] == f"openai[aiohttp]>={OLDEST}"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", [OLDEST, "2.8.0", "2.54.0", "3.0.0"])
def test_an_agent_works_with_every_allowed_sdk(version: str, tmp_path: Path) -> None:
    folder = tmp_path / "sdk"
    # Only what other versions need and this environment lacks: everything would take a minute for each.
    wanted = [f"openai=={version}", *OTHERS]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*install, *wanted], check=True, timeout=240)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    look = Reply(tool_calls=(ToolCallReply("look", {}, thought_signature="c2ln"),), reasoning="Look.")
    with ModelServer(Script((look, "Snow."), per="turn"), faults=ReasoningNotReturned()) as server:
        done = subprocess.run(
            [sys.executable, str(program), f"{server.base_url}/v1"],
            env={"PYTHONPATH": f"{folder}:{SOURCE}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout.strip()) == (0, version), done.stderr


# Keys are sent to the address that was configured, and nowhere else.


KEY = "sk-the-key-of-somebody-1234567890"


@pytest.fixture
def redirecting() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that leads to another host, and the heads of the requests that got there."""
    heads: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.server is servers[1]:
                heads.append(str(self.headers))
            self.send_response(307 if self.server is servers[0] else 400)
            self.send_header("Location", f"http://localhost:{servers[1].server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{servers[0].server_port}", heads
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("adapter", [OpenAIAdapter, AnthropicAdapter, GeminiAdapter, ConverseAdapter])
async def test_a_provider_cannot_have_the_key_sent_to_another_host(
    redirecting: tuple[str, list[str]], adapter: Any
) -> None:
    address, heads = redirecting
    model = adapter("m", api_key=KEY, base_url=address, retry=RetryPolicy(attempts=1))
    with pytest.raises(ModelError):
        await model.complete([{"role": "user", "content": "hello"}])
    assert KEY not in "".join(heads)
