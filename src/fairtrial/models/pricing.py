"""What a model call costs, by the price list that comes with the `pricing` extra. Nothing is looked up online."""

from __future__ import annotations

import functools
from dataclasses import replace

from fairtrial.session.events import TokenUsage


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
