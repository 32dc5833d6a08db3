"""The events every part of Fairtrial understands. Any other frozen dataclass can be recorded beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from fairtrial.data.attachment import Attachment
from fairtrial.frozen import EMPTY


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """What one or more model calls used. `cached_tokens` is the part of the input served from a provider's cache."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None

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
        )


@dataclass(frozen=True, slots=True)
class ToolInvoked:
    """A tool was called. `success` None means that the tool did not say."""

    name: str
    params: Mapping[str, Any] = EMPTY
    result: Any = None
    success: bool | None = None
    error: str | None = None
    prompt_name: str = ""
    adapter: str = ""
    session_id: UUID | None = None
    created_at: datetime | None = None

    @property
    def failed(self) -> bool:
        """True if the call is marked unsuccessful, however the tool reported it."""
        if self.success is False or self.error is not None:
            return True
        # Some tools put the mark in what they return.
        return self.success is None and isinstance(self.result, Mapping) and self.result.get("success") is False


@dataclass(frozen=True, slots=True)
class PromptExecuted:
    """A model was called. `tokens` refers to token ids and log-probabilities kept for training."""

    prompt_name: str = ""
    adapter: str = ""
    model: str = ""
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    tokens: Attachment | None = None


@dataclass(frozen=True, slots=True)
class SpanClosed:
    """A named stretch of work ended; what was recorded inside it carries its span id."""

    name: str
    duration_ms: float
    error: str | None = None
