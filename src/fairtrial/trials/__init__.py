"""One trial: its key, its context, its environment, its result."""

from fairtrial.trials.config import EvalConfig, Experiment, StopWhen
from fairtrial.trials.context import TrialContext, TrialKey, current_trial
from fairtrial.trials.environment import Environment, EnvironmentRegistry, EnvironmentSaved, check_state
from fairtrial.trials.result import EvalResult, Outcome
from fairtrial.trials.task import Task, task

__all__ = [
    "Environment",
    "EnvironmentRegistry",
    "EnvironmentSaved",
    "EvalConfig",
    "EvalResult",
    "Experiment",
    "Outcome",
    "StopWhen",
    "Task",
    "TrialContext",
    "TrialKey",
    "check_state",
    "current_trial",
    "task",
]
