"""The types of tasks and evaluators that a suite takes, for type checkers.

At run time the parameters of a function decide how it is called (`scoring.evaluator`, `trials.task`). Type checkers
need the same forms as types: a task whose types are not those of the dataset, or an evaluator that returns no score,
is an error. The four positional forms of evaluators also type the parameters of a lambda.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from fairtrial.data.sample import Sample
from fairtrial.data.session.trajectory import Trajectory
from fairtrial.data.session.views import SessionView
from fairtrial.scoring.evaluator import EvalContext, Scorer
from fairtrial.scoring.score import Score
from fairtrial.trials.context import TrialContext

type Assessment = Score | bool | float | Mapping[str, Any] | Sequence[Score]
"""What an evaluator may return."""
type Assessed = Assessment | Awaitable[Assessment]


class TaskProvider[I, O](Protocol):
    """A `MainLoop`, or anything else that can be used as a task."""

    def as_task(self) -> Callable[[I, TrialContext], Awaitable[O]]:
        """Return the task."""
        ...


type AsyncTask[I, O] = Callable[[I], Awaitable[O]] | Callable[[I, TrialContext], Awaitable[O]] | TaskProvider[I, O]
"""An async task, with or without the context of the trial."""
type SyncTask[I, O] = Callable[[I], O] | Callable[[I, TrialContext], O]
"""A task that is not async, with or without the context of the trial."""


class ContextEvaluator[I, O, E](Protocol):
    """An evaluator of sample and output by position, with the context by name."""

    def __call__(self, sample: Sample[I, E], output: O, /, *, context: EvalContext) -> Assessed: ...


type SuiteEvaluator[I, O, E] = (
    Callable[[O, E], Assessed]
    | Callable[[O, E, SessionView], Assessed]
    | Callable[[Trajectory, Sample[I, E]], Assessed]
    | ContextEvaluator[I, O, E]
    | Callable[..., Assessed]
    | Scorer
)
"""An evaluator for inputs of type I, outputs of type O and expected values of type E; others are bound by name."""
