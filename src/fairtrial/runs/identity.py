"""What a run is the same as: its code, its settings, its plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from uuid import uuid4

from fairtrial.base.codec import digest, from_json, to_json
from fairtrial.base.formatting import count
from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.data.splits import SplitOrigin
from fairtrial.errors import RunBusyError, RunMismatchError, UnknownRunError
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.reports.figures.metrics import ERRORS
from fairtrial.runs.baseline import SuiteCode
from fairtrial.runs.plan import AUTO, Resume, RunRequest
from fairtrial.store.notes import PlanNote, UserNote, write_notes
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig, Experiment

_RUNS_READ = 200  # Number of newest runs that are searched for earlier results of the same code.
_NAMED = 3


def plan_note(plan: AnalysisPlan) -> PlanNote:
    """Return the note of a plan that is given now, to a run without results."""
    return PlanNote(plan.digest, plan.content, time.time())


def name_earlier_runs(store: RunStore, wanted: RunRecord) -> RunRecord:
    """Return a run to be created, its plan with the runs that had executed the same code on the same samples."""
    if not wanted.noted.plans or not wanted.code_hash:
        return wanted
    earlier = [
        run.name
        for run in store.runs(suite=wanted.suite, limit=_RUNS_READ)
        if (run.code_hash, run.dataset_fingerprint) == (wanted.code_hash, wanted.dataset_fingerprint)
        and any(to_json(run.params.get(name)) == to_json(found) for name, found in wanted.params.items())
        and run.run_id != wanted.run_id
        and _stored(store, run)
    ]
    plans = [replace(note, earlier=tuple(earlier[:_NAMED])) for note in wanted.noted.plans]
    return replace(wanted, notes={**wanted.notes, **write_notes(plans=plans)})


def add_plan(store: RunStore, found: RunRecord, wanted: RunRecord) -> tuple[RunRecord, str | None]:
    """Record the plan that a resumed run is given, if it is another one; returns the run, and a line about it."""
    plans, given = found.noted.plans, wanted.noted.plans
    if not given or any(note.digest == given[-1].digest for note in plans):
        return found, None
    results = _stored(store, found)
    note = replace(given[-1], results=results)
    changes = write_notes(plans=[*plans, note])
    store.update_run(found.run_id, notes=changes)
    found = replace(found, notes={**found.notes, **changes})
    if not results:
        return found, None
    keeps = f"keeps its plan {plans[0].digest[:8]}" if plans else "had no plan"
    return found, (
        f"run {found.run_id} {keeps}: plan {note.digest[:8]} was given after {count(results, 'result')}, "
        "and its reports will say so"
    )


def _stored(store: RunStore, run: RunRecord) -> int:
    return sum(byte.bit_count() for byte in store.done(run.run_id))


_SETTINGS = ("seed", "timeout_seconds", "max_retries", "max_output_bytes", "refusals")
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
        parts: Digests of files and values by name, to say what has changed.
        packages: The versions of installed packages: recorded and named, but no difference without `strict_packages`.
        reads: Digests of text files and environment variables that the code names: a change is named only.
        strict_packages: Whether another version of a package is a difference.
    """

    suite: str
    dataset: Mapping[str, JSON]
    experiments: tuple[tuple[str, str], ...]
    repeats: int
    evaluator: tuple[str, str]
    settings: Mapping[str, JSON]
    code: tuple[str, ...]
    parts: Mapping[str, str] = EMPTY
    packages: Mapping[str, str] = EMPTY
    reads: Mapping[str, str] = EMPTY
    strict_packages: bool = False

    @property
    def fingerprint(self) -> str:
        """Return the digest on which client and workers of a fleet must agree: everything except the samples."""
        common = [self.suite, self.experiments, self.evaluator, dict(self.settings), self.code[-1]]
        if self.strict_packages:
            common.append(dict(self.packages))
        return digest(to_json(common))[:32]

    @classmethod
    def read(cls, stored: Mapping[str, JSON]) -> RunIdentity:
        """Read an identity from a run's record."""
        return from_json(cls, {name: stored[name] for name in cls.__slots__ if name in stored})

    def to_json(self) -> dict[str, JSON]:
        """Return the identity as it is stored."""
        return {"format": 1, **cast(dict[str, JSON], to_json(self))}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a run and a suite."""

    part: Literal["plan", "evaluator", "settings", "code", "packages"]
    text: str


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The run to execute.

    Attributes:
        run: The run.
        resumed: Whether it existed before.
        warning: A warning for the user: why a run was not resumed, or what in it may differ from its stored results.
        code: The index of the code version that executes it now.
        ended: Whether it has ended under the key that was given, so that nothing is executed.
    """

    run: RunRecord
    resumed: bool
    warning: str | None = None
    code: int = 0
    ended: bool = False


def identify(request: RunRequest, *, samples: bool = True) -> RunIdentity:
    """Return the identity of the run that a request would start; without `samples` the dataset is not read."""
    dataset, config = request.dataset, request.config
    code = request.code
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
        (request.scorer.name, code.evaluator),
        {name: getattr(config, name) for name in _SETTINGS},
        (code.code,),
        code.parts,
        code.packages,
        code.reads,
        config.strict_packages,
    )


def describe_run(
    identity: RunIdentity,
    experiments: Sequence[Experiment],
    config: EvalConfig,
    *,
    tags: Mapping[str, str],
    once: str | None = None,
    plan: AnalysisPlan | None = None,
    split: SplitOrigin | None = None,
    users: Sequence[UserNote] = (),
) -> RunRecord:
    """Return a run as it would be stored."""
    dataset: Mapping[str, Any] = identity.dataset
    notes = write_notes(order=dataset["order"])
    if once is not None:  # A digest, because a key that looks like a credential would be redacted.
        notes |= write_notes(once=digest(once)[:32])
    if plan is not None:
        notes |= write_notes(plans=[plan_note(plan)])
    if split is not None:
        notes |= write_notes(split=split)
    if users:
        notes |= write_notes(users=users)
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
        notes=notes,
        identity=identity.to_json(),
    )


def open_run(
    store: RunStore,
    wanted: RunRecord,
    *,
    resume: Resume = AUTO,
    allow_changed_code: bool = False,
    code: SuiteCode | None = None,
) -> ResumedRun:
    """Resume a run, or start a new one.

    Without `run_id`, the latest run of the suite is resumed if it is unfinished and its identity is that of `wanted`;
    a difference starts a new run and is named in `warning`. A run that was asked for, by `run_id` or to retry its
    errors, is resumed or refused. If `wanted` has the key of a run that is executed once, that run is meant.

    Args:
        store: The store of the run.
        wanted: The run that would be started.
        resume: The run to resume. To retry the trials that ended in an error, a finished run is resumed too; its code
            may differ, because that is how errors are corrected.
        allow_changed_code: Resume even if the code differs; no other difference is allowed.
        code: What the suite executes: its unknown parts and its state are named when a run is resumed.

    Raises:
        RunMismatchError: the requested run differs.
    """
    fresh, retry_errors, run_id = resume
    while True:
        # Read first: if another process starts a run from here on, creating this one fails.
        latest = None if fresh else next((run.number for run in store.runs(suite=wanted.suite, limit=1)), 0)
        if wanted.noted.once is not None:
            found = _with_key(store, wanted)
            run_id = None if found is None else found.run_id
        elif run_id is not None:
            found = store.get_run(run_id)
        else:
            found = None if fresh else latest_executed(store, wanted.suite)
        try:
            return _resume_or_create(store, wanted, found, latest, retry_errors, run_id, allow_changed_code, code)
        except RunBusyError:
            continue


def _resume_or_create(
    store: RunStore,
    wanted: RunRecord,
    found: RunRecord | None,
    latest: int | None,
    retry_errors: bool,
    run_id: str | None,
    allow_changed_code: bool,
    code: SuiteCode | None,
) -> ResumedRun:
    if found is not None and run_id is not None:
        _check_resumable(found, wanted)
    elif found is None or found.parent_run is not None or (found.status in _ENDED and not retry_errors):
        return ResumedRun(_create(store, wanted, latest), resumed=False)
    differences = find_differences(found, wanted)
    parts = {difference.part for difference in differences}
    if wanted.noted.once is not None and found.status in _ENDED and (not parts or allow_changed_code):
        return ResumedRun(found, resumed=True, ended=True)
    if parts <= {"code", "packages"} and (
        not parts or allow_changed_code or retry_errors or found.status == "unscored"
    ):
        found, late = add_plan(store, found, wanted)
        resumed = _resume(store, found, wanted, code, changed="code" in parts, retry_errors=retry_errors)
        return resumed if late is None else replace(resumed, warning=". ".join(filter(None, (resumed.warning, late))))
    reasons = "; ".join(difference.text for difference in differences)
    # A new run would pay again for stored outputs that only need a score.
    only_scoring = found.status == "unscored" and parts <= {"evaluator", "code"}
    if run_id is not None or retry_errors or only_scoring:
        key = " has this key and" if wanted.noted.once is not None else ""
        raise RunMismatchError(
            f"run {found.run_id} of suite {wanted.suite!r}{key} cannot be resumed: {reasons}. "
            + ("Give another key to start a new run" if key else _remedy(found, parts))
        )
    started = _create(store, wanted, latest)
    return ResumedRun(
        started,
        resumed=False,
        warning=f"started run {started.run_id} and did not resume run {found.run_id} ({found.status}): {reasons}. "
        + _remedy(found, parts, started=True),
    )


_ENDED = ("finished", "stopped")


def _with_key(store: RunStore, wanted: RunRecord) -> RunRecord | None:
    """Return the run of the same suite and key, or None."""
    return next((run for run in store.runs(suite=wanted.suite) if run.noted.once == wanted.noted.once), None)


def _create(store: RunStore, wanted: RunRecord, latest: int | None) -> RunRecord:
    """Store a new run. If its connection was lost meanwhile, the store may have it: then it is that one."""
    if latest is None:
        with contextlib.suppress(UnknownRunError):
            return store.get_run(wanted.run_id)
    return store.create_run(name_earlier_runs(store, wanted), latest=latest)


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
    if parts <= {"code", "packages"}:
        return (
            f"Resume it anyway with resume={name!r}, allow_changed_code=True "
            f"(--resume {name} --allow-changed-code): "
            "its results then come from two code versions"
        )
    undo = f"Undo the change and resume it with resume={name!r} (--resume {name})"
    return undo if started else f"{undo}, or start a new run with resume='never' (--resume never)"


def _resume(
    store: RunStore,
    found: RunRecord,
    wanted: RunRecord,
    code: SuiteCode | None,
    *,
    changed: bool,
    retry_errors: bool,
) -> ResumedRun:
    if found.identity is None or wanted.identity is None:
        if changed:
            store.update_run(found.run_id, notes=write_notes(code_changed=True))
        return ResumedRun(found, resumed=True)
    old, new = RunIdentity.read(found.identity), RunIdentity.read(wanted.identity)
    warnings = list(_remarks(store, found, old, new, code, changed=changed, retry_errors=retry_errors))
    packages = {name: _join(old.packages.get(name), version) for name, version in new.packages.items()}
    joined = replace(old, packages={**old.packages, **packages})
    if changed:
        joined = replace(joined, code=(*old.code, *new.code), parts=new.parts)
    if joined != old:
        found = replace(found, identity=joined.to_json())
        store.update_run(found.run_id, identity=found.identity)
    return ResumedRun(found, resumed=True, warning=". ".join(warnings) or None, code=_code_index(found, wanted))


def _join(before: str | None, now: str) -> str:
    """Return the versions of a package in the order of their use."""
    return now if not before else before if now in before.split(", ") else f"{before}, {now}"


def _remarks(
    store: RunStore,
    found: RunRecord,
    old: RunIdentity,
    new: RunIdentity,
    code: SuiteCode | None,
    *,
    changed: bool,
    retry_errors: bool,
) -> Iterator[str]:
    """Yield what a resumed run may have in its results besides what its stored results came from."""
    if changed and _keeps_results(store, found, retry_errors):
        yield (
            f"run {found.run_id} has results of two code versions: the code of suite {found.suite!r} has changed"
            + _changed_parts(old, new)
        )
    packages = _package_changes(old.packages, new.packages)
    if packages:
        yield f"run {found.run_id} was begun with other versions of packages: {'; '.join(packages)}"
    reads = _changed_names(old.reads, new.reads)
    if reads:
        yield f"run {found.run_id} is resumed although {_listed(reads)} changed, which its code may read"
    if code is not None and code.unknown:
        yield f"run {found.run_id} is resumed without a comparison of what cannot be described: {_listed(code.unknown)}"
    if code is not None and code.state:
        yield f"run {found.run_id} is resumed although trials have changed {_listed(code.state)}"


def _keeps_results(store: RunStore, found: RunRecord, retry_errors: bool) -> bool:
    """Return whether stored results of a run stay when it is resumed."""
    outcomes = [outcome for part in store.totals(found.run_id) for outcome, count in part.outcomes.items() if count]
    return any(not retry_errors or outcome not in ERRORS or outcome == "scorer_error" for outcome in outcomes)


def _changed_names(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _changed_parts(old: RunIdentity, new: RunIdentity) -> str:
    """Return the names of the files and values that differ, for a message; "" if they are not known."""
    names = _changed_names(old.parts, new.parts) if old.parts and new.parts else []
    return f" ({_listed(names)})" if names else ""


def _package_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {old.get(name, 'not imported')}, now {new.get(name, 'not imported')}"
        for name in sorted(old.keys() | new.keys())
        if old and new.get(name, "") not in old.get(name, "").split(", ")
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


_MOST_NAMES = 6


def _code_index(found: RunRecord, wanted: RunRecord) -> int:
    if found.identity is None or wanted.identity is None:
        return 0
    return RunIdentity.read(found.identity).code.index(RunIdentity.read(wanted.identity).code[-1])


def find_differences(stored: RunRecord, wanted: RunRecord) -> list[Difference]:
    """Return the differences between a stored run and the one that a suite would start."""
    plan = [Difference("plan", text) for text in _changes(stored, wanted)]
    if stored.identity is None or wanted.identity is None:  # Stored by a version without identities.
        same = stored.code_hash == wanted.code_hash
        return plan if same else [*plan, Difference("code", "its code has changed")]
    old, new = RunIdentity.read(stored.identity), RunIdentity.read(wanted.identity)
    rest: list[Difference] = []
    if old.evaluator != new.evaluator:
        (before, _), (after, _) = old.evaluator, new.evaluator
        how = f"its evaluator was {before}, now {after}" if before != after else f"its evaluator {after} has changed"
        how += _changed_parts(old, new) if new.code[-1] in old.code and before == after else ""
        rest.append(Difference("evaluator", how))
    for name, value in new.settings.items():
        if old.settings.get(name) != value:
            rest.append(Difference("settings", f"{name} was {old.settings.get(name)}, now {value}"))
    if new.code[-1] not in old.code:
        rest.append(Difference("code", f"its code has changed{_changed_parts(old, new)}"))
    packages = _package_changes(old.packages, new.packages) if new.strict_packages else []
    if packages:
        rest.append(Difference("packages", f"its packages were {'; '.join(packages)} (strict_packages)"))
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
