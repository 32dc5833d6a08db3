"""Fakes and fixtures for people who test their own evaluators, tasks and mailboxes; and evals as tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.testing.fakes import FakeClock, session_of

if TYPE_CHECKING:
    from fairtrial.testing.assertions import assert_eval, eval_test

__all__ = ["FakeClock", "assert_eval", "eval_test", "session_of"]

if not TYPE_CHECKING:  # Loaded when asked for: a test of an evaluator needs no statistics.

    def __getattr__(name: str) -> object:
        if name not in ("assert_eval", "eval_test"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fairtrial.testing import assertions

        return getattr(assertions, name)
