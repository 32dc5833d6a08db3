"""The identity of a trial."""

from __future__ import annotations

from typing import NamedTuple


class TrialKey(NamedTuple):
    """The identity of a trial: run, experiment, sample and repeat."""

    run_id: str
    experiment: str
    sample_id: str
    repeat: int = 0

    def __str__(self) -> str:
        return f"{self.run_id}/{self.experiment}/{self.sample_id}#{self.repeat}"
