"""All faults of the model server, with the adapters and in whole trials.

By command, with FAIRTRIAL_FAULT_TRIALS=500, the runs are as long as the acceptance asks for; here they are shorter.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairtrial import ChatMessage, EvalResult, Experiment, PromptExecuted, Sample, Session, TrialKey, exact_match
from fairtrial.errors import (
    ContextLengthError,
    MalformedReplyError,
    ModelAuthError,
    ModelError,
    ModelRefusedError,
    ModelUnavailableError,
    RateLimitedError,
)
from fairtrial.integrations.model_server import (
    ConnectionReset,
    ContentFiltered,
    ContextTooLong,
    EmptyBody,
    Fault,
    FaultRule,
    FixedLatency,
    HalfSent,
    Hang,
    MalformedJson,
    ModelServer,
    NotAuthorised,
    RateLimited,
    Refused,
    ServerFailed,
    Slow,
    StreamFailed,
    WrongShape,
)
from fairtrial.models.clients import retry_after
from fairtrial.models.limiter import NO_RETRY, AdaptiveLimiter, RetryPolicy
from fairtrial.models.sdk import SdkAdapter
from fairtrial.scoring.evaluator import resolve
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task

type MakeAdapter = Callable[..., SdkAdapter]

TRIALS = int(os.environ.get("FAIRTRIAL_FAULT_TRIALS", "24"))
QUICK = RetryPolicy(attempts=3, rate_limited_attempts=12, base_seconds=0.01, max_seconds=0.05)

# The fault, the error it means, and whether trying again can help.
FAULTS: list[tuple[Fault, type[ModelError] | None]] = [
    (RateLimited(), RateLimitedError),
    (RateLimited(0.02), RateLimitedError),
    (RateLimited(0.02, "milliseconds"), RateLimitedError),
    (RateLimited(0.5, "date"), RateLimitedError),
    (ServerFailed(500), ModelUnavailableError),
    (ServerFailed(503, 0.01), ModelUnavailableError),
    (ServerFailed(529), ModelUnavailableError),
    (NotAuthorised(401), ModelAuthError),
    (NotAuthorised(403), ModelAuthError),
    (ContextTooLong(), ContextLengthError),
    (Hang(), ModelUnavailableError),
    (ConnectionReset(), ModelUnavailableError),
    (HalfSent(0.5), ModelUnavailableError),
    (HalfSent(0.0), ModelUnavailableError),
    (MalformedJson(), MalformedReplyError),
    (WrongShape(), MalformedReplyError),
    (WrongShape({"choices": None, "content": None}), MalformedReplyError),
    (WrongShape({"choices": [], "content": [{}]}), MalformedReplyError),
    (WrongShape({"choices": [{"message": None}], "content": [{"type": "text", "text": 5}]}), MalformedReplyError),
    (WrongShape({"choices": [{"message": {}}], "content": "text"}), MalformedReplyError),
    (WrongShape({"error": {"message": "oops"}}), MalformedReplyError),
    (WrongShape([1]), MalformedReplyError),
    (WrongShape("text"), MalformedReplyError),
    (WrongShape(None), MalformedReplyError),
    (EmptyBody(), MalformedReplyError),
    (ContentFiltered(), ModelRefusedError),
    (Refused("I would rather not."), ModelRefusedError),
    (StreamFailed(), ModelUnavailableError),
    (Slow(FixedLatency(0.02)), None),
]
IDS = [f"{fault.kind}-{number}" for number, (fault, _) in enumerate(FAULTS)]
EVERY_KIND = {fault.kind for fault, _ in FAULTS}


def ask(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


def test_no_fault_of_the_server_is_left_out() -> None:
    import typing

    known = {typing.get_type_hints(kind)["kind"].__args__[0] for kind in typing.get_args(Fault.__value__)[0].__args__}
    # What providers refuse to reasoning models is tried in test_reasoning.py, token ids in tests/rl, and what only
    # some providers refuse in test_odd_providers.py.
    reasoning = {"tools_need_responses", "reasoning_not_returned", "temperature_refused", "cut_off"}
    by_provider = {"stream_options_refused", "encrypted_refused"}
    # A lost reply matters where a request must not be sent twice: to batches (tests/models/batches).
    assert known == EVERY_KIND | reasoning | by_provider | {"tokens_damaged", "reply_lost"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=IDS)
async def test_every_fault_has_its_place_in_the_tree(
    adapter_for: MakeAdapter, fault: Fault, expected: type[ModelError] | None, stream: bool
) -> None:
    session = Session()
    with ModelServer("ok", faults=fault) as server:
        adapter = adapter_for(
            server, retry=NO_RETRY, stream=stream, timeout_seconds=0.3 if fault.kind == "hang" else 30
        )
        with anyio.fail_after(60):
            if expected is None:
                assert (await adapter.complete(ask("x"), session=session)).output == "ok"
                return
            with pytest.raises(ModelError) as caught:
                await adapter.complete(ask("x"), session=session)
        assert server.stats().requests == 1
    if stream and fault.kind in ("wrong_shape", "malformed_json", "empty_body", "half_sent"):
        # In a stream these are all ways not to finish it.
        assert isinstance(caught.value, MalformedReplyError | ModelUnavailableError)
    else:
        assert type(caught.value) is expected
    assert "test-model" in str(caught.value)
    if isinstance(fault, RateLimited):
        assert (caught.value.retry_after is None) == (fault.retry_after is None)
        if fault.form != "date" and fault.retry_after is not None:
            assert caught.value.retry_after == pytest.approx(fault.retry_after)
    # A refusal is an answer, and requests that may have been answered are counted too.
    refused = isinstance(caught.value, ModelRefusedError)
    assert len(session[PromptExecuted].all()) == (1 if refused or caught.value.sent else 0)


async def run_trials(
    adapter: SdkAdapter, count: int, *, concurrency: int = 12, timeout_seconds: float = 60.0
) -> list[EvalResult]:
    async def answer(question: str) -> str:
        return (await adapter.complete(ask(question))).output or ""

    rules = TrialRules((resolve_task(answer),), (Experiment(),), resolve(exact_match), timeout_seconds=timeout_seconds)
    results: list[EvalResult] = []
    ordinals = iter(range(count))

    async def work() -> None:
        for ordinal in ordinals:
            sample = Sample(f"s{ordinal}", f"question {ordinal}", f"question {ordinal}")
            results.append(await run_trial(rules, TrialKey("r", "baseline", sample.id), ordinal, sample, 0))

    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(work)
    return results


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=IDS)
async def test_a_run_with_any_fault_ends_with_the_right_outcomes(
    adapter_for: MakeAdapter, fault: Fault, expected: type[ModelError] | None
) -> None:
    """A third of the questions meet the fault at their first attempt; what can be mended is."""
    faults = FaultRule(fault, attempts=(1,), when=r"[147]$")
    with ModelServer(faults=faults) as server:
        adapter = adapter_for(
            server, retry=QUICK, limiter=AdaptiveLimiter(), timeout_seconds=1.5 if fault.kind == "hang" else 30
        )
        with anyio.fail_after(120 + TRIALS):
            results = await run_trials(adapter, TRIALS)
        stats = server.stats()
    met = sum(ordinal % 10 in (1, 4, 7) for ordinal in range(TRIALS))
    outcomes = Counter(result.outcome for result in results)
    assert stats.in_flight == 0
    assert len(results) == TRIALS
    if expected is None or expected.retryable:
        assert outcomes == {"scored": TRIALS}
        assert all(result.passed for result in results)
        assert stats.requests == TRIALS + (0 if expected is None else met)
    else:
        assert outcomes == {"scored": TRIALS - met, "task_error": met}
        errors = {str(result.error).partition(":")[0] for result in results if result.error}
        assert errors == {f"fairtrial.errors.{expected.__name__}"}
        assert stats.requests == TRIALS


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=IDS)
async def test_a_run_whose_fault_never_ends_fails_and_does_not_hang(
    adapter_for: MakeAdapter, fault: Fault, expected: type[ModelError] | None
) -> None:
    with ModelServer(faults=fault) as server:
        adapter = adapter_for(
            server,
            retry=RetryPolicy(attempts=2, rate_limited_attempts=2, base_seconds=0.01),
            limiter=AdaptiveLimiter(),
            timeout_seconds=0.2 if fault.kind == "hang" else 30,
        )
        with anyio.fail_after(60):
            results = await run_trials(adapter, 6)
    wanted = {"scored": 6} if expected is None else {"task_error": 6}
    assert Counter(result.outcome for result in results) == wanted


async def test_a_hanging_model_ends_with_the_trials_time(adapter_for: MakeAdapter) -> None:
    with ModelServer(faults=Hang()) as server:
        started = time.monotonic()
        results = await run_trials(adapter_for(server), 12, timeout_seconds=0.3)
        assert time.monotonic() - started < 20
        with anyio.fail_after(20):
            while server.stats().in_flight:  # noqa: ASYNC110 - the server has no event for it
                await anyio.sleep(0.01)
    assert {result.outcome for result in results} == {"timeout"}


schedules = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([fault for fault, _ in FAULTS if fault.kind not in ("hang",)])),
    max_size=25,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=schedules, provider=st.sampled_from(["openai", "anthropic"]), stream=st.booleans())
def test_whatever_the_schedule_of_faults_every_trial_ends_rightly(
    make_adapter: MakeAdapter, schedule: list[tuple[int, Fault]], provider: str, stream: bool
) -> None:
    rules = [FaultRule(fault, numbers=(number,)) for number, fault in dict(schedule).items()]
    fatal = {kind.__name__ for _, kind in FAULTS if kind is not None and not kind.retryable}

    async def main() -> tuple[list[EvalResult], Any]:
        with ModelServer(faults=rules) as server:
            async with make_adapter(provider, server.base_url, retry=QUICK, stream=stream) as adapter:
                with anyio.fail_after(60):
                    return await run_trials(adapter, 20), server.stats()

    results, stats = anyio.run(main)
    assert stats.in_flight == 0
    assert len(results) == 20
    for result in results:
        if result.outcome == "scored":
            assert result.output == f"question {result.ordinal}"  # Nobody gets another's answer.
        else:
            name = str(result.error).partition(":")[0].rpartition(".")[2]
            # Either it could not be mended, or it failed as often as it may.
            assert result.outcome == "task_error"
            assert name in fatal | {"ModelUnavailableError", "MalformedReplyError", "RateLimitedError"}
    scored = sum(result.outcome == "scored" for result in results)
    assert scored >= 20 - len(rules)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 10.0),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "99999999"}, 3600.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after-ms": "x", "retry-after": "1"}, 1.0),
    ],
)
def test_the_pause_a_provider_asks_for_is_read_in_every_form(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after(headers, now=lambda: 1445412470.0) == expected


async def test_an_exception_that_is_nobodys_is_let_through(adapter_for: MakeAdapter) -> None:
    with ModelServer() as server:
        adapter = adapter_for(server, params={"temperature": object()})
        with pytest.raises(TypeError):
            await adapter.complete(ask("x"))
    filtered = type("Filtered", (Exception,), {"status_code": 400, "body": {"code": "content_filter"}})
    assert isinstance(adapter._classified(filtered()), ModelRefusedError)
    assert isinstance(adapter._classified(ConnectionResetError()), ModelUnavailableError)
    assert isinstance(adapter._classified(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")), MalformedReplyError)
    assert adapter._classified(ZeroDivisionError()) is None
