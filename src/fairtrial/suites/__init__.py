"""Suites: a dataset, a task, an evaluator and experiments under one name.

This package imports the runner and the fleet, because either can run a suite.
"""

from fairtrial.suites.suite import EvalSuite, evaluate, evaluate_sync

__all__ = ["EvalSuite", "evaluate", "evaluate_sync"]
