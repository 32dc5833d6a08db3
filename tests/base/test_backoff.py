"""Calls that are repeated while a store or a queue is unavailable."""

from __future__ import annotations

import logging

import pytest

from fairtrial.base.backoff import backoff, patience_seconds, retry_while_unavailable, retry_while_unavailable_sync
from fairtrial.base.metrics import WAITING
from fairtrial.errors import ConfigurationError, MailboxConnectionError, MailboxFullError, StoreUnavailableError
from fairtrial.trials.failures import retry_pause

log = logging.getLogger("test")


def test_patience_is_600_seconds_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRTRIAL_PATIENCE_SECONDS", raising=False)
    assert patience_seconds() == 600.0
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "2.5")
    assert patience_seconds() == 2.5


@pytest.mark.parametrize("text", ["long", "-1", "nan", "inf"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", text)
    with pytest.raises(ConfigurationError, match="FAIRTRIAL_PATIENCE_SECONDS must be a number of seconds"):
        patience_seconds()


@pytest.mark.parametrize("enough", [False, True])
@pytest.mark.parametrize("error", [MailboxConnectionError, MailboxFullError, StoreUnavailableError])
async def test_a_call_is_repeated_until_patience_ends_unless_it_is_enough(error: type[Exception], enough: bool) -> None:
    calls = 0

    async def away() -> None:
        nonlocal calls
        calls += 1
        raise error("away")

    with pytest.raises(error):
        await retry_while_unavailable(away, "asking", log, seconds=0.12, enough=lambda: enough)
    assert (calls == 1) is enough


def test_waiting_is_logged_once_and_each_failure_is_told(caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([StoreUnavailableError("away"), StoreUnavailableError("away")])
    told: list[int] = []

    def call() -> int:
        error = next(failures, None)
        if error is not None:
            raise error
        return 3

    assert retry_while_unavailable_sync(call, "asking", log, on_failure=lambda: told.append(1)) == 3
    assert caplog.text.count("asking: away; trying again") == 1
    assert told == [1, 1]


def test_pauses_double_up_to_a_limit_and_half_of_each_is_random() -> None:
    assert [backoff(n, first=1, longest=8, draw=lambda: 1.0) for n in range(1, 6)] == [1, 2, 4, 8, 8]
    assert backoff(1, first=1, longest=8, draw=lambda: 0.0) == 0.5
    assert backoff(10_000, first=1, longest=8, draw=lambda: 1.0) == 8


@pytest.mark.parametrize("failures", [1, 5, 1100])
def test_a_trial_that_failed_a_thousand_times_pauses_at_most_30_seconds(failures: int) -> None:
    longest = {1: 1.0, 5: 16.0, 1100: 30.0}[failures]
    pauses = [retry_pause(failures, None) for _ in range(200)]
    assert longest / 2 < max(pauses) <= longest


def test_a_call_is_counted_while_it_waits_and_no_longer() -> None:
    def waiting() -> tuple[float, float]:
        counts = WAITING.read()
        return counts.get(("store",), 0.0), counts.get(("queue",), 0.0)

    errors = [StoreUnavailableError("away"), MailboxConnectionError("away")]
    before, seen = waiting(), []

    def call() -> int:
        seen.append(waiting())
        if errors:
            raise errors.pop(0)
        return 7

    assert retry_while_unavailable_sync(call, "asking", log) == 7
    assert seen == [before, (before[0] + 1, before[1]), (before[0], before[1] + 1)]
    errors.append(StoreUnavailableError("for good"))
    with pytest.raises(StoreUnavailableError):
        retry_while_unavailable_sync(call, "asking", log, seconds=0)
    assert waiting() == before
