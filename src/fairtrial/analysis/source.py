"""The source of the results of one experiment."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Return the metadata key of clusters in this run; "" if samples were declared independent."""
        key = self.run.config.get("cluster", _CLUSTER_KEY)
        return key if isinstance(key, str) else _CLUSTER_KEY
