"""R116: people test their own evaluators with plain calls and these fakes."""

from __future__ import annotations

import pytest

from fairtrial import Score, SessionView, ToolInvoked
from fairtrial.base.backoff import SYSTEM_CLOCK
from fairtrial.testing import FakeClock, session_of


def careful(output: str, expected: str, session: SessionView) -> Score:
    looked = any(call.name == "lookup" for call in session[ToolInvoked].all())
    return Score(1.0 if looked and output == expected else 0.0)


@pytest.mark.proves("R16", "R116")
def test_an_evaluator_is_tested_with_a_bare_call_and_a_made_up_session() -> None:
    assert careful("a", "a", session_of(ToolInvoked("lookup"))).passed
    assert not careful("a", "a", session_of()).passed
    assert session_of(ToolInvoked("x"), tags={"run": "r"}).tags == {"run": "r"}


@pytest.mark.proves("R116")
def test_a_fake_clock_moves_when_it_is_told_to() -> None:
    clock = FakeClock(50.0)
    assert (clock.time(), clock.monotonic()) == (50.0, 0.0)
    clock.advance(1.5)
    assert (clock.time(), clock.monotonic()) == (51.5, 1.5)


def test_the_systems_clock_runs_forward() -> None:
    before = SYSTEM_CLOCK.monotonic()
    assert SYSTEM_CLOCK.monotonic() >= before
    assert SYSTEM_CLOCK.time() > 1_700_000_000
