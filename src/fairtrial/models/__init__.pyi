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
    BeforeRequest as BeforeRequest,
    HistoryReplaced as HistoryReplaced,
    PrepareMessages as PrepareMessages,
    agent_task as agent_task,
    tool_schema_accuracy as tool_schema_accuracy,
)
from fairtrial.models.anthropic import AnthropicAdapter as AnthropicAdapter
from fairtrial.models.base import BaseAdapter as BaseAdapter, ModelCallFailed as ModelCallFailed
from fairtrial.models.batches.batching import Batching as Batching
from fairtrial.models.cache import ResponseCache as ResponseCache
from fairtrial.models.conversation import ConversationEnded as ConversationEnded, conversation_task as conversation_task
from fairtrial.models.history import summarize_history as summarize_history, trim_history as trim_history
from fairtrial.models.limiter import (
    AdaptiveLimiter as AdaptiveLimiter,
    Budget as Budget,
    FixedLimiter as FixedLimiter,
    Limiter as Limiter,
    RetryPolicy as RetryPolicy,
    Unlimited as Unlimited,
)
from fairtrial.models.main_loop import TaskLoop as TaskLoop, prompt_task as prompt_task
from fairtrial.models.mcp import mcp_tools as mcp_tools
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
from fairtrial.models.users import (
    ConversationUser as ConversationUser,
    UserBriefed as UserBriefed,
    recorded_user as recorded_user,
    simulated_user as simulated_user,
)
from fairtrial.models.tools import BeforeTool as BeforeTool, StopAgent as StopAgent, Tool as Tool

__all__: list[str]
