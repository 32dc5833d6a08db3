"""Runs whose calls go through batches of a model server, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairtrial import Dataset, EvalConfig, EvalReport, EvalSuite, Sample
from fairtrial.integrations.model_server import BatchFault, BatchLedger, BatchOptions, FaultRule, ModelServer, ReplyLost
from fairtrial.models import AnthropicAdapter, Batching, OpenAIAdapter, Prices
from fairtrial.models.sdk import SdkAdapter
from fairtrial.store.protocol import RunStore

PRICES = Prices(input=1000.0, output=3000.0)
QUICK: dict[str, Any] = {"poll_seconds": 0.05, "list_lag_seconds": 0.5, "max_wait_seconds": 30.0}


def lossy(provider: str, **options: Any) -> ModelServer:
    """A server whose answer to the first batch is lost."""
    lost = FaultRule(ReplyLost(), numbers=(2 if provider == "openai" else 1,))
    return ModelServer(faults=[lost], batches=BatchOptions(0.3, **options))


def server(*faults: BatchFault, seconds: float = 0.3, **options: Any) -> ModelServer:
    """A server whose batches take a fraction of a second."""
    return ModelServer(batches=BatchOptions(seconds, faults=faults, **options))


def adapter(provider: str, where: ModelServer, model: str = "test-model", **options: Any) -> SdkAdapter:
    """An adapter that sends its calls in batches."""
    given: dict[str, Any] = {"api_key": "test", "prices": PRICES, "batch": Batching(**QUICK), **options}
    if provider == "openai":
        return OpenAIAdapter(model, base_url=where.base_url + "/v1", **given)
    return AnthropicAdapter(model, base_url=where.base_url, **given)


def samples(count: int) -> list[Sample[str, str]]:
    return [Sample(f"s{number}", f"question {number}") for number in range(count)]


def charged(ledger: BatchLedger) -> float:
    """What the provider charges: half of the price."""
    return sum(1000 * one.input_tokens + 3000 * one.output_tokens for one in ledger.executed) / 2 / 1_000_000


async def evaluate_turns(
    model: SdkAdapter, store: RunStore, *, count: int = 5, turns: int = 1, config: EvalConfig | None = None, **run: Any
) -> EvalReport:
    """Run a suite in which every trial makes `turns` calls, one after the other."""

    async def ask(question: str) -> Sequence[str]:
        return [(await model.complete(f"{question}, turn {turn}")).text for turn in range(turns)]

    suite = EvalSuite("batched", Dataset(samples(count)), ask, passes, config=config or EvalConfig())
    return await suite.run(store=store, **run)


def passes(output: Any) -> bool:
    return bool(output)
