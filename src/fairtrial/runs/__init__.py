"""Carrying out a run: scheduling, storing, resuming, scoring again."""

from fairtrial.runs.events import EvalRunCompleted, EvalRunStarted, Observer, RunEvent, SampleEvaluated, TrialStarted

__all__ = [
    "EvalRunCompleted",
    "EvalRunStarted",
    "Observer",
    "RunEvent",
    "SampleEvaluated",
    "TrialStarted",
]
