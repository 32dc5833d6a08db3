"""Limits and budgets on Redis and PostgreSQL: the same decisions, also for many processes at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fairtrial import ConfigurationError, TokenUsage
from fairtrial.fleet.limits import postgres, redis
from fairtrial.fleet.limits import postgres as postgres_statements
from fairtrial.fleet.limits import redis as redis_scripts
from fairtrial.fleet.limits.connections import limit_server
from fairtrial.fleet.limits.quota import FleetLimiter, FleetSpending
from fairtrial.fleet.limits.servers import LimitServer, Quota
from fairtrial.mailbox.postgres.statements import MIGRATIONS, SCHEMA_VERSION
from fairtrial.mailbox.redis.scripts import LuaScript
from tests.fleet.limit_servers import PostgresState, RedisState, SharedServer
from tests.servers import PgBouncer, PostgresServer

pytestmark = pytest.mark.proves("R70", "R106")

NOW = 1_800_000_000
"""The time on both servers, in seconds, where it is fixed."""

PROCESS = """
import asyncio, sys, time
from fairtrial.fleet.limits.quota import FleetLimiter
if sys.argv[2] == "tomorrow":
    real = time.time
    time.time = lambda: real() + 86_400
async def call(limiter):
    while True:
        async with limiter.slot():
            print(time.monotonic(), flush=True)
async def main():
    async with FleetLimiter(sys.argv[1], "processes", requests_per_second=100, fill=1) as limiter:
        await asyncio.gather(*(call(limiter) for _ in range(20)))
asyncio.run(main())
"""


@contextmanager
def processes(url: str, *clocks: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that call as often as they may, each with the clock of today or tomorrow."""
    started = [
        subprocess.Popen([sys.executable, "-c", PROCESS, url, clock], stdout=subprocess.PIPE, text=True)
        for clock in clocks
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=30)


def test_processes_that_die_freeze_or_have_a_wrong_clock_exceed_no_rate(limits: SharedServer) -> None:
    with processes(limits.url, "today", "today", "tomorrow") as (first, second, third):
        lines = []
        for process in (first, second, third):
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        second.send_signal(signal.SIGSTOP)
        time.sleep(0.4)
        second.send_signal(signal.SIGCONT)
        first.kill()
        time.sleep(1.0)
        killed_at = time.monotonic()
        for process in (second, third):
            process.kill()
        lines += [line for process in (first, second, third) for line in process.communicate(timeout=30)[0].split()]
    times = sorted(float(line) for line in lines)
    # At 100/s: 6 may begin at once, and a call that was admitted may be held up by the machine for a moment.
    for place, begun in enumerate(times):
        assert len([later for later in times[place:] if later < begun + 0.5]) <= 50 + 6 + 20
    assert len(times) <= (times[-1] - times[0]) * 100 + 6 + 20
    assert times[-1] > killed_at - 0.5  # Those that were left went on.


async def reserved(url: str, connections: int, times: int, quota: Quota) -> int:
    """The number of start times that several connections reserve at once."""

    async def one() -> int:
        server = limit_server(url)
        try:
            return sum([len((await server.reserve(quota, 10, 0.0, 0.0)).offsets_us) for _ in range(times)])
        finally:
            await server.close()

    return sum(await asyncio.gather(*(one() for _ in range(connections))))


async def test_no_start_time_is_given_twice(limits: SharedServer) -> None:
    quota = Quota("contended", 1000.0, 1.0, 0.0, 0.0, 0.0, 1000.0)
    await reserved(limits.url, 1, 1, quota)
    begin = round((time.time() + 9) * 1e6)  # Reservations are never further ahead than ten seconds.
    limits.change("contended", requests=begin)
    assert await reserved(limits.url, 10, 5, quota) == 500
    assert limits.state("contended")["requests"] == begin + 500 * 1000


async def test_next_to_no_tokens_are_no_error(limits: SharedServer) -> None:
    # As is expected after thousands of calls that used none. PostgreSQL refuses to calculate with such numbers.
    quota = Quota("tiny", 1000.0, 1.0, 0.5, 100.0, 0.0, 1000.0)
    server = limit_server(limits.url)
    for tokens, owed in ((1e-310, 0.0), (0.0, -5e-324)):
        assert len((await server.reserve(quota, 2, tokens, owed)).offsets_us) == 2
    await server.close()


async def test_no_usage_is_lost_when_all_report_it_at_once(limits: SharedServer) -> None:
    async def spend() -> None:
        server = limit_server(limits.url)
        for _ in range(10):
            await server.spend("contended", TokenUsage(3, 2, 1, 0.25), 2)
        await server.close()

    await asyncio.gather(*(spend() for _ in range(10)))
    async with FleetSpending(limits.url) as spending:
        await spending.refresh("contended")
        assert spending.of("contended") == (TokenUsage(300, 200, 100, 25.0), 200)


@pytest.fixture
def frozen_servers(
    redis_url: str, mailbox_database: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[asyncio.Runner, list[tuple[SharedServer, LimitServer]]]]:
    """Both servers, whose clocks stand still."""
    for name in ("RESERVE", "REFUSED", "LISTEN"):
        text = getattr(redis_scripts, name).text
        assert text.count("redis.call('TIME')") == 1
        monkeypatch.setattr(redis, name, LuaScript(text.replace("redis.call('TIME')", f"{{{NOW}, 0}}")))
    for name in ("RESERVE", "REFUSE", "LISTEN", "OPEN"):
        text = getattr(postgres, name)
        monkeypatch.setattr(postgres, name, text.replace("clock_timestamp()", f"to_timestamp({NOW})"))
    with asyncio.Runner() as runner:
        shared: list[SharedServer] = [RedisState(redis_url), PostgresState(mailbox_database)]
        servers = [(one, limit_server(one.url)) for one in shared]
        for _, server in servers:
            runner.run(server.spend("nothing", TokenUsage(), 0))  # Creates the tables.
        yield runner, servers
        for one, server in servers:
            one.clear()
            runner.run(server.close())


def seconds(least: float, most: float) -> st.SearchStrategy[int | None]:
    """A time in microseconds around now, or none."""
    return st.none() | st.integers(round((NOW + least) * 1e6), round((NOW + most) * 1e6))


STATES = st.fixed_dictionaries(
    {
        "requests": seconds(-1, 12) | seconds(-500, 500),
        "tokens": seconds(-2, 12) | seconds(-500, 8000),
        "until": seconds(-1, 2) | seconds(-500, 500),
        "epoch": st.integers(1, 3),
        "began": seconds(-6, 1) | seconds(-500, 500),
        "rate": st.none() | st.floats(0.5, 500),
        "ceiling": st.none() | st.floats(0.5, 500),
        "grown": seconds(-2, 1),
    }
)
QUOTAS = st.builds(
    Quota,
    st.just("same"),
    cost_us=st.floats(50, 5e6),
    burst=st.floats(1, 100),
    token_cost_us=st.sampled_from([0.0, 0.5, 100.0, 60_000.0]),
    token_burst=st.floats(0.01, 1000),
    first=st.sampled_from([0.0, 0.0, 5.0, 80.0]),
    largest=st.floats(1, 1000),
)
ADAPTIVE = Quota("same", 1000.0, 5.0, 0.0, 0.0, 5.0, 1000.0)


def learned(*, began: float = -9, rate: float = 100.0, ceiling: float | None = 101.0) -> dict[str, float | None]:
    """The state of a limit near the rate of its last refusal, all of it in demand."""
    times = {"requests": 1.0, "began": began, "grown": -2.0}
    return {"epoch": 1, "rate": rate, "ceiling": ceiling} | {name: (NOW + ahead) * 1e6 for name, ahead in times.items()}


SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # Each example begins with a state of its own.
TOKENS = st.sampled_from([0.0, 1e-310, 1.0, 1000.0]) | st.floats(0, 20_000)


class TestBothServersDecideTheSame:
    @settings(max_examples=100, suppress_health_check=SHARED)
    @given(STATES, QUOTAS, st.integers(0, 60), TOKENS, st.floats(-20_000, 20_000))
    @example(learned(), ADAPTIVE, 5, 0.0, 0.0)
    @example(learned(rate=40.0), ADAPTIVE, 5, 0.0, 0.0)
    @example(learned(ceiling=None), ADAPTIVE, 5, 0.0, 0.0)
    def test_reservations(
        self, frozen_servers: Any, state: dict[str, Any], quota: Quota, count: int, tokens: float, owed: float
    ) -> None:
        found = decisions(frozen_servers, state, lambda server: server.reserve(quota, count, tokens, owed))
        (block, after), (other, other_after) = found
        assert abs(len(block.offsets_us) - len(other.offsets_us)) <= 1  # Unless one falls on the very end.
        if len(block.offsets_us) == len(other.offsets_us):
            assert other.offsets_us == pytest.approx(block.offsets_us, abs=2)
            assert other.wait_us == pytest.approx(block.wait_us, abs=2)
            assert other_after == pytest.approx(after, rel=1e-9, abs=2)
        assert (other.epoch, other.rate) == (block.epoch, pytest.approx(block.rate, rel=1e-6, abs=0.002))

    @settings(max_examples=50, suppress_health_check=SHARED)
    @given(STATES, QUOTAS, st.integers(0, 3), st.sampled_from([-1.0, 0.0, 1e5, 3e6, 9e9]))
    @example(learned(began=-2), ADAPTIVE, 1, -1.0)
    @example(learned(began=-5), ADAPTIVE, 1, 3e6)
    @example(learned(began=-5, ceiling=None), ADAPTIVE, 1, -1.0)
    def test_refusals(self, frozen_servers: Any, state: dict[str, Any], quota: Quota, epoch: int, told: float) -> None:
        async def refuse_and_listen(server: LimitServer) -> tuple[Any, Any]:
            return await server.refuse(quota, epoch, told), await server.listen(quota)

        ((refused, heard), after), ((other, other_heard), other_after) = decisions(
            frozen_servers, state, refuse_and_listen
        )
        assert (other.epoch, other_heard.epoch) == (refused.epoch, heard.epoch)
        waits = [other.wait_us, other_heard.wait_us]
        assert waits == pytest.approx([refused.wait_us, heard.wait_us], abs=2)
        assert other_after == pytest.approx(after, rel=1e-9, abs=2)


def decisions(servers: Any, state: dict[str, Any], operation: Any) -> list[tuple[Any, dict[str, float]]]:
    """What each server answers in a state, and its state after that."""
    runner, both = servers
    found = []
    for shared, server in both:
        shared.begin("same", NOW, {name: value for name, value in state.items() if value is not None})
        answer = runner.run(operation(server))
        after = {name: value for name, value in shared.state("same").items() if value}
        found.append((answer, after))
    return found


class TestOnPostgres:
    async def test_they_pass_a_pooler_in_transaction_mode(
        self, pg_server: PostgresServer, mailbox_database: str
    ) -> None:
        with PgBouncer(pg_server) as pooler:
            url = f"{pooler.url(mailbox_database)}?pgbouncer=true"
            async with FleetLimiter(url, "pooled", requests_per_second=1000) as limiter, FleetSpending(url) as spending:
                for _ in range(8):  # More often than a statement is executed before it would be prepared.
                    async with limiter.slot():
                        spending.add("pooled", TokenUsage(1, 1))
                        await spending._exchanged("pooled", spending._run("pooled"))
                assert spending.of("pooled") == (TokenUsage(8, 8), 8)
            plain = pooler.url(mailbox_database)
            async with FleetLimiter(plain, "pooled", adaptive=True) as limiter, FleetSpending(plain) as spending:
                with pytest.raises(ConfigurationError, match=r"\?pgbouncer=true"):
                    async with limiter.slot():
                        pass
                with pytest.raises(ConfigurationError, match=r"\?pgbouncer=true"):
                    await spending.refresh("pooled")

    async def test_a_limit_is_forgotten_after_a_day_and_a_budget_after_a_month(self, mailbox_database: str) -> None:
        quota = Quota("old", 1000.0, 1.0, 0.0, 0.0, 50.0, 1000.0)
        server = limit_server(mailbox_database)
        await server.reserve(quota, 1, 0.0, 0.0)
        await server.refuse(quota, 0, 1.0)
        await server.spend("old", TokenUsage(1), 1)
        with psycopg.connect(mailbox_database) as client:
            client.execute("UPDATE fleet_limits SET used_at = used_at - interval '23 hours' WHERE name = 'old'")
            client.execute("UPDATE fleet_spending SET used_at = used_at - interval '29 days' WHERE name = 'old'")
        again = limit_server(mailbox_database)
        assert (await again.reserve(quota, 1, 0.0, 0.0)).rate == 25
        assert (await again.spend("old", TokenUsage(), 0))[1] == 1
        await again.close()
        with psycopg.connect(mailbox_database) as client:
            client.execute("UPDATE fleet_limits SET used_at = used_at - interval '25 hours' WHERE name = 'old'")
            client.execute("UPDATE fleet_spending SET used_at = used_at - interval '2 days' WHERE name = 'old'")
        assert (await server.listen(quota)).epoch == 0
        assert (await server.reserve(quota, 1, 0.0, 0.0)).rate == 50
        await server.close()
        later = limit_server(mailbox_database)
        assert (await later.spend("old", TokenUsage(), 0))[1] == 0
        await later.close()

    async def test_the_tables_are_added_to_mailboxes_of_an_earlier_version(self, pg_url: str) -> None:
        with psycopg.connect(pg_url) as client:
            for statement in MIGRATIONS[0]:
                client.execute(statement)
            client.execute("UPDATE mailbox_schema SET version = 1")
        async with FleetLimiter(pg_url, "x", requests_per_second=1000) as limiter, limiter.slot():
            pass
        with psycopg.connect(pg_url) as client:
            assert client.execute("SELECT version FROM mailbox_schema").fetchone() == (SCHEMA_VERSION,)

    async def test_commits_do_not_wait_for_the_disk_and_others_still_do(self, mailbox_database: str) -> None:
        # The row is locked until the commit is complete: waiting for the disk, all processes would wait for it.
        server = limit_server(mailbox_database, max_connections=1)
        assert isinstance(server, postgres.PostgresLimits)
        setting = "SELECT current_setting('synchronous_commit')"
        during = f"{postgres_statements.SPEND.rstrip()}, current_setting('synchronous_commit')"
        parameters = {"name": "disk", "requests": 1, "input": 1, "output": 1, "cached": 1, "dollars": None}
        ((*_, value),) = await server.connection.run("looking", during, parameters)
        assert value == "off"
        assert await server.connection.run("looking", setting, {}) == [("on",)]
        await server.close()


@pytest.mark.parametrize(("missing", "engine"), [("redis", "postgresql"), ("psycopg", "redis")])
def test_only_the_client_of_the_server_in_use_must_be_installed(missing: str, engine: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from fairtrial.errors import MissingExtraError
from fairtrial.fleet import FleetLimiter, FleetSpending
FleetLimiter("{engine}://localhost", "x", requests_per_second=1)
FleetSpending("{engine}://localhost")
try:
    FleetSpending({{"redis": "redis://x", "psycopg": "postgresql://x"}}[{missing!r}])
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout
