from fairtrial.integrations.model_server.batches import (
    BatchFault as BatchFault,
    BatchLedger as BatchLedger,
    BatchOptions as BatchOptions,
    CreatedBatch as CreatedBatch,
    ExecutedRequest as ExecutedRequest,
)
from fairtrial.integrations.model_server.config import (
    FaultPlan as FaultPlan,
    FaultRule as FaultRule,
    ServerConfig as ServerConfig,
    ServerOptions as ServerOptions,
)
from fairtrial.integrations.model_server.faults import (
    ConnectionReset as ConnectionReset,
    ContentFiltered as ContentFiltered,
    ContextTooLong as ContextTooLong,
    CutOff as CutOff,
    EmptyBody as EmptyBody,
    EncryptedRefused as EncryptedRefused,
    Fault as Fault,
    HalfSent as HalfSent,
    Hang as Hang,
    MalformedJson as MalformedJson,
    NotAuthorised as NotAuthorised,
    RateLimited as RateLimited,
    ReasoningNotReturned as ReasoningNotReturned,
    Refused as Refused,
    ReplyLost as ReplyLost,
    ServerFailed as ServerFailed,
    Slow as Slow,
    StreamFailed as StreamFailed,
    StreamOptionsRefused as StreamOptionsRefused,
    TemperatureRefused as TemperatureRefused,
    TokensDamaged as TokensDamaged,
    ToolsNeedResponses as ToolsNeedResponses,
    WrongShape as WrongShape,
)
from fairtrial.integrations.model_server.reply import (
    FixedLatency as FixedLatency,
    Latency as Latency,
    LogNormalLatency as LogNormalLatency,
    ParsedMessage as ParsedMessage,
    ParsedRequest as ParsedRequest,
    ParsedTool as ParsedTool,
    Reply as Reply,
    ToolCallReply as ToolCallReply,
    UniformLatency as UniformLatency,
    Usage as Usage,
    count_tokens as count_tokens,
)
from fairtrial.integrations.model_server.rules import (
    HostedEvals as HostedEvals,
    Predicate as Predicate,
    Replies as Replies,
    ReplyFunction as ReplyFunction,
    Rule as Rule,
    Script as Script,
    UnsatisfiedSchemaError as UnsatisfiedSchemaError,
    minimal_instance as minimal_instance,
)
from fairtrial.integrations.model_server.server import (
    ModelServer as ModelServer,
    ModelServerProcess as ModelServerProcess,
    spawn_model_server as spawn_model_server,
)
from fairtrial.integrations.model_server.stats import ServerStats as ServerStats

__all__: list[str]
