"""The events every part of Fairtrial understands. Any other frozen dataclass can be recorded beside them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from fairtrial.data.attachment import Attachment
from fairtrial.frozen import EMPTY

MAX_CALL_TOKENS = (1 << 31) - 1
_COUNTS = ("input_tokens", "output_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """What one or more model calls used. `cached_tokens` is the part of the input served from a provider's cache.

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
        )


@dataclass(frozen=True, slots=True)
class ToolInvoked:
    """A tool was called. `success` None means that the tool did not say; `params` None becomes an empty mapping."""

    name: str
    params: Mapping[str, Any] = EMPTY
    result: Any = None
    success: bool | None = None
    error: str | None = None
    prompt_name: str = ""
    adapter: str = ""
    session_id: UUID | None = None
    created_at: datetime | None = None

    def __post_init__(self) -> None:
        check_text(self, "name", "error", "prompt_name", "adapter")
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

    `cached` says that the answer came from the response cache: nothing was sent, and nothing was paid.
    """

    prompt_name: str = ""
    adapter: str = ""
    model: str = ""
    usage: TokenUsage | None = None
    finish_reason: str | None = None
    tokens: Attachment | None = None
    cached: bool = False

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
class SpanClosed:
    """A named stretch of work ended; what was recorded inside it carries its span id."""

    name: str
    duration_ms: float
    error: str | None = None


def check_text(event: object, *names: str) -> None:
    """Raise a TypeError if one of these fields is neither text nor a None that its type allows."""
    for name in names:
        value = getattr(event, name)
        if type(value) is not str and not isinstance(value, str):
            if value is None and name in _OPTIONAL:
                continue
            raise TypeError(f"{type(event).__name__}.{name} must be text (got {value!r})")


def fill_text(event: object, name: str) -> None:
    """Put an empty text in place of a None."""
    if getattr(event, name) is None:
        object.__setattr__(event, name, "")


def fill_mapping(event: object, name: str) -> None:
    """Put an empty mapping in place of a None; raise a TypeError for anything else that is not a mapping."""
    value = getattr(event, name)
    if value is None:
        object.__setattr__(event, name, EMPTY)
    elif not isinstance(value, Mapping):
        raise TypeError(f"{type(event).__name__}.{name} must be a mapping (got {value!r})")


_OPTIONAL = frozenset({"error", "finish_reason"})


def _whole(value: Any, name: str) -> int:
    """A count as providers report it, as an int."""
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
    """A cost as a float."""
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
