"""Prompts, adapters to providers, agents and judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.base.lazy import lazy_names

if TYPE_CHECKING:
    from fairtrial.models.adapter import Completion, ModelCall, ModelReply, PromptResponse, ProviderAdapter, ToolSpec
    from fairtrial.models.agent import AgentEnded, PrepareMessages, agent_task, tool_schema_accuracy
    from fairtrial.models.anthropic import AnthropicAdapter
    from fairtrial.models.base import BaseAdapter, ModelCallFailed
    from fairtrial.models.cache import ResponseCache
    from fairtrial.models.limiter import AdaptiveLimiter, Budget, FixedLimiter, Limiter, RetryPolicy, Unlimited
    from fairtrial.models.main_loop import TaskLoop, prompt_task
    from fairtrial.models.openai import OpenAIAdapter
    from fairtrial.models.pricing import Prices
    from fairtrial.models.prompt import MarkdownSection, Prompt, PromptTemplate
    from fairtrial.models.providers import PROVIDERS, model_from_name
    from fairtrial.models.schema import OutputRepaired, schema_of
    from fairtrial.models.scripted import ScriptedAdapter, choice_task
    from fairtrial.models.tools import StopAgent, Tool

# Imported on first use, so that `import fairtrial` is fast.
_HOMES = {
    "AdaptiveLimiter": "limiter",
    "AgentEnded": "agent",
    "AnthropicAdapter": "anthropic",
    "BaseAdapter": "base",
    "Budget": "limiter",
    "Completion": "adapter",
    "FixedLimiter": "limiter",
    "Limiter": "limiter",
    "MarkdownSection": "prompt",
    "ModelCall": "adapter",
    "ModelCallFailed": "base",
    "ModelReply": "adapter",
    "OpenAIAdapter": "openai",
    "OutputRepaired": "schema",
    "PROVIDERS": "providers",
    "PrepareMessages": "agent",
    "Prices": "pricing",
    "Prompt": "prompt",
    "PromptResponse": "adapter",
    "PromptTemplate": "prompt",
    "ProviderAdapter": "adapter",
    "ResponseCache": "cache",
    "RetryPolicy": "limiter",
    "ScriptedAdapter": "scripted",
    "StopAgent": "tools",
    "TaskLoop": "main_loop",
    "Tool": "tools",
    "ToolSpec": "adapter",
    "Unlimited": "limiter",
    "agent_task": "agent",
    "choice_task": "scripted",
    "model_from_name": "providers",
    "prompt_task": "main_loop",
    "schema_of": "schema",
    "tool_schema_accuracy": "agent",
}


if not TYPE_CHECKING:  # A type checker would take this to mean that every name exists.
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)


__all__ = [
    "AdaptiveLimiter",
    "AgentEnded",
    "AnthropicAdapter",
    "BaseAdapter",
    "Budget",
    "Completion",
    "FixedLimiter",
    "Limiter",
    "MarkdownSection",
    "ModelCall",
    "ModelCallFailed",
    "ModelReply",
    "OpenAIAdapter",
    "OutputRepaired",
    "PROVIDERS",
    "PrepareMessages",
    "Prices",
    "Prompt",
    "PromptResponse",
    "PromptTemplate",
    "ProviderAdapter",
    "ResponseCache",
    "RetryPolicy",
    "ScriptedAdapter",
    "StopAgent",
    "TaskLoop",
    "Tool",
    "ToolSpec",
    "Unlimited",
    "agent_task",
    "choice_task",
    "model_from_name",
    "prompt_task",
    "schema_of",
    "tool_schema_accuracy",
]
