"""The faults that the server can inject."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import Field

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.reply import (
    FixedLatency,
    Latency,
    LogNormalLatency,
    Record,
    TokenDamage,
    UniformLatency,
)


class ProviderRule(Record):
    """A rule of providers: only the requests that break it are refused."""

    __slots__ = ()


@first_is(int, float, NoneType)
@dataclass(frozen=True, slots=True)
class RateLimited(Record):
    """Status 429. `retry_after` seconds are sent in the form that `form` names; None sends none.

    `reset` is OpenAI's `x-ratelimit-reset-requests` and Anthropic's counterpart, `body` Google's `retryDelay`.
    """

    retry_after: float | None = None
    form: Literal["seconds", "milliseconds", "date", "reset", "body"] = "seconds"
    kind: Literal["rate_limited"] = field(default="rate_limited", kw_only=True, repr=False)


@first_is(int)
@dataclass(frozen=True, slots=True)
class ServerFailed(Record):
    """A 5xx status with a well-formed error body; 529 is Anthropic's "overloaded"."""

    status: int = 500
    retry_after: float | None = None
    kind: Literal["server_failed"] = field(default="server_failed", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not 500 <= self.status <= 599:
            raise ValueError(f"the status of ServerFailed must be from 500 to 599 (got {self.status})")


@first_is(int)
@dataclass(frozen=True, slots=True)
class NotAuthorised(Record):
    """Status 401 (an unknown key) or 403 (a key without the right)."""

    status: Literal[401, 403] = 401
    kind: Literal["not_authorised"] = field(default="not_authorised", kw_only=True, repr=False)


@first_is(int)
@dataclass(frozen=True, slots=True)
class ContextTooLong(Record):
    """Status 400: the prompt has more tokens than the model accepts."""

    limit: int = 8192
    kind: Literal["context_too_long"] = field(default="context_too_long", kw_only=True, repr=False)


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class Hang(Record):
    """No answer. After `seconds`, or when the server stops, the connection is dropped."""

    seconds: float = 600.0
    kind: Literal["hang"] = field(default="hang", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class ConnectionReset(Record):
    """The connection is reset before any byte of an answer."""

    kind: Literal["connection_reset"] = field(default="connection_reset", kw_only=True, repr=False)


@first_is(int, NoneType)
@dataclass(frozen=True, slots=True)
class ReplyLost(Record):
    """The request is executed and billed, but its answer is lost: `status` is sent instead, or the connection is reset.

    This happens after `seconds`, or when the server stops. It is counted in `ServerStats.by_fault` when the work is
    done, so that a test can wait for that and stop its client there; `Hang` is the same before the work.
    """

    status: Literal[500, 502, 503, 504] | None = None
    seconds: float = 0.0
    kind: Literal["reply_lost"] = field(default="reply_lost", kw_only=True, repr=False)


@first_is(int, float)
@dataclass(frozen=True, slots=True)
class HalfSent(Record):
    """Status 200 and the declared length, or a stream, but the connection ends after this part of the body."""

    fraction: float = 0.5
    kind: Literal["half_sent"] = field(default="half_sent", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"the fraction of HalfSent must be at least 0 and below 1 (got {self.fraction!r})")


@dataclass(frozen=True, slots=True)
class MalformedJson(Record):
    """Status 200 and a complete response with truncated JSON."""

    kind: Literal["malformed_json"] = field(default="malformed_json", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class WrongShape(Record):
    """Status 200 and valid JSON that is not a completion."""

    body: Any = field(default_factory=lambda: {"status": "ok"})
    kind: Literal["wrong_shape"] = field(default="wrong_shape", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class EmptyBody(Record):
    """Status 200 and no body."""

    kind: Literal["empty_body"] = field(default="empty_body", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class ContentFiltered(Record):
    """An answer that the provider's filter truncates: `content_filter` (OpenAI), `refusal` (Anthropic)."""

    kind: Literal["content_filtered"] = field(default="content_filtered", kw_only=True, repr=False)


@first_is(str)
@dataclass(frozen=True, slots=True)
class Refused(Record):
    """The model declines: the `refusal` field (OpenAI), the stop reason `refusal` (Anthropic)."""

    text: str = "I can't help with that."
    kind: Literal["refused"] = field(default="refused", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class StreamFailed(Record):
    """An error event in the middle of a stream. A request without streaming gets status 500."""

    kind: Literal["stream_failed"] = field(default="stream_failed", kw_only=True, repr=False)


@first_is(FixedLatency, UniformLatency, LogNormalLatency)
@dataclass(frozen=True, slots=True)
class Slow(Record):
    """A valid answer, delayed by this latency."""

    latency: Latency
    kind: Literal["slow"] = field(default="slow", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class ToolsNeedResponses(ProviderRule):
    """Status 400 for chat completions with tools, unless `reasoning_effort` is "none"; other requests are answered."""

    kind: Literal["tools_need_responses"] = field(default="tools_need_responses", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class ReasoningNotReturned(ProviderRule):
    """Status 400 for a request whose tool calls lack the reasoning that was sent with them, or have it changed.

    The message is that of the provider whose format the reasoning has: Gemini's thought signatures,
    `reasoning_content`, reasoning items of Responses, Anthropic's thinking blocks. All other requests are answered.
    """

    kind: Literal["reasoning_not_returned"] = field(default="reasoning_not_returned", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class TemperatureRefused(ProviderRule):
    """Status 400 for a request with a `temperature` other than 1, as from a reasoning model; others are answered."""

    kind: Literal["temperature_refused"] = field(default="temperature_refused", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class StreamOptionsRefused(ProviderRule):
    """Status 422 for a request with `stream_options`, as from Mistral; others are answered."""

    kind: Literal["stream_options_refused"] = field(default="stream_options_refused", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class EncryptedRefused(ProviderRule):
    """Status 400 for a request of encrypted reasoning, as from models that do not reason; others are answered."""

    kind: Literal["encrypted_refused"] = field(default="encrypted_refused", kw_only=True, repr=False)


@first_is(int, NoneType)
@dataclass(frozen=True, slots=True)
class CutOff(Record):
    """An answer of at most this many tokens, reasoning included; by default the limit of the request."""

    tokens: int | None = None
    kind: Literal["cut_off"] = field(default="cut_off", kw_only=True, repr=False)


@first_is(str)
@dataclass(frozen=True, slots=True)
class TokensDamaged(Record):
    """A valid answer whose token ids cannot be trained on, from a server with `token_ids`.

    - `ids_missing`: without ids. `logprob_missing`: one log-probability short.
    - `not_a_number`: the first log-probability is null. `clamped`: it is -9999.0, as vLLM writes an unknown one.
    - `retokenized`: the ids of the first reply in the prompt differ from those that were sampled.
    """

    how: TokenDamage = "ids_missing"
    kind: Literal["tokens_damaged"] = field(default="tokens_damaged", kw_only=True, repr=False)


type Fault = Annotated[
    RateLimited
    | ServerFailed
    | NotAuthorised
    | ContextTooLong
    | Hang
    | ConnectionReset
    | ReplyLost
    | HalfSent
    | MalformedJson
    | WrongShape
    | EmptyBody
    | ContentFiltered
    | Refused
    | StreamFailed
    | ToolsNeedResponses
    | ReasoningNotReturned
    | TemperatureRefused
    | StreamOptionsRefused
    | EncryptedRefused
    | CutOff
    | Slow
    | TokensDamaged,
    Field(discriminator="kind"),
]
"""Any of the faults."""
