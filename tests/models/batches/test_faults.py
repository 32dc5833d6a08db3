"""What may go wrong with lines and batches; the first four are faults that lose or pay for calls elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from fairtrial import open_store
from fairtrial.errors import ModelAuthError
from fairtrial.integrations.model_server import BatchFault, BatchOptions, FaultRule, ModelServer, NotAuthorised
from fairtrial.models import Batching
from fairtrial.store.batches import batch_table
from fairtrial.store.protocol import RunStore
from tests.models.batches.build import PRICES, QUICK, adapter, evaluate_turns, lossy, server

pytestmark = pytest.mark.anyio


@pytest.fixture
def store(tmp_path: Any) -> RunStore:
    return open_store(f"sqlite:///{tmp_path}/runs.db")


@pytest.mark.parametrize("kind", ["missing", "expired", "rate_limited", "server_failed", "malformed"])
async def test_a_request_without_an_outcome_is_sent_in_the_next_batch(
    kind: Any, provider: str, store: RunStore
) -> None:
    fault = BatchFault(kind, lines=(2, 4), batches=(1,))
    with server(fault) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=5)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 5
    assert [one.requests for one in ledger.created] == [5, 2], "only the lines that failed are sent again"


async def test_a_request_that_stays_without_an_outcome_is_an_error_after_three_batches(
    provider: str, store: RunStore
) -> None:
    with server(BatchFault("expired", lines=(1,))) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=1)
        ledger = running.batches()
    (result,) = report.results
    assert result.outcome == "task_error"
    assert "3 batches came back without an outcome" in str(result.error)
    assert len(ledger.created) == 3


async def test_with_the_fallback_such_a_request_is_sent_at_full_price(provider: str, store: RunStore) -> None:
    with server(BatchFault("expired")) as running:
        model = adapter(provider, running, batch=Batching(**QUICK, fallback="live"))
        report = await evaluate_turns(model, store, count=2)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 2
    assert len(ledger.created) == 3
    assert ledger.executed == ()
    for result in report.results:
        assert result.usage.cost_usd == pytest.approx(
            (PRICES.input * result.usage.input_tokens + PRICES.output * result.usage.output_tokens) / 1e6
        )


async def test_an_invalid_request_is_an_error_at_once(provider: str, store: RunStore) -> None:
    with server(BatchFault("invalid", lines=(2,))) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=3)
        ledger = running.batches()
    assert sorted(result.outcome for result in report.results) == ["scored", "scored", "task_error"]
    assert len(ledger.created) == 1


@pytest.mark.parametrize("kind", ["duplicate", "unknown", "reordered", "counts_hidden"])
async def test_strange_results_change_nothing(kind: Any, provider: str, store: RunStore) -> None:
    with server(BatchFault(kind)) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=4, turns=2)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 4
    assert len(ledger.executed) == 8
    assert ledger.paid_twice() == {}


@pytest.mark.parametrize("kind", ["no_files", "gone"])
async def test_a_batch_whose_results_cannot_be_had_is_sent_again(kind: Any, provider: str, store: RunStore) -> None:
    with server(BatchFault(kind, batches=(1,))) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=3)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len(ledger.created) == 2


async def test_a_batch_that_cannot_be_found_right_after_it_was_made_is_not_sent_again(
    provider: str, store: RunStore
) -> None:
    with server(get_lag=0.25) as running:
        batching = Batching(poll_seconds=0.05, list_lag_seconds=60.0)
        report = await evaluate_turns(adapter(provider, running, batch=batching), store, count=3)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len(ledger.created) == 1
    assert ledger.paid_twice() == {}


async def test_a_batch_that_exceeds_the_enqueued_tokens_waits_for_another_to_end(store: RunStore) -> None:
    with server(enqueued_tokens=60) as running:
        model = adapter("openai", running, batch=Batching(**QUICK, max_requests=4))
        report = await evaluate_turns(model, store, count=12)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 12
    assert "failed" in {one.status for one in ledger.created}
    assert ledger.paid_twice() == {}


async def test_a_batch_that_is_refused_for_another_reason_is_an_error_with_the_reason(store: RunStore) -> None:
    fault = BatchFault("failed", code="invalid_json_line", message="This line is not parseable as valid JSON.")
    with server(fault) as running:
        report = await evaluate_turns(adapter("openai", running), store, count=2)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["task_error"] * 2
    assert all("not parseable" in str(result.error) for result in report.results)
    assert len(ledger.created) == 1


async def test_a_lost_answer_to_create_does_not_make_a_second_batch(provider: str, store: RunStore) -> None:
    with lossy(provider, list_lag=0.2) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=3)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len([one for one in ledger.created if not one.foreign]) == 1
    assert ledger.paid_twice() == {}
    assert [one.state for one in batch_table(store).intents(report.run_id)] == ["collected"]


async def test_batches_of_others_are_not_taken_for_lost_ones(provider: str, store: RunStore) -> None:
    with lossy(provider, foreign=2, metadata=False) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=3)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len([one for one in ledger.created if not one.foreign]) == 1


@pytest.mark.parametrize("looked_at", ["state", "results"])
async def test_a_key_that_fails_while_batches_are_watched_says_that_they_stay_and_the_run_continues_with_them(
    looked_at: str, provider: str, store: RunStore
) -> None:
    paths = {
        ("openai", "state"): r"GET /v1/batches/",
        ("openai", "results"): r"GET /v1/files/.*/content",
        ("anthropic", "state"): r"GET /v1/messages/batches/[^/]*$",
        ("anthropic", "results"): r"GET /v1/messages/batches/.*/results",
    }
    refused = FaultRule(NotAuthorised(), attempts=(1, 2), when=paths[provider, looked_at])
    with ModelServer(faults=[refused], batches=BatchOptions(0.3)) as running:
        model = adapter(provider, running)
        for _process in ("that sent them", "that continues"):
            with pytest.raises(ModelAuthError) as caught:
                await evaluate_turns(model, store, count=3)
            assert "The key is not valid." in str(caught.value)
            assert "the batches stay at the provider" in str(caught.value)
            assert "once this key works again, the same command continues with them" in str(caught.value)
        report = await evaluate_turns(model, store, count=3)
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len(ledger.created) == 1
    assert ledger.paid_twice() == {}
