"""What was sent is asked for, counted and paid once: after retries, kills, broken reads, and with several adapters."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, open_store
from fairtrial.integrations.model_server import (
    BatchFault,
    BatchOptions,
    FaultRule,
    HalfSent,
    ModelServer,
    RateLimited,
    ReplyLost,
)
from fairtrial.models import Batching, ResponseCache, RetryPolicy
from fairtrial.models.batches.openai_wire import OpenAIBatches
from fairtrial.models.batches.sent_batch import SentBatch
from fairtrial.models.providers import PROVIDERS
from fairtrial.store.batches import OPEN, BatchIntent, BatchRequest, batch_table
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import RunStore
from tests.models.batches.build import PRICES, QUICK, adapter, evaluate_turns, lossy, passes, samples, server

pytestmark = pytest.mark.anyio
RESULTS = r"^GET .*/(content|results)$"


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> RunStore:
    return MemoryStore() if request.param == "memory" else open_store(f"sqlite:///{tmp_path}/runs.db")


class Killed:
    """Ends a run after a change of the stored batches: the replies of one, or its provider's id."""

    def __init__(self, store: RunStore, when: str, *, after: int = 0, file: bool = False) -> None:
        self.table: Any = type(batch_table(store))
        self.when, self.after, self.file = when, after, file
        self.name = "settle" if when == "settled" else "change"

    def __enter__(self) -> None:
        real = self.real = getattr(self.table, self.name)

        def die(table: Any, run_id: str, given: Any, **named: Any) -> None:
            real(table, run_id, given, **named)
            if self.when != "settled" and (given.state != self.when or (self.file and given.file_id is None)):
                return
            self.after -= 1
            if self.after < 0:
                raise RuntimeError("the process dies")

        setattr(self.table, self.name, die)

    def __exit__(self, *_: object) -> None:
        setattr(self.table, self.name, self.real)


@pytest.mark.parametrize("when", ["settled", "submitted"])
async def test_errors_that_are_tried_again_use_what_a_killed_process_has_sent(store: RunStore, when: str) -> None:
    broken = [True]
    with server() as running:
        model = adapter("openai", running)

        async def ask(question: str) -> str:
            text = (await model.complete(question)).text
            if broken[0]:
                raise ValueError("broken")
            return text

        suite = EvalSuite("errors", Dataset(samples(3)), ask, passes, config=EvalConfig(max_same_errors=0))
        assert {result.outcome for result in (await suite.run(store=store)).results} == {"task_error"}
        broken[0] = False
        with Killed(store, when), pytest.raises(RuntimeError, match="the process dies"):
            await suite.run(store=store, resume="errors")
        report = await suite.run(store=store, resume="errors")
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len(ledger.executed) == 6
    assert not {one.state for one in batch_table(store).intents(report.run_id)} & set(OPEN)
    assert ledger.files == (), "also the files of a batch whose replies the killed process had stored are deleted"


async def test_results_that_are_read_again_are_counted_once(
    provider: str, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.models.batches.results.PIECE", 2)
    cut = FaultRule(HalfSent(0.8), when=RESULTS, attempts=(1,))
    with ModelServer(batches=BatchOptions(0.3), faults=[cut]) as running:
        report = await evaluate_turns(adapter(provider, running), store, count=9)
        ledger = running.batches()
    assert len(ledger.executed) == 9
    note = report.run.noted.batches
    assert note is not None
    assert (note.replies, note.unused) == (9, 0)


async def test_what_a_killed_process_has_sent_counts_for_the_cost_cap(store: RunStore) -> None:
    config = EvalConfig(max_cost_usd=2.5 * 500 * PRICES.output / 2e6)  # Room for two answers of 500 tokens.
    with server(seconds=1.0) as running:
        model = adapter("openai", running, batch=Batching(**QUICK, max_requests=2))
        with Killed(store, "submitted"), pytest.raises(RuntimeError, match="the process dies"):
            await evaluate_turns(model, store, count=6, config=config)
        report = await evaluate_turns(model, store, count=6, config=config)
        ledger = running.batches()
    assert report.status == "finished"
    first, second, *_ = sorted(one.created_at for one in ledger.created)
    assert second >= first + 1.0, "the second batch was sent before the first one had been paid for"


async def test_only_attempts_without_a_result_are_asked_for_again(store: RunStore) -> None:
    with server() as running:
        report = await evaluate_turns(adapter("openai", running), store, count=2)
    table = batch_table(store)
    assert table.begin(report.run_id, epoch=None)[1] == []
    intent = BatchIntent("0123456789ab", "openai", "", "", "", "test-model", 1, 0.0)
    again = BatchRequest("0" * 28, intent.id, 0, attempt=2)
    table.plan(report.run_id, intent, [again])
    assert table.begin(report.run_id, epoch=None)[1] == [again]


async def test_calls_at_full_price_have_the_retries_of_their_adapter(provider: str, store: RunStore) -> None:
    refused = FaultRule(RateLimited(), when="question", attempts=(1,))
    with ModelServer(batches=BatchOptions(0.3, faults=(BatchFault("expired"),)), faults=[refused]) as running:
        model = adapter(
            provider, running, batch=Batching(**QUICK, fallback="live"), retry=RetryPolicy(base_seconds=0.01)
        )
        report = await evaluate_turns(model, store, count=2)
        stats = running.stats()
    assert stats.by_fault == {"rate_limited": 2}
    assert [result.outcome for result in report.results] == ["scored"] * 2


async def test_two_adapters_of_a_model_keep_their_own_settings(store: RunStore) -> None:
    with server(BatchFault("expired")) as running:
        strict = adapter("openai", running)
        lenient = adapter("openai", running, batch=Batching(**QUICK, fallback="live"))

        async def ask(question: str) -> str:
            return (await (strict if question.endswith("0") else lenient).complete(question)).text

        suite = EvalSuite("two", Dataset(samples(2)), ask, passes, config=EvalConfig(max_same_errors=0))
        report = await suite.run(store=store)
    assert [result.outcome for result in report.results] == ["task_error", "scored"]


async def test_a_batch_of_another_run_that_is_deleted_before_it_is_read_does_no_harm(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_id = SentBatch._first_id
    deleted: list[str] = []
    with lossy("anthropic", foreign=1) as running:

        async def delete_first(own: Any, batch_id: str) -> str:
            foreign = [one.id for one in running.batches().created if one.foreign]
            if batch_id in foreign:  # The other run has read its results between the list and this look.
                await (await own._calls.client()).messages.batches.delete(batch_id)
                deleted.append(batch_id)
            return await first_id(own, batch_id)

        monkeypatch.setattr(SentBatch, "_first_id", delete_first)
        report = await evaluate_turns(adapter("anthropic", running), store, count=3)
        ledger = running.batches()
    assert deleted
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len([one for one in ledger.created if not one.foreign]) == 1


async def test_a_call_that_the_cache_answers_is_neither_unused_nor_the_reply_to_a_later_equal_call(
    store: RunStore, tmp_path: Any
) -> None:
    cache = ResponseCache(tmp_path / "cache.db")
    with server() as running:
        model = adapter("openai", running, cache=cache)

        async def ask(question: str) -> int:
            return len([await model.complete(asked) for asked in (question, question, f"{question}?")])

        suite = EvalSuite("cached", Dataset(samples(3)), ask, passes)
        with Killed(store, "submitting", after=4), pytest.raises(RuntimeError, match="the process dies"):
            await suite.run(store=store)
        report = await suite.run(store=store)
        ledger = running.batches()
    cache.close()
    note = report.run.noted.batches
    assert note is not None
    assert (note.requests, note.replies, note.unused) == (9, 9, 0)
    assert len(ledger.executed) == 9


@pytest.mark.parametrize("when", ["lost", "killed", "not made"])
async def test_uploaded_requests_of_which_nobody_knows_are_deleted(store: RunStore, when: str) -> None:
    """The answer to an upload is lost, the process dies after it, or the batch of the file was never made."""
    faults = [FaultRule(ReplyLost(), when=r"^POST /v1/files$", attempts=(1,))] if when == "lost" else []
    with ModelServer(batches=BatchOptions(0.3), faults=faults) as running:
        model = adapter("openai", running)
        if when != "lost":
            with Killed(store, "submitting", file=when == "not made"), pytest.raises(RuntimeError, match="dies"):
                await evaluate_turns(model, store, count=3)
        if when == "killed":  # An upload that the dead process did not hear of.
            (intent,) = batch_table(store).intents(store.runs()[0].run_id)
            await OpenAIBatches().upload(await model._client(), intent, ["{}"])
        report = await evaluate_turns(model, store, count=3)
        await model._client()
        ledger = running.batches()
    assert [result.outcome for result in report.results] == ["scored"] * 3
    assert len(ledger.executed) == 3
    assert ledger.files == ()


async def test_files_that_a_process_has_read_and_not_deleted_are_deleted_by_the_next(
    provider: str, store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    with server() as running:
        model = adapter(provider, running)
        with Killed(store, "collected"), pytest.raises(RuntimeError, match="dies"):
            await evaluate_turns(model, store, count=3, turns=2)
        await evaluate_turns(model, store, count=3, turns=2)
        ledger = running.batches()
    assert len(ledger.executed) == 6
    assert ledger.files == ()
    assert "sent again" not in caplog.text


async def test_the_last_replies_of_a_run_are_used_when_their_batch_is_deleted(
    provider: str, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run whose trials all have results, the next process would not look at any batch again."""
    with server() as running:
        model = adapter(provider, running)
        wire = type(model.require_batches())
        delete = wire.delete

        async def die(*given: Any) -> None:
            monkeypatch.setattr(wire, "delete", delete)
            with anyio.move_on_after(1.0):  # The time that trials would need for their results.
                while not any(store.done(store.runs()[0].run_id)):  # noqa: ASYNC110 - the store has no events
                    await anyio.sleep(0.02)
            raise RuntimeError("the process dies")

        monkeypatch.setattr(wire, "delete", die)
        with pytest.raises(RuntimeError, match="the process dies"):
            await evaluate_turns(model, store, count=3)
        report = await evaluate_turns(model, store, count=3)
        ledger = running.batches()
    assert report.status == "finished"
    assert {one.state for one in batch_table(store).intents(report.run_id)} == {"collected"}
    assert (len(ledger.executed), ledger.files) == (3, ())


async def test_only_adapters_that_a_run_uses_change_how_it_is_executed(store: RunStore) -> None:
    with server() as running:
        narrow = adapter("openai", running, batch=Batching(**QUICK, window=2))
        adapter("openai", running, batch=Batching(**QUICK, window=500))  # Of another suite, in this process.
        await evaluate_turns(narrow, store, count=9, config=EvalConfig(max_concurrent=1))
        ledger = running.batches()
        suite = EvalSuite("plain", Dataset(samples(2)), str.upper, passes)
        assert (await suite.run(store=StoreWithoutBatches())).status == "finished"
    assert max(one.requests for one in ledger.created) <= 3


class StoreWithoutBatches(MemoryStore):
    """A store that cannot keep batches, as those of users may."""

    def __init__(self) -> None:
        super().__init__()
        del self.batches


@pytest.mark.parametrize("name", sorted(PROVIDERS.keys() - {"openai", "anthropic"}))
def test_servers_of_others_get_no_batches(name: str) -> None:
    """`run --batch` would send files to servers that take none, and every trial would end with an error."""
    assert PROVIDERS[name].batch_wire is None
