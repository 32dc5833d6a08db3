"""Where the results of one experiment are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig

_CLUSTER_KEY = EvalConfig().cluster


@dataclass(frozen=True, slots=True)
class ExperimentSource:
    """One experiment of a stored run: the store, the run's record and the experiment's name."""

    store: RunStore
    run: RunRecord
    name: str

    @property
    def cluster_key(self) -> str:
        """The metadata key that names clusters in this run; "" if it said that samples are independent."""
        key = self.run.config.get("cluster", _CLUSTER_KEY)
        return key if isinstance(key, str) else _CLUSTER_KEY


def adaptive_note(run: RunRecord) -> Mapping[str, Any] | None:
    """The record of adaptive stopping (its keys: `fairtrial.runs.adaptive.Adaptive.note`); None for other runs."""
    note = run.notes.get("adaptive")
    return note if isinstance(note, Mapping) else None
