"""The types of tasks and evaluators that a suite takes, for type checkers.

At run time the parameters of a function decide how it is called (`scoring.evaluator`, `trials.task`). Type checkers
need the same forms as types: a function that fits none of them, or whose types are not those of the dataset and the
task, is an error. An evaluator with other parameters is accepted as an `Evaluator`, which says nothing of its types.
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


# Evaluators whose parameters are bound by name, in any order: a protocol for each useful set of names.


class ByOutput[O](Protocol):
    """An evaluator of output."""

    def __call__(self, *, output: O) -> Assessed: ...


class ByOutputSession[O](Protocol):
    """An evaluator of output and session."""

    def __call__(self, *, output: O, session: SessionView) -> Assessed: ...


class ByOutputContext[O](Protocol):
    """An evaluator of output and context."""

    def __call__(self, *, output: O, context: EvalContext) -> Assessed: ...


class ByOutputEnvironment[O](Protocol):
    """An evaluator of output and environment."""

    def __call__(self, *, output: O, environment: Any) -> Assessed: ...


class ByOutputExpected[O, E](Protocol):
    """An evaluator of output and expected."""

    def __call__(self, *, output: O, expected: E) -> Assessed: ...


class ByOutputExpectedSession[O, E](Protocol):
    """An evaluator of output, expected and session."""

    def __call__(self, *, output: O, expected: E, session: SessionView) -> Assessed: ...


class ByOutputExpectedContext[O, E](Protocol):
    """An evaluator of output, expected and context."""

    def __call__(self, *, output: O, expected: E, context: EvalContext) -> Assessed: ...


class ByOutputExpectedEnvironment[O, E](Protocol):
    """An evaluator of output, expected and environment."""

    def __call__(self, *, output: O, expected: E, environment: Any) -> Assessed: ...


class ByOutputInput[I, O](Protocol):
    """An evaluator of output and input."""

    def __call__(self, *, output: O, input: I) -> Assessed: ...


class ByOutputInputSession[I, O](Protocol):
    """An evaluator of output, input and session."""

    def __call__(self, *, output: O, input: I, session: SessionView) -> Assessed: ...


class ByOutputInputContext[I, O](Protocol):
    """An evaluator of output, input and context."""

    def __call__(self, *, output: O, input: I, context: EvalContext) -> Assessed: ...


class ByOutputInputEnvironment[I, O](Protocol):
    """An evaluator of output, input and environment."""

    def __call__(self, *, output: O, input: I, environment: Any) -> Assessed: ...


class ByOutputExpectedInput[I, O, E](Protocol):
    """An evaluator of output, expected and input."""

    def __call__(self, *, output: O, expected: E, input: I) -> Assessed: ...


class ByOutputExpectedInputSession[I, O, E](Protocol):
    """An evaluator of output, expected, input and session."""

    def __call__(self, *, output: O, expected: E, input: I, session: SessionView) -> Assessed: ...


class ByOutputExpectedInputContext[I, O, E](Protocol):
    """An evaluator of output, expected, input and context."""

    def __call__(self, *, output: O, expected: E, input: I, context: EvalContext) -> Assessed: ...


class ByOutputExpectedInputEnvironment[I, O, E](Protocol):
    """An evaluator of output, expected, input and environment."""

    def __call__(self, *, output: O, expected: E, input: I, environment: Any) -> Assessed: ...


class ByOutputSample[I, O, E](Protocol):
    """An evaluator of output and sample."""

    def __call__(self, *, output: O, sample: Sample[I, E]) -> Assessed: ...


class ByOutputSampleSession[I, O, E](Protocol):
    """An evaluator of output, sample and session."""

    def __call__(self, *, output: O, sample: Sample[I, E], session: SessionView) -> Assessed: ...


class ByOutputSampleContext[I, O, E](Protocol):
    """An evaluator of output, sample and context."""

    def __call__(self, *, output: O, sample: Sample[I, E], context: EvalContext) -> Assessed: ...


class ByOutputSampleEnvironment[I, O, E](Protocol):
    """An evaluator of output, sample and environment."""

    def __call__(self, *, output: O, sample: Sample[I, E], environment: Any) -> Assessed: ...


class ByTrajectory(Protocol):
    """An evaluator of trajectory."""

    def __call__(self, *, trajectory: Trajectory) -> Assessed: ...


class ByTrajectoryExpected[E](Protocol):
    """An evaluator of trajectory and expected."""

    def __call__(self, *, trajectory: Trajectory, expected: E) -> Assessed: ...


class ByTrajectorySample[I, E](Protocol):
    """An evaluator of trajectory and sample."""

    def __call__(self, *, trajectory: Trajectory, sample: Sample[I, E]) -> Assessed: ...


class ByEnvironment(Protocol):
    """An evaluator of environment."""

    def __call__(self, *, environment: Any) -> Assessed: ...


class ByExpectedEnvironment[E](Protocol):
    """An evaluator of expected and environment."""

    def __call__(self, *, expected: E, environment: Any) -> Assessed: ...


class BySampleEnvironment[I, E](Protocol):
    """An evaluator of sample and environment."""

    def __call__(self, *, sample: Sample[I, E], environment: Any) -> Assessed: ...


class ByInputsOutputs[I, O](Protocol):
    """An evaluator of inputs and outputs."""

    def __call__(self, *, inputs: I, outputs: O) -> Assessed: ...


class ByInputsOutputsReferenceOutputs[I, O, E](Protocol):
    """An evaluator of inputs, outputs and reference_outputs."""

    def __call__(self, *, inputs: I, outputs: O, reference_outputs: E) -> Assessed: ...


type SuiteEvaluator[I, O, E] = (
    Callable[[O, E], Assessed]
    | Callable[[O, E, SessionView], Assessed]
    | Callable[[Trajectory, Sample[I, E]], Assessed]
    | ContextEvaluator[I, O, E]
    | Scorer
    | ByOutput[O]
    | ByOutputSession[O]
    | ByOutputContext[O]
    | ByOutputEnvironment[O]
    | ByOutputExpected[O, E]
    | ByOutputExpectedSession[O, E]
    | ByOutputExpectedContext[O, E]
    | ByOutputExpectedEnvironment[O, E]
    | ByOutputInput[I, O]
    | ByOutputInputSession[I, O]
    | ByOutputInputContext[I, O]
    | ByOutputInputEnvironment[I, O]
    | ByOutputExpectedInput[I, O, E]
    | ByOutputExpectedInputSession[I, O, E]
    | ByOutputExpectedInputContext[I, O, E]
    | ByOutputExpectedInputEnvironment[I, O, E]
    | ByOutputSample[I, O, E]
    | ByOutputSampleSession[I, O, E]
    | ByOutputSampleContext[I, O, E]
    | ByOutputSampleEnvironment[I, O, E]
    | ByTrajectory
    | ByTrajectoryExpected[E]
    | ByTrajectorySample[I, E]
    | ByEnvironment
    | ByExpectedEnvironment[E]
    | BySampleEnvironment[I, E]
    | ByInputsOutputs[I, O]
    | ByInputsOutputsReferenceOutputs[I, O, E]
)
"""An evaluator for inputs of type I, outputs of type O and expected values of type E."""
