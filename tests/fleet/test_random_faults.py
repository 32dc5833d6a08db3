"""Runs under random faults: results are right, exit codes are true, and the same command resumes the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.random_faults import FAULTS, FaultPlan, run_with_faults

SEED = 20261115
ONLY_FLEET = tuple(name for name, (kinds, _) in FAULTS.items() if kinds == ("fleet",))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.proves("R60", "R82", "R108")
@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        ("sqlite", tuple(name for name, (kinds, _) in FAULTS.items() if "sqlite" in kinds)),
        ("postgresql", tuple(name for name, (kinds, _) in FAULTS.items() if "postgresql" in kinds)),
        ("fleet", (*ONLY_FLEET, "kill the client", "connections reset", "failover with lost commits")),
    ],
)
def test_a_run_under_every_fault_ends_complete_by_the_same_command(
    tmp_path: Path, kind: str, faults: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = FaultPlan(SEED, 0, trials=300, kind=kind, faults=faults, seconds=0.5, workers=2)
    outcome = run_with_faults(tmp_path, plan)
    with capsys.disabled():
        print(f"\nseed {SEED}: {outcome}")
    assert set(outcome.faults) == set(faults)
    assert outcome.executions >= plan.trials
