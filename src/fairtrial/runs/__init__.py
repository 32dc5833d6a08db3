"""Execution of runs: planning, scheduling, storing, resuming and rescoring."""

from fairtrial.runs.events import (
    EvalRunCompleted,
    EvalRunStarted,
    ExperimentFigures,
    Observer,
    ResumeWarning,
    RunEvent,
    SampleEvaluated,
    TrialStarted,
)

__all__ = [
    "EvalRunCompleted",
    "EvalRunStarted",
    "ExperimentFigures",
    "Observer",
    "ResumeWarning",
    "RunEvent",
    "SampleEvaluated",
    "TrialStarted",
]
