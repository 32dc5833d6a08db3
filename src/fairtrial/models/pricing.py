"""What a model call costs: by prices that were given, or by the price list that comes with the `pricing` extra.

Nothing is looked up online.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.frozen import EMPTY
from fairtrial.session.events import TokenUsage


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a model in US dollars per million tokens.

    Attributes:
        input: Of input tokens.
        output: Of output tokens.
        cached: Of input tokens that the provider's cache served; `input` unless given.
    """

    input: float
    output: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            if value is None and name == "cached":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"Prices.{name} must be US dollars per million tokens, at least 0 (got {value!r})"
                )

    def cost(self, usage: TokenUsage) -> float:
        """What a call cost, in US dollars."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        rate = self.input if self.cached is None else self.cached
        millions = (usage.input_tokens - cached) * self.input + cached * rate + usage.output_tokens * self.output
        return millions / 1_000_000


_configured: Mapping[str, Prices] = EMPTY


def configure_prices(prices: Mapping[str, Prices]) -> Mapping[str, Prices]:
    """Set the prices of models by name for adapters that were given none; returns those that held before."""
    global _configured
    before, _configured = _configured, dict(prices)
    return before


def configured_prices(model: str) -> Prices | None:
    """The prices that `configure_prices` set for a model."""
    return _configured.get(model)


def read_prices(table: Any) -> dict[str, Prices]:
    """Prices from a table of plain values: `{"my-model": {"input": 0.5, "output": 1.5}}`."""
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"prices must be a table of models (got {table!r})")
    prices: dict[str, Prices] = {}
    for model, entry in table.items():
        if not isinstance(entry, Mapping) or not {"input", "output"} <= entry.keys() <= {"input", "output", "cached"}:
            raise ConfigurationError(
                f"the prices of {model!r} must be input, output and, if it differs, cached (got {entry!r})"
            )
        prices[model] = Prices(**entry)
    return prices


def priced(
    usage: TokenUsage, model: str, *, provider: str | None = None, base_url: str | None = None, cache_writes: int = 0
) -> TokenUsage:
    """The usage with its cost; None where the model is not in the list, or the list is not installed.

    Args:
        usage: What was used.
        model: The model.
        provider: Whose price list, as in "openai".
        base_url: Where it was called; it says whose price list, where `provider` does not.
        cache_writes: Input tokens that were written to the provider's cache, which some charge extra.
    """
    cost = _cost(model, provider, base_url, usage.input_tokens, usage.output_tokens, usage.cached_tokens, cache_writes)
    return usage if cost is None else replace(usage, cost_usd=cost)


# A calculation takes a third of a millisecond, and a model that is not known stays unknown.
@functools.lru_cache(maxsize=8192)
def _cost(
    model: str, provider: str | None, base_url: str | None, given: int, said: int, cached: int, written: int
) -> float | None:
    if not is_known(model, provider, base_url):
        return None
    from genai_prices import Usage, calc_price

    usage = Usage(
        input_tokens=given, output_tokens=said, cache_read_tokens=cached or None, cache_write_tokens=written or None
    )
    try:
        if provider is not None:
            return float(calc_price(usage, model, provider_id=provider).total_price)
        return float(calc_price(usage, model, provider_api_url=base_url).total_price)
    except (LookupError, ValueError):
        return None


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
