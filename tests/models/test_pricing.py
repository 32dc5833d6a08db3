from __future__ import annotations

import sys

import pytest

from fairtrial import ConfigurationError, TokenUsage
from fairtrial.models.pricing import Prices, _cost, is_known, priced, read_prices

USED = TokenUsage(1000, 100, 500)


def test_a_known_model_has_its_price_by_provider_or_by_address() -> None:
    by_name = priced(USED, "gpt-4o-mini", provider="openai")
    by_address = priced(USED, "gpt-4o-mini", base_url="https://api.openai.com/v1")
    assert by_name.cost_usd == by_address.cost_usd == pytest.approx(0.0001725)
    assert (by_name.input_tokens, by_name.output_tokens, by_name.cached_tokens) == (1000, 100, 500)


def test_writing_to_a_providers_cache_costs_extra() -> None:
    plain = priced(TokenUsage(1000, 0), "claude-sonnet-4-5", provider="anthropic").cost_usd
    used = TokenUsage(1000, 0, cache_write_tokens=1000)
    written = priced(used, "claude-sonnet-4-5", provider="anthropic").cost_usd
    assert plain is not None
    assert written == pytest.approx(plain * 1.25)


def test_given_prices_tell_cache_writes_and_reasoning_apart() -> None:
    used = TokenUsage(1_000_000, 1_000_000, 500_000, reasoning_tokens=600_000, cache_write_tokens=300_000)
    assert Prices(input=2.0, output=10.0).cost(used) == pytest.approx(12.0)
    assert Prices(2.0, 10.0, cached=0.2, cache_write=2.5, reasoning=5.0).cost(used) == pytest.approx(
        0.2 * 2 + 0.5 * 0.2 + 0.3 * 2.5 + 0.4 * 10 + 0.6 * 5
    )
    table = read_prices({"m": {"input": 1, "output": 2, "cache_write": 3, "reasoning": 4}})
    assert table == {"m": Prices(1, 2, cache_write=3, reasoning=4)}
    with pytest.raises(ConfigurationError, match="cached, cache_write, reasoning"):
        read_prices({"m": {"input": 1, "output": 2, "thinking": 3}})


@pytest.mark.parametrize(
    ("model", "provider", "base_url"),
    [
        ("no-such-model", "openai", None),
        ("gpt-4o", "no-such-provider", None),
        ("gpt-4o", None, "http://127.0.0.1:1"),
        ("gpt-4o", None, None),
    ],
)
def test_what_is_not_in_the_list_has_no_price(model: str, provider: str | None, base_url: str | None) -> None:
    assert priced(USED, model, provider=provider, base_url=base_url) == USED


def test_counts_that_cannot_be_have_no_price() -> None:
    assert priced(TokenUsage(10, 5, 500), "gpt-4o-mini", provider="openai").cost_usd is None


def test_without_the_list_nothing_has_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    is_known.cache_clear()
    _cost.cache_clear()
    try:
        assert priced(USED, "gpt-4o-mini", provider="openai") == USED
    finally:
        is_known.cache_clear()
        _cost.cache_clear()
