"""Threads and thread pools that a trial uses belong to it, so that its calls from them are recorded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fairtrial.trials.context import TrialContext, _current, running_trial

REPLACES = "_fairtrial_recorded"
"""The attribute of a function in place of another one: that function."""


def carry_trials_into_threads() -> None:
    """Make threads and thread pools that a trial uses belong to it, which they do not by themselves."""
    if hasattr(ThreadPoolExecutor.submit, REPLACES):
        return
    submit: Any = ThreadPoolExecutor.submit
    start = threading.Thread.start

    @functools.wraps(submit)
    def submit_in_trial(self: Any, fn: Any, /, *args: Any, **options: Any) -> Any:
        trial = running_trial()
        if trial is None:
            return submit(self, fn, *args, **options)
        token = _current.set(None)  # The pool's thread, which this may start, serves other trials later.
        try:
            return submit(self, _within(trial, fn), *args, **options)
        finally:
            _current.reset(token)

    @functools.wraps(start)
    def start_in_trial(self: threading.Thread) -> None:
        trial = running_trial()
        if trial is not None:
            self.run = _within(trial, self.run)  # type: ignore[method-assign]
        start(self)

    setattr(submit_in_trial, REPLACES, submit)
    setattr(start_in_trial, REPLACES, start)
    ThreadPoolExecutor.submit = submit_in_trial  # type: ignore[method-assign]
    threading.Thread.start = start_in_trial  # type: ignore[method-assign]


def _within(trial: TrialContext, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        token = _current.set(trial)
        try:
            return function(*args, **options)
        finally:
            _current.reset(token)

    return called


def leave_threads_alone() -> None:
    """Undo `carry_trials_into_threads`."""
    ThreadPoolExecutor.submit = getattr(ThreadPoolExecutor.submit, REPLACES, ThreadPoolExecutor.submit)  # type: ignore[method-assign]
    threading.Thread.start = getattr(threading.Thread.start, REPLACES, threading.Thread.start)  # type: ignore[method-assign]
