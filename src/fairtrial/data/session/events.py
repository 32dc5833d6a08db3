"""The events that a session records, and how model calls end."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Literal
from uuid import UUID

from fairtrial.base.codec.encode import SPARSE
from fairtrial.base.frozen import EMPTY
from fairtrial.data.sample import Attachment

type Ending = Literal["complete", "cut off", "refused", "failed", "paused", "context full", "unknown"]
"""What a reason means.

- complete: the model finished, or calls tools.
- cut off: a limit of tokens ended the answer.
- refused: the model or a filter declined.
- failed: the server failed although its status is 200; the call is retried.
- paused: the provider waits for the message to be sent back, and goes on.
- context full: the conversation does not fit into the context of the model.
- unknown: the reason is in no table. The answer counts as complete, and reports count the reason by its name.
"""

# Chat completions of many servers: OpenAI, Mistral (`error`, `model_length`), OpenRouter (`error`), Gemini
# (`malformed_function_call`), DeepSeek (`insufficient_system_resource`), vLLM and SGLang (`abort`).
CHAT_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "stop": "complete",
        "tool_calls": "complete",
        "function_call": "complete",
        "eos": "complete",
        "length": "cut off",
        "model_length": "context full",
        "content_filter": "refused",
        "refusal": "refused",
        "safety": "refused",
        "recitation": "refused",
        "prohibited_content": "refused",
        "error": "failed",
        "abort": "failed",
        "insufficient_system_resource": "failed",
        "malformed_function_call": "failed",
    }
)

# The reason is `incomplete_details.reason` if there is one, else the status.
RESPONSES_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "completed": "complete",
        "max_output_tokens": "cut off",
        "content_filter": "refused",
        "refusal": "refused",
        "failed": "failed",
        "cancelled": "failed",
        "in_progress": "failed",
        "queued": "failed",
    }
)

ANTHROPIC_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "end_turn": "complete",
        "stop_sequence": "complete",
        "tool_use": "complete",
        "max_tokens": "cut off",
        "refusal": "refused",
        "pause_turn": "paused",
        "compaction": "paused",
        "model_context_window_exceeded": "context full",
    }
)

# Google's own API: the names of google-genai's `FinishReason`. Answers without text end with `NO_IMAGE` and the like.
GEMINI_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "STOP": "complete",
        "MAX_TOKENS": "cut off",
        "SAFETY": "refused",
        "RECITATION": "refused",
        "BLOCKLIST": "refused",
        "PROHIBITED_CONTENT": "refused",
        "SPII": "refused",
        "IMAGE_SAFETY": "refused",
        "IMAGE_PROHIBITED_CONTENT": "refused",
        "IMAGE_RECITATION": "refused",
        "FINISH_REASON_UNSPECIFIED": "failed",
        "MALFORMED_FUNCTION_CALL": "failed",
        "MALFORMED_RESPONSE": "failed",
        "UNEXPECTED_TOOL_CALL": "failed",
        "TOO_MANY_TOOL_CALLS": "failed",
        "OTHER": "failed",
        "IMAGE_OTHER": "failed",
        "NO_IMAGE": "failed",
        "LANGUAGE": "failed",
    }
)

# Amazon Bedrock's Converse, which has most of Anthropic's names.
CONVERSE_ENDINGS: Mapping[str, Ending] = MappingProxyType(
    {
        "end_turn": "complete",
        "stop_sequence": "complete",
        "tool_use": "complete",
        "max_tokens": "cut off",
        "content_filtered": "refused",
        "guardrail_intervened": "refused",
        "malformed_model_output": "failed",
        "malformed_tool_use": "failed",
        "model_context_window_exceeded": "context full",
    }
)

# "timeout" is what an adapter records for a request without an answer.
_ALL: Mapping[str, Ending] = {
    **RESPONSES_ENDINGS,
    **ANTHROPIC_ENDINGS,
    **GEMINI_ENDINGS,
    **CONVERSE_ENDINGS,
    **CHAT_ENDINGS,
    "timeout": "failed",
}
CUT_OFF_REASONS = frozenset(name for name, ending in _ALL.items() if ending in ("cut off", "context full"))
"""What providers say when an answer ended at a limit of tokens."""


def ending_of(reason: str | None, table: Mapping[str, Ending] = _ALL) -> Ending:
    """Return what a reason means by the table of a protocol, by default in any of them; no reason means complete."""
    if reason is None:
        return "complete"
    # Gemini's own names are in capitals.
    return table.get(reason) or table.get(reason.lower(), "unknown")


MAX_CALL_TOKENS = (1 << 31) - 1
_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "cache_write_tokens")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token usage and cost of one or more model calls.

    `cached_tokens` is the part of the input served from a provider's cache, `cache_write_tokens` the part that was
    written to it. `reasoning_tokens` is the part of the output that the model spent on reasoning.

    Takes what SDKs return: a count of None (not reported) becomes 0; integral floats and numpy integers become int; a
    cost may be any real number type. `cost_usd` None means that the cost is unknown.

    Raises:
        TypeError: a count is not a whole number, or the cost is not a number.
        ValueError: a count or the cost is negative, or the cost is not finite.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    reasoning_tokens: int = field(default=0, metadata=SPARSE)
    cache_write_tokens: int = field(default=0, metadata=SPARSE)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                object.__setattr__(self, name, _whole(count, name))
        cost = self.cost_usd
        if cost is not None and (type(cost) is not float or not 0.0 <= cost < math.inf):
            object.__setattr__(self, "cost_usd", _amount(cost))

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        # An unknown price makes the sum unknown only if it is unknown on both sides: a lower bound is still a fact.
        known = [cost for cost in (self.cost_usd, other.cost_usd) if cost is not None]
        return TokenUsage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(known) if known else None,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )


NO_USAGE: Final = TokenUsage()
"""The usage of a trial without model calls: one object, so that it can be recognized and left out."""


@dataclass(frozen=True, slots=True)
class ToolInvoked:
    """A tool was called. `success` None means that the tool did not say; `params` None becomes an empty mapping.

    Calls are recorded when they end. `call_id` is the id that the model gave the call; `duration_ms` is how long it
    took, None if that was not measured.
    """

    name: str
    params: Mapping[str, Any] = EMPTY
    result: Any = None
    success: bool | None = None
    error: str | None = None
    prompt_name: str = ""
    adapter: str = ""
    session_id: UUID | None = None
    created_at: datetime | None = None
    duration_ms: float | None = field(default=None, compare=False, metadata=SPARSE)
    call_id: str = field(default="", compare=False, metadata=SPARSE)

    def __post_init__(self) -> None:
        check_text(self, "name", "error", "prompt_name", "adapter", "call_id")
        fill_mapping(self, "params")
        if self.success is not None and not isinstance(self.success, bool):
            raise TypeError(f"ToolInvoked.success must be True, False or None (got {self.success!r})")

    @property
    def failed(self) -> bool:
        """True if the call is marked unsuccessful, however the tool reported it."""
        if self.success is False or self.error is not None:
            return True
        # A tool that returned without raising may still say in its result that it failed.
        return isinstance(self.result, Mapping) and self.result.get("success") is False


@dataclass(frozen=True, slots=True)
class PromptExecuted:
    """A model was called. `tokens` refers to token ids and log-probabilities kept for training.

    `cached` says that the answer came from the response cache: nothing was sent, and nothing was paid. `duration_ms` is
    how long the provider took to answer, `waited_ms` how long the call waited before: for the limiter, for requests
    that failed and for the pauses after them; or for its batch. Both are None where nothing was measured.
    `requested_model` is the name that was asked for, if the provider answered with another one in `model`.
    """

    prompt_name: str = ""
    adapter: str = ""
    model: str = ""
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    tokens: Attachment | None = None
    cached: bool = False
    duration_ms: float | None = field(default=None, compare=False, metadata=SPARSE)
    waited_ms: float | None = field(default=None, compare=False, metadata=SPARSE)
    requested_model: str = field(default="", compare=False, metadata=SPARSE)

    @property
    def cut_off(self) -> bool:
        """True if the answer ended because it reached a limit of tokens."""
        return self.finish_reason in CUT_OFF_REASONS

    def __post_init__(self) -> None:
        check_text(self, "prompt_name", "adapter", "model", "finish_reason")
        usage = self.usage
        if usage is None:
            return
        if not isinstance(usage, TokenUsage):
            raise TypeError(f"PromptExecuted.usage must be a TokenUsage or None (got {usage!r})")
        for name in _COUNTS:
            if getattr(usage, name) > MAX_CALL_TOKENS:
                raise ValueError(
                    f"PromptExecuted.usage.{name} must be at most {MAX_CALL_TOKENS:,} (got {getattr(usage, name):,})"
                )


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Documents were retrieved for a query, best first. Evaluators of retrieval read these events."""

    query: str
    documents: tuple[str, ...]
    source: str = ""
    duration_ms: float | None = field(default=None, compare=False, metadata=SPARSE)

    def __post_init__(self) -> None:
        check_text(self, "query", "source")
        given: Any = self.documents
        if isinstance(given, str):
            raise TypeError(f"Retrieved.documents must be a list of texts (got the text {given[:40]!r})")
        documents = tuple(given)
        if not all(isinstance(document, str) for document in documents):
            raise TypeError(f"Retrieved.documents must be a list of texts (got {documents!r})")
        object.__setattr__(self, "documents", documents)


@dataclass(frozen=True, slots=True)
class SpanClosed:
    """A named span of work ended; events recorded inside it carry its span id."""

    name: str
    duration_ms: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TraceIncomplete:
    """The trace that the application sent is not complete: evaluators of the session cannot be trusted with it."""

    reason: str
    spans: int = 0


def check_text(event: object, *names: str) -> None:
    """Raise a TypeError if one of these fields is neither text nor a None that its type allows."""
    for name in names:
        value = getattr(event, name)
        if type(value) is not str and not isinstance(value, str):
            if value is None and name in _OPTIONAL:
                continue
            raise TypeError(f"{type(event).__name__}.{name} must be text (got {value!r})")


def fill_text(event: object, name: str) -> None:
    """Replace None by an empty text."""
    if getattr(event, name) is None:
        object.__setattr__(event, name, "")


def fill_mapping(event: object, name: str) -> None:
    """Replace None by an empty mapping; raise a TypeError for anything else that is not a mapping."""
    value = getattr(event, name)
    if value is None:
        object.__setattr__(event, name, EMPTY)
    elif not isinstance(value, Mapping):
        raise TypeError(f"{type(event).__name__}.{name} must be a mapping (got {value!r})")


_OPTIONAL = frozenset({"error", "finish_reason"})


def _whole(value: Any, name: str) -> int:
    """Convert a count, as providers report it, to an int."""
    if value is None:
        return 0
    try:
        count = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError:
        raise TypeError(f"TokenUsage.{name} must be a whole number (got {value!r})") from None
    if count < 0:
        raise ValueError(f"TokenUsage.{name} must be at least 0 (got {value!r})")
    return count


def _amount(value: Any) -> float:
    """Convert a cost to a float."""
    if isinstance(value, str | bytes):
        raise TypeError(f"TokenUsage.cost_usd must be a number (got {value!r})")
    try:
        cost = float(value)
    except TypeError:
        raise TypeError(f"TokenUsage.cost_usd must be a number (got {value!r})") from None
    except (ValueError, OverflowError):
        cost = math.nan
    if not 0.0 <= cost < math.inf:
        raise ValueError(f"TokenUsage.cost_usd must be a finite number of at least 0 (got {value!r})")
    return cost
