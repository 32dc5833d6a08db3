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

    @classmethod
    def _url_from_environment(cls) -> str | None:
        endpoint = os.environ.get(cls.url_variable, "").rstrip("/")
        return endpoint if not endpoint or endpoint.endswith("/v1") else f"{endpoint}/openai/v1"


class GoogleAdapter(OpenAIAdapter):
    """A Gemini model, through Google's endpoint for chat completions."""

    provider = "google"
    key_variables = ("GEMINI_API_KEY", "GOOGLE_API_KEY")
    url_variable = "GEMINI_BASE_URL"
    default_url = "https://generativelanguage.googleapis.com/v1beta/openai"
    default_api = "chat"


class MistralAdapter(OpenAIAdapter):
    """A model of Mistral."""

    provider = "mistral"
    key_variables = ("MISTRAL_API_KEY",)
    url_variable = "MISTRAL_BASE_URL"
    default_url = "https://api.mistral.ai/v1"
    default_api = "chat"
    stream_usage = False  # It refuses `stream_options`, and reports usage without it.


class OpenRouterAdapter(OpenAIAdapter):
    """A model at OpenRouter, as in `openrouter:deepseek/deepseek-v4`."""

    provider = "openrouter"
    key_variables = ("OPENROUTER_API_KEY",)
    url_variable = "OPENROUTER_BASE_URL"
    default_url = "https://openrouter.ai/api/v1"
    default_api = "chat"


class OllamaAdapter(OpenAIAdapter):
    """A model of a local Ollama server; no key is needed."""

    provider = "ollama"
    key_variables = ("OLLAMA_API_KEY",)
    url_variable = "OLLAMA_BASE_URL"
    default_url = "http://localhost:11434/v1"
    default_key = "ollama"
    default_api = "chat"


class VllmAdapter(OpenAIAdapter):
    """A model of a local vLLM server; no key is needed unless the server was given one."""

    provider = "vllm"
    key_variables = ("VLLM_API_KEY",)
    url_variable = "VLLM_BASE_URL"
    default_url = "http://localhost:8000/v1"
    default_key = "none"
    default_api = "chat"


class _Bedrock:
    """The common part of the two adapters for Amazon Bedrock: the address is derived from AWS_REGION."""

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

    provider = "bedrock"
    key_variables = ("AWS_BEARER_TOKEN_BEDROCK",)
    url_variable = "AWS_REGION"
    default_url = ""
    default_api = "chat"
    price_list = "aws"
    suffix = "/v1"


class BedrockAnthropicAdapter(_Bedrock, AnthropicAdapter):
    """A Claude model at Amazon Bedrock, with a Bedrock API key."""

    provider = "bedrock"
    key_variables = ("AWS_BEARER_TOKEN_BEDROCK",)
    url_variable = "AWS_REGION"
    default_url = ""
    price_list = "aws"
    suffix = "/anthropic"


PROVIDERS: Mapping[str, type[SdkAdapter]] = MappingProxyType(
    {
        "openai": OpenAIAdapter,
        "anthropic": AnthropicAdapter,
        "azure": AzureAdapter,
        "google": GoogleAdapter,
        "gemini": GeminiAdapter,
        "vertex": VertexAdapter,
        "bedrock": BedrockAdapter,
        "bedrock-runtime": ConverseAdapter,
        "mistral": MistralAdapter,
        "openrouter": OpenRouterAdapter,
        "ollama": OllamaAdapter,
        "vllm": VllmAdapter,
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
