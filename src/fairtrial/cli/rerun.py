"""The commands that run something again, as people would type them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fairtrial.store.protocol import RunRecord

NOTE = "command_line"
"""The note of a run that says how it was started: the words after `fairtrial run` that name what to run."""

PART = "+part"
"""Ends the name of a suite of which only some samples were run."""


def base_words(run: RunRecord) -> list[str]:
    """What to type after `fairtrial run` for the suite of a run."""
    noted = run.notes.get(NOTE)
    if isinstance(noted, Sequence) and not isinstance(noted, str):
        return [str(word) for word in noted]
    return ["SUITE"]


def rerun_command(run: RunRecord, *, sample: str | None = None, experiment: str | None = None) -> str:
    """The command that runs a suite again, or one sample of it."""
    words = ["fairtrial", "run", *base_words(run)]
    if experiment is not None and len(run.experiments) > 1:
        words += ["--experiment", experiment]
    if sample is not None:
        words += ["--sample", sample]
    return shlex.join(words)
