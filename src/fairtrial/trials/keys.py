"""The identity of a trial."""

from __future__ import annotations

from typing import NamedTuple


class TrialKey(NamedTuple):
    """One sample, in one experiment, one time, in one run: the identity of everything that is stored about it."""

    run_id: str
    experiment: str
    sample_id: str
    repeat: int = 0

    def __str__(self) -> str:
        return f"{self.run_id}/{self.experiment}/{self.sample_id}#{self.repeat}"
