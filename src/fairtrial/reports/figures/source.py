"""The source of the results of one experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.store.column_cache import cached_totals
from fairtrial.store.protocol import RunRecord, RunStore, Totals
from fairtrial.trials.config import EvalConfig

_CLUSTER_KEY = EvalConfig().cluster


def run_totals(store: RunStore, run: RunRecord) -> list[Totals]:
    """Return the sums of each experiment: those that the store computed when the column file of the run was written.

    Without a file that has the final state of the run, the store computes them now.
    """
    address = getattr(store, "identity", None)
    if isinstance(address, str) and run.finished_at is not None:
        found = cached_totals(address, store.get_run(run.run_id))
        if found is not None:
            return found
    return store.totals(run.run_id)


def code_versions(store: RunStore, run: RunRecord) -> int:
    """Return the number of code versions that the stored results of a run come from.

    A run whose old results were all replaced has one, whatever has executed it before.
    """
    if run.identity is None:  # Stored by a version that did not record the code of each result.
        return 2 if run.noted.code_changed else 1
    versions = run.identity.get("code")
    several = isinstance(versions, Sequence) and not isinstance(versions, str) and len(versions) > 1
    return max(len(store.codes(run.run_id)), 1) if several or run.parent_run is not None else 1


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
