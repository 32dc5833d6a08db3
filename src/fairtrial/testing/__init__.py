"""Test utilities: fakes, checks for your own mailboxes, and suites as pytest tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.base.lazy import lazy_names
from fairtrial.testing.fakes import FakeClock, session_of

if TYPE_CHECKING:
    from fairtrial.testing.assertions import assert_eval, eval_test
    from fairtrial.testing.cases import eval_cases
    from fairtrial.testing.environments import check_environment

__all__ = ["FakeClock", "assert_eval", "check_environment", "eval_cases", "eval_test", "session_of"]

if not TYPE_CHECKING:  # Loaded on first use: a test of an evaluator needs no statistics and no server.
    _MODULES = {
        "assert_eval": "assertions",
        "check_environment": "environments",
        "eval_cases": "cases",
        "eval_test": "assertions",
    }
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
