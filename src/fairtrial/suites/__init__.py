"""Suites: what people write, name and run. Above the runner and the fleet, because a suite can be run by either."""

from fairtrial.suites.suite import EvalSuite, evaluate, evaluate_sync

__all__ = ["EvalSuite", "evaluate", "evaluate_sync"]
