"""A fleet whose queue is in the database of its store: a result is stored in the transaction that settles its request.

`tests/fleet/conftest.py` has the fixture `place`, by which the tests of clients run with and without this.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psycopg
import psycopg.sql
import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, TokenUsage, TrialContext, TrialKey, open_store
from fairtrial.data.session.events import PromptExecuted
from fairtrial.errors import LeaseLostError, StoreUnavailableError
from fairtrial.fleet import EvalLoopConfig, EvalReply, EvalRequest, LoopCounters, PostgresBroker
from fairtrial.fleet.client import dispatch
from fairtrial.fleet.worker import outbox
from fairtrial.fleet.worker.outbox import OneTransaction, ToSender, delivery_to
from fairtrial.mailbox import Message, PostgresConnection, PostgresMailbox
from fairtrial.mailbox.postgres import connection as connections
from fairtrial.store.notes import FleetNote, write_notes
from fairtrial.store.protocol import RunRecord
from fairtrial.store.sql import SqlStore
from fairtrial.suites.worker import run_worker
from tests.fleet.dispatching import Watcher, suite_of, until
from tests.fleet.fake_worker import FakeWorker, answer
from tests.fleet.processes import ROOT, Processes, environment, said, wait_for_lines
from tests.servers import PgBouncer, PostgresServer

pytestmark = pytest.mark.usefixtures("short_waits")
CODE = "the code of the client"


@dataclass
class Bench:
    """A run in the store, its queue beside it, and a worker's delivery."""

    url: str
    store: SqlStore
    requests: PostgresMailbox[EvalRequest]
    results: PostgresMailbox[EvalReply]
    counters: LoopCounters = field(default_factory=LoopCounters)

    def __post_init__(self) -> None:
        self.delivery = delivery_to(None, self.requests, self.counters)
        assert isinstance(self.delivery, OneTransaction)

    async def take(self, seconds: float = 60, **changes: Any) -> Message[EvalRequest]:
        """Send a request and receive it."""
        sample = Sample("s0", 0, 0)
        made: dict[str, Any] = {"fingerprint": CODE, "commit": True, **changes}
        await self.requests.send(EvalRequest(TrialKey("run", "baseline", "s0"), sample, **made), reply_to=self.results)
        (message,) = await self.requests.receive(1, seconds)
        return message

    async def state(self) -> tuple[int, int, int, int]:
        """How many results are stored; how many requests, dead letters and replies there are."""
        with psycopg.connect(self.url) as connection:
            (stored,) = connection.execute("SELECT count(*) FROM results").fetchone() or (0,)
        depth = await self.requests.depth()
        waiting = depth.waiting + depth.delayed + depth.in_flight
        return stored, waiting, depth.dead, await self.results.approximate_count()


@pytest.fixture
async def bench(pg_url: str) -> AsyncIterator[Bench]:
    with closing(cast(SqlStore, open_store(pg_url))) as store:
        store.create_run(RunRecord("run", "numbers", "numbers", "1", "f", 10, ("baseline",), 1))
        store.update_run("run", notes=write_notes(fleet=FleetNote(10, CODE)))
        async with (
            PostgresConnection(pg_url) as connection,
            PostgresMailbox("numbers.requests", EvalRequest, connection) as requests,
            PostgresMailbox("numbers.results.run", EvalReply, connection) as results,
        ):
            made = Bench(pg_url, store, requests, results)
            yield made
            made.delivery.close()


async def test_a_result_is_stored_and_its_request_is_gone_and_no_reply_is_sent(bench: Bench) -> None:
    message = await bench.take()
    await bench.delivery.deliver(message, answer(message.body))
    assert message.settled
    assert await bench.state() == (1, 0, 0, 0)
    assert bench.counters.committed == 1


async def test_a_dead_letter_is_set_aside_in_the_transaction_that_stores_its_outcome(bench: Bench) -> None:
    message = await bench.take()
    reply = answer(message.body, outcome="dead_letter", error="it crashes")
    await bench.delivery.deliver(message, reply, death="ChildDiedError")
    assert message.settled
    assert await bench.state() == (1, 0, 1, 0)
    (letter,) = await bench.requests.dead_letters.page()
    assert (letter.reason, letter.error) == ("it crashes", "ChildDiedError")


async def test_a_worker_whose_lease_was_lost_stores_nothing(bench: Bench) -> None:
    late = await bench.take(0.05)
    await asyncio.sleep(0.1)
    with pytest.raises(LeaseLostError):
        await bench.delivery.deliver(late, answer(late.body))
    assert await bench.state() == (0, 1, 0, 0)
    (again,) = await bench.requests.receive(1, 60)
    with pytest.raises(LeaseLostError):  # Another worker has it now.
        await bench.delivery.deliver(late, answer(late.body))
    assert await bench.state() == (0, 1, 0, 0)
    await bench.delivery.deliver(again, answer(again.body))
    assert await bench.state() == (1, 0, 0, 0)


async def test_one_lost_lease_in_a_batch_leaves_the_whole_batch_to_be_delivered_one_by_one(bench: Bench) -> None:
    late = await bench.take(0.05)
    await asyncio.sleep(0.1)
    kept = await bench.take(ordinal=0)
    with pytest.raises(LeaseLostError):
        await bench.delivery.deliver_all([(late, answer(late.body)), (kept, answer(kept.body))])
    assert (await bench.state())[0] == 0
    assert not kept.settled


def _finished(store: SqlStore) -> None:
    store.update_run("run", status="finished", finished_at=1.0)


def _stopped(store: SqlStore) -> None:
    store.update_run("run", status="stopped", finished_at=1.0)


def _deleted(store: SqlStore) -> None:
    store.delete_run("run")


def _taken_over(store: SqlStore) -> None:
    assert store.acquire_run("run", '{"pid": 1, "host": "elsewhere"}', store.run_owner("run"))


def _of_client(store: SqlStore) -> None:
    assert store.acquire_run("run", '{"pid": 1, "host": "elsewhere", "client": true}', store.run_owner("run"))


def _other_code(store: SqlStore) -> None:
    store.update_run("run", notes=write_notes(fleet=FleetNote(10, "other code")))


def _interrupted(store: SqlStore) -> None:
    store.update_run("run", status="interrupted")


@pytest.mark.parametrize(
    ("happens", "stored", "replied"),
    [
        (_finished, 0, 1),
        (_stopped, 0, 1),
        (_deleted, 0, 1),
        (_taken_over, 0, 1),
        (_other_code, 0, 0),
        (_of_client, 1, 0),
        (_interrupted, 1, 0),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
async def test_what_has_become_of_the_run_decides_whether_a_worker_stores(
    bench: Bench, happens: Any, stored: int, replied: int, *, cached: bool
) -> None:
    """A refused result goes to the client, who decides as on any queue; the request of older code is withdrawn."""
    if cached:  # The worker knows the run from an earlier trial.
        earlier = await bench.take()
        await bench.delivery.deliver(earlier, answer(earlier.body))
        with psycopg.connect(bench.url) as connection:
            connection.execute("DELETE FROM results")
    message = await bench.take()
    happens(bench.store)
    await bench.delivery.deliver(message, answer(message.body))
    if not message.settled:
        await message.acknowledge()
    assert await bench.state() == (stored, 0, 0, replied)
    assert bench.counters.commits_refused == 1 - stored


async def test_a_result_that_the_store_refuses_is_sent_to_the_client(bench: Bench) -> None:
    message = await bench.take(ordinal=99, sample_ordinal=99)
    await bench.delivery.deliver(message, answer(message.body))
    assert not message.settled
    assert await bench.state() == (0, 1, 0, 1)


async def test_a_worker_that_is_frozen_in_a_transaction_does_not_hold_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores nothing, and when it goes on, it does it again."""
    monkeypatch.setattr(connections, "_IDLE_SECONDS", 0.3)
    frozen, waking = threading.Event(), threading.Event()
    checked = outbox._Settling.check

    def freeze(*given: Any) -> None:
        checked(*given)
        frozen.set()
        waking.wait(20)

    monkeypatch.setattr(outbox._Settling, "check", freeze)
    message = await bench.take()
    delivering = asyncio.create_task(bench.delivery.deliver(message, answer(message.body)))
    await asyncio.to_thread(frozen.wait, 20)
    await asyncio.to_thread(bench.store.update_run, "run", notes={})  # Waits for the lock on the run.
    assert (await bench.state())[:2] == (0, 1)
    waking.set()
    with pytest.raises(StoreUnavailableError):
        await delivering
    monkeypatch.undo()
    assert not message.settled
    await bench.delivery.deliver(message, answer(message.body))
    assert await bench.state() == (1, 0, 0, 0)


async def test_requests_that_do_not_allow_it_are_replied_to(bench: Bench) -> None:
    message = await bench.take(commit=False)
    await bench.delivery.deliver_all([(message, answer(message.body))])
    assert not message.settled
    assert await bench.state() == (0, 1, 0, 1)


async def test_a_worker_without_rights_on_the_stores_tables_replies(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(bench.url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest-password'")
        connection.execute("GRANT ALL ON mailbox_schema, mailbox_queues, mailbox_messages, mailbox_workers TO guest")
        connection.execute("GRANT SELECT ON meta TO guest")
    try:
        url = bench.url.replace("tester:store-test-password", "guest:guest-password")
        message = await bench.take()
        async with PostgresMailbox("numbers.requests", EvalRequest, url) as requests:
            guest = delivery_to(None, requests, bench.counters)
            await guest.deliver(message, answer(message.body))
            guest.close()
        assert await bench.state() == (0, 1, 0, 1)
        assert "results are sent to the client, because" in caplog.text
    finally:
        with psycopg.connect(bench.url, autocommit=True) as connection:
            connection.execute("DROP OWNED BY guest")
            connection.execute("DROP ROLE guest")


@asynccontextmanager
async def worker_of(suite: EvalSuite, broker: PostgresBroker, **settings: Any) -> AsyncIterator[Any]:
    """A worker of a suite in this process."""
    loops: list[Any] = []
    config = EvalLoopConfig(**{"concurrency": 8, "wait_seconds": 0.5, **settings})
    working = asyncio.create_task(run_worker(suite, broker, config=config, started=loops.append))
    await until(lambda: bool(loops) or working.done())
    if working.done():
        working.result()
    try:
        yield loops[0]
    finally:
        loops[0].stop()
        await working


@contextmanager
def replies_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = dispatch.DispatchConfig
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "DispatchConfig", lambda: made(one_transaction=False))
        yield


@dataclass(frozen=True)
class Question:
    text: str
    facts: tuple[float, ...]


ODD = ["plain", "snow \N{SNOWMAN}", "nul \0 and \ud800", 'quote " and \\ back', "fail", "secret", "long " * 5000]


def odd_suite() -> EvalSuite:
    async def task(question: Question, ctx: TrialContext) -> dict[str, Any]:
        if question.text == "fail":
            raise ValueError("no answer to this")
        ctx.session.record(PromptExecuted(model="m", usage=TokenUsage(3, 4, cost_usd=0.25)))
        shown = "the key is tooth-brush-4711-x" if question.text == "secret" else question.text
        return {"text": shown, "n": [1.5, None, True], "repeat": ctx.key.repeat}

    def score(output: Any, expected: Any) -> float:
        return 0.5 if expected is None else 1.0

    data = Dataset(
        [
            Sample(f"s{i} {'ü' * i}", Question(text, (1.0, i / 3)), None if i % 2 else {"b": 1, "a": [text]}, {"i": i})
            for i, text in enumerate(ODD)
        ],
        name="odd",
    )
    return EvalSuite(
        "odd", data, task, score, experiments=[Experiment("a", {"x": 1}), Experiment("b")],
        config=EvalConfig(repeats=2), version="1",
    )  # fmt: skip


def stored_rows(url: str) -> dict[str, list[dict[str, Any]]]:
    """Everything that is stored of the runs but times, random ids and the numbers of run and dataset."""
    left_out = {"run", "dataset", "started_at", "latency_ms", "execution", "transcript"}
    found: dict[str, list[dict[str, Any]]] = {}
    with psycopg.connect(url, row_factory=psycopg.rows.dict_row) as connection:
        for table in ("results", "details", "samples"):
            rows = connection.execute(f"SELECT * FROM {table} ORDER BY ordinal").fetchall()
            found[table] = [{name: value for name, value in row.items() if name not in left_out} for row in rows]
            if table == "details":
                for row, kept in zip(rows, found[table], strict=True):
                    kept["has_transcript"] = row["transcript"] is not None
    return found


@pytest.mark.proves("R146")
async def test_both_paths_store_the_same_rows(pg_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOTH_API_KEY", "tooth-brush-4711-x")
    rows, events = [], []
    for shared in (True, False):
        url, watcher = pg_server.new_database(), Watcher()
        broker = PostgresBroker(url)
        async with worker_of(odd_suite(), broker) as worker:
            if shared:
                report = await odd_suite().run(store=url, mailbox=broker, bus=watcher)
            else:
                with replies_only(monkeypatch):
                    report = await odd_suite().run(store=url, mailbox=broker, bus=watcher)
        assert (report.status, report.total) == ("finished", 4 * len(ODD))
        assert worker.counters.committed == (4 * len(ODD) if shared else 0)
        rows.append(stored_rows(url))
        evaluated = sorted((event.result for event in watcher.named("SampleEvaluated")), key=lambda one: one.ordinal)
        events.append([(one.key[1:], one.outcome, one.score, one.total_cost_usd, one.error) for one in evaluated])
        await broker.close()
        pg_server.drop_database(url)
    assert rows[0] == rows[1]
    assert events[0] == events[1]
    assert len(rows[0]["details"]) == 4 * len(ODD)
    assert sum(row["redacted"] for row in rows[0]["results"]) > 0


async def test_two_runs_at_once_each_count_their_own_results(pg_url: str) -> None:
    broker, watchers = PostgresBroker(pg_url), [Watcher(), Watcher()]
    async with FakeWorker(broker, "numbers").at_work() as worker:
        reports = await asyncio.gather(
            *(suite_of(60).run(store=pg_url, mailbox=broker, bus=watcher, resume="never") for watcher in watchers)
        )
    assert len({report.run_id for report in reports}) == 2
    for report, watcher in zip(reports, watchers, strict=True):
        assert (report.status, report.total) == ("finished", 60)
        seen = [event.result.key for event in watcher.named("SampleEvaluated")]
        assert {key.run_id for key in seen} == {report.run_id}
        assert len(set(seen)) == len(seen) == 60
    assert worker.counters.committed == 120
    await broker.close()


@pytest.mark.parametrize("setting", ["default_transaction_isolation = serializable", "deadlock_timeout = '1ms'"])
async def test_odd_settings_of_the_server_cost_no_trial(pg_server: PostgresServer, setting: str) -> None:
    url = pg_server.new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {url.rpartition('/')[2]} SET {setting}")
    broker = PostgresBroker(url)
    async with asyncio.timeout(60), FakeWorker(broker, "numbers").at_work():
        report = await suite_of(60).run(store=url, mailbox=broker)
    assert (report.status, report.total, report.pass_rate) == ("finished", 60, 1.0)
    await broker.close()
    pg_server.drop_database(url)


async def test_it_works_behind_a_pgbouncer_without_notifications(pg_server: PostgresServer) -> None:
    url = pg_server.new_database()
    with PgBouncer(pg_server) as pooler:
        broker = PostgresBroker(f"{pooler.url(url)}?pgbouncer=true")
        async with FakeWorker(broker, "numbers").at_work() as worker:
            report = await suite_of(60).run(store=url, mailbox=broker)
        assert (report.status, report.total, worker.counters.committed) == ("finished", 60, 60)
        await broker.close()
    pg_server.drop_database(url)


@pytest.mark.parametrize("where", ["another database", "a copy of the database", "another schema", "an older worker"])
async def test_otherwise_results_are_sent_to_the_client(pg_server: PostgresServer, where: str) -> None:
    url, other = pg_server.new_database(), pg_server.new_database()
    queue = url
    if where == "another database":
        queue = other
    elif where == "a copy of the database":
        queue = other
        open_store(url).close()
        pg_server.drop_database(other)
        with psycopg.connect(pg_server.url("postgres"), autocommit=True) as connection:
            names = [psycopg.sql.Identifier(address.rpartition("/")[2]) for address in (other, url)]
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
    elif where == "another schema":
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA queue")
        queue = f"{url}?options=-csearch_path%3Dqueue"
    broker = PostgresBroker(queue)

    class Older(FakeWorker):
        async def one(self, message: Message[EvalRequest]) -> None:
            self.delivery = ToSender(await self.broker.requests("numbers"))
            await super().one(message)

    make = Older if where == "an older worker" else FakeWorker
    async with make(broker, "numbers").at_work() as worker:
        report = await suite_of(40).run(store=url, mailbox=broker)
    assert (report.status, report.total, worker.counters.committed) == ("finished", 40, 0)
    assert any(request.commit for request in worker.seen) is (where == "an older worker")
    await broker.close()
    for database in (url, other):
        pg_server.drop_database(database)


async def test_a_server_that_restarts_in_mid_run_costs_no_trial() -> None:
    suite = replace_task(suite_of(120))
    with PostgresServer() as server:
        url = server.new_database()
        broker, watcher = PostgresBroker(url), Watcher()
        async with worker_of(suite, broker, lease_seconds=5.0) as worker:
            running = asyncio.create_task(suite.run(store=url, mailbox=broker, bus=watcher))
            await until(lambda: worker.counters.committed >= 20)
            await asyncio.to_thread(server.restart, crash=True)
            report = await asyncio.wait_for(running, 60)
        assert (report.status, report.total, report.successful) == ("finished", 120, 120)
        seen = [event.result.ordinal for event in watcher.named("SampleEvaluated")]
        assert sorted(seen) == list(range(120))
        await broker.close()


def replace_task(suite: EvalSuite) -> EvalSuite:
    async def same(given: int) -> int:
        await asyncio.sleep(0.05)
        return given

    return EvalSuite(suite.name, suite.dataset, same, suite.evaluator, config=suite.config, version="1")


@pytest.mark.long
def test_workers_store_while_the_client_is_dead_and_the_next_client_goes_on(tmp_path: Path, pg_url: str) -> None:
    trials, log = 400, tmp_path / "executed"
    settings: dict[str, Any] = {"samples": trials, "log": log, "sleep": "0.05,0.1", "concurrency": 8}

    def stored() -> int:
        with psycopg.connect(pg_url) as connection:
            return int((connection.execute("SELECT count(*) FROM results").fetchone() or (0,))[0])

    with Processes(tmp_path, pg_url, **settings) as fleet:
        fleet.worker()
        client = fleet.client(pg_url)
        wait_for_lines(log, 30)
        client.kill()
        client.wait()
        before = stored()
        end = time.monotonic() + 30
        while stored() <= before:  # No client: the worker stores by itself.
            assert time.monotonic() < end, fleet.logs()
            time.sleep(0.1)
        answer = said(fleet.client(pg_url), 60)
        assert (answer["status"], answer["successful"]) == ("finished", trials), fleet.logs()
        assert stored() == trials
        assert log.read_bytes().count(b"\n") == trials  # Nothing was executed twice.


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.proves("R61", "R146")
def test_workers_killed_at_random_moments_store_everything_once(pg_url: str) -> None:
    """A short run of the benchmark, which has the checks in SQL."""
    command = [sys.executable, str(ROOT / "benchmarks" / "one_transaction.py"), "--kills", "20", "--url", pg_url]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["status"], outcome["stored"]) == ("finished", outcome["trials"])
    assert outcome["extra_executions"] > 0  # Kills hit workers in the middle of trials.
