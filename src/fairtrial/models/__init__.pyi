from fairtrial.models.adapter import (
    Completion as Completion,
    ModelCall as ModelCall,
    ModelReply as ModelReply,
    PromptResponse as PromptResponse,
    ProviderAdapter as ProviderAdapter,
    ToolSpec as ToolSpec,
)
from fairtrial.models.agent import (
    AgentEnded as AgentEnded,
    PrepareMessages as PrepareMessages,
    agent_task as agent_task,
    tool_schema_accuracy as tool_schema_accuracy,
)
from fairtrial.models.anthropic import AnthropicAdapter as AnthropicAdapter
from fairtrial.models.base import BaseAdapter as BaseAdapter, ModelCallFailed as ModelCallFailed
from fairtrial.models.cache import ResponseCache as ResponseCache
from fairtrial.models.limiter import (
    AdaptiveLimiter as AdaptiveLimiter,
    Budget as Budget,
    FixedLimiter as FixedLimiter,
    Limiter as Limiter,
    RetryPolicy as RetryPolicy,
    Unlimited as Unlimited,
)
from fairtrial.models.main_loop import TaskLoop as TaskLoop, prompt_task as prompt_task
from fairtrial.models.openai import OpenAIAdapter as OpenAIAdapter
from fairtrial.models.pricing import Prices as Prices
from fairtrial.models.prompt import (
    MarkdownSection as MarkdownSection,
    Prompt as Prompt,
    PromptTemplate as PromptTemplate,
)
from fairtrial.models.providers import PROVIDERS as PROVIDERS, model_from_name as model_from_name
from fairtrial.models.schema import OutputRepaired as OutputRepaired, schema_of as schema_of
from fairtrial.models.scripted import ScriptedAdapter as ScriptedAdapter, choice_task as choice_task
from fairtrial.models.tools import StopAgent as StopAgent, Tool as Tool

__all__: list[str]
