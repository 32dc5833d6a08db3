"""Attributes that LangSmith and Langfuse need in addition to the GenAI conventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairtrial.errors import ConfigurationError

if TYPE_CHECKING:
    from fairtrial.trials.result import EvalResult

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
