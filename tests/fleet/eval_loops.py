"""Rules and tasks for tests of evaluation loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fairtrial import Experiment, exact_match
from fairtrial.scoring.evaluator import resolve
from fairtrial.trials.run_trial import TrialRules
from fairtrial.trials.task import resolve_task


async def echo(input: Any) -> Any:
    return input


def rules(fn: Any = echo, *names: str, **settings: Any) -> TrialRules:
    experiments = tuple(Experiment(name, {"of": name}) for name in names or ("baseline",))
    made = TrialRules(
        tasks=tuple(resolve_task(fn) for _ in experiments), experiments=experiments, scorer=resolve(exact_match)
    )
    return replace(made, **settings)
