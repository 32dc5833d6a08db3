"""What traces say about trials, and the attributes that other products read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fairtrial.base.codec import dumps
from fairtrial.errors import ConfigurationError

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
    if result.output_json is None and result.outcome in ("scored", "scorer_error", "user_error"):
        return dumps(result.output)
    return result.output_json


def utf8(text: str) -> str:
    """Return text that UTF-8 can encode: lone surrogates become question marks."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")


type TextAttributes = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Profile:
    """The additional attributes of spans; the plain profile has none.

    Attributes:
        name: Its name.
        model_call: The attributes of a model call.
        tool_call: The attributes of a tool call.
        texts: The names of input and output of a trial.
        every_span: Returns the attributes of every span, from the id of the run and the result.
        trial: Returns the attributes of the trial's own span, from the name of the suite and the result.
    """

    name: str
    model_call: TextAttributes = ()
    tool_call: TextAttributes = ()
    texts: Sequence[str] = ()
    every_span: Callable[[str, EvalResult], TextAttributes] = lambda _run_id, _result: ()
    trial: Callable[[str, EvalResult], TextAttributes] = lambda _suite, _result: ()

    def trial_texts(self, *texts: str | None) -> TextAttributes:
        """Return input and output of a trial as attributes; None for what is not sent."""
        return [(name, text) for name, text in zip(self.texts, texts, strict=False) if text is not None]


def _langsmith_trial(suite: str, result: EvalResult) -> TextAttributes:
    # `langsmith.trace.id` is left out on purpose: it breaks the relation of parents and children.
    key = result.key
    return [
        ("langsmith.span.kind", "chain"),
        ("langsmith.trace.name", f"{suite}/{key.experiment}/{key.sample_id}"),
        ("langsmith.metadata.run_id", key.run_id),
        ("langsmith.metadata.experiment", key.experiment),
        ("langsmith.metadata.sample_id", key.sample_id),
        ("langsmith.metadata.outcome", result.outcome),
    ]


def _langfuse_span(run_id: str, result: EvalResult) -> TextAttributes:
    """A run's experiment is an experiment there."""
    name = result.key.experiment
    return [("langfuse.experiment.id", f"{run_id}:{name}"), ("langfuse.experiment.name", name)]


def _langfuse_trial(suite: str, result: EvalResult) -> TextAttributes:
    trace = ("langfuse.trace.name", f"{suite}/{result.key.experiment}")
    return [trace, ("langfuse.experiment.item.id", result.key.sample_id)]


PLAIN = Profile("plain")
_LANGSMITH = Profile(
    "langsmith",
    [("langsmith.span.kind", "llm")],
    [("langsmith.span.kind", "tool")],
    ("gen_ai.prompt", "gen_ai.completion"),
    trial=_langsmith_trial,
)
_LANGFUSE = Profile(
    "langfuse",
    [("langfuse.observation.type", "generation")],
    [("langfuse.observation.type", "tool")],
    ("langfuse.observation.input", "langfuse.observation.output"),
    _langfuse_span,
    _langfuse_trial,
)
PROFILES = {profile.name: profile for profile in (PLAIN, _LANGSMITH, _LANGFUSE)}


def profile_named(name: str | None) -> Profile:
    """Return a profile by name; None means plain."""
    if name is None:
        return PLAIN
    if name not in PROFILES:
        raise ConfigurationError(f"the trace profile must be one of {', '.join(PROFILES)} (got {name!r})")
    return PROFILES[name]
