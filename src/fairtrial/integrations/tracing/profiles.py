"""Attributes that LangSmith and Langfuse need in addition to the GenAI conventions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.errors import ConfigurationError

if TYPE_CHECKING:
    from fairtrial.trials.result import EvalResult

type TextAttributes = list[tuple[str, str]]


class Profile:
    """The plain profile: no additional attributes."""

    name = "plain"

    def every_span(self, run_id: str, result: EvalResult) -> TextAttributes:
        """Return the attributes of every span of a trial."""
        return []

    def trial(self, suite: str, result: EvalResult, given: str | None, output: str | None) -> TextAttributes:
        """Return the attributes of the trial's own span; input and output are None without content."""
        return []

    def model_call(self) -> TextAttributes:
        """Return the attributes of a model call."""
        return []

    def tool_call(self) -> TextAttributes:
        """Return the attributes of a tool call."""
        return []


class LangSmithProfile(Profile):
    """LangSmith: the kind of each span, and inputs and outputs under the names that it shows."""

    # `langsmith.trace.id` is left out on purpose: it breaks the relation of parents and children.

    name = "langsmith"

    def trial(self, suite: str, result: EvalResult, given: str | None, output: str | None) -> TextAttributes:
        """Return the kind and name of the trace, its metadata, and input and output."""
        key = result.key
        found = [
            ("langsmith.span.kind", "chain"),
            ("langsmith.trace.name", f"{suite}/{key.experiment}/{key.sample_id}"),
            ("langsmith.metadata.run_id", key.run_id),
            ("langsmith.metadata.experiment", key.experiment),
            ("langsmith.metadata.sample_id", key.sample_id),
            ("langsmith.metadata.outcome", result.outcome),
        ]
        if given is not None:
            found.append(("gen_ai.prompt", given))
        if output is not None:
            found.append(("gen_ai.completion", output))
        return found

    def model_call(self) -> TextAttributes:
        """Return the kind of a model call."""
        return [("langsmith.span.kind", "llm")]

    def tool_call(self) -> TextAttributes:
        """Return the kind of a tool call."""
        return [("langsmith.span.kind", "tool")]


class LangfuseProfile(Profile):
    """Langfuse: a run's experiment as an experiment there, and inputs and outputs under its names."""

    name = "langfuse"

    def every_span(self, run_id: str, result: EvalResult) -> TextAttributes:
        """Return the experiment that a span belongs to."""
        return [
            ("langfuse.experiment.id", f"{run_id}:{result.key.experiment}"),
            ("langfuse.experiment.name", result.key.experiment),
        ]

    def trial(self, suite: str, result: EvalResult, given: str | None, output: str | None) -> TextAttributes:
        """Return the item of the experiment, and input and output."""
        found = [
            ("langfuse.trace.name", f"{suite}/{result.key.experiment}"),
            ("langfuse.experiment.item.id", result.key.sample_id),
        ]
        if given is not None:
            found.append(("langfuse.observation.input", given))
        if output is not None:
            found.append(("langfuse.observation.output", output))
        return found

    def model_call(self) -> TextAttributes:
        """Return the type of a model call."""
        return [("langfuse.observation.type", "generation")]

    def tool_call(self) -> TextAttributes:
        """Return the type of a tool call."""
        return [("langfuse.observation.type", "tool")]


PLAIN = Profile()
PROFILES = {profile.name: profile for profile in (PLAIN, LangSmithProfile(), LangfuseProfile())}


def profile_named(name: str | None) -> Profile:
    """Return a profile by name; None means plain."""
    if name is None:
        return PLAIN
    if name not in PROFILES:
        raise ConfigurationError(f"the trace profile must be one of {', '.join(PROFILES)} (got {name!r})")
    return PROFILES[name]
