"""Faults, latencies and quotas depend on the seed and not on timing."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.integrations.model_server import (
    FaultPlan,
    FaultRule,
    FixedLatency,
    LogNormalLatency,
    ModelServer,
    ParsedMessage,
    ParsedRequest,
    RateLimited,
    ServerFailed,
    UniformLatency,
)
from fairtrial.integrations.model_server.reply import draw
from fairtrial.integrations.model_server.service import TokenBucket


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request(number: int, text: str = "hi", attempt: int = 1) -> ParsedRequest:
    return ParsedRequest(number, "openai", "m", (ParsedMessage("user", text, {}),), {}, digest=text, attempt=attempt)


def faulty(plan: FaultPlan, count: int = 1000) -> list[int]:
    return [number for number in range(1, count + 1) if plan.fault(request(number)) is not None]


def test_the_same_seed_gives_the_same_faults_and_another_seed_others() -> None:
    rules = [FaultRule(RateLimited(), 0.3), FaultRule(ServerFailed(), 0.1)]
    first, again, other = (FaultPlan(rules, seed=seed) for seed in (7, 7, 8))
    assert faulty(first) == faulty(again)
    assert faulty(first) != faulty(other)


def test_a_probability_is_the_share_of_requests() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), 0.3), FaultRule(ServerFailed(), 0.5)], seed=1)
    kinds = Counter(fault.kind for number in range(20_000) if (fault := plan.fault(request(number))))
    # The second rule is asked only where the first has passed, and draws for itself: half of seven tenths.
    assert kinds["rate_limited"] / 20_000 == pytest.approx(0.3, abs=0.02)
    assert kinds["server_failed"] / 20_000 == pytest.approx(0.35, abs=0.02)


def test_the_order_of_asking_does_not_matter() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), 0.5)], seed=3)
    forwards = {number: plan.fault(request(number)) for number in range(100)}
    backwards = {number: plan.fault(request(number)) for number in reversed(range(100))}
    assert forwards == backwards


def test_by_content_the_number_of_the_request_does_not_matter_but_the_attempt_does() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), 0.5, by="content")], seed=3)
    texts = [f"text {index}" for index in range(200)]
    early = [plan.fault(request(index, text)) for index, text in enumerate(texts)]
    late = [plan.fault(request(1000 - index, text)) for index, text in enumerate(texts)]
    retried = [plan.fault(request(index, text, attempt=2)) for index, text in enumerate(texts)]
    assert early == late
    assert early != retried


def test_schedules_name_requests_by_number() -> None:
    assert faulty(FaultPlan([FaultRule(RateLimited(), numbers=(2, 3, 500))])) == [2, 3, 500]
    assert faulty(FaultPlan([FaultRule(RateLimited(), every=250)])) == [250, 500, 750, 1000]
    assert faulty(FaultPlan([FaultRule(RateLimited(), 0.0)])) == []
    assert faulty(FaultPlan([FaultRule(RateLimited(), every=2, numbers=(1, 2, 3))])) == [2]


def test_a_predicate_decides_from_the_request() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), when=lambda asked: asked.number > 998)])
    assert faulty(plan) == [999, 1000]


async def test_two_servers_of_one_seed_fail_the_same_requests_at_any_concurrency() -> None:
    rules = [FaultRule(RateLimited(), 0.2, by="content"), FaultRule(ServerFailed(), 0.2, by="content")]

    async def statuses(concurrency: int, latency: UniformLatency) -> dict[int, int]:
        async with (
            ModelServer(faults=rules, seed=11, latency=latency) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session,
        ):

            async def ask(index: int) -> tuple[int, int]:
                body = {"model": "m", "messages": [{"role": "user", "content": f"question {index}"}]}
                async with session.post(server.base_url + "/v1/chat/completions", json=body) as answer:
                    return index, answer.status

            return dict(await asyncio.gather(*map(ask, range(100))))

    alone = await statuses(1, UniformLatency(0, 0))
    crowded = await statuses(25, UniformLatency(0, 0.01))
    assert alone == crowded
    assert set(alone.values()) == {200, 429, 500}


@given(st.lists(st.one_of(st.integers(), st.text()), min_size=1))
def test_a_draw_is_in_the_unit_interval_and_repeatable(parts: list[int | str]) -> None:
    value = draw(*parts)
    assert 0 <= value < 1
    assert draw(*parts) == value


def test_draws_are_spread_evenly() -> None:
    values = [draw("spread", index) for index in range(10_000)]
    assert statistics.fmean(values) == pytest.approx(0.5, abs=0.02)
    assert statistics.pstdev(values) == pytest.approx((1 / 12) ** 0.5, abs=0.01)


def test_latencies_have_their_distributions() -> None:
    quantiles = [(index + 0.5) / 1000 for index in range(1000)]
    assert {FixedLatency(0.2).at(quantile) for quantile in quantiles} == {0.2}
    uniform = [UniformLatency(1, 3).at(quantile) for quantile in quantiles]
    assert min(uniform) == pytest.approx(1, abs=0.01)
    assert max(uniform) == pytest.approx(3, abs=0.01)
    tailed = [LogNormalLatency(0.1, 1.0, maximum=2.0).at(quantile) for quantile in quantiles]
    assert statistics.median(tailed) == pytest.approx(0.1, rel=0.01)
    # One standard deviation up, a log-normal of sigma 1 is e times its median.
    assert tailed[841] == pytest.approx(0.1 * 2.71828, rel=0.02)
    assert max(tailed) == 2.0
    assert LogNormalLatency(0.1).at(0.0) >= 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_latency_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds"):
        FixedLatency(seconds)


def test_a_uniform_latency_has_its_ends_in_order() -> None:
    with pytest.raises(ValueError, match="low must be at most high"):
        UniformLatency(2, 1)


def test_a_quota_grants_a_burst_and_then_its_rate() -> None:
    now = 0.0
    bucket = TokenBucket(2.0, 3, clock=lambda: now)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now = 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


def test_the_default_burst_of_a_quota_is_that_of_one_second() -> None:
    quick, slow = (TokenBucket(rate, clock=lambda: 0.0) for rate in (5.0, 0.1))
    assert sum(quick.take() for _ in range(20)) == 5
    assert sum(slow.take() for _ in range(20)) == 1


@pytest.mark.parametrize(("rate", "burst"), [(0.0, None), (-1.0, None), (1.0, 0)])
def test_a_quota_that_makes_no_sense_is_refused(rate: float, burst: int | None) -> None:
    with pytest.raises(ValueError):
        TokenBucket(rate, burst)
