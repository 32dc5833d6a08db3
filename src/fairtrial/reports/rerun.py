"""Commands that run a suite or a sample again."""

from __future__ import annotations

import shlex

from fairtrial.store.protocol import RunRecord

PART = "+part"
"""Ends the name of a suite of which only some samples were run."""


def base_words(run: RunRecord) -> list[str]:
    """Return the words after `fairtrial run` for the suite of a run."""
    words = run.noted.command_line
    return ["SUITE"] if words is None else list(words)


def resume_command(run: RunRecord, *, max_cost: float | None = None) -> str:
    """Return the command that resumes a run, with the options that it was started with."""
    words = run.noted.resume_words
    if words is None:
        words = ("run", *base_words(run))
    if max_cost is not None:
        before = [place for place, word in enumerate(words) if word == "--max-cost"]
        kept = [word for place, word in enumerate(words) if place not in before and place - 1 not in before]
        words = (*(word for word in kept if not word.startswith("--max-cost=")), "--max-cost", f"{max_cost:g}")
    hint = " (with the password in place of [redacted])" if any("[redacted]" in word for word in words) else ""
    return shlex.join(["fairtrial", *words]) + hint


def rerun_command(run: RunRecord, *, sample: str | None = None, experiment: str | None = None) -> str:
    """Return the command that runs a suite again, or one sample of it."""
    words = ["fairtrial", "run", *base_words(run)]
    if experiment is not None and len(run.experiments) > 1:
        words += ["--experiment", experiment]
    if sample is not None:
        words += ["--sample", sample]
    return shlex.join(words)
