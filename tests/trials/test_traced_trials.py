"""Trials whose application sends spans: what is waited for, added to the session, and closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from fairtrial import EvalResult, Session, SessionView, ToolInvoked, TrialContext, TrialKey, exact_match
from fairtrial.data.session import restore_session
from fairtrial.data.session.events import TraceIncomplete
from fairtrial.trials.context import CollectedTrace, traceparent_of
from tests.trials.build import KEY, answer, rules, trial


def spans(name: str, problem: str | None = None) -> CollectedTrace:
    session = Session()
    session.record(ToolInvoked(name))
    return CollectedTrace(session.everything().envelopes, 3, problem)


class Source:
    """A source of traces that notes what it is asked for."""

    endpoint = "http://127.0.0.1:4318"

    def __init__(self, *, problem: str | None = None, stuck: bool = False) -> None:
        self.steps: list[Any] = []
        self._problem, self._stuck = problem, stuck
        self.wait_seconds = -9.95 if stuck else 5.0  # With the source's own time to end, 50 ms.

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def expect(self, key: TrialKey, attempt: int) -> Source:
        self.steps.append((key, attempt))
        return self

    async def wait(self) -> CollectedTrace:
        self.steps.append("wait")
        if self._stuck:
            await anyio.sleep_forever()
        return spans("waited", self._problem)

    def collected(self) -> CollectedTrace:
        self.steps.append("collected")
        return spans("arrived", self._problem)

    def close(self) -> None:
        self.steps.append("close")


def uses_tools(output: str, expected: str, session: SessionView) -> bool:
    return [event.name for event in session[ToolInvoked].all()] == ["waited"]


def recorded(result: EvalResult) -> tuple[list[str], list[TraceIncomplete]]:
    assert result.snapshot is not None
    session = restore_session(result.snapshot)
    return [event.name for event in session[ToolInvoked].all()], list(session[TraceIncomplete].all())


async def test_the_spans_of_an_attempt_are_awaited_before_it_is_scored_and_then_forgotten() -> None:
    source = Source()
    result = await trial(answer, uses_tools, traces=source)
    assert (result.passed, recorded(result)) == (True, (["waited"], []))
    assert source.steps == [(KEY, 1), "wait", "close"]


async def test_a_failed_task_keeps_the_spans_that_have_arrived_and_waits_for_none() -> None:
    async def broken(given: str) -> str:
        raise ValueError("broken")

    source = Source(problem="no root span")
    result = await trial(broken, traces=source)
    assert (result.outcome, recorded(result)) == ("task_error", (["arrived"], []))
    assert "trace_incomplete" not in result.metadata
    assert source.steps == [(KEY, 1), "collected", "close"]


async def test_an_incomplete_trace_is_an_error_only_if_the_evaluator_looks_at_the_session() -> None:
    result = await trial(answer, uses_tools, traces=Source(problem="no root span"))
    assert (result.outcome, result.stage) == ("scorer_error", "score")
    assert result.error == "the application's trace is incomplete: no root span"
    assert result.metadata["trace_incomplete"] is True
    assert recorded(result) == (["waited"], [TraceIncomplete("no root span", 3)])
    plain = await trial(answer, exact_match, traces=Source(problem="no root span"))
    assert (plain.passed, "trace_incomplete" in plain.metadata) == (True, False)


async def test_a_source_that_does_not_end_its_wait_is_left_with_what_has_arrived() -> None:
    source = Source(problem="too slow", stuck=True)
    result = await trial(answer, uses_tools, traces=source)
    assert result.error == "the application's trace is incomplete: too slow"
    assert recorded(result)[0] == ["arrived"]
    assert source.steps == [(KEY, 1), "wait", "collected", "close"]


@pytest.mark.parametrize("traced", [False, True])
async def test_a_task_can_pass_its_trace_to_the_application(traced: bool) -> None:
    seen: list[TrialContext] = []

    async def look(given: str, ctx: TrialContext) -> str:
        seen.append(ctx)
        return "a"

    await trial(look, traces=Source() if traced else None)
    parent = traceparent_of(KEY, 1)
    assert (seen[0].traceparent, seen[0].trace_headers) == (parent, {"traceparent": parent})
    sending = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": Source.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_BLRP_SCHEDULE_DELAY": "100",
    }
    assert seen[0].trace_environment == {"TRACEPARENT": parent, **(sending if traced else {})}
    assert seen[0].trace_endpoint == (Source.endpoint if traced else "")


def test_the_longest_duration_of_a_trial_allows_for_every_attempt_and_for_spans() -> None:
    once = rules(answer, timeout_seconds=5.0, close_seconds=0.25)
    assert (once.grace_seconds, once.longest_seconds) == (1.0, 5.25 + 5.0 + 1.0)
    thrice = rules(answer, timeout_seconds=5.0, close_seconds=2.0, max_retries=2)
    assert (thrice.grace_seconds, thrice.longest_seconds) == (2.0, 3 * 7.0 + 2 * 60.0 + 5.0 + 2.0)
    assert rules(answer, traces=Source()).longest_seconds == rules(answer).longest_seconds + 60.0
