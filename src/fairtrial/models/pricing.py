"""The cost of model calls, from given prices or from the price list of the extra `models`.

Nothing is looked up online.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairtrial.base.frozen import EMPTY, FrozenDict
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import ConfigurationError

_REQUIRED_PRICES = ("input", "output")
_OPTIONAL_PRICES = ("cached", "cache_write", "reasoning", "audio_input", "audio_output", "cache_write_hour")
_BATCH, _BATCH_FACTOR = "batch", 0.5  # The tier of answers in batches, at half price everywhere.
_STANDARD_TIERS = frozenset({"", "default", "standard", "auto", "on_demand", "unspecified", "traffic_type_unspecified"})


@dataclass(frozen=True, slots=True)
class UsageExtras:
    """The parts of a call's usage that have a price of their own and are not in its `TokenUsage`.

    Attributes:
        audio_input: Input tokens of audio.
        audio_output: Output tokens of audio.
        hour_writes: Tokens that were written to the provider's cache for one hour.
        searches: Web searches of the provider's own tool.
        other: Tokens without a price, such as those of pictures that the model made: the cost is unknown.
        tier: The service tier, in small letters; "" for the standard one.
        cost_usd: What the provider says that the call cost.
    """

    audio_input: int = 0
    audio_output: int = 0
    hour_writes: int = 0
    searches: int = 0
    other: int = 0
    tier: str = ""
    cost_usd: float | None = None

    @classmethod
    def of(cls, tier: Any, **parts: Any) -> UsageExtras:
        """Return the extras of an answer; `NO_EXTRAS` if it has none."""
        named = tier.lower().removeprefix("on_demand_") if isinstance(tier, str) else ""  # Vertex AI's prefix.
        named = "" if named in _STANDARD_TIERS else named
        return cls(tier=named, **parts) if named or any(part not in (0, None) for part in parts.values()) else NO_EXTRAS


NO_EXTRAS = UsageExtras()


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a model in US dollars per million tokens.

    Attributes:
        input: Of input tokens.
        output: Of output tokens.
        cached: Of input tokens that the provider's cache served; by default `input`.
        cache_write: Of input tokens that were written to the provider's cache; by default `input`.
        reasoning: Of output tokens that the model spent on reasoning; by default `output`.
        audio_input: Of input tokens of audio; without it, the cost of a call with audio is unknown.
        audio_output: Of output tokens of audio; likewise.
        cache_write_hour: Of tokens that were written to the cache for one hour; likewise.
        tiers: Factors for other service tiers, such as `{"flex": 0.5, "priority": 2}`; likewise. That of answers in
            batches, "batch", is 0.5 unless it is given.
    """

    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None
    reasoning: float | None = None
    audio_input: float | None = None
    audio_output: float | None = None
    cache_write_hour: float | None = None
    tiers: Mapping[str, float] = EMPTY

    def __post_init__(self) -> None:
        for name in (*_REQUIRED_PRICES, *_OPTIONAL_PRICES):
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL_PRICES) and not _is_amount(value):
                raise ConfigurationError(
                    f"Prices.{name} must be US dollars per million tokens, at least 0 (got {value!r})"
                )
        tiers: object = self.tiers  # Checked at run time, for callers without a type checker.
        if not isinstance(tiers, Mapping) or not all(map(_is_amount, tiers.values())):
            raise ConfigurationError(
                f'Prices.tiers must be factors by service tier, such as {{"flex": 0.5}} (got {tiers!r})'
            )
        object.__setattr__(self, "tiers", FrozenDict(tiers))

    def cost(self, usage: TokenUsage, extras: UsageExtras = NO_EXTRAS) -> float | None:
        """Return the cost of a call in US dollars; None if a part of it has no price."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        written = min(usage.cache_write_tokens, usage.input_tokens - cached)
        reasoned = min(usage.reasoning_tokens, usage.output_tokens)
        parts = [
            (usage.input_tokens - cached - written, self.input),
            (cached, self.input if self.cached is None else self.cached),
            (written, self.input if self.cache_write is None else self.cache_write),
            (usage.output_tokens - reasoned, self.output),
            (reasoned, self.output if self.reasoning is None else self.reasoning),
        ]
        factor: float = 1
        if extras is not NO_EXTRAS:
            tiers = {"": 1.0, _BATCH: _BATCH_FACTOR, **self.tiers}
            if extras.searches or extras.other or extras.tier not in tiers:
                return None
            factor = tiers[extras.tier]
            special = (
                (min(extras.audio_input, parts[0][0]), 0, self.audio_input),
                (min(extras.hour_writes, written), 2, self.cache_write_hour),
                (min(extras.audio_output, parts[3][0]), 3, self.audio_output),
            )
            for tokens, place, price in special:
                if tokens and price is None:
                    return None
                count, usual = parts[place]
                parts[place] = (count - tokens, usual)
                parts.append((tokens, price or 0.0))
        return factor * sum(tokens * price for tokens, price in parts) / 1_000_000


def _is_amount(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf


_configured: Mapping[str, Prices] = EMPTY


def configure_prices(prices: Mapping[str, Prices]) -> Mapping[str, Prices]:
    """Set the prices of models by name, for adapters without prices of their own; returns the previous ones."""
    global _configured
    before, _configured = _configured, dict(prices)
    return before


def all_configured_prices() -> Mapping[str, Prices]:
    """Return the prices that `configure_prices` set."""
    return _configured


def configured_prices(model: str) -> Prices | None:
    """Return the prices that `configure_prices` set for a model; None if there are none."""
    return _configured.get(model)


def read_prices(table: Any) -> dict[str, Prices]:
    """Parse prices from a table of plain values: `{"my-model": {"input": 0.5, "output": 1.5}}`."""
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"prices must be a table of models (got {table!r})")
    prices: dict[str, Prices] = {}
    for model, entry in table.items():
        names = {*_REQUIRED_PRICES, *_OPTIONAL_PRICES, "tiers"}
        if not isinstance(entry, Mapping) or not set(_REQUIRED_PRICES) <= entry.keys() <= names:
            raise ConfigurationError(
                f"the prices of {model!r} must be input, output and, if they differ, "
                f"{', '.join(_OPTIONAL_PRICES)} and tiers (got {entry!r})"
            )
        prices[model] = Prices(**entry)
    return prices


def priced(
    usage: TokenUsage,
    model: str,
    *,
    provider: str | None = None,
    base_url: str | None = None,
    extras: UsageExtras = NO_EXTRAS,
) -> TokenUsage:
    """Return the usage with its cost; None if the list lacks a price for a part of it, or is not installed.

    Args:
        usage: The token usage.
        model: The model.
        provider: The provider whose price list applies, such as "openai".
        base_url: The address of the call; determines the price list if `provider` is not given.
        extras: Further parts of the usage. A cost that the provider reports is taken as it is; tiers other than the
            standard one are not in the list.
    """
    if extras.cost_usd is not None:
        return replace(usage, cost_usd=extras.cost_usd)
    if extras.tier not in ("", _BATCH) or extras.other:
        return usage
    counts = (usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.cache_write_tokens)
    cost = _cost(model, provider, base_url, *counts, extras)
    if cost is None:
        return usage
    # Web searches cost the same in a batch: they are not in the list's price of tokens.
    if extras.tier == _BATCH and extras.searches:
        return usage
    return replace(usage, cost_usd=cost * (_BATCH_FACTOR if extras.tier == _BATCH else 1))


# Cached, because a calculation takes a third of a millisecond and its result does not change.
@functools.lru_cache(maxsize=8192)
def _cost(
    model: str,
    provider: str | None,
    base_url: str | None,
    given: int,
    output_tokens: int,
    cached: int,
    written: int,
    extras: UsageExtras,
) -> float | None:
    if not is_known(model, provider, base_url):
        return None
    from genai_prices import Usage, calc_price

    special = {
        "input_audio_tokens": (extras.audio_input, "input_audio_mtok"),
        "output_audio_tokens": (extras.audio_output, "output_audio_mtok"),
        "cache_write_1h_tokens": (extras.hour_writes, "cache_write_1h_mtok"),
        "web_searches": (extras.searches, "web_searches_kcount"),
    }
    counts = {name: count for name, (count, _) in special.items() if count}
    try:
        usage = Usage(
            input_tokens=given,
            output_tokens=output_tokens,
            cache_read_tokens=cached or None,
            cache_write_tokens=written or None,
            **counts,
        )
        where = {"provider_id": provider} if provider is not None else {"provider_api_url": base_url}
        found = calc_price(usage, model, **where)
    except (LookupError, ValueError):
        return None
    # A part without a price of its own would be charged like text, or not at all.
    if any(getattr(found.model_price, special[name][1], None) is None for name in counts):
        return None
    return float(found.total_price)


@functools.lru_cache(maxsize=1024)
def is_known(model: str, provider: str | None, base_url: str | None) -> bool:
    """True if the price list has the model."""
    if provider is None and base_url is None:
        return False
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        return False
    try:
        get_snapshot().find_provider_model(model, None, provider, None if provider else base_url)
    except LookupError:
        return False
    return True
