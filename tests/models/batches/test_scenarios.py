"""What goes wrong with batches: every request is answered once, at the price that the scenario names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairtrial import open_store
from tests.models.batches.build import adapter, evaluate_turns
from tests.models.batches.scenarios import REQUESTS, SCENARIOS, SECONDS, BatchScenario, ProviderName

pytestmark = pytest.mark.anyio

CASES = [(scenario, provider) for scenario in SCENARIOS for provider in scenario.providers]


@pytest.mark.parametrize(("scenario", "provider"), CASES, ids=lambda one: getattr(one, "name", one))
async def test_every_request_is_answered_at_the_price_of_the_scenario(
    scenario: BatchScenario, provider: ProviderName, tmp_path: Path
) -> None:
    with scenario.server(rate=SECONDS / 0.3) as server:
        store = open_store(tmp_path / "runs.db")
        report = await evaluate_turns(adapter(provider, server), store, count=REQUESTS)
        ledger = server.batches()
    answers = {result.key.sample_id: result.output for result in report.results}
    assert answers == {f"s{number}": [f"question {number}, turn 0"] for number in range(REQUESTS)}
    assert len(ledger.executed) == scenario.paid
    assert sum(not one.foreign for one in ledger.created) == scenario.batches


def test_names_of_scenarios_are_unique() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
