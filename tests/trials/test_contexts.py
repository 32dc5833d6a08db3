"""The context of a trial: counts of calls, and the context that a child process builds from its parts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from fairtrial import ChatMessage, Experiment, FairtrialError, PromptExecuted, Sample, Session, ToolInvoked, exact_match
from fairtrial.runs.suspects import run_trial_in_child
from fairtrial.trials.context import TrialContext, TrialKey, call_task_in_child, current_trial, trial_seed
from tests.trials.build import KEY, rules

SAMPLE = Sample("s1", "q", "a")


def context(**changes: Any) -> TrialContext:
    return TrialContext(KEY, SAMPLE, Experiment("terse"), Session(tags={"team": "search"}), **changes)


def test_a_context_has_its_defaults() -> None:
    made = context()
    assert (made.attempt, made.deadline, made.shared, made.trace_endpoint) == (1, float("inf"), None, "")
    assert (made.seed, made.scoring, made.has_resources) == (trial_seed(0, "s1", 0), False, False)


def test_a_seed_depends_on_the_run_the_sample_and_the_repeat() -> None:
    seeds = [trial_seed(*parts) for parts in ((0, "s", 0), (1, "s", 0), (0, "t", 0), (0, "s", 1))]
    assert len(set(seeds)) == 4
    # Known values: a run that is resumed has the seeds that it had.
    assert seeds == [882425626, 3332938771, 4262194297, 2917863843]
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_equal_calls_of_an_attempt_are_numbered() -> None:
    made = context()
    assert [made.count_call(content) for content in ("a", "b", "a", "a", "b")] == [0, 0, 1, 2, 1]


def test_all_threads_of_a_task_share_one_recorder_of_calls() -> None:
    made = context()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(made.application_calls)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert set(found) == {made.application_calls}


class LeftOpen:
    """A stream that the task has not read to its end."""

    def __init__(self, made: TrialContext) -> None:
        self._made = made

    def abandon(self) -> None:
        self._made.application_calls.end(self.abandon)
        self._made.application_calls.answered(PromptExecuted(), ChatMessage("assistant", "a"))


def streams(given: str, ctx: TrialContext) -> str:
    """Leave a stream open."""
    assert current_trial() is ctx
    ctx.application_calls.begin([ChatMessage("user", given)], LeftOpen(ctx).abandon)
    if given == "broken":
        raise ValueError("broken")
    return f"{ctx.seed} {ctx.attempt} {ctx.shared} {ctx.deadline:g} {ctx.session.tags['team']} {ctx.trace_endpoint}"


@pytest.mark.parametrize("shared", [False, True])
def test_a_child_process_has_the_same_context_and_returns_what_was_recorded(shared: bool) -> None:
    made = context(run_seed=7, attempt=3, deadline=5.0, shared="pool", trace_endpoint="http://x")
    output, name, envelopes = call_task_in_child(streams, "q", made.parts(shared=shared), True)
    assert output == f"{made.seed} 3 {'pool' if shared else None} 5 search http://x"
    assert name == ""  # JSON is enough.
    assert [envelope.kind.rpartition(":")[2] for envelope in envelopes] == [
        "ChatMessage",
        "PromptExecuted",
        "ChatMessage",
    ]
    with pytest.raises(FairtrialError, match="no trial is running"):
        current_trial()


def test_an_error_in_a_child_process_carries_what_was_recorded() -> None:
    with pytest.raises(ValueError, match="broken") as raised:
        call_task_in_child(streams, "broken", context().parts(shared=False), True)
    assert len(raised.value.isolated_details) == 3  # type: ignore[attr-defined]
    with pytest.raises(FairtrialError, match="no trial is running"):
        current_trial()


def test_a_task_without_a_context_gets_its_input_only_in_a_child_process() -> None:
    assert call_task_in_child(len, "four", context().parts(shared=False), False)[0] == 4


def test_a_trial_in_a_child_process_gives_the_result_that_it_gives_here() -> None:
    async def talk(given: str, ctx: TrialContext) -> str:
        ctx.session.record(ToolInvoked("search"))
        return "a"

    made = rules(talk, exact_match, timeout_seconds=5000.0)
    key = TrialKey("run", "terse", "s1", 1)
    try:
        result = asyncio.run(run_trial_in_child(made, key, 5, SAMPLE, 1, attempt=3))
    finally:
        made.close()
    assert (result.key, result.ordinal, result.attempt, result.outcome, result.passed) == (key, 5, 3, "scored", True)
    assert (result.output, result.output_json, result.source) == ("a", '"a"', None)
    assert result.metadata["earlier_attempts"] == 2
    assert result.snapshot is not None
    assert result.execution > 0
    assert result.started_at > 0
