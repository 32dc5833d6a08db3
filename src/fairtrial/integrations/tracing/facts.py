"""What every export reads of finished trials: their evaluations, the types of their errors, their outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fairtrial.base.codec import dumps

if TYPE_CHECKING:
    from fairtrial.data.sample import Sample
    from fairtrial.store.protocol import RunRecord, RunStore
    from fairtrial.trials.result import EvalResult

FAILED_OUTCOMES = ("task_error", "timeout", "dead_letter")
"""The outcomes that are errors of the task, or of its execution."""

_TYPE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(?=\s*(?::|\Z))")


class EvaluationFact(NamedTuple):
    """A named number that an evaluator gave, with its verdict, if it has one."""

    name: str
    value: float
    passed: bool | None
    reason: str


def trials_with_samples(
    store: RunStore, run: RunRecord, *, content: bool, experiment: str | None = None, snapshots: bool = False
) -> Iterator[tuple[EvalResult, Sample[Any, Any] | None]]:
    """Yield the executed trials of a stored run in the order of the plan; with their samples if content is wanted."""
    place, sample = -1, None
    for result in store.results(run.run_id, experiment=experiment, outputs=content, snapshots=snapshots):
        if result.outcome == "not_run":
            continue
        ordinal = run.split(result.ordinal)[0]
        if content and ordinal != place:
            place, sample = ordinal, store.sample(run.run_id, ordinal)
        yield result, sample


def evaluations_of(result: EvalResult, evaluator: str) -> list[EvaluationFact]:
    """Return the score of a trial and its metrics; nothing if it was not scored."""
    score = result.score
    if score is None:
        return []
    whole = EvaluationFact(score.name or evaluator or "score", float(score.value), score.passed, score.reason)
    return [whole, *(EvaluationFact(each.name, float(each.value), each.passed, each.reason) for each in score.metrics)]


def error_type(error: str, otherwise: str) -> str:
    """Return the type of an error from its text, `ValueError: too hard`; a message alone is content."""
    found = _TYPE_NAME.match(error)
    return found[0] if found is not None and ":" in error else otherwise


def output_text(result: EvalResult) -> str | None:
    """Return the output as JSON text; None if the trial has none."""
    if result.output_json is None and result.outcome in ("scored", "scorer_error"):
        return dumps(result.output)
    return result.output_json


def utf8(text: str) -> str:
    """Return text that UTF-8 can encode: lone surrogates become question marks."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")
