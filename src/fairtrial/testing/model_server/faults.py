"""What can go wrong with a model server, one record per kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from fairtrial.testing.model_server.latency import Latency
from fairtrial.testing.model_server.record import Record


@dataclass(frozen=True, slots=True)
class RateLimited(Record):
    """Status 429. `retry_after` seconds are announced in the header that `form` names, or not at all."""

    retry_after: float | None = None
    form: Literal["seconds", "milliseconds", "date"] = "seconds"
    kind: Literal["rate_limited"] = field(default="rate_limited", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class ServerFailed(Record):
    """A 5xx status with a well-formed error body; 529 is Anthropic's "overloaded"."""

    status: int = 500
    retry_after: float | None = None
    kind: Literal["server_failed"] = field(default="server_failed", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not 500 <= self.status <= 599:
            raise ValueError(f"a server failure has a status from 500 to 599, not {self.status}")


@dataclass(frozen=True, slots=True)
class NotAuthorised(Record):
    """Status 401 (an unknown key) or 403 (a key without the right)."""

    status: Literal[401, 403] = 401
    kind: Literal["not_authorised"] = field(default="not_authorised", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class ContextTooLong(Record):
    """Status 400: the prompt has more tokens than the model takes."""

    limit: int = 8192
    kind: Literal["context_too_long"] = field(default="context_too_long", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Hang(Record):
    """No answer at all. After `seconds`, or when the server stops, the connection is dropped."""

    seconds: float = 600.0
    kind: Literal["hang"] = field(default="hang", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class ConnectionReset(Record):
    """The connection is reset before any byte of an answer."""

    kind: Literal["connection_reset"] = field(default="connection_reset", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class HalfSent(Record):
    """Status 200 and the declared length, or a stream, but the connection ends after this part of the body."""

    fraction: float = 0.5
    kind: Literal["half_sent"] = field(default="half_sent", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"the fraction of a half-sent body is in [0, 1), not {self.fraction!r}")


@dataclass(frozen=True, slots=True)
class MalformedJson(Record):
    """Status 200, a complete response, and JSON that breaks off in the middle."""

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
    """An answer cut off by the provider's filter: `content_filter` (OpenAI), `refusal` (Anthropic)."""

    kind: Literal["content_filtered"] = field(default="content_filtered", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Refused(Record):
    """The model declines: the `refusal` field (OpenAI), the stop reason `refusal` (Anthropic)."""

    text: str = "I can't help with that."
    kind: Literal["refused"] = field(default="refused", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class StreamFailed(Record):
    """An error event in the middle of a stream that began well. A request without a stream gets status 500."""

    kind: Literal["stream_failed"] = field(default="stream_failed", kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Slow(Record):
    """A good answer, later than the others by this latency."""

    latency: Latency
    kind: Literal["slow"] = field(default="slow", kw_only=True, repr=False)


type Fault = Annotated[
    RateLimited
    | ServerFailed
    | NotAuthorised
    | ContextTooLong
    | Hang
    | ConnectionReset
    | HalfSent
    | MalformedJson
    | WrongShape
    | EmptyBody
    | ContentFiltered
    | Refused
    | StreamFailed
    | Slow,
    Field(discriminator="kind"),
]
"""Any of the faults."""
