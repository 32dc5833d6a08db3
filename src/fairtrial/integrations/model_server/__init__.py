"""A real HTTP model server for tests and demos, on loopback.

It implements OpenAI's chat completions and Responses, Anthropic's messages, Google's `generateContent` and Amazon
Bedrock's `Converse`. It returns configured replies (`Reply`,
`Script`, `Rule`, a function) or echoes the last user message, and injects faults (`FaultRule`) that depend on a seed.
It can also serve a project of OpenAI's hosted Evals (`HostedEvals`), for tests of importers.
In this process: `ModelServer`. In another: `spawn_model_server`. From the shell: `python -m` this package.
"""

from fairtrial.integrations.model_server.config import ServerConfig, ServerOptions
from fairtrial.integrations.model_server.faults import (
    ConnectionReset,
    ContentFiltered,
    ContextTooLong,
    CutOff,
    EmptyBody,
    EncryptedRefused,
    Fault,
    HalfSent,
    Hang,
    MalformedJson,
    NotAuthorised,
    RateLimited,
    ReasoningNotReturned,
    Refused,
    ServerFailed,
    Slow,
    StreamFailed,
    StreamOptionsRefused,
    TemperatureRefused,
    TokensDamaged,
    ToolsNeedResponses,
    WrongShape,
)
from fairtrial.integrations.model_server.hosted_evals import HostedEvals
from fairtrial.integrations.model_server.latency import FixedLatency, Latency, LogNormalLatency, UniformLatency
from fairtrial.integrations.model_server.plan import FaultPlan, FaultRule
from fairtrial.integrations.model_server.process import ModelServerProcess, spawn_model_server
from fairtrial.integrations.model_server.reply import Reply, ToolCallReply, Usage, count_tokens
from fairtrial.integrations.model_server.request import ParsedMessage, ParsedRequest, ParsedTool
from fairtrial.integrations.model_server.rules import Predicate, Replies, ReplyFunction, Rule, Script
from fairtrial.integrations.model_server.schema import UnsatisfiedSchemaError, minimal_instance
from fairtrial.integrations.model_server.server import ModelServer
from fairtrial.integrations.model_server.stats import ServerStats

__all__ = [
    "ModelServer",
    "spawn_model_server",
    "ModelServerProcess",
    "ServerConfig",
    "ServerOptions",
    "ServerStats",
    "HostedEvals",
    "Reply",
    "ToolCallReply",
    "Usage",
    "Script",
    "Rule",
    "Replies",
    "ReplyFunction",
    "Predicate",
    "ParsedRequest",
    "ParsedMessage",
    "ParsedTool",
    "count_tokens",
    "minimal_instance",
    "UnsatisfiedSchemaError",
    "Latency",
    "FixedLatency",
    "UniformLatency",
    "LogNormalLatency",
    "Fault",
    "FaultRule",
    "FaultPlan",
    "RateLimited",
    "ServerFailed",
    "NotAuthorised",
    "ContextTooLong",
    "Hang",
    "ConnectionReset",
    "HalfSent",
    "MalformedJson",
    "WrongShape",
    "EmptyBody",
    "ContentFiltered",
    "Refused",
    "StreamFailed",
    "ToolsNeedResponses",
    "ReasoningNotReturned",
    "TemperatureRefused",
    "StreamOptionsRefused",
    "EncryptedRefused",
    "CutOff",
    "Slow",
    "TokensDamaged",
]
