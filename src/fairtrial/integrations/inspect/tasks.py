"""An Inspect task as a suite: durable, resumable, on a fleet, and with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import PromptExecuted, TokenUsage, ToolInvoked
from fairtrial.data.session.trajectory import ChatMessage, ToolCall
from fairtrial.errors import ConfigurationError
from fairtrial.integrations.importers.inspect_log import number_of
from fairtrial.integrations.importers.records import experiment_name, suite_name
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.suites.suite import EvalSuite
from fairtrial.trials.config import EvalConfig, Experiment
from fairtrial.trials.context import TrialContext

if TYPE_CHECKING:
    from fairtrial.integrations.inspect.shim import Execution


def suite(
    task: Any, *, model: Any, name: str | None = None, score: str | None = None, config: EvalConfig | None = None
) -> EvalSuite[Any, Any, Any]:
    """Return an Inspect task as a suite.

    Dataset, setup, solvers, tools, scorers and cleanup are Inspect's. Running, storing, resuming and reporting
    are Fairtrial's. Scorers run inside the trial, where a sandbox still exists.

    Args:
        task: A `Task` of Inspect, or a function that returns one.
        model: A model of Inspect or its name; a mapping of names to models makes an experiment of each.
        name: The name of the suite; by default that of the task.
        score: The scorer whose value is the value of a trial, as "scorer" or "scorer.part"; by default the first one.
        config: Settings of the run. By default, the epochs of the task are its repeats.

    Raises:
        ConfigurationError: the task uses features that need Inspect's own runner; it names them.
        MissingExtraError: Inspect is not installed.
    """
    from fairtrial.integrations.inspect.shim import TaskRunner, unsupported_features

    if not hasattr(task, "dataset"):
        task = task()
    if features := unsupported_features(task):
        raise ConfigurationError(
            f"the task {task.name!r} uses what only Inspect's own runner supports: {', '.join(features)}\n"
            "remove it from the task, or run it with `inspect eval` and import the log: fairtrial import LOG.eval"
        )
    if not task.scorer:
        raise ConfigurationError(f"the task {task.name!r} must have a scorer (it has none)")
    models: Mapping[str, Any] = model if isinstance(model, Mapping) else {experiment_name(str(model)): model}
    dataset = _dataset(task)
    runner = TaskRunner(task, models)

    async def inspect_task(_: Any, ctx: TrialContext) -> dict[str, Any]:
        execution = await runner.execute(ctx.sample.id, ctx.key.repeat + 1, ctx.key.experiment)
        _record(execution, ctx)
        return {
            "completion": execution.completion,
            "scores": execution.scores,
            "scorer_error": execution.scorer_error,
        }

    return EvalSuite(
        name or suite_name(task.name.rpartition("/")[2]),
        dataset,
        inspect_task,
        _evaluator(score),
        experiments=[Experiment(key, {"model": str(entry)}) for key, entry in models.items()],
        config=config or EvalConfig(repeats=task.epochs or 1),
    )


def _dataset(task: Any) -> Dataset[Any, Any]:
    samples = []
    for place, sample in enumerate(task.dataset, 1):
        if sample.id is None:
            sample.id = place  # As Inspect numbers them.
        given = sample.input
        if not isinstance(given, str):
            given = [message.model_dump(mode="json", exclude_none=True, exclude={"id"}) for message in given]
        if sample.choices:
            given = {"input": given, "choices": list(sample.choices)}
        samples.append(Sample(str(sample.id), given, sample.target, _json(sample.metadata or {})))
    return Dataset(samples, name=task.dataset.name or suite_name(task.name))


def _json(value: Any) -> Any:
    """Return metadata as JSON; what JSON does not have becomes text."""
    import json

    return json.loads(json.dumps(value, default=str))


def _record(execution: Execution, ctx: TrialContext) -> None:
    """Record messages, model calls and tool calls in the session."""
    for event in execution.events:
        if event.event == "model" and event.output.usage is not None:
            usage = event.output.usage
            cached, written = usage.input_tokens_cache_read or 0, usage.input_tokens_cache_write or 0
            tokens = TokenUsage(
                usage.input_tokens + cached + written, usage.output_tokens, cached,
                reasoning_tokens=usage.reasoning_tokens or 0, cache_write_tokens=written,
            )  # fmt: skip
            choices = event.output.choices
            ctx.session.record(
                PromptExecuted(
                    adapter="inspect", model=event.model, usage=tokens,
                    finish_reason=choices[0].stop_reason if choices else None, cached=event.cache == "read",
                )
            )  # fmt: skip
        elif event.event == "tool":
            error = None if event.error is None else event.error.message
            result = event.result if isinstance(event.result, str | int | float | bool) else str(event.result)
            ctx.session.record(
                ToolInvoked(
                    event.function, _json(event.arguments), result, error is None, error, adapter="inspect",
                    call_id=event.id,
                )
            )  # fmt: skip
    for message in execution.messages:
        requested = tuple(
            ToolCall(call.function, _json(call.arguments), call.id)
            for call in getattr(message, "tool_calls", None) or ()
        )
        answered = getattr(message, "tool_call_id", None) or ""
        ctx.session.record(ChatMessage(message.role, message.text, requested, answered))


def _evaluator(wanted: str | None) -> Callable[[Any, Any], Score]:
    def inspect_scores(output: Any, expected: Any) -> Score:
        """Score a trial by what the scorers of the task said."""
        if output["scorer_error"]:
            raise ValueError(output["scorer_error"])
        metrics: list[Metric] = []
        reasons: dict[str, str] = {}
        unscored: list[str] = []
        for scorer, found in output["scores"].items():
            value = found["value"]
            parts = {f"{scorer}.{part}": number for part, number in value.items()} if isinstance(value, dict) else None
            for name, part in (parts or {scorer: value}).items():
                number = number_of(part)
                if number is None:
                    unscored.append(name)
                    continue
                judged = isinstance(part, str | bool)  # Letters and truth values are verdicts, numbers may not be.
                reasons[name] = (found.get("explanation") or "")[:4000]
                metrics.append(Metric(name, number, passed=number >= 0.5 if judged else None, reason=reasons[name]))
        names = [*(metric.name for metric in metrics), *unscored]
        decisive = wanted or next(iter(names), None)
        main = next((metric for metric in metrics if metric.name == decisive), None)
        if main is None:
            raise ValueError(f"no score of {decisive or 'any scorer'} (scores: {', '.join(names) or 'none'})")
        if not 0.0 <= main.value <= 1.0:
            raise ValueError(
                f"the score of {main.name} must be from 0 to 1 to be the value of a trial (got {main.value:g})\n"
                "name another scorer: suite(task, score=...)"
            )
        decided = replace(main, passed=main.value >= 0.5, higher_is_better=True, bounds=SHARE)
        kept = [decided if metric is main else metric for metric in metrics]
        return Score(main.value, None, reasons[main.name], kept)

    return inspect_scores
