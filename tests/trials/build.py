"""Rules and trials for tests."""

from __future__ import annotations

from typing import Any

from fairtrial import EvalResult, Evaluator, Experiment, Sample, TrialKey, exact_match
from fairtrial.scoring import resolve
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task

KEY = TrialKey("run", "baseline", "s1")


def rules(fn: Any, evaluator: Evaluator = exact_match, **changes: Any) -> TrialRules:
    settings: dict[str, Any] = {"timeout_seconds": 5.0, **changes}
    experiments = (Experiment(), Experiment("terse", params={"style": "terse"}))
    return TrialRules(
        tasks=(resolve_task(fn), resolve_task(fn)), experiments=experiments, scorer=resolve(evaluator), **settings
    )


async def trial(
    fn: Any, evaluator: Evaluator = exact_match, *, given: Any = "q", expected: Any = "a", **changes: Any
) -> EvalResult:
    made = rules(fn, evaluator, **changes)
    try:
        return await run_trial(made, KEY, 0, Sample("s1", given, expected), 0)
    finally:
        made.threads.close()


async def answer(given: str) -> str:
    return "a"
