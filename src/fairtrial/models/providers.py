"""Adapters by provider and model, as in `model_from_name("google:gemini-3.8-flash")`, with addresses and keys."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from fairtrial.base.plugins import find_plugin, plugin_names
from fairtrial.errors import ConfigurationError
from fairtrial.models.anthropic import AnthropicAdapter
from fairtrial.models.batches.wire import BatchWire
from fairtrial.models.bedrock import ConverseAdapter
from fairtrial.models.gemini import GeminiAdapter, VertexAdapter
from fairtrial.models.openai import OpenAIAdapter
from fairtrial.models.sdk import SdkAdapter


class AzureAdapter(OpenAIAdapter):
    """A deployment at Azure OpenAI. AZURE_OPENAI_ENDPOINT is the resource, as in `https://NAME.openai.azure.com`."""

    provider = "azure"
    key_variables = ("AZURE_OPENAI_API_KEY",)
    url_variable = "AZURE_OPENAI_ENDPOINT"
    default_url = ""
    default_api = "responses"
    batch_wire: ClassVar[BatchWire | None] = None  # Its batches have deployments of their own.

    @classmethod
    def _url_from_environment(cls) -> str | None:
        endpoint = os.environ.get(cls.url_variable, "").rstrip("/")
        return endpoint if not endpoint or endpoint.endswith("/v1") else f"{endpoint}/openai/v1"


def _chat_adapter(name: str, url: str, **constants: Any) -> type[OpenAIAdapter]:
    """Return the adapter of a server with chat completions; by default its variables begin with its name."""
    own = {
        "__module__": __name__,
        "provider": name.lower(),
        "key_variables": (f"{name.upper()}_API_KEY",),
        "url_variable": f"{name.upper()}_BASE_URL",
        "default_url": url,
        "default_api": "chat",
        "batch_wire": None,
    }
    return type(f"{name}Adapter", (OpenAIAdapter,), own | constants)


class _Bedrock:
    """The common part of the two adapters for Amazon Bedrock: the address is derived from AWS_REGION."""

    provider = "bedrock"
    key_variables: ClassVar[tuple[str, ...]] = ("AWS_BEARER_TOKEN_BEDROCK",)
    url_variable = "AWS_REGION"
    default_url = ""
    price_list: ClassVar[str | None] = "aws"
    batch_wire: ClassVar[BatchWire | None] = None
    suffix: ClassVar[str]

    @classmethod
    def _url_from_environment(cls) -> str | None:
        given = os.environ.get("BEDROCK_BASE_URL", "").rstrip("/")
        if given:
            return f"{given}{cls.suffix}"
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return f"https://bedrock-mantle.{region}.api.aws{cls.suffix}" if region else None


class BedrockAdapter(_Bedrock, OpenAIAdapter):
    """A model at Amazon Bedrock that is not Anthropic's, with a Bedrock API key."""

    default_api = "chat"
    suffix = "/v1"


class BedrockAnthropicAdapter(_Bedrock, AnthropicAdapter):
    """A Claude model at Amazon Bedrock, with a Bedrock API key."""

    suffix = "/anthropic"


PROVIDERS: Mapping[str, type[SdkAdapter]] = MappingProxyType(
    {
        "openai": OpenAIAdapter,
        "anthropic": AnthropicAdapter,
        "azure": AzureAdapter,
        "google": _chat_adapter(
            "Google",
            "https://generativelanguage.googleapis.com/v1beta/openai",
            key_variables=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
            url_variable="GEMINI_BASE_URL",
        ),
        "gemini": GeminiAdapter,
        "vertex": VertexAdapter,
        "bedrock": BedrockAdapter,
        "bedrock-runtime": ConverseAdapter,
        # It refuses `stream_options`, and reports usage without it.
        "mistral": _chat_adapter("Mistral", "https://api.mistral.ai/v1", stream_usage=False),
        "openrouter": _chat_adapter("OpenRouter", "https://openrouter.ai/api/v1"),
        # Local servers need no key, unless they were given one.
        "ollama": _chat_adapter("Ollama", "http://localhost:11434/v1", default_key="ollama"),
        "vllm": _chat_adapter("Vllm", "http://localhost:8000/v1", default_key="none"),
    }
)
"""The providers by name."""


def model_from_name(name: str, **options: Any) -> Any:
    """Return the adapter of a model named as `provider:model`.

    Args:
        name: As in "openai:gpt-6.1-sol", "anthropic:claude-opus-5" or "ollama:qwen3:8b". Providers of other packages
            are entry points of `fairtrial.providers`, called with the model and the options.
        options: The options of the provider's adapter: see `OpenAIAdapter` and `AnthropicAdapter`.
    """
    provider, _, model = name.partition(":")
    kind: Any = PROVIDERS.get(provider) or find_plugin("providers", provider)
    if kind is None:
        known = [*PROVIDERS, *plugin_names("providers")]
        near = difflib.get_close_matches(provider, known, 1)
        remedy = f"did you mean {near[0]}:{model or 'NAME'}?" if near else f"use one of {', '.join(known)}"
        raise ConfigurationError(f"the provider of {name!r} must be a known one (got {provider!r})\n{remedy}")
    if not model:
        raise ConfigurationError(f"a model must be named as provider:model (got {name!r})\nas in: {provider}:NAME")
    if kind is BedrockAdapter and "claude" in model:
        kind = BedrockAnthropicAdapter
    return kind(model, **options)
