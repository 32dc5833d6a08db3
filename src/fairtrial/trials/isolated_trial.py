"""Executes a whole trial in a child process, for trials that may crash their process."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import fields
from typing import Any, get_type_hints

import anyio

from fairtrial.base.codec import from_json
from fairtrial.base.isolation.runner import START_SECONDS
from fairtrial.data.sample import Sample
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import TrialRules, run_trial


async def run_trial_in_child(
    rules: TrialRules, key: TrialKey, ordinal: int, sample: Sample[Any, Any], experiment: int, *, attempt: int = 1
) -> EvalResult:
    """Execute and score one trial in a child process.

    Raises:
        ChildDiedError: the trial crashed its process.
        NotSendableError: the task, the evaluator or their dependencies cannot be sent to a child process.
        TimeoutError: the child did not answer within the time limit of all attempts together.
    """
    trial = (rules, key, ordinal, sample, experiment, attempt)
    with anyio.fail_after(START_SECONDS + rules.longest_seconds):
        told: Any = await rules.isolated.run(_run, *trial, kind=object, what="a suspected trial")
    return EvalResult(**{name: from_json(kind, told[name]) for name, kind in _result_types().items()})


def _run(
    rules: TrialRules, key: TrialKey, ordinal: int, sample: Sample[Any, Any], experiment: int, attempt: int
) -> dict[str, Any]:
    """Run the trial in the child process, with its own threads and child processes."""
    try:
        result = asyncio.run(run_trial(rules, key, ordinal, sample, experiment, attempt=attempt))
    finally:
        rules.close()
    return {name: getattr(result, name) for name in _result_types()}


@functools.cache
def _result_types() -> dict[str, Any]:
    hints = get_type_hints(EvalResult) | {"output": Any}
    return {field.name: hints[field.name] for field in fields(EvalResult) if field.name != "source"}
