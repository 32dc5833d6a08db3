"""Carrying out a run: scheduling, storing, resuming, scoring again."""

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
