"""A fleet whose queue, database or network fails in the middle of a run: every trial is stored exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match, open_store
from fairtrial.errors import MailboxError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, RedisBroker
from fairtrial.suites.worker import run_worker
from tests.fleet.build import until
from tests.proxy import Proxy
from tests.redis_server import RedisServer
from tests.servers import PostgresServer

TRIALS = 300
CONCURRENCY = 10
REQUESTS = "{fairtrial:faults.requests}:stream"


@dataclass
class Fleet:
    """A client and a worker in this process, with a proxy in front of each of their servers."""

    redis: RedisServer
    redis_proxy: Proxy
    store: str
    database: str = ""  # The address of a PostgreSQL store beside the proxy.
    postgres: PostgresServer | None = None
    postgres_proxy: Proxy | None = None
    executed: list[int] = field(default_factory=list)

    @property
    def extra(self) -> int:
        return len(self.executed) - TRIALS

    def suite(self) -> EvalSuite:
        async def double(number: int) -> int:
            self.executed.append(number)
            await asyncio.sleep(0.04)
            return 2 * number

        data = Dataset.of({number: 2 * number for number in range(TRIALS)}, name="numbers")
        config = EvalConfig(max_concurrent=CONCURRENCY, timeout_seconds=30)
        return EvalSuite("faults", data, double, exact_match, config=config, version="1")

    def broker(self) -> RedisBroker:
        return RedisBroker(f"redis://127.0.0.1:{self.redis_proxy.port}/0", timeout_seconds=2.0)

    async def run(self, fault: Callable[[Fleet], Awaitable[None]]) -> Any:
        """Run the suite, bring the fault about after a quarter of it, and return the report."""
        loops: list[EvalLoop] = []
        config = EvalLoopConfig(concurrency=CONCURRENCY, lease_seconds=3.0, wait_seconds=0.5)
        here, there = self.broker(), self.broker()
        worker = asyncio.create_task(run_worker(self.suite(), there, config=config, started=loops.append))
        client = asyncio.create_task(self.suite().run(store=self.store, mailbox=here))
        try:
            await until(lambda: len(self.executed) > TRIALS // 4 or client.done(), 60)
            await fault(self)
            return await asyncio.wait_for(client, 90)
        finally:
            client.cancel()
            loops[0].stop()
            await asyncio.gather(worker, client, return_exceptions=True)
            await here.close()
            await there.close()

    def stored(self) -> list[int]:
        store = open_store(self.store)
        try:
            (run,) = store.runs()
            assert run.status == "finished"
            results = list(store.results(run.run_id, outputs=True))
            assert all(result.output == 2 * result.ordinal for result in results)
            return [result.ordinal for result in results]
        finally:
            store.close()


@pytest.fixture
def redis_proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with redis_server.client() as client:
        client.flushall()
    with Proxy(redis_server.port) as proxy:
        yield proxy


async def network(fleet: Fleet, seconds: float, **faults: Any) -> None:
    for name, value in faults.items():
        setattr(fleet.redis_proxy, name, value)
    await asyncio.sleep(seconds)
    fleet.redis_proxy.calm()
    assert fleet.redis_proxy.faults > 0 or not {"dropped", "reset_share", "half_close_share"} & set(faults)


async def cut_often(fleet: Fleet) -> None:
    for _ in range(8):
        await asyncio.to_thread(fleet.redis_proxy.cut)
        await asyncio.sleep(0.15)


async def fill_up(fleet: Fleet) -> None:
    with fleet.redis.client() as client:
        used: int = client.info("memory")["used_memory"]
        client.config_set("maxmemory", max(1, used - 200_000))
        await asyncio.sleep(1.5)
        client.config_set("maxmemory", 0)


async def flush(fleet: Fleet) -> None:
    with fleet.redis.client() as client:
        client.flushall()


async def destroy_groups(fleet: Fleet) -> None:
    with fleet.redis.client() as client:
        for key in client.keys("*:stream"):
            client.xgroup_destroy(key, "fairtrial")


async def write_garbage(fleet: Fleet) -> None:
    draw = random.Random(7)
    with fleet.redis.client() as client:
        for key in client.keys("*:stream"):
            for _ in range(50):
                client.xadd(key, {"b": draw.randbytes(300)})
            client.xadd(key, {"b": b"[" * 100_000 + b"]" * 100_000})
            client.xadd(key, {"b": b"x" * 3_000_000})
            client.xadd(key, {"s": "../../../../etc/passwd"})
            client.xadd(key, {f"f{number}": "v" for number in range(5_000)})


type Fault = Callable[[Fleet], Awaitable[None]]

# The fault, and how many trials it may have executed twice: those in flight, or all that were queued and lost.
REDIS_FAULTS: dict[str, tuple[Fault, int]] = {
    "connections reset again and again": (cut_often, CONCURRENCY),
    "commands reset after they arrived": (lambda fleet: network(fleet, 2.0, reset_share=0.1), 2 * CONCURRENCY),
    "packets from Redis dropped": (lambda fleet: network(fleet, 2.5, dropped={"down"}), 2 * CONCURRENCY),
    "no room left": (fill_up, CONCURRENCY),
    "all keys deleted": (flush, TRIALS),
    "consumer groups destroyed": (destroy_groups, TRIALS),
    "garbage in every stream": (write_garbage, 0),
}
SLOWER_REDIS_FAULTS: dict[str, tuple[Fault, int]] = {
    "packets cut into pieces": (lambda fleet: network(fleet, 2.0, piece=97), 0),
    "packets late by 150 ms": (lambda fleet: network(fleet, 10.0, delay=0.15), 0),
    "packets held": (lambda fleet: network(fleet, 12.0, held=True), 2 * CONCURRENCY),
    "packets to Redis dropped": (lambda fleet: network(fleet, 14.0, dropped={"up"}), 2 * CONCURRENCY),
    "packets from Redis dropped": (lambda fleet: network(fleet, 14.0, dropped={"down"}), 2 * CONCURRENCY),
    "connections half closed": (lambda fleet: network(fleet, 3.0, half_close_share=0.05), 2 * CONCURRENCY),
}


async def check(fleet: Fleet, fault: Fault, allowed: int) -> None:
    report = await fleet.run(fault)
    assert (report.status, report.successful) == ("finished", TRIALS)
    assert fleet.stored() == list(range(TRIALS))
    assert 0 <= fleet.extra <= allowed


def cases(quick: dict[str, tuple[Fault, int]], slower: dict[str, tuple[Fault, int]]) -> list[Any]:
    """Faults and what they allow, as parameters of a test."""
    return [
        *(pytest.param(*case, id=name, marks=pytest.mark.long) for name, case in quick.items()),
        *(pytest.param(*case, id=f"slower: {name}", marks=pytest.mark.soak) for name, case in slower.items()),
    ]


@pytest.mark.parametrize(("fault", "allowed"), cases(REDIS_FAULTS, SLOWER_REDIS_FAULTS))
async def test_a_run_survives_a_fault_of_redis(
    fault: Fault, allowed: int, redis_server: RedisServer, redis_proxy: Proxy, tmp_path: Path
) -> None:
    await check(Fleet(redis_server, redis_proxy, f"sqlite:///{tmp_path}/runs.db"), fault, allowed)


async def replace_the_stream(fleet: Fleet) -> None:
    with fleet.redis.client() as client:
        client.delete(REQUESTS)
        client.set(REQUESTS, "text")


async def use_up_the_ids(fleet: Fleet) -> None:
    with fleet.redis.client() as client:
        client.xadd(REQUESTS, {"b": b"x"}, id="18446744073709551615-18446744073709551614")


async def do_nothing(fleet: Fleet) -> None:
    pass


@pytest.mark.long
@pytest.mark.parametrize("fault", [replace_the_stream, use_up_the_ids], ids=["another type", "last possible id"])
async def test_a_stream_that_was_made_unusable_ends_the_run_which_resumes_once_its_key_is_deleted(
    fault: Fault, redis_server: RedisServer, redis_proxy: Proxy, tmp_path: Path
) -> None:
    fleet = Fleet(redis_server, redis_proxy, f"sqlite:///{tmp_path}/runs.db")
    with pytest.raises(MailboxError, match=r"faults\.requests: "):
        await fleet.run(fault)
    with redis_server.client() as client:
        client.delete(REQUESTS)
    report = await fleet.run(do_nothing)
    assert (report.status, report.successful) == ("finished", TRIALS)
    assert fleet.stored() == list(range(TRIALS))


DISCONNECT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'fairtrial'"


def execute(fleet: Fleet, *statements: str) -> None:
    """Do something to the database as its administrator, beside the proxy."""
    with psycopg.connect(fleet.database, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


async def postgres_network(fleet: Fleet, seconds: float, **faults: Any) -> None:
    assert fleet.postgres_proxy is not None
    for name, value in faults.items():
        setattr(fleet.postgres_proxy, name, value)
    if "refused" in faults:
        fleet.postgres_proxy.cut()
    await asyncio.sleep(seconds)
    fleet.postgres_proxy.calm()
    assert fleet.postgres_proxy.faults > 0


async def crash_twice(fleet: Fleet) -> None:
    assert fleet.postgres is not None
    for _ in range(2):
        await asyncio.to_thread(fleet.postgres.restart, crash=True)
        await asyncio.sleep(0.5)


async def freeze_postgres(fleet: Fleet) -> None:
    assert fleet.postgres is not None
    pids = fleet.postgres.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(3)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def use_up_connections(fleet: Fleet) -> None:
    taken: list[psycopg.Connection[Any]] = []
    try:
        with psycopg.connect(fleet.database, autocommit=True) as admin:
            with contextlib.suppress(psycopg.OperationalError):
                taken.extend(psycopg.connect(fleet.database) for _ in range(100))
            assert len(taken) < 100
            admin.execute(DISCONNECT)
            await asyncio.sleep(2)
    finally:
        for connection in taken:
            connection.close()


async def cancel_statements(fleet: Fleet) -> None:
    """What a statement timeout of the server does."""
    with psycopg.connect(fleet.database, autocommit=True) as admin:
        for _ in range(100):
            admin.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'fairtrial'")
            await asyncio.sleep(0.02)


async def lock_results(fleet: Fleet) -> None:
    with psycopg.connect(fleet.database) as other:
        other.execute("LOCK TABLE results IN ACCESS EXCLUSIVE MODE")
        await asyncio.sleep(3)
        other.rollback()


async def turn_read_only(fleet: Fleet) -> None:
    name = fleet.database.rpartition("/")[2]
    execute(fleet, f"ALTER DATABASE {name} SET default_transaction_read_only = on", DISCONNECT)
    await asyncio.sleep(2)
    execute(
        fleet,
        "SET default_transaction_read_only = off",
        f"ALTER DATABASE {name} RESET default_transaction_read_only",
        DISCONNECT,
    )


async def fill_the_disk(fleet: Fleet) -> None:
    execute(
        fleet,
        "CREATE FUNCTION full_disk() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'no space left on device' "
        "USING ERRCODE = 'disk_full'; END $$ LANGUAGE plpgsql",
        "CREATE TRIGGER full_disk BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION full_disk()",
    )
    await asyncio.sleep(2)
    execute(fleet, "DROP TRIGGER full_disk ON results")


async def lose_commits(fleet: Fleet) -> None:
    """What a failover to an asynchronous standby does: results that were committed are gone."""
    with psycopg.connect(fleet.database, autocommit=True) as admin:
        await until(lambda: admin.execute("DELETE FROM results WHERE ordinal < 50").rowcount > 0)
        admin.execute("DELETE FROM details WHERE ordinal < 50")
        admin.execute(DISCONNECT)


POSTGRES_FAULTS: dict[str, tuple[Fault, int]] = {
    "connections reset and refused": (lambda fleet: postgres_network(fleet, 2.0, refused=True), 0),
    "statements reset after they arrived": (lambda fleet: postgres_network(fleet, 2.0, reset_share=0.2), 0),
    "packets dropped": (lambda fleet: postgres_network(fleet, 3.0, dropped={"down"}), 0),
    "statements cancelled": (cancel_statements, 0),
    "table locked": (lock_results, 0),
    "database read-only": (turn_read_only, 0),
    "disk full": (fill_the_disk, 0),
    "committed results lost": (lose_commits, 50),
}
SLOWER_POSTGRES_FAULTS: dict[str, tuple[Fault, int]] = {
    "connections used up": (use_up_connections, 0),
    "server crashed twice": (crash_twice, 0),
    "connections half closed": (lambda fleet: postgres_network(fleet, 6.0, half_close_share=0.1), 0),
    "server frozen": (freeze_postgres, 0),
}


@pytest.mark.parametrize(("fault", "allowed"), cases(POSTGRES_FAULTS, SLOWER_POSTGRES_FAULTS))
async def test_a_run_survives_a_fault_of_postgresql(
    fault: Fault, allowed: int, redis_server: RedisServer, redis_proxy: Proxy, own_postgres: PostgresServer
) -> None:
    database, port = own_postgres.new_database(), own_postgres.port
    with Proxy(port) as proxy:
        url = database.replace(f":{port}/", f":{proxy.port}/")
        await check(Fleet(redis_server, redis_proxy, url, database, own_postgres, proxy), fault, allowed)
