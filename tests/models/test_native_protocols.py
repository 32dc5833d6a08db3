"""Google's own API and Amazon Bedrock's Converse: requests by the vendors' types, answers, keys, signatures."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.config import Config
from botocore.validate import ParamValidator
from google import genai
from google.genai import types

from fairtrial import AnthropicAdapter, ChatMessage, OpenAIAdapter, Session, TokenUsage, ToolCall
from fairtrial.data.sample import BlobFolder
from fairtrial.errors import (
    ContextLengthError,
    InvalidCallError,
    MalformedReplyError,
    ModelAuthError,
    ModelRefusedError,
    ModelUnavailableError,
    RateLimitedError,
)
from fairtrial.integrations.model_server import ConnectionReset, EmptyBody, FaultRule, HalfSent, Refused, Reply, Script
from fairtrial.integrations.model_server.faults import (
    ContentFiltered,
    ContextTooLong,
    Fault,
    MalformedJson,
    NotAuthorised,
    RateLimited,
    ReasoningNotReturned,
    ServerFailed,
    StreamFailed,
    WrongShape,
)
from fairtrial.integrations.model_server.reply import ParsedRequest, ToolCallReply, Usage
from fairtrial.integrations.model_server.server import ModelServer
from fairtrial.models import model_from_name
from fairtrial.models.bedrock import ConverseAdapter
from fairtrial.models.gemini import GeminiAdapter, VertexAdapter
from fairtrial.models.limiter import NO_RETRY, Unlimited
from fairtrial.models.sdk import SdkAdapter
from fairtrial.models.tools import Tool, tool_message

KINDS = ("gemini", "bedrock")
PIXEL = bytes.fromhex("89504e470d0a1a0a")


@dataclass(frozen=True, slots=True)
class Answer:
    reason: str
    points: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"snow in {city}"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_BEARER_TOKEN_BEDROCK", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-real-secret-of-anyone")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def make(kind: str, server: ModelServer, **options: Any) -> SdkAdapter:
    given: dict[str, Any] = {"retry": NO_RETRY, "limiter": Unlimited(), **options}
    if kind == "gemini":
        return GeminiAdapter("gemini-3.8-flash", base_url=f"{server.base_url}/v1beta", **{"api_key": "k", **given})
    return ConverseAdapter("eu.anthropic.claude-opus-5-v1:0", base_url=server.base_url, **given)


def check_by_vendor(request: ParsedRequest) -> None:
    """Validate a request with the types of the vendor's SDK, which know every field."""
    body = request.body
    if request.protocol == "gemini":
        for content in body["contents"]:
            types.Content.model_validate(content)
        if "systemInstruction" in body:
            types.Content.model_validate(body["systemInstruction"])
        for tool in body.get("tools") or ():
            types.Tool.model_validate(tool)
        types.GenerationConfig.model_validate(body.get("generationConfig") or {})
        known = {"contents", "systemInstruction", "tools", "generationConfig", "safetySettings"}
        assert body.keys() <= known
        return
    model = botocore.session.Session().get_service_model("bedrock-runtime")
    shape = model.operation_model("Converse").input_shape
    found = ParamValidator().validate({"modelId": request.model, **body}, shape)
    assert not found.has_errors(), found.generate_report()
    assert body.keys() <= shape.members.keys()


async def test_a_conversation_with_parallel_tools_returns_reasoning_and_is_valid(kind: str, stream: bool) -> None:
    calls = (ToolCallReply("weather", {"city": "Oslo"}), ToolCallReply("weather", {"city": "Rome"}))
    script = Script(
        (Reply(tool_calls=calls, reasoning="Look at both."), Reply("Snow.", usage=Usage(90, 7, 30))), per="turn"
    )
    with ModelServer(script, faults=ReasoningNotReturned()) as server:
        session = Session()
        async with make(kind, server, stream=stream, params={"temperature": 0.5, "max_tokens": 99}) as adapter:
            said = [ChatMessage("system", "Be brief."), ChatMessage("user", "Weather?")]
            first = await adapter.complete(said, tools=[Tool(weather).spec], session=session)
            results = [tool_message(call, weather(**call.arguments)) for call in first.message.tool_calls]
            last = await adapter.complete([*said, first.message, *results], tools=[Tool(weather).spec], session=session)
        requests = server.requests()
    assert first.message.reasoning == "Look at both."
    assert [dict(call.arguments) for call in first.message.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert (last.output, last.usage) == ("Snow.", TokenUsage(90, 7, 30))
    for request in requests:
        check_by_vendor(request)
    assert requests[1].last is not None
    assert requests[1].last.text == "snow in Oslosnow in Rome"
    config = requests[0].body["generationConfig" if kind == "gemini" else "inferenceConfig"]
    assert config == {"temperature": 0.5, "maxOutputTokens" if kind == "gemini" else "maxTokens": 99}


async def test_typed_outputs_are_requested_with_a_schema(kind: str, stream: bool) -> None:
    with ModelServer(Reply(output={"reason": "r", "points": 4})) as server:
        async with make(kind, server, stream=stream) as adapter:
            completion = await adapter.complete("Judge.", output_type=Answer)
        async with make(kind, server, structured_output="prompt") as adapter:
            assert (await adapter.complete("Judge.", output_type=Answer)).output == Answer("r", 4)
        native, prompted = server.requests()
    assert completion.output == Answer("r", 4)
    assert native.output_schema is not None
    assert list(native.output_schema["properties"]) == ["reason", "points"]
    assert prompted.output_schema is None
    assert "JSON Schema" in prompted.system
    check_by_vendor(native)


async def test_pictures_are_sent_also_from_tools_and_others_are_refused(kind: str, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    picture = blobs.put(PIXEL, media_type="image/png")
    document = blobs.put(b"%PDF-1.7", media_type="application/pdf", name="a.pdf")
    call = ToolCallReply("weather", {"city": "Oslo"}, id="call-1")
    with ModelServer(Script((Reply(tool_calls=(call,)), "Fine."), per="turn")) as server:
        async with make(kind, server, blobs=blobs) as adapter:
            asked = ChatMessage("user", ("Look:", picture, document))
            first = (await adapter.complete([asked], tools=[Tool(weather).spec])).message
            await adapter.complete([asked, first, ChatMessage("tool", ("Seen:", picture), name="call-1")])
            with pytest.raises(InvalidCallError, match="does not support attachments of type application/zip"):
                await adapter.complete([ChatMessage("user", (blobs.put(b"x", media_type="application/zip"),))])
        requests = server.requests()
    for request in requests:
        check_by_vendor(request)
    sent = json.dumps(requests[1].body)
    assert sent.count("iVBORw0KGgo=") == 2
    assert "JVBERi0xLjc=" in sent


async def test_sound_is_sent_to_google_and_refused_by_bedrock(kind: str, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    asked = [ChatMessage("user", ("Listen:", blobs.put(b"RIFF", media_type="audio/wav")))]
    with ModelServer("Fine.") as server:
        async with make(kind, server, blobs=blobs) as adapter:
            if kind == "bedrock":
                with pytest.raises(InvalidCallError, match="audio/wav"):
                    await adapter.complete(asked)
                return
            await adapter.complete(asked)
        (request,) = server.requests()
    check_by_vendor(request)
    assert request.body["contents"][0]["parts"][1] == {"inlineData": {"mimeType": "audio/wav", "data": "UklGRg=="}}


async def test_parameters_of_google_are_sent_where_they_belong() -> None:
    params = {
        "seed": 7,
        "response_logprobs": True,
        "thinkingConfig": {"includeThoughts": True},
        "tools": [{"googleSearch": {}}],
        "safety_settings": [],
    }
    with ModelServer("Fine.") as server:
        async with make("gemini", server, params=params) as adapter:
            await adapter.complete("x", tools=[Tool(weather).spec])
        (request,) = server.requests()
    check_by_vendor(request)
    config = {"seed": 7, "responseLogprobs": True, "thinkingConfig": {"includeThoughts": True}}
    assert request.body["generationConfig"] == config
    assert [next(iter(tool)) for tool in request.body["tools"]] == ["functionDeclarations", "googleSearch"]
    assert request.body["safetySettings"] == []


FAULTS: dict[str, tuple[Fault, type[Exception]]] = {
    "rate limit": (RateLimited(retry_after=2.0), RateLimitedError),
    "overloaded": (ServerFailed(503), ModelUnavailableError),
    "key": (NotAuthorised(401), ModelAuthError),
    "context": (ContextTooLong(), ContextLengthError),
    "reset": (ConnectionReset(), ModelUnavailableError),
    "empty": (EmptyBody(), (MalformedReplyError, ModelUnavailableError)),  # type: ignore[dict-item]
    "not JSON": (MalformedJson(), (MalformedReplyError, ModelUnavailableError)),  # type: ignore[dict-item]
    "another shape": (WrongShape({"x": 1}), (MalformedReplyError, ModelUnavailableError)),  # type: ignore[dict-item]
    "half": (HalfSent(), (MalformedReplyError, ModelUnavailableError)),  # type: ignore[dict-item]
    "in the stream": (StreamFailed(), ModelUnavailableError),
    "refused": (Refused("I would rather not."), ModelRefusedError),
    "filtered": (ContentFiltered(), ModelRefusedError),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_are_classified(kind: str, stream: bool, fault: str) -> None:
    injected, expected = FAULTS[fault]
    with ModelServer("fine", faults=injected) as server:
        async with make(kind, server, stream=stream) as adapter:
            with pytest.raises(expected) as raised:
                await adapter.complete("x")
    if isinstance(raised.value, RateLimitedError):
        assert raised.value.retry_after == 2.0


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("MALFORMED_FUNCTION_CALL", ModelUnavailableError), ("OTHER", ModelUnavailableError), ("SPII", ModelRefusedError),
     ("malformed_tool_use", ModelUnavailableError), ("guardrail_intervened", ModelRefusedError)],
)  # fmt: skip
async def test_endings_that_are_no_answers_raise(reason: str, expected: type[Exception], stream: bool) -> None:
    kind = "gemini" if reason.isupper() else "bedrock"
    with ModelServer(Reply("half an ans", finish_reason=reason)) as server:
        async with make(kind, server, stream=stream) as adapter:
            with pytest.raises(expected, match=f"{reason}|declined"):
                await adapter.complete("x")


async def test_an_answer_that_reached_its_limit_is_cut_off(kind: str, stream: bool) -> None:
    with ModelServer(Reply("half an ans", finish_reason="length")) as server:
        async with make(kind, server, stream=stream) as adapter:
            completion = await adapter.complete("x")
    assert completion.finish_reason == ("length" if kind == "gemini" else "max_tokens")


async def test_calls_without_ids_can_be_told_apart_and_no_made_id_is_sent(stream: bool) -> None:
    calls = tuple(ToolCallReply("weather", {"city": city}, id="") for city in ("Oslo", "Rome"))
    with ModelServer(Script((Reply(tool_calls=calls, reasoning="Hm."), "Snow."), per="turn")) as server:
        async with make("gemini", server, stream=stream) as adapter:
            asked = ChatMessage("user", "Weather?")
            first = (await adapter.complete([asked], tools=[Tool(weather).spec])).message
            assert len({call.id for call in first.tool_calls}) == 2
            results = [tool_message(call, "snow") for call in first.tool_calls]
            await adapter.complete([asked, first, *results], tools=[Tool(weather).spec])
        request = server.requests()[1]
    check_by_vendor(request)
    sent = json.dumps(request.body)
    assert "made-" not in sent
    assert '"thoughtSignature"' in sent
    assert sent.count('"name": "weather", "response"') == 2


def test_the_servers_answers_are_those_of_the_vendors_own_clients() -> None:
    call = ToolCallReply("weather", {"city": "Oslo"})
    script = Script((Reply("Hm.", tool_calls=(call,), reasoning="Look.", usage=Usage(9, 8, 4, 3)), "Snow."), per="turn")
    with ModelServer(script) as server:
        google = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=server.base_url))
        answer = google.models.generate_content(model="gemini-3.8-flash", contents="Weather?")
        chunks = list(google.models.generate_content_stream(model="gemini-3.8-flash", contents="Weather?"))
        google.close()
        config = Config(retries={"total_max_attempts": 1})
        aws = botocore.session.Session().create_client(
            "bedrock-runtime", region_name="eu-west-1", endpoint_url=server.base_url, config=config
        )
        asked = [{"role": "user", "content": [{"text": "Weather?"}]}]
        converse = aws.converse(modelId="m:0", messages=asked)
        events = list(aws.converse_stream(modelId="m:0", messages=asked)["stream"])
        aws.close()
    assert answer.function_calls is not None
    assert answer.function_calls[0].args == {"city": "Oslo"}
    assert answer.usage_metadata is not None
    assert answer.usage_metadata.thoughts_token_count == 3
    assert "".join(chunk.text or "" for chunk in chunks) == "Hm."
    assert chunks[-1].candidates
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert converse["output"]["message"]["content"][0]["reasoningContent"]["reasoningText"]["text"] == "Look."
    assert converse["usage"]["cacheReadInputTokens"] == 4
    assert [next(iter(event)) for event in events][-2:] == ["messageStop", "metadata"]
    assert converse["stopReason"] == "tool_use"


async def test_audio_has_its_own_price_and_what_has_none_makes_the_cost_unknown() -> None:
    usage: dict[str, Any] = {"promptTokenCount": 1000, "candidatesTokenCount": 100, "thoughtsTokenCount": 50}
    adapter = GeminiAdapter("gemini-2.5-flash", api_key="k")

    def cost(**details: Any) -> float | None:
        tree = {"usageMetadata": {**usage, **details}}
        found = adapter._usage(tree["usageMetadata"], "gemini-2.5-flash", adapter._extras(tree))
        assert found is not None
        assert (found.input_tokens, found.output_tokens, found.reasoning_tokens) == (1000, 150, 50)
        return found.cost_usd

    text, sound = cost(), cost(promptTokensDetails=[{"modality": "AUDIO", "tokenCount": 900}])
    assert text is not None
    assert sound is not None
    assert sound - text == pytest.approx(900 * (1.0 - 0.3) / 1e6)  # Sound costs $1 per million tokens, text $0.30.
    assert cost(promptTokensDetails=[{"modality": "VIDEO", "tokenCount": 900}]) is None
    assert cost(candidatesTokensDetails=[{"modality": "IMAGE", "tokenCount": 90}]) is None
    assert cost(cacheTokensDetails=[{"modality": "AUDIO", "tokenCount": 90}]) is None
    assert cost(trafficType="ON_DEMAND") == text
    assert cost(trafficType="ON_DEMAND_PRIORITY") is cost(serviceTier="flex") is None


async def test_a_service_tier_that_the_gemini_api_does_not_confirm_has_no_cost() -> None:
    with ModelServer("hi") as server:
        async with make("gemini", server, prices_of="google") as adapter:
            usual = (await adapter.complete("q")).usage
            flex = (await adapter.complete("q", params={"service_tier": "flex"})).usage
    assert usual is not None
    assert flex is not None
    assert (usual.cost_usd is None, flex.cost_usd) == (False, None)


async def test_an_answer_without_content_is_an_error_except_after_tools(kind: str) -> None:
    empty: Any = {"candidates": [{"content": {"role": "model"}, "finishReason": "STOP"}]}
    if kind == "bedrock":
        empty = {"output": {"message": {"role": "assistant", "content": []}}, "stopReason": "end_turn"}
    call = ToolCall("weather", {"city": "Oslo"}, "c1")
    said = [ChatMessage("user", "q"), ChatMessage("assistant", "", (call,)), tool_message(call, "snow")]
    with ModelServer("x", faults=WrongShape(empty)) as server:
        async with make(kind, server) as adapter:
            assert (await adapter.complete(said)).text == ""
            with pytest.raises(MalformedReplyError, match="without content"):
                await adapter.complete("q")


async def test_a_failed_tool_is_marked(kind: str) -> None:
    call = ToolCall("weather", {"city": "Oslo"}, "c1")
    failed = ChatMessage("tool", "no such city", name="c1", failed=True)
    with ModelServer("Sorry.") as server:
        async with make(kind, server) as adapter:
            await adapter.complete([ChatMessage("user", "q"), ChatMessage("assistant", "", (call,)), failed])
        (request,) = server.requests()
    check_by_vendor(request)
    if kind == "gemini":
        result = request.body["contents"][-1]["parts"][0]["functionResponse"]
        assert result["response"] == {"error": "no such city"}
    else:
        assert request.body["messages"][-1]["content"][0]["toolResult"]["status"] == "error"


async def test_cited_text_of_bedrock_is_part_of_the_answer() -> None:
    cited = {"citationsContent": {"content": [{"text": "It is Paris."}], "citations": [{"title": "Atlas"}]}}
    body = {"output": {"message": {"content": [{"text": "Look: "}, cited]}}, "stopReason": "end_turn"}
    with ModelServer("x", faults=FaultRule(WrongShape(body), numbers=(1,))) as server:
        async with make("bedrock", server) as adapter:
            first = await adapter.complete("q")
            await adapter.complete([ChatMessage("user", "q"), first.message, ChatMessage("user", "And?")])
        request = server.requests()[1]
    assert first.text == "Look: It is Paris."
    assert request.body["messages"][1]["content"] == [{"text": "Look: "}, cited]
    check_by_vendor(request)


class Signed(BaseHTTPRequestHandler):
    """Verifies signatures with an implementation of its own, and answers."""

    problems: list[str]
    keys: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        given = self.headers["authorization"]
        type(self).keys.append(given)
        if given.startswith("AWS4-HMAC-SHA256"):
            expected = signature(self.path, self.headers, body, "not-a-real-secret-of-anyone")
            if f"Signature={expected}" not in given:
                type(self).problems.append(f"{given} is not {expected}")
        answer: dict[str, Any] = {
            "output": {"message": {"role": "assistant", "content": [{"text": "Signed."}]}},
            "stopReason": "end_turn",
            "usage": {"inputTokens": 1, "outputTokens": 2, "totalTokens": 3},
            "choices": [{"message": {"content": "Keyed."}, "finish_reason": "stop"}],
            "candidates": [{"content": {"parts": [{"text": "Keyed."}]}, "finishReason": "STOP"}],
        }
        if self.path.endswith("/responses"):
            said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Keyed."}]}
            answer = {"status": "completed", "output": [said]}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def signature(path: str, headers: Any, body: bytes, secret: str) -> str:
    """Compute Signature Version 4 from the documentation of AWS."""
    credential, signed, _ = (part.strip() for part in headers["authorization"].partition(" ")[2].split(","))
    _key, date, region, service, ending = credential.removeprefix("Credential=").split("/")
    names = signed.removeprefix("SignedHeaders=").split(";")
    canonical = "\n".join(
        [
            "POST",
            path.replace("%", "%25"),  # Each part of the path is encoded twice.
            "",
            *(f"{name}:{' '.join(headers[name].split())}" for name in names),
            "",
            ";".join(names),
            hashlib.sha256(body).hexdigest(),
        ]
    )
    scope = f"{date}/{region}/{service}/{ending}"
    assert (region, service, ending) == ("eu-west-1", "bedrock", "aws4_request")
    assert {"host", "x-amz-date"} <= set(names)
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, ending, text):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()


@contextmanager
def verifying() -> Iterator[tuple[str, type[Signed]]]:
    handler = type("Handler", (Signed,), {"problems": [], "keys": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


async def test_requests_are_signed_with_the_credentials_of_the_chain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with verifying() as (url, handler):
        monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token")
        name = "bedrock-runtime:eu.anthropic.claude-opus-5-v1:0"
        async with model_from_name(name, base_url=url, retry=NO_RETRY) as adapter:
            assert (await adapter.complete("Grüße")).output == "Signed."
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(variable)
        profile = "[other]\naws_access_key_id = AKIDOTHER\naws_secret_access_key = not-a-real-secret-of-anyone\n"
        (tmp_path / "credentials").write_text(profile)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        async with model_from_name(name, base_url=url, retry=NO_RETRY) as adapter:
            with pytest.raises(ModelAuthError, match="the chain found none: set AWS_ACCESS_KEY_ID"):
                await adapter.complete("x")
        monkeypatch.setenv("AWS_PROFILE", "other")
        async with model_from_name(name, base_url=url, retry=NO_RETRY) as adapter:
            await adapter.complete("x")
        monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "a-bedrock-key")
        async with model_from_name(name, base_url=url, retry=NO_RETRY) as adapter:
            await adapter.complete("x")
        assert handler.problems == []
        signed, other, bearer = handler.keys
    assert "Credential=AKIDEXAMPLE/" in signed
    assert "x-amz-security-token" in signed
    assert "Credential=AKIDOTHER/" in other
    assert bearer == "Bearer a-bedrock-key"


@pytest.mark.parametrize("kind", [OpenAIAdapter, partial(OpenAIAdapter, api="responses"), VertexAdapter])
@pytest.mark.parametrize("waits", [False, True])
async def test_keys_are_renewed_by_a_function(kind: Any, waits: bool) -> None:
    made = iter(f"token-{number}" for number in range(9))

    def renew() -> str:
        return next(made)

    async def renew_later() -> str:
        return next(made)

    with verifying() as (url, handler):
        options = {"base_url": url, "api_key": renew_later if waits else renew, "retry": NO_RETRY}
        async with kind("some-model", **options) as adapter:
            for _ in range(2):
                assert (await adapter.complete("x")).output == "Keyed."
        assert handler.keys == ["Bearer token-0", "Bearer token-1"]
        async with kind("some-model", base_url=url, api_key=lambda: "", retry=NO_RETRY) as adapter:
            with pytest.raises(ModelAuthError, match="must return a key"):
                await adapter.complete("x")


async def test_a_renewed_key_of_anthropic_is_its_header() -> None:
    with ModelServer("fine") as server:
        async with AnthropicAdapter("m", base_url=server.base_url, api_key=lambda: "k", stream=True) as adapter:
            assert (await adapter.complete("x")).output == "fine"
        (request,) = server.requests()
    assert "x-api-key" in request.headers


def test_addresses_follow_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "mine")
    start = "aiplatform.googleapis.com/v1/projects/mine/locations"
    assert model_from_name("vertex:g", api_key=str)._base_url == f"https://{start}/global/publishers/google"
    monkeypatch.setenv("GOOGLE_CLOUD_LOCATION", "europe-west4")
    found = model_from_name("vertex:g", api_key=str)._base_url
    assert found == f"https://europe-west4-{start}/europe-west4/publishers/google"
    assert model_from_name("bedrock-runtime:m")._base_url == "https://bedrock-runtime.eu-west-1.amazonaws.com"
