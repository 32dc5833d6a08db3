"""One quota and one budget for many processes."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ChatMessage, ConfigurationError, ScriptedAdapter, TokenUsage
from fairtrial.errors import BudgetExceededError, MailboxAccessError, MailboxError
from fairtrial.fleet.limits import quota as limits_module
from fairtrial.fleet.limits.quota import FleetLimiter, FleetSpending
from fairtrial.mailbox import PostgresConnection, RedisConnection
from fairtrial.models.limiter import Budget, Limiter, Permit, Spending, TokenLimiter
from tests.fleet.build import until
from tests.fleet.limit_servers import ENGINES, SharedServer, nobodys_url, own_server

pytestmark = pytest.mark.proves("R106")


async def begun(limiter: Limiter, calls: int) -> list[float]:
    """When each of `calls` calls could begin, from now."""
    start = time.monotonic()

    async def call() -> float:
        async with limiter.slot():
            return time.monotonic() - start

    return sorted(await asyncio.gather(*(call() for _ in range(calls))))


class TestRequests:
    async def test_several_processes_together_keep_one_rate(self, limits: SharedServer) -> None:
        limiters = [FleetLimiter(limits.url, "q", requests_per_second=100, fill=1) for _ in range(4)]
        start = time.monotonic()
        times = sorted(chain(*await asyncio.gather(*(begun(limiter, 25) for limiter in limiters))))
        took = time.monotonic() - start
        # 100 calls at 100/s, of which 6 may begin at once: later is slow, and sooner would be wrong.
        assert took >= 0.9
        for at in range(10, 100, 10):
            assert times[at] >= (at - 12) / 100
        assert [limiter.counters["limiter_admitted"] for limiter in limiters] == [25] * 4
        assert sum(limiter.counters["limiter_blocks"] for limiter in limiters) <= 45
        for limiter in limiters:
            await limiter.aclose()

    async def test_turns_are_given_to_all(self, limits: SharedServer) -> None:
        # The one that wants a hundred times as much gets no more than its turn.
        async with (
            FleetLimiter(limits.url, "fair", requests_per_second=100) as greedy,
            FleetLimiter(limits.url, "fair", requests_per_second=100) as modest,
        ):
            crowd = asyncio.create_task(begun(greedy, 1000))
            await until(lambda: greedy.counters["limiter_admitted"] > 5)
            before = greedy.counters["limiter_admitted"]
            await begun(modest, 10)
            assert greedy.counters["limiter_admitted"] - before < 50
            crowd.cancel()
            await asyncio.wait([crowd])

    async def test_other_names_are_other_quotas(self, limits: SharedServer) -> None:
        async with (
            FleetLimiter(limits.url, "a", requests_per_minute=6, fill=1) as first,
            FleetLimiter(limits.url, "b", requests_per_minute=6, fill=1) as second,
        ):
            assert (await begun(first, 2))[-1] < 5
            assert (await begun(second, 2))[-1] < 5
            assert set(limits.state(first.name)) == {"requests"}

    async def test_a_call_that_gives_up_waiting_takes_nobody_elses_turn(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "gone", requests_per_second=20, fill=1) as limiter:
            await begun(limiter, 2)
            waiting = [asyncio.create_task(begun(limiter, 1)) for _ in range(5)]
            await asyncio.sleep(0)
            for task in waiting[:4]:
                task.cancel()
            await asyncio.wait(waiting)
            assert waiting[4].result()[0] < 2
            assert limiter.counters["limiter_admitted"] == 3

    async def test_missed_start_times_are_not_caught_up(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "hoard", requests_per_second=200, fill=1) as limiter:
            inner = limiter._for_this_loop()
            inner._slots.extend([time.monotonic() - 0.2] * 50)
            inner._heard_at = time.monotonic()
            times = await begun(limiter, 31)
            assert times[-1] >= 0.08  # 20 beyond the burst, at 200/s.

    async def test_start_times_far_ahead_are_reserved_later(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "slow", requests_per_minute=2, fill=1) as limiter:
            await begun(limiter, 2)
            waiting = asyncio.create_task(begun(limiter, 1))
            await until(lambda: limiter.counters["limiter_blocks"] >= 2)
            found = limits.state(limiter.name)
            await asyncio.sleep(0.05)
            assert limits.state(limiter.name) == found  # It reserved nothing, and blocks no other process.
            waiting.cancel()
            await asyncio.wait([waiting])

    async def test_a_clock_that_was_set_back_does_not_stop_the_fleet(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "clock", requests_per_second=100, tokens_per_minute=6e6) as limiter:
            await begun(limiter, 1)
            tomorrow = round((time.time() + 86_400) * 1e6)
            limits.change("clock", requests=tomorrow, tokens=tomorrow, until=tomorrow)
            assert (await begun(limiter, 1))[-1] < 5

    def test_it_serves_one_event_loop_after_another(self, limits: SharedServer) -> None:
        limiter = FleetLimiter(limits.url, "loops", requests_per_second=1000)
        for _ in range(2):
            assert len(asyncio.run(begun(limiter, 3))) == 3

    async def test_a_connection_that_is_given_stays_open(self, limits: SharedServer) -> None:
        kind = RedisConnection if limits.title == "Redis" else PostgresConnection
        async with kind(limits.url) as connection:
            async with FleetLimiter(connection, "given", requests_per_second=1000) as limiter:
                await begun(limiter, 1)
            async with FleetSpending(connection) as spending:
                await spending.refresh("given")
            assert limits.state("given")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"requests_per_second": 1, "requests_per_minute": 1},
            {"requests_per_second": 0},
            {"tokens_per_minute": float("nan")},
            {"adaptive": True, "initial": 0},
            {"requests_per_second": 1, "fill": 1.5},
            {"requests_per_second": 1, "share_without_server": 0},
            {"requests_per_second": 1, "share_without_server": -1},
        ],
    )
    @pytest.mark.parametrize("engine", ENGINES)
    async def test_settings_that_cannot_work_are_refused(self, engine: str, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=r"must be|mutually exclusive|requires"):
            FleetLimiter(f"{engine}://localhost", "x", **options)

    async def test_names_and_addresses_that_cannot_be_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="name"):
            FleetLimiter("redis://localhost", "a}b", requests_per_second=1)
        for address in ("http://localhost", "sqs://eu-west-1/x", "", "localhost"):
            with pytest.raises(ConfigurationError, match=r"must start with redis://, .* or postgresql://"):
                FleetLimiter(address, "x", requests_per_second=1)
        with pytest.raises(ConfigurationError, match="invalid Redis URL"):
            FleetLimiter("redis://[::1", "x", requests_per_second=1)
        with pytest.raises(ConfigurationError, match="invalid PostgreSQL URL"):
            FleetSpending("postgresql://[::1")

    @pytest.mark.parametrize("engine", ENGINES)
    def test_without_asyncio_it_says_what_is_wrong(self, engine: str) -> None:
        limiter = FleetLimiter(f"{engine}://localhost", "x", requests_per_second=1)
        with pytest.raises(ConfigurationError, match="asyncio"):
            limiter.report(Permit(), "rate_limited")

    @pytest.mark.parametrize("engine", ENGINES)
    def test_it_is_a_limiter(self, engine: str) -> None:
        limiter: Limiter = FleetLimiter(f"{engine}://user:hunter22@localhost", "x", requests_per_second=1)
        assert isinstance(limiter, TokenLimiter)
        assert "hunter22" not in repr(limiter)


class TestRefusals:
    async def test_a_retry_after_holds_back_the_whole_fleet(self, limits: SharedServer) -> None:
        async with (
            FleetLimiter(limits.url, "cool", requests_per_second=200) as told,
            FleetLimiter(limits.url, "cool", requests_per_second=200) as other,
        ):
            await begun(other, 1)
            async with told.slot() as permit:
                told.report(permit, "rate_limited", retry_after=1.0)
            await until(lambda: told.episodes == 1)
            mine, theirs = await asyncio.gather(begun(told, 5), begun(other, 5))
            assert min(mine[0], theirs[0]) >= 0.8
            assert max(mine[-1], theirs[-1]) < 5
            assert other.episodes == 1

    async def test_calls_held_back_together_do_not_all_begin_together(self, limits: SharedServer) -> None:
        limiters = [FleetLimiter(limits.url, "burst", requests_per_second=100) for _ in range(5)]
        for limiter in limiters:
            await begun(limiter, 1)
        waiting = [asyncio.create_task(begun(limiter, 10)) for limiter in limiters]
        start = time.monotonic()
        # Refusals that come in one by one, each asking for a little longer.
        for number in range(4):
            limiters[number].report(Permit(0), "rate_limited", retry_after=0.3)
            await asyncio.sleep(0.05)
        times = sorted(chain(*[await task for task in waiting]))
        assert time.monotonic() - start >= 0.3 + 0.3
        late = [at for at in times if at > 0.3]
        assert len(late) >= 20
        assert late[-1] - late[0] >= len(late) / 100 * 0.8
        for limiter in limiters:
            await limiter.aclose()

    async def test_many_refusals_of_one_moment_are_one_episode(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "episode", adaptive=True, initial=100) as limiter:
            await begun(limiter, 3)
            for _ in range(10):
                limiter.report(Permit(0), "rate_limited", retry_after=0.01)
            await until(lambda: limiter.episodes == 1)
            limiter.report(Permit(1), "rate_limited")
            await until(lambda: not limiter._for_this_loop()._chores)
            found = limits.state(limiter.name)
            assert (found["epoch"], found["rate"], found["ceiling"]) == (1, 50, 100)
            assert limiter.counters["limiter_refused"] == 11

    async def test_a_refusal_that_names_no_time_makes_a_short_pause(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "short", requests_per_second=20, fill=1) as limiter:
            async with limiter.slot() as permit:
                limiter.report(permit, "rate_limited")
            assert (await begun(limiter, 1))[0] >= 0.4

    async def test_answers_and_failures_do_not_change_the_shared_state(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "quiet", requests_per_second=20) as limiter:
            async with limiter.slot() as permit:
                limiter.report(permit, "answered")
                limiter.report(permit, "failed")
            assert "epoch" not in limits.state(limiter.name)


class TestLearning:
    async def test_an_unknown_rate_limit_is_found_by_all_processes_together(self, limits: SharedServer) -> None:
        limiters = [FleetLimiter(limits.url, "learn", adaptive=True, initial=50) for _ in range(3)]
        refused_above = 120.0
        end = time.monotonic() + 60.0

        async def work(limiter: FleetLimiter) -> None:
            nonlocal end
            while time.monotonic() < end:
                async with limiter.slot() as permit:
                    if limiter.rate > refused_above:
                        limiter.report(permit, "rate_limited", retry_after=0.05)
                        end = min(end, time.monotonic() + 2.0)

        await asyncio.gather(*(work(limiter) for limiter in limiters for _ in range(40)))
        found = limits.state(limiters[0].name)
        assert found["epoch"] >= 1
        assert found["ceiling"] > refused_above
        assert 80 < found["rate"] <= 140
        for limiter in limiters:
            await limiter.aclose()

    async def test_a_rate_that_is_not_wanted_does_not_grow(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "unwanted", adaptive=True, initial=50) as limiter:
            for _ in range(3):
                await begun(limiter, 1)
                past = round((time.time() - 5) * 1e6)
                limits.change("unwanted", requests=past, grown=past)
            assert (limits.state(limiter.name))["rate"] == 50

    async def test_it_never_learns_more_than_it_is_told_at_most(self, limits: SharedServer) -> None:
        async with FleetLimiter(
            limits.url, "most", adaptive=True, initial=50, requests_per_second=60, fill=1
        ) as limiter:
            await begun(limiter, 5)
            soon, past = (round((time.time() + shift) * 1e6) for shift in (1, -5))
            limits.change("most", requests=soon, grown=past)
            await begun(limiter, 1)
            assert (limits.state(limiter.name))["rate"] == 60
            assert limiter.rate == pytest.approx(60, abs=0.01)


class TestTokens:
    async def test_tokens_are_limited_apart_from_requests(self, limits: SharedServer) -> None:
        # 6,000 a second; 1,000 a call: 6 calls a second beyond the first second's worth.
        options: dict[str, Any] = {"tokens_per_minute": 360_000, "fill": 1}
        async with FleetLimiter(limits.url, "tokens", **options) as limiter:
            times = await begun(limiter, 12)
            assert times[11] >= 0.7
            assert times[5] < times[11] - 0.5

    async def test_what_calls_really_took_counts_for_everyone(self, limits: SharedServer) -> None:
        options: dict[str, Any] = {"tokens_per_minute": 600_000, "fill": 1, "tokens_per_call": 100}
        async with (
            FleetLimiter(limits.url, "really", **options) as first,
            FleetLimiter(limits.url, "really", **options) as second,
        ):
            async with first.slot() as permit:
                first.used(permit, 20_000)  # Two seconds' worth, where a hundredth was expected.
            await until(lambda: first._for_this_loop()._settling is None)
            assert (await begun(second, 1))[0] >= 0.3

    async def test_what_calls_did_not_take_is_given_back(self, limits: SharedServer) -> None:
        options: dict[str, Any] = {"tokens_per_minute": 600_000, "fill": 1, "tokens_per_call": 9_000}
        async with FleetLimiter(limits.url, "back", **options) as limiter:
            async with limiter.slot() as permit:
                limiter.used(permit, 0)
            async with limiter.slot() as permit:
                limiter.report(permit, "rate_limited", retry_after=0.001)
            before = limits.state(limiter.name)
            await until(lambda: limiter._for_this_loop()._settling is None)
            assert (limits.state(limiter.name))["tokens"] < before["tokens"]
            assert limiter._for_this_loop()._expected < 9_000

    async def test_an_adapter_tells_the_limiter_what_its_calls_took(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "adapter", tokens_per_minute=6e6, tokens_per_call=1000) as limiter:
            adapter = ScriptedAdapter({"hello": "world"}, limiter=limiter)
            await adapter.complete([ChatMessage("user", "hello")])
            assert limiter._for_this_loop()._expected < 1000

    async def test_without_a_limit_of_tokens_nothing_is_counted(self, limits: SharedServer) -> None:
        async with FleetLimiter(limits.url, "none", requests_per_second=100) as limiter:
            async with limiter.slot() as permit:
                limiter.used(permit, 5000)
            assert limiter._for_this_loop()._settling is None


@pytest.mark.parametrize("engine", ENGINES)
class TestUnavailable:
    async def test_calls_wait_for_the_server_and_go_on_when_it_is_back(
        self, engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with own_server(engine, tmp_path) as (server, url):
            async with FleetLimiter(url, "away", requests_per_second=100, timeout_seconds=2) as limiter:
                title = "Redis" if engine == "redis" else "PostgreSQL"
                await begun(limiter, 1)
                await asyncio.to_thread(server.stop)
                waiting = asyncio.create_task(begun(limiter, 3))
                await until(lambda: f"waits for {title}" in caplog.text)
                limiter.report(Permit(0), "rate_limited")  # Nobody can be told, and nothing breaks.
                assert not waiting.done()
                await asyncio.to_thread(server.start)
                assert len(await asyncio.wait_for(waiting, 20)) == 3
                inner = limiter._for_this_loop()
                await asyncio.to_thread(server.stop)
                inner._slots.append(time.monotonic() + 0.05)  # What was reserved stays valid.
                inner._heard_at = 0.0
                assert (await begun(limiter, 1))[0] < 5
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert said[1] == f"the limiter reaches {title} again"
        assert [text.partition(":")[0] for text in said] == [f"the limiter waits for {title}", said[1]] + [
            f"the limiter waits for {title}"
        ] * (len(said) - 2)

    async def test_with_a_share_calls_go_on_slowly(self, engine: str) -> None:
        options: dict[str, Any] = {"share_without_server": 0.05, "requests_per_second": 1000, "timeout_seconds": 1}
        async with FleetLimiter(nobodys_url(engine), "share", **options) as limiter:
            times = await begun(limiter, 20)
            assert times[-1] >= 19 / 1000 / 0.05 * 0.9

    async def test_while_the_server_is_unavailable_each_process_counts_on(
        self, engine: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with FleetSpending(nobodys_url(engine), timeout_seconds=1) as spending:
            await spending.refresh("r")
            spending.add("r", TokenUsage(5, 5))
            await spending.refresh("r")
            assert spending.of("r") == (TokenUsage(5, 5), 1)
            assert "continues with the last known total" in caplog.text


class TestFailures:
    async def test_a_server_that_refuses_us_is_an_error_and_not_a_wait(self, refusing_url: str) -> None:
        async with FleetLimiter(refusing_url, "locked", requests_per_second=1, tokens_per_minute=60) as limiter:
            with pytest.raises(MailboxAccessError) as caught:
                await begun(limiter, 1)
            assert "wrong-password" not in str(caught.value)
            limiter.report(Permit(0), "rate_limited")
            limiter.used(limits_module.FleetPermit(0, 1.0), 5)
            await until(lambda: limiter._for_this_loop()._settling is None and not limiter._for_this_loop()._chores)
        async with FleetSpending(refusing_url) as spending:
            with pytest.raises(MailboxAccessError):
                await spending.refresh("r")

    async def test_an_unexpected_failure_reaches_all_waiting_callers(
        self, limits: SharedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def broken(*args: Any) -> Any:
            raise LookupError("a bug")

        async with FleetLimiter(limits.url, "bug", requests_per_second=100) as limiter:
            monkeypatch.setattr(limiter._for_this_loop(), "_ask", broken)
            outcomes = await asyncio.gather(*(begun(limiter, 1) for _ in range(3)), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [MailboxError] * 3

    async def test_closing_cancels_what_waits(self, limits: SharedServer) -> None:
        limiter = FleetLimiter(limits.url, "closed", requests_per_minute=1)
        await begun(limiter, 2)
        waiting = asyncio.create_task(begun(limiter, 1))
        await asyncio.sleep(0.02)
        await limiter.aclose()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled()


class TestSpending:
    async def test_what_one_process_spends_counts_in_the_other(self, limits: SharedServer) -> None:
        async with FleetSpending(limits.url) as first, FleetSpending(limits.url, refresh_seconds=0.02) as second:
            first.add("run", TokenUsage(100, 20, 5, 0.25))
            first.add("run", None)
            assert first.of("run") == (TokenUsage(100, 20, 5, 0.25), 2)
            await first.refresh("run")
            second.add("run", TokenUsage(1, 2, 0, None))
            await second.refresh("run")
            assert second.of("run") == (TokenUsage(101, 22, 5, 0.25), 3)
            assert second.of("another run/}") == (TokenUsage(), 0)

    async def test_the_last_usage_is_published_too(self, limits: SharedServer) -> None:
        async with FleetSpending(limits.url, refresh_seconds=0.02) as first, FleetSpending(limits.url) as second:
            first.add("last", TokenUsage(1, 1))
            await until(lambda: first._run("last").known_requests == 1)
            await second.refresh("last")
            assert second.of("last")[1] == 1
        closing = FleetSpending(limits.url)
        closing.add("closing", TokenUsage(7, 0))
        await closing.aclose()
        async with FleetSpending(limits.url) as third:
            await third.refresh("closing")
            assert third.of("closing")[0].input_tokens == 7

    async def test_one_budget_holds_for_all_workers(self, limits: SharedServer) -> None:
        answered = 0
        async with FleetSpending(limits.url) as first, FleetSpending(limits.url) as second:
            budget = Budget(requests=5)
            adapters = [
                ScriptedAdapter({"hello": "world"}, run_budget=budget, spending=spending)
                for spending in (first, second)
            ]
            for spending in (first, second):
                spending._refresh_seconds = 1e-9  # Always ask.

            async def spend() -> None:
                nonlocal answered
                for number in range(20):
                    await adapters[number % 2].complete([ChatMessage("user", "hello")])
                    answered += 1

            with pytest.raises(BudgetExceededError, match="5 requests is used up"):
                await spend()
        assert 5 <= answered <= 6  # The last one of the other had not been told yet.

    async def test_only_the_latest_runs_are_kept_in_mind(self, limits: SharedServer) -> None:
        async with FleetSpending(limits.url) as spending:
            for number in range(300):
                spending.of(f"r{number}")
            assert len(spending._runs) == 256

    async def test_settings_that_cannot_work_are_refused(self) -> None:
        with pytest.raises(ConfigurationError):
            FleetSpending("redis://localhost", refresh_seconds=0)
        assert repr(FleetSpending("redis://localhost")) == "FleetSpending(RedisConnection(redis://localhost:6379))"

    async def test_spending_of_a_single_process_needs_no_refresh(self) -> None:
        spending = Spending()
        await spending.refresh("r")
        assert spending.of("r") == (TokenUsage(), 0)
