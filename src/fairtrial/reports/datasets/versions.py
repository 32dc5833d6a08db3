"""Versions of a dataset: which content runs used, and what changed between two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fairtrial.base.codec import digest, to_json
from fairtrial.base.frozen import JSON
from fairtrial.data.sample import Sample
from fairtrial.store.protocol import RunRecord, RunStore


@dataclass(frozen=True, slots=True)
class DatasetVersion:
    """A content of a dataset, by its fingerprint.

    Attributes:
        fingerprint: The fingerprint.
        parent: That of the content which runs used before; None for the first.
        version: The version as given by the owner of the dataset.
        samples: Number of samples.
        first_run: The name of the first run on it.
        last_run: The name of the last run on it, before another content.
        created_at: When its first run was started, in seconds since the epoch.
        runs: Number of runs on it.
        split: The split that it is; empty without one.
    """

    fingerprint: str
    parent: str | None
    version: str
    samples: int
    first_run: str
    last_run: str
    created_at: float
    runs: int
    split: str


def dataset_versions(runs: Iterable[RunRecord]) -> list[DatasetVersion]:
    """Return the contents that runs of one dataset used, the oldest first; one that comes back is named again.

    Each split of it has contents of its own.
    """
    found: dict[str, list[DatasetVersion]] = {}
    for run in sorted(runs, key=lambda one: (one.created_at, one.suite, one.number)):
        own = found.setdefault("" if run.noted.split is None else run.noted.split.name, [])
        if own and own[-1].fingerprint == run.dataset_fingerprint:
            own[-1] = _with_run(own[-1], run)
        else:
            own.append(_first(run, own[-1].fingerprint if own else None))
    return sorted((version for own in found.values() for version in own), key=lambda one: one.created_at)


def _first(run: RunRecord, parent: str | None) -> DatasetVersion:
    split = run.noted.split
    return DatasetVersion(
        run.dataset_fingerprint, parent, run.dataset_version, run.dataset_size, run.name, run.name, run.created_at, 1,
        "" if split is None else split.name,
    )  # fmt: skip


def _with_run(version: DatasetVersion, run: RunRecord) -> DatasetVersion:
    return DatasetVersion(
        version.fingerprint, version.parent, version.version, version.samples, version.first_run, run.name,
        version.created_at, version.runs + 1, version.split,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DatasetChanges:
    """What differs between two versions of a dataset. A changed sample has the same id and another content.

    Attributes:
        same: Number of samples with the same input and expected value: a comparison pairs them.
        added: The ids of samples that only the second one has.
        removed: The ids of samples that only the first one has.
        input: The ids of samples with another input.
        expected: The ids of samples with the same input and another expected value.
        metadata: The ids of samples with other metadata only; they count as the same.
    """

    json_format: ClassVar[str] = "fairtrial.dataset_diff/1"

    same: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    input: tuple[str, ...]
    expected: tuple[str, ...]
    metadata: tuple[str, ...]

    def to_json(self) -> dict[str, JSON]:
        """Return all facts as JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("added", "removed", "input", "expected", "metadata")}
        return {"format": self.json_format, "same": self.same, **lists}


type Contents = Mapping[str, tuple[str, str, str]]
"""Digests of input, expected value and metadata by id."""


def contents_of(samples: Iterable[Sample[Any, Any]]) -> Contents:
    """Return what identifies the content of each sample."""
    return {
        sample.id: (
            digest(to_json(sample.input)),
            digest([sample.has_expected, to_json(sample.expected)]),
            digest(to_json(sample.metadata)),
        )
        for sample in samples
    }


def stored_contents(store: RunStore, run: RunRecord) -> Contents:
    """Return the contents of the samples of a run."""
    return contents_of(sample for _, sample in store.samples(run.run_id))


def diff_versions(before: Contents, after: Contents) -> DatasetChanges:
    """Return what differs between two versions."""
    changed: dict[int, list[str]] = {0: [], 1: [], 2: []}
    same = 0
    for name, old in before.items():
        new = after.get(name)
        if new is not None:
            place = next((place for place in range(3) if old[place] != new[place]), None)
            same += place in (None, 2)
            if place is not None:
                changed[place].append(name)
    return DatasetChanges(
        same,
        tuple(name for name in after if name not in before),
        tuple(name for name in before if name not in after),
        *(tuple(changed[place]) for place in range(3)),
    )
