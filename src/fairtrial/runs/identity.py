"""Which run a command means: a new one, or the unfinished one it goes on with."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from fairtrial.codec import to_json
from fairtrial.data.dataset import Dataset
from fairtrial.errors import RunMismatchError
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The run to work on."""

    run: RunRecord
    resumed: bool
    warning: str | None = None


def describe_run(
    suite: str,
    dataset: Dataset[Any, Any],
    experiments: Sequence[Experiment],
    config: EvalConfig,
    *,
    evaluator: str,
    code_hash: str,
    tags: Mapping[str, str],
) -> RunRecord:
    """A run as it would be stored."""
    return RunRecord(
        run_id=uuid4().hex[:12],
        suite=suite,
        dataset_name=dataset.name,
        dataset_version=dataset.version,
        dataset_fingerprint=dataset.fingerprint,
        dataset_size=len(dataset),
        experiments=tuple(experiment.name for experiment in experiments),
        repeats=config.repeats,
        params={experiment.name: experiment.params for experiment in experiments},
        config=to_json(config),
        tags=dict(tags),
        evaluator=evaluator,
        code_hash=code_hash,
        created_at=time.time(),
        notes={"order": dataset.order},
    )


def open_run(store: RunStore, wanted: RunRecord, *, fresh: bool, reopen: bool = False) -> ResumedRun:
    """Resume the latest run of this suite if it is unfinished and of the same make; start a new one otherwise.

    `reopen` goes on with a finished run too: its errors are to be tried again.

    Raises:
        RunMismatchError: the latest run is unfinished and something it was made of has changed.
    """
    latest = None if fresh else latest_executed(store, wanted.suite)
    ended = latest is not None and latest.status in ("finished", "stopped") and not reopen
    if latest is None or ended or latest.parent_run is not None:
        return ResumedRun(store.create_run(wanted), resumed=False)
    changes = _changes(latest, wanted)
    if changes:
        raise RunMismatchError(
            f"run {latest.run_id} of suite {wanted.suite!r} is {latest.status}, and {'; '.join(changes)}. "
            "Undo the change to go on with that run, or start a new one with fresh=True (--fresh)"
        )
    warning = None
    if latest.code_hash != wanted.code_hash:
        warning = (
            f"the code of suite {wanted.suite!r} has changed since run {latest.run_id} began; its results mix both "
            "versions. Start over with fresh=True (--fresh) if that matters"
        )
    return ResumedRun(latest, resumed=True, warning=warning)


def latest_executed(store: RunStore, suite: str) -> RunRecord | None:
    """The latest run of a suite that was executed here: imported runs of that name are none of ours to go on with."""
    latest = next(iter(store.runs(suite=suite, limit=1)), None)
    if latest is None or not latest.imported:
        return latest
    return next((run for run in store.runs(suite=suite) if not run.imported), None)


def _changes(stored: RunRecord, wanted: RunRecord) -> list[str]:
    changes = []
    if stored.dataset_fingerprint != wanted.dataset_fingerprint:
        changes.append(
            f"its dataset has changed ({stored.dataset_name}, {stored.dataset_size} samples, then; "
            f"{wanted.dataset_name}, {wanted.dataset_size} samples, now)"
        )
    elif stored.notes.get("order") != wanted.notes["order"]:
        changes.append("its samples are now in another order")
    if stored.experiments != wanted.experiments:
        changes.append(f"its experiments were {', '.join(stored.experiments)}, now {', '.join(wanted.experiments)}")
    elif to_json(stored.params) != to_json(wanted.params):
        changes.append("the parameters of its experiments have changed")
    if stored.repeats != wanted.repeats:
        changes.append(f"its repeats were {stored.repeats}, now {wanted.repeats}")
    return changes


def code_hash(version: str | None, root: Path | None = None, *, files: Iterable[str] | None = None) -> str:
    """The identity of the project's own code: every loaded module under the current folder, or a given version.

    Installed packages are left out: a change there shows in a lock file, not here.

    Args:
        version: The identity, where somebody keeps count.
        root: The project's folder.
        files: The modules that matter, in place of all that are loaded.
    """
    if version is not None:
        return f"version:{version}"
    prefix = os.path.join(os.path.realpath(root or Path.cwd()), "")
    hashes: dict[str, str] = {}
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in loaded if files is None else files:
        relative = _relative(file, prefix)
        if file is None or relative is None:
            continue
        try:
            hashes[relative] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except OSError:
            continue  # A module whose file is gone says nothing about the code that is left.
    content = "\n".join(f"{name} {hashes[name]}" for name in sorted(hashes))
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _relative(file: str | None, prefix: str) -> str | None:
    """The path of a module of the project's own within it."""
    if not file or not file.endswith(".py") or not os.path.abspath(file).startswith(prefix):
        return None
    relative = os.path.abspath(file)[len(prefix) :]
    installed = any(part in ("site-packages", "dist-packages") or part[0] == "." for part in relative.split(os.sep))
    return None if installed else relative


def is_project_file(file: str | None, root: Path | None = None) -> bool:
    """Whether a module's file is the project's own."""
    return _relative(file, os.path.join(os.path.realpath(root or Path.cwd()), "")) is not None
