"""Every provider's preset, against the model server."""

from __future__ import annotations

import pytest

from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import ConfigurationError, ModelAuthError
from fairtrial.integrations.model_server import ModelServer, ReasoningNotReturned, Reply, Script, ToolCallReply
from fairtrial.models.providers import PROVIDERS, model_from_name
from fairtrial.models.tools import Tool, tool_message

VARIABLES = {name for kind in PROVIDERS.values() for name in (*kind.key_variables, kind.url_variable)}
LOOK = Reply(tool_calls=(ToolCallReply("look", {}, thought_signature="c2ln"),), reasoning="Look.")
PRESETS = {
    "openai:gpt-6.1-sol": ("openai", "OPENAI_API_KEY"),
    "anthropic:claude-opus-5": ("anthropic", "ANTHROPIC_API_KEY"),
    "azure:my-deployment": ("responses", "AZURE_OPENAI_API_KEY"),
    "google:gemini-3.8-flash": ("openai", "GEMINI_API_KEY"),
    "gemini:gemini-3.8-flash": ("gemini", "GEMINI_API_KEY"),
    "vertex:gemini-3.8-flash": ("gemini", "GOOGLE_CLOUD_ACCESS_TOKEN"),
    "bedrock-runtime:eu.anthropic.claude-opus-5-v1:0": ("bedrock", None),
    "bedrock:openai.gpt-oss-120b": ("openai", "AWS_BEARER_TOKEN_BEDROCK"),
    "bedrock:anthropic.claude-opus-5": ("anthropic", "AWS_BEARER_TOKEN_BEDROCK"),
    "mistral:mistral-large-latest": ("openai", "MISTRAL_API_KEY"),
    "openrouter:deepseek/deepseek-v4": ("openai", "OPENROUTER_API_KEY"),
    "ollama:qwen3:8b": ("openai", None),
    "vllm:my-model": ("openai", None),
}


def look() -> str:
    """Look outside."""
    return "snow"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*VARIABLES, "AWS_DEFAULT_REGION", "BEDROCK_BASE_URL"}:
        monkeypatch.delenv(name, raising=False)


def test_every_provider_has_a_preset_here() -> None:
    assert {name.partition(":")[0] for name in PRESETS} == set(PROVIDERS)


@pytest.mark.parametrize("name", PRESETS)
async def test_a_preset_holds_a_conversation_with_tools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, key = PRESETS[name]
    tool = Tool(look).spec
    with ModelServer(Script((LOOK, "Snow."), per="turn"), faults=ReasoningNotReturned()) as server:
        base_url = server.base_url if protocol == "anthropic" else f"{server.base_url}/v1"
        if key is not None:
            with pytest.raises(ModelAuthError, match=key):
                model_from_name(name, base_url=base_url)
            monkeypatch.setenv(key, "test-key-of-no-value")
        if protocol == "bedrock":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret-of-no-value")
        async with model_from_name(name, base_url=base_url) as adapter:
            asked = ChatMessage("user", "Weather?")
            first = (await adapter.complete([asked], tools=[tool])).message
            results = [tool_message(call, "snow") for call in first.tool_calls]
            assert (await adapter.complete([asked, first, *results], tools=[tool])).output == "Snow."
        requests = server.requests()
    assert [(request.protocol, request.model) for request in requests] == [(protocol, name.partition(":")[2])] * 2
    assert adapter.name == name.partition(":")[0]
    assert {"authorization", "x-goog-api-key"} & requests[0].headers.keys()


def test_addresses_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("azure:x", "bedrock:x", "bedrock:claude-x"):
        with pytest.raises(ConfigurationError, match="needs an address: set A"):
            model_from_name(name, api_key="k")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://mine.openai.azure.com/")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "mine")
    monkeypatch.setenv("GEMINI_BASE_URL", "http://127.0.0.1:1/v1/")
    found = {name: model_from_name(name, api_key="k")._base_url for name in PRESETS}
    assert found["azure:my-deployment"] == "https://mine.openai.azure.com/openai/v1"
    assert found["bedrock:openai.gpt-oss-120b"] == "https://bedrock-mantle.eu-west-1.api.aws/v1"
    assert found["bedrock:anthropic.claude-opus-5"] == "https://bedrock-mantle.eu-west-1.api.aws/anthropic"
    assert found["google:gemini-3.8-flash"] == "http://127.0.0.1:1/v1"
    monkeypatch.setenv("BEDROCK_BASE_URL", "http://127.0.0.1:2")
    assert model_from_name("bedrock:x", api_key="k")._base_url == "http://127.0.0.1:2/v1"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gogle:gemini", "must be a known one (got 'gogle')\ndid you mean google:gemini?"),
        ("x", "use one of openai, anthropic, azure"),
        ("google", "must be named as provider:model (got 'google')\nas in: google:NAME"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_a_remedy(name: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        model_from_name(name)
    assert problem in str(refused.value)
