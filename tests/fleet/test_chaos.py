"""All processes and servers of a fleet are killed; no trial is lost. Minutes; `scripts/check --all` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.chaos import Engine, Plan, run_chaos


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.proves("R60", "R61", "R79", "R82")
@pytest.mark.parametrize(("queue", "trials"), [("redis", 5_000), ("postgresql", 4_000)])
def test_every_trial_is_stored_exactly_once_whatever_is_killed(
    queue: Engine, trials: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(trials, queue, kill_every_seconds=2.0)  # `benchmarks/fleet_soak.py` does the like for an hour.
    outcome = run_chaos(tmp_path, plan)
    extra = outcome.executions - plan.trials
    with capsys.disabled():
        print(
            f"\nchaos: {plan.trials} trials in {outcome.seconds:.0f} s; killed: {outcome.worker_kills} workers, "
            f"{outcome.client_kills} clients; restarted: {queue} {outcome.queue_restarts} times, the store "
            f"{outcome.store_restarts} times; extra executions: {extra} ({extra / plan.trials:.2%}), "
            f"requests sent again: {outcome.resent}"
        )
    assert outcome.status == "finished"
    assert (outcome.runs, outcome.stored, outcome.missing) == (1, plan.trials, 0)
    assert outcome.outcomes == {"scored": plan.trials}
    assert outcome.dead_letters == 0
    assert outcome.queue_restarts == outcome.client_kills == 2
    assert outcome.store_restarts == 1
    assert outcome.worker_kills >= 10
    assert 0 <= extra < plan.trials / 4
