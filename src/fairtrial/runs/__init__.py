"""Carrying out a suite: scheduling, storing, resuming, scoring again."""

from fairtrial.runs.events import EvalRunCompleted, EvalRunStarted, Observer, RunEvent, SampleEvaluated, TrialStarted
from fairtrial.runs.suite import EvalSuite, evaluate, evaluate_sync

__all__ = [
    "EvalRunCompleted",
    "EvalRunStarted",
    "EvalSuite",
    "Observer",
    "RunEvent",
    "SampleEvaluated",
    "TrialStarted",
    "evaluate",
    "evaluate_sync",
]
