"""Limiter, retries and budgets, without a network."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial import ChatMessage, ConfigurationError, Experiment, Sample, Session, TokenUsage, TrialKey, exact_match
from fairtrial.errors import BudgetExceededError, InvalidCallError, ModelUnavailableError, RateLimitedError
from fairtrial.models import AdaptiveLimiter, FixedLimiter, ModelCallFailed, ScriptedAdapter
from fairtrial.models.limiter import NO_RETRY, Budget, Limiter, Permit, RetryPolicy, Spending, Unlimited, shared_limiter
from fairtrial.scoring.evaluator import resolve
from fairtrial.testing.environments import FakeClock
from fairtrial.trials.context import TrialContext, _current
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task

ASK = [ChatMessage("user", "?")]
QUICK = RetryPolicy(attempts=3, rate_limited_attempts=5, base_seconds=0.001, max_seconds=0.01)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def take(limiter: Limiter, verdict: Any = "answered") -> None:
    async with limiter.slot() as permit:
        limiter.report(permit, verdict)


async def crowd(limiter: AdaptiveLimiter, rounds: int) -> list[int]:
    """The limit after each of these rounds, in which more want to call than may."""
    limits: list[int] = []
    waiting = anyio.Event()
    inside = 0

    async def call() -> None:
        nonlocal inside
        while len(limits) < rounds:
            async with limiter.slot() as permit:
                inside += 1
                await waiting.wait()
                limiter.report(permit, "answered")

    async with anyio.create_task_group() as group:
        for _ in range(64):
            group.start_soon(call)
        while len(limits) < rounds:
            while inside < limiter.limit:  # Until all that may be are in flight.
                await anyio.lowlevel.checkpoint()
            limits.append(limiter.limit)
            inside = 0
            waiting.set()
            waiting = anyio.Event()
        waiting.set()
    return limits


async def test_the_limit_doubles_with_each_round_while_all_goes_well() -> None:
    assert await crowd(AdaptiveLimiter(initial=2, largest=30), 6) == [2, 4, 8, 16, 30, 30]


async def test_a_limit_that_is_not_used_does_not_grow() -> None:
    limiter = AdaptiveLimiter(initial=8)
    for _ in range(50):
        await take(limiter)
    assert limiter.limit == 8


async def test_one_episode_of_refusals_lowers_the_limit_once() -> None:
    limiter = AdaptiveLimiter(initial=10, decrease=0.5)
    old = [Permit(0) for _ in range(5)]
    for permit in old:
        limiter.report(permit, "rate_limited")
    assert (limiter.limit, limiter.episodes) == (5, 1)
    limiter.report(Permit(1), "rate_limited")
    assert (limiter.limit, limiter.episodes) == (2, 2)
    for epoch in range(2, 6):
        limiter.report(Permit(epoch), "rate_limited")
    assert limiter.limit == 1


async def test_the_number_of_refusals_tells_where_the_limit_was() -> None:
    limiter = AdaptiveLimiter(initial=64)
    for _ in range(24):
        limiter.report(Permit(0), "rate_limited")
    assert (limiter.limit, limiter.episodes) == (40, 1)
    for _ in range(40):  # Those that were refused to the last tell nothing.
        limiter.report(Permit(0), "rate_limited")
    assert limiter.limit == 32


async def test_after_an_episode_the_limit_comes_back_in_small_steps() -> None:
    limiter = AdaptiveLimiter(initial=10, decrease=0.5)
    limiter.report(Permit(0), "rate_limited")
    limits = await crowd(limiter, 40)
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(limits))
    assert limits.index(9) <= 8
    # From there on, near the place where it went wrong, it takes ten times as long.
    assert limits.count(9) >= 8


@pytest.mark.parametrize(
    "make", [lambda clock: AdaptiveLimiter(clock=clock), lambda clock: FixedLimiter(3, clock=clock)]
)
async def test_a_named_pause_holds_back_everyone(make: Any) -> None:
    clock = FakeClock()
    limiter = make(clock)
    limiter.report(Permit(0), "rate_limited", retry_after=0.02)
    got_in = anyio.Event()

    async def enter() -> None:
        async with limiter.slot():
            got_in.set()

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
        await anyio.sleep(0.05)
        assert not got_in.is_set()  # The limiter's clock has not moved.
        clock.advance(1.0)
        with anyio.fail_after(5):
            await got_in.wait()


@pytest.mark.parametrize("limit", [1, 2])
async def test_waiting_is_in_order_and_bounded(limit: int) -> None:
    limiter = FixedLimiter(limit)
    order: list[int] = []
    inside = most = 0

    async def call(number: int) -> None:
        nonlocal inside, most
        async with limiter.slot() as permit:
            order.append(number)
            inside += 1
            most = max(most, inside)
            await anyio.sleep(0.001)
            inside -= 1
            limiter.report(permit, "answered")

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(call, number)
            await anyio.wait_all_tasks_blocked()
    assert most == limit
    assert limit > 1 or order == sorted(order)


@pytest.mark.parametrize("retry_after", [None, 0.01])
async def test_a_fixed_limit_stays_as_it_is_after_refusals(retry_after: float | None) -> None:
    clock = FakeClock()
    limiter = FixedLimiter(4, clock=clock)
    for _ in range(3):
        limiter.report(Permit(0), "rate_limited", retry_after=retry_after)
    clock.advance(1.0)
    inside = 0
    full = anyio.Event()

    async def enter() -> None:
        nonlocal inside
        async with limiter.slot():
            inside += 1
            if inside == 4:
                full.set()
            await full.wait()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(enter)


async def test_a_waiter_that_is_cancelled_leaves_no_hole() -> None:
    limiter = AdaptiveLimiter(initial=1, largest=1)
    async with limiter.slot():
        for _ in range(3):
            with anyio.move_on_after(0.005):
                async with limiter.slot():
                    raise AssertionError("it is full")
    with anyio.fail_after(5):
        await take(limiter)
    assert limiter.in_flight == 0


async def test_one_that_is_let_in_and_cancelled_at_once_gives_its_place_back() -> None:
    clock = FakeClock()
    limiter = AdaptiveLimiter(initial=1, largest=1, clock=clock)

    async def wait_in_vain() -> None:
        with anyio.move_on_after(0.05):
            async with limiter.slot():
                raise AssertionError("there is a pause")

    async with anyio.create_task_group() as group, limiter.slot() as permit:
        group.start_soon(wait_in_vain)
        await anyio.wait_all_tasks_blocked()
        limiter.report(permit, "rate_limited", retry_after=60)
    assert limiter.in_flight == 0
    clock.advance(100)
    with anyio.fail_after(5):
        await take(limiter)


def test_one_limiter_serves_several_event_loops() -> None:
    limiter = FixedLimiter(3)
    inside = most = done = 0
    lock = threading.Lock()

    async def call() -> None:
        nonlocal inside, most, done
        async with limiter.slot() as permit:
            with lock:
                inside += 1
                most = max(most, inside)
            await anyio.sleep(0.001)
            with lock:
                inside -= 1
                done += 1
            limiter.report(permit, "answered")

    async def many() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(call)

    threads = [threading.Thread(target=anyio.run, args=(many,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (done, most <= 3) == (90, True)


def test_waiters_of_an_event_loop_that_is_gone_are_passed_over() -> None:
    limiter = AdaptiveLimiter(initial=1, largest=1)
    loop = asyncio.new_event_loop()
    slot = limiter.slot()
    loop.run_until_complete(slot.__aenter__())
    stuck = loop.create_task(take(limiter))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    async def leave_and_enter() -> None:
        await slot.__aexit__(None, None, None)
        await take(limiter)

    anyio.run(leave_and_enter)
    assert limiter.in_flight == 0
    stuck.get_coro().close()  # type: ignore[union-attr]  # it has one


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["answered", "rate_limited", "failed"]), max_size=200), st.randoms())
def test_the_limit_stays_between_its_bounds(verdicts: list[Any], rng: random.Random) -> None:
    limiter = AdaptiveLimiter(initial=4, smallest=2, largest=16)
    for verdict in verdicts:
        limiter.report(Permit(rng.choice([limiter.episodes, 0])), verdict)
        assert 2 <= limiter.limit <= 16


def test_limiters_are_shared_per_provider_address_and_model() -> None:
    one = shared_limiter("p", "u", "m")
    assert shared_limiter("p", "u", "m") is one
    assert shared_limiter("p", "u", "other") is not one


async def test_no_limit_is_no_limit() -> None:
    limiter = Unlimited()
    async with limiter.slot() as one, limiter.slot():
        limiter.report(one, "rate_limited", retry_after=60)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveLimiter(initial=0),
        lambda: AdaptiveLimiter(decrease=1.5),
        lambda: RetryPolicy(attempts=0),
        lambda: RetryPolicy(base_seconds=-1),
        lambda: Budget(tokens=0),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


async def test_what_may_help_is_tried_again_and_recorded() -> None:
    session = Session()
    adapter = ScriptedAdapter([ModelUnavailableError("a"), RateLimitedError("b"), "ok"], retry=QUICK)
    assert (await adapter.complete(ASK, session=session)).output == "ok"
    assert [event.error for event in session[ModelCallFailed].all()] == [
        "ModelUnavailableError: a",
        "RateLimitedError: b",
    ]


async def test_what_cannot_help_is_not_tried_again() -> None:
    adapter = ScriptedAdapter([InvalidCallError("never"), "ok"], retry=QUICK)
    with pytest.raises(InvalidCallError):
        await adapter.complete(ASK)
    assert len(adapter.calls) == 1


async def test_trying_again_has_an_end() -> None:
    adapter = ScriptedAdapter([ModelUnavailableError("a")], repeat=True, retry=QUICK)
    with pytest.raises(ModelUnavailableError):
        await adapter.complete(ASK)
    assert len(adapter.calls) == 3
    refused = ScriptedAdapter([RateLimitedError("a")], repeat=True, retry=QUICK)
    with pytest.raises(RateLimitedError):
        await refused.complete(ASK)
    assert len(refused.calls) == 5


async def test_with_no_time_left_the_cause_is_the_error_not_a_timeout() -> None:
    adapter = ScriptedAdapter([RateLimitedError("slow down", retry_after=30)], repeat=True, retry=RetryPolicy())

    async def ask(text: str) -> str | None:
        return (await adapter.complete(ASK)).output

    rules = TrialRules((resolve_task(ask),), (Experiment(),), resolve(exact_match), timeout_seconds=25)
    started = time.monotonic()
    result = await run_trial(rules, TrialKey("r", "baseline", "s"), 0, Sample("s", "x", "x"), 0)
    assert time.monotonic() - started < 15
    assert result.outcome == "task_error"
    assert "slow down" in str(result.error)


@given(st.integers(1, 6), st.integers(0, 2**32), st.one_of(st.none(), st.floats(0, 100)))
def test_pauses_are_spread_and_honour_what_the_provider_asked(count: int, seed: int, wanted: float | None) -> None:
    policy = RetryPolicy(attempts=10, base_seconds=0.5, max_seconds=4.0, random=random.Random(seed))
    pause = policy.pause(RateLimitedError("x", retry_after=wanted), 0, count)
    assert pause is not None
    assert (wanted or 0.0) <= pause <= (wanted or 0.0) + min(4.0, 0.5 * 2 ** (count - 1))
    assert NO_RETRY.pause(RateLimitedError("x"), 0, 1) is None
    assert policy.pause(InvalidCallError("x"), 1, 0) is None


def within(trial: TrialContext) -> Any:
    return _current.set(trial)


async def test_a_trials_budget_counts_what_its_session_holds() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True, usage=TokenUsage(30, 20), trial_budget=Budget(tokens=100))
    session, other = Session(), Session()
    for _ in range(2):
        await adapter.complete(ASK, session=session)
    with pytest.raises(BudgetExceededError, match=r"trial's budget of 100 tokens is used up \(100 so far\)"):
        await adapter.complete(ASK, session=session)
    await adapter.complete(ASK, session=session, actor="judge")  # The judge has its own.
    await adapter.complete(ASK, session=other)
    await adapter.complete(ASK)
    assert len(adapter.calls) == 5


async def test_a_runs_budget_counts_over_all_its_trials() -> None:
    usage = TokenUsage(1, 1, 0, 0.25)
    adapter = ScriptedAdapter(["ok"], repeat=True, usage=usage, run_budget=Budget(cost_usd=0.5, requests=10))

    async def call(run_id: str, sample: str) -> None:
        context = TrialContext(TrialKey(run_id, "baseline", sample), Sample(sample, 1), Experiment(), Session())
        token = _current.set(context)
        try:
            await adapter.complete(ASK)
        finally:
            _current.reset(token)

    await call("one", "a")
    await call("one", "b")
    with pytest.raises(BudgetExceededError, match=r"run's budget of 0.5 dollars"):
        await call("one", "c")
    await call("two", "a")


@pytest.mark.parametrize("usage", [None, TokenUsage(30, 20)])
async def test_a_budget_of_dollars_says_once_that_it_cannot_count_calls_of_unknown_cost(
    usage: TokenUsage | None, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True, usage=usage, run_budget=Budget(cost_usd=0.5))
    for _ in range(3):
        await adapter.complete(ASK)
    assert (
        len([record for record in caplog.records if "so they do not count towards its budget" in record.message]) == 1
    )


async def test_a_strict_budget_of_dollars_refuses_calls_after_one_of_unknown_cost() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True, usage=TokenUsage(3, 2), trial_budget=Budget(cost_usd=1, strict=True))
    await adapter.complete(ASK)
    with pytest.raises(BudgetExceededError, match=r"cost of calls to .* is not known"):
        await adapter.complete(ASK)
    assert len(adapter.calls) == 1


async def test_requests_are_a_budget() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True, run_budget=Budget(requests=1))
    await adapter.complete(ASK)
    with pytest.raises(BudgetExceededError, match="1 requests"):
        await adapter.complete(ASK)


def test_only_the_latest_runs_are_kept_in_mind() -> None:
    spending = Spending()
    for number in range(300):
        spending.add(str(number), None)
    assert spending.of("0") == (TokenUsage(), 0)
    assert spending.of("299") == (TokenUsage(), 1)
