"""Execution of runs: scheduling, storing, resuming, rescoring."""

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
