"""The private modules of Inspect that a sample needs outside Inspect's own runner. Nothing else imports them.

`eval_async` of Inspect refuses a second call in a process, so it cannot execute single trials. `scripts/peers files`
tests this module against the pinned release and, with `--newest`, against the newest.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fairtrial.errors import MissingExtraError

TESTED = "0.3.285"
"""The release of Inspect that this module was written for."""

try:
    import anyio
    import inspect_ai  # noqa: F401 - first, to tell a missing package from one with other modules
    from inspect_ai._eval.context import init_runtime_context, init_task_context
    from inspect_ai._eval.task.generate import task_generate
    from inspect_ai._eval.task.run import init_sample_model_data, resolve_plan
    from inspect_ai._eval.task.sandbox import sandboxenv_context
    from inspect_ai._eval.task.util import sample_messages
    from inspect_ai._util.notgiven import NOT_GIVEN
    from inspect_ai._util.registry import registry_unqualified_name
    from inspect_ai.log._samples import active_sample
    from inspect_ai.log._transcript import Transcript, init_transcript
    from inspect_ai.model import ModelName, get_model
    from inspect_ai.scorer import Target
    from inspect_ai.scorer._score import init_scoring_context
    from inspect_ai.scorer._scorer import unique_scorer_name
    from inspect_ai.solver import TaskState
    from inspect_ai.solver._fork import set_task_generate
    from inspect_ai.solver._task_state import set_sample_state
    from inspect_ai.util._store import init_subtask_store
except ModuleNotFoundError as error:
    if error.name != "inspect_ai":
        error.add_note(f"this version of inspect-ai is not supported; it is known to work with {TESTED}")
        raise
    raise MissingExtraError("running tasks of Inspect", "inspect") from None
except ImportError as error:
    error.add_note(f"this version of inspect-ai is not supported; it is known to work with {TESTED}")
    raise

_UNSUPPORTED = (
    "message_limit", "token_limit", "turn_limit", "time_limit", "working_limit", "cost_limit", "approval", "review",
    "model_roles", "early_stopping", "checkpoint", "on_checkpoint", "on_resume", "sentinel", "score_on_error",
)  # fmt: skip
_SANDBOXES = ("local",)


@dataclass(frozen=True, slots=True)
class Execution:
    """What a sample has when its solver and its scorers have ended."""

    completion: str
    scores: dict[str, dict[str, Any]]  # Scorer -> value, answer and explanation.
    scorer_error: str | None
    messages: Sequence[Any]
    events: Sequence[Any]


def unsupported_features(task: Any) -> list[str]:
    """Return the features of a task that need Inspect's own runner."""
    found = [name for name in _UNSUPPORTED if getattr(task, name, None) not in (None, False)]
    if not hasattr(task.dataset, "__getitem__"):
        found.append("a dataset that makes samples while it runs")
    reducers = getattr(task, "epochs_reducer", None) or []
    names = {_reducer_name(reducer) for reducer in reducers} - {"mean"}
    found += [f"epochs reduced by {name}" for name in sorted(names)]
    kinds = {_sandbox_kind(task.sandbox)}
    if hasattr(task.dataset, "__getitem__"):
        kinds |= {_sandbox_kind(sample.sandbox) for sample in task.dataset}
    found += [f"sandbox {kind}" for kind in sorted(kinds - {None, *_SANDBOXES}, key=str)]
    return found


def _reducer_name(reducer: Any) -> str:
    if isinstance(reducer, str):
        return reducer
    try:
        return str(registry_unqualified_name(reducer))
    except (AttributeError, ValueError):
        return str(getattr(reducer, "__name__", reducer))


def _sandbox_kind(sandbox: Any) -> str | None:
    if sandbox is None or isinstance(sandbox, str):
        return sandbox
    return str(sandbox[0] if isinstance(sandbox, tuple) else sandbox.type)


def _finite(value: Any) -> Any:
    """Return a value of a score without NaN, with which Inspect marks what is unscored."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


class TaskRunner:
    """Executes samples of a task, each in the context of its own trial."""

    def __init__(self, task: Any, models: Mapping[str, Any]) -> None:
        self.task = task
        self.models = models
        self.plan = resolve_plan(task, None)
        self.scorers = list(task.scorer or ())
        self.samples = {str(sample.id): sample for sample in task.dataset}
        self._ready_for: object = None

    def _prepare(self) -> None:
        # The limiters of Inspect belong to an event loop.
        import asyncio

        loop = asyncio.get_running_loop()
        if self._ready_for is not loop:
            init_runtime_context()
            self._ready_for = loop

    async def execute(self, sample_id: str, epoch: int, experiment: str) -> Execution:
        """Run solver and scorers on one sample."""
        self._prepare()
        task, sample, model = self.task, deepcopy(self.samples[sample_id]), get_model(self.models[experiment])
        target = Target(sample.target)
        init_task_context(model, config=task.config)
        state = TaskState(
            model=ModelName(model),
            sample_id=sample.id,
            epoch=epoch,
            input=sample.input,
            target=target,
            choices=sample.choices,
            messages=sample_messages(sample),
            metadata=sample.metadata or {},
        )
        init_sample_model_data()
        set_sample_state(state)
        transcript = Transcript()
        init_transcript(transcript)
        init_subtask_store(state.store)
        init_scoring_context(self.scorers, target)

        async def generate(state: Any, tool_calls: Any = "loop", **settings: Any) -> Any:
            cache = settings.pop("cache", False) or NOT_GIVEN
            return await task_generate(model, state, tool_calls, cache, task.config.merge(settings))

        set_task_generate(generate)
        scores: dict[str, dict[str, Any]] = {}
        problem: str | None = None
        async with self._open(sample, state, transcript):
            try:
                state = await self.plan(state, generate)
                try:
                    await self._score(state, target, scores)
                except Exception as error:  # A scorer's error is not the task's.
                    problem = f"{type(error).__name__}: {error}"
            finally:
                if task.cleanup is not None:
                    await task.cleanup(state)
        return Execution(state.output.completion, scores, problem, state.messages, transcript.events)

    async def _score(self, state: Any, target: Any, scores: dict[str, dict[str, Any]]) -> None:
        for scorer in self.scorers:
            score = await scorer(state, target)
            if score is not None:
                written = score.model_dump(mode="json", include={"value", "answer", "explanation"})
                scores[unique_scorer_name(scorer, list(scores))] = {**written, "value": _finite(score.value)}

    @contextlib.asynccontextmanager
    async def _open(self, sample: Any, state: Any, transcript: Any) -> AsyncIterator[None]:
        """Register the running sample and open its sandbox, if it has one."""
        task = self.task
        failure: Exception | None = None
        async with active_sample(
            task=task.name, log_location="", model=str(state.model), sample=sample, epoch=state.epoch,
            message_limit=None, token_limit=None, cost_limit=None, time_limit=None, working_limit=None,
            fails_on_error=True, transcript=transcript, eval_id="fairtrial", sample_uuid=state.uuid,
        ) as active, anyio.create_task_group() as group:  # fmt: skip
            active.start(group)
            needs_sandbox = task.sandbox is not None or sample.sandbox is not None
            sandbox = sandboxenv_context(task.name, task.sandbox, None, True, sample) if needs_sandbox else None
            try:
                async with sandbox if sandbox is not None else contextlib.nullcontext():
                    yield
            except Exception as error:  # A task group would wrap it.
                failure = error
            group.cancel_scope.cancel()  # What the sample left in the background ends with it.
        if failure is not None:
            raise failure
