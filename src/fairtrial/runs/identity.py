"""The identity of a run, and the decision whether to resume a run or start a new one."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from uuid import uuid4

from fairtrial.codec import digest, from_json, to_json
from fairtrial.errors import RunBusyError, RunMismatchError
from fairtrial.runs.callables import describe
from fairtrial.runs.code import code_hash, code_version
from fairtrial.runs.request import RunRequest
from fairtrial.store.notes import write_notes
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment
from fairtrial.types import JSON

_SETTINGS = ("seed", "timeout_seconds", "max_retries", "max_output_bytes")
"""The settings that influence the outcome of a trial."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Everything that determines the results of a run: names and digests, no data.

    It decides whether a run can be resumed, and whether a worker of a fleet accepts a request.

    Attributes:
        suite: The suite's name.
        dataset: Name, version, fingerprint and size of the dataset, and the order of its samples.
        experiments: The experiments in order, each with a digest of its parameters.
        repeats: How often every sample is executed.
        evaluator: The evaluator's name, and a digest of its code, composition and parameters.
        settings: The settings that influence the outcome of a trial.
        code: The code versions that executed trials of the run, oldest first.
    """

    suite: str
    dataset: Mapping[str, JSON]
    experiments: tuple[tuple[str, str], ...]
    repeats: int
    evaluator: tuple[str, str]
    settings: Mapping[str, JSON]
    code: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Return the digest on which client and workers of a fleet must agree: everything except the samples."""
        common = [self.suite, self.experiments, self.evaluator, dict(self.settings), self.code[-1]]
        return digest(to_json(common))[:32]

    @classmethod
    def read(cls, stored: Mapping[str, JSON]) -> RunIdentity:
        """Read an identity from a run's record."""
        return from_json(cls, {name: stored[name] for name in cls.__slots__})

    def to_json(self) -> dict[str, JSON]:
        """Return the identity as it is stored."""
        return {"format": 1, **cast(dict[str, JSON], to_json(self))}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a run and a suite."""

    part: Literal["plan", "evaluator", "settings", "code"]
    text: str


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The run to execute.

    Attributes:
        run: The run.
        resumed: Whether it existed before.
        warning: A warning for the user: why a run was not resumed, or that it has two code versions.
        code: The index of the code version that executes it now.
    """

    run: RunRecord
    resumed: bool
    warning: str | None = None
    code: int = 0


def identify(request: RunRequest, *, samples: bool = True) -> RunIdentity:
    """Return the identity of the run that a request would start; without `samples` the dataset is not read."""
    dataset, config = request.dataset, request.config
    code = code_version(
        request.version,
        request.home,
        tasks=[task.fn for task in request.rules.tasks],
        others=[request.evaluator, request.lifespan, request.adapter],
    )
    facts: dict[str, JSON] = (
        {
            "name": dataset.name,
            "version": dataset.version,
            "fingerprint": dataset.fingerprint,
            "size": len(dataset),
            "order": dataset.order,
        }
        if samples
        else {}
    )
    return RunIdentity(
        request.suite,
        facts,
        tuple((experiment.name, digest(to_json(experiment.params))[:32]) for experiment in request.experiments),
        config.repeats,
        (request.scorer.name, request.evaluator_digest),
        {name: getattr(config, name) for name in _SETTINGS},
        (code,),
    )


def evaluator_digest(evaluator: Any) -> str:
    """Return a digest of an evaluator's code, composition and parameters.

    It is computed on first use, so that counters and caches of an evaluator do not change it.
    """
    key = id(evaluator)
    known = _digests.get(key)
    if known is not None and known[0]() is evaluator:
        return known[1]
    made = digest(describe(evaluator))[:32]
    try:
        _digests[key] = weakref.ref(evaluator, lambda _: _digests.pop(key, None)), made
    except TypeError:
        pass  # Built-in functions have no weak references, and no state.
    return made


_digests: dict[int, tuple[weakref.ref[Any], str]] = {}


def describe_run(
    identity: RunIdentity, experiments: Sequence[Experiment], config: EvalConfig, *, tags: Mapping[str, str]
) -> RunRecord:
    """Return a run as it would be stored."""
    dataset: Mapping[str, Any] = identity.dataset
    return RunRecord(
        run_id=uuid4().hex[:12],
        suite=identity.suite,
        dataset_name=dataset["name"],
        dataset_version=dataset["version"],
        dataset_fingerprint=dataset["fingerprint"],
        dataset_size=dataset["size"],
        experiments=tuple(experiment.name for experiment in experiments),
        repeats=identity.repeats,
        params={experiment.name: experiment.params for experiment in experiments},
        config=to_json(config),
        tags=dict(tags),
        evaluator=identity.evaluator[0],
        code_hash=identity.code[-1],
        created_at=time.time(),
        notes=write_notes(order=dataset["order"]),
        identity=identity.to_json(),
    )


def open_run(
    store: RunStore,
    wanted: RunRecord,
    *,
    fresh: bool = False,
    retry_errors: bool = False,
    run_id: str | None = None,
    force: bool = False,
    version: str | None = None,
) -> ResumedRun:
    """Resume a run, or start a new one.

    Without `run_id`, the latest run of the suite is resumed if it is unfinished and its identity is that of `wanted`;
    a difference starts a new run and is named in `warning`. A run that was asked for, by `run_id` or to retry its
    errors, is resumed or refused.

    Args:
        store: The store of the run.
        wanted: The run that would be started.
        fresh: Start a new run.
        retry_errors: Also resume a finished run, to retry the trials that ended in an error. Its code may differ,
            because that is how errors are corrected.
        run_id: The run to resume.
        force: Resume even if the code differs; no other difference is allowed.
        version: The code version given by the user.

    Raises:
        RunMismatchError: the requested run differs.
    """
    while True:
        # Read first: if another process starts a run from here on, creating this one fails.
        latest = None if fresh else next((run.number for run in store.runs(suite=wanted.suite, limit=1)), 0)
        found = store.get_run(run_id) if run_id is not None else None if fresh else latest_executed(store, wanted.suite)
        try:
            return _resume_or_create(store, wanted, found, latest, retry_errors, run_id, force, version)
        except RunBusyError:
            continue


def _resume_or_create(
    store: RunStore,
    wanted: RunRecord,
    found: RunRecord | None,
    latest: int | None,
    retry_errors: bool,
    run_id: str | None,
    force: bool,
    version: str | None,
) -> ResumedRun:
    if found is not None and run_id is not None:
        _check_resumable(found, wanted)
    elif found is None or found.parent_run is not None or (found.status in _ENDED and not retry_errors):
        return ResumedRun(store.create_run(wanted, latest=latest), resumed=False)
    differences = find_differences(found, wanted, version=version)
    parts = {difference.part for difference in differences}
    if parts <= {"code"} and (not parts or force or retry_errors or found.status == "unscored"):
        return _resume(store, found, wanted, changed=bool(parts))
    said = "; ".join(difference.text for difference in differences)
    # A new run would pay again for stored outputs that only need a score.
    only_scoring = found.status == "unscored" and parts <= {"evaluator", "code"}
    if run_id is not None or retry_errors or only_scoring:
        raise RunMismatchError(
            f"run {found.run_id} of suite {wanted.suite!r} cannot be resumed: {said}. {_remedy(found, parts)}"
        )
    started = store.create_run(wanted, latest=latest)
    return ResumedRun(
        started,
        resumed=False,
        warning=f"started run {started.run_id} and did not resume run {found.run_id} ({found.status}): {said}. "
        + _remedy(found, parts, started=True),
    )


_ENDED = ("finished", "stopped")


def _check_resumable(found: RunRecord, wanted: RunRecord) -> None:
    if found.suite != wanted.suite:
        raise RunMismatchError(
            f"run {found.run_id} belongs to suite {found.suite!r} (got {wanted.suite!r}). Resume it with its own suite"
        )
    if found.parent_run is not None:
        raise RunMismatchError(f"run {found.run_id} is a rescoring of run {found.parent_run}. Resume it with rescore")


def _remedy(found: RunRecord, parts: Set[str], *, started: bool = False) -> str:
    name = found.run_id
    if parts <= {"evaluator", "code"} and "evaluator" in parts:
        return f"Score its stored outputs with this evaluator: suite.rescore({name!r}) (fairtrial rescore {name} SUITE)"
    if parts == {"code"}:
        return (
            f"Resume it anyway with run_id={name!r}, force=True (--resume {name} --force): "
            "its results then come from two code versions"
        )
    undo = f"Undo the change and resume it with run_id={name!r} (--resume {name})"
    return undo if started else f"{undo}, or start a new run with fresh=True (--fresh)"


def _resume(store: RunStore, found: RunRecord, wanted: RunRecord, *, changed: bool) -> ResumedRun:
    if not changed:
        return ResumedRun(found, resumed=True, code=_code_index(found, wanted))
    warning = f"run {found.run_id} has results of two code versions: the code of suite {wanted.suite!r} has changed"
    identity = found.identity
    code = 0
    if identity is not None and wanted.identity is not None:
        known = RunIdentity.read(identity)
        code = len(known.code)
        identity = replace(known, code=(*known.code, *RunIdentity.read(wanted.identity).code)).to_json()
    store.update_run(found.run_id, notes=write_notes(code_changed=True), identity=identity)
    return ResumedRun(replace(found, identity=identity), resumed=True, warning=warning, code=code)


def _code_index(found: RunRecord, wanted: RunRecord) -> int:
    if found.identity is None or wanted.identity is None:
        return 0
    return RunIdentity.read(found.identity).code.index(RunIdentity.read(wanted.identity).code[-1])


def find_differences(stored: RunRecord, wanted: RunRecord, *, version: str | None = None) -> list[Difference]:
    """Return the differences between a stored run and the one that a suite would start."""
    plan = [Difference("plan", text) for text in _changes(stored, wanted)]
    if stored.identity is None or wanted.identity is None:  # Stored by a version without identities.
        same = stored.code_hash == code_hash(version)
        return plan if same else [*plan, Difference("code", "its code has changed")]
    old, new = RunIdentity.read(stored.identity), RunIdentity.read(wanted.identity)
    rest: list[Difference] = []
    if old.evaluator != new.evaluator:
        (before, _), (after, _) = old.evaluator, new.evaluator
        how = f"its evaluator was {before}, now {after}" if before != after else f"its evaluator {after} has changed"
        rest.append(Difference("evaluator", how))
    for name, value in new.settings.items():
        if old.settings.get(name) != value:
            rest.append(Difference("settings", f"{name} was {old.settings.get(name)}, now {value}"))
    if new.code[-1] not in old.code:
        rest.append(Difference("code", "its code has changed"))
    return plan + rest


def latest_executed(store: RunStore, suite: str) -> RunRecord | None:
    """Return the latest executed run of a suite; imported runs cannot be resumed."""
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
    elif stored.noted.order != wanted.noted.order:
        changes.append("its samples are now in another order")
    if stored.experiments != wanted.experiments:
        changes.append(f"its experiments were {', '.join(stored.experiments)}, now {', '.join(wanted.experiments)}")
    elif _params(stored, wanted) != _params(wanted, stored):
        changes.append("the parameters of its experiments have changed")
    if stored.repeats != wanted.repeats:
        changes.append(f"its repeats were {stored.repeats}, now {wanted.repeats}")
    return changes


def _params(run: RunRecord, other: RunRecord) -> JSON:
    """Return what identifies the parameters of a run's experiments, for a comparison with another run."""
    if run.identity is None or other.identity is None:
        return cast(JSON, to_json(run.params))
    return cast(JSON, to_json(RunIdentity.read(run.identity).experiments))
