"""The cost of model calls that an application's spans report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fairtrial import PromptExecuted, TokenUsage, TrialContext
from fairtrial.integrations.tracing import TraceReceiver
from fairtrial.integrations.tracing.mapping import session_events
from fairtrial.integrations.tracing.received import ReceivedSpan
from fairtrial.models.pricing import Prices, configure_prices, priced
from tests.integrations.tracing.test_receive import App, only, suite_of

USAGE = TokenUsage(1_000, 200, 400)
TOKENS = {
    "gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 1_000, "gen_ai.usage.output_tokens": 200,
    "gen_ai.usage.cache_read.input_tokens": 400,
}  # fmt: skip


@pytest.fixture
def prices() -> Iterator[None]:
    before = configure_prices({"my-model": Prices(1.0, 10.0), "gpt-4o": Prices(2.0, 20.0)})
    yield
    configure_prices(before)


def cost(**attributes: Any) -> float | None:
    """The cost that a model call with these attributes is recorded with."""
    given = {name.replace("__", "."): value for name, value in attributes.items()}
    span = ReceivedSpan("t", "s", "", "chat", 1.0, 2.0, None, TOKENS | given)
    (event,) = session_events([span])
    assert event.kind.endswith(":PromptExecuted")
    assert event.data["usage"]["input_tokens"] == 1_000
    found: float | None = event.data["usage"]["cost_usd"]
    return found


@pytest.mark.parametrize(
    ("name", "provider", "model"),
    [
        ("openai", "openai", "gpt-4o"),
        ("openai.responses", "openai", "gpt-4o"),
        ("azure.ai.openai", "azure", "gpt-4o"),
        ("Anthropic", "anthropic", "claude-3-5-haiku-latest"),
        ("gcp.gemini", "google", "gemini-2.5-pro"),
        ("mistral_ai", "mistral", "mistral-large-latest"),
    ],
)
def test_the_price_list_of_the_provider_applies_under_every_name_of_it(name: str, provider: str, model: str) -> None:
    expected = priced(USAGE, model, provider=provider).cost_usd
    assert expected is not None
    assert cost(gen_ai__provider__name=name, gen_ai__response__model=model) == expected


def test_configured_prices_precede_the_list_and_the_cost_of_the_span_precedes_both(prices: None) -> None:
    assert cost(gen_ai__provider__name="openai", gen_ai__response__model="gpt-4o") == pytest.approx(0.006)
    assert cost(gen_ai__request__model="my-model") == pytest.approx(0.003)
    for name in ("llm__cost__total", "gen_ai__usage__cost", "fairtrial__cost_usd"):
        assert cost(gen_ai__request__model="my-model", **{name: 0.5}) == 0.5
    assert cost(gen_ai__request__model="my-model", langfuse__observation__cost_details='{"total": 0.25}') == 0.25


@pytest.mark.parametrize("nonsense", [-1.0, "much", True, float("nan"), float("inf")])
def test_a_cost_that_is_no_amount_is_ignored(prices: None, nonsense: Any) -> None:
    assert cost(gen_ai__request__model="my-model", llm__cost__total=nonsense) == pytest.approx(0.003)


@pytest.mark.parametrize("attributes", [{}, {"gen_ai__provider__name": "openai"}, {"gen_ai__provider__name": "nobody"}])
def test_the_cost_of_an_unknown_model_is_unknown(attributes: dict[str, str]) -> None:
    assert cost(gen_ai__request__model="no-such-model", **attributes) is None


def test_the_costs_of_received_calls_are_those_of_the_trial(prices: None) -> None:
    def answer(number: int, ctx: TrialContext) -> str:
        app = App(ctx.trace_endpoint, ctx.traceparent)
        outer = app.span("POST /ask")
        models = [TOKENS | {"gen_ai.request.model": model} for model in ("my-model", "no-such-model")]
        app.send(outer, *(app.span("chat", attributes, parent=outer["spanId"]) for attributes in models))
        return "snow"

    def scored(output: str, expected: str, session: Any) -> float:
        return float(len(session[PromptExecuted].all()) == 2)

    receiver = TraceReceiver(trace_wait_seconds=120.0)
    result = only(suite_of(answer, receiver, evaluator=scored).run_sync(store="memory:"))
    assert result.passed
    assert (result.usage.cost_usd, result.unpriced_calls) == (pytest.approx(0.003), 1)
