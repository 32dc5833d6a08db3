"""Runs, datasets and suites that importers read: their records, and how they are stored and written."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import UUID

from fairtrial.base.codec import digest
from fairtrial.base.foreign import check_limit
from fairtrial.base.frozen import EMPTY, JSON
from fairtrial.base.plugins import load_plugin, plugin_names
from fairtrial.base.system import replace_file
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import NO_USAGE, TokenUsage
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import Envelope
from fairtrial.errors import DataError, StoreError, UnknownRunError
from fairtrial.runs.opening import write_column_file
from fairtrial.scoring.score import Score
from fairtrial.store.notes import ImportNote, write_notes
from fairtrial.store.portable import copy_run
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, Outcome, Stage

_LONGEST_NAME = 60
_MAX_TOKENS = (1 << 31) - 1
_LONGEST_MS = 1 << 53  # Beyond it, floats are not exact.

_PLANNED, _PLANNED_PER_ROW = 10_000, 100


@dataclass(frozen=True, slots=True)
class ImportedTrial:
    """One imported trial and its result. `latency_ms` is None if unknown."""

    sample: int
    outcome: Outcome
    experiment: int = 0
    repeat: int = 0
    score: Score | None = None
    output: Any = None
    error: str | None = None
    stage: Stage | None = None
    usage: TokenUsage = NO_USAGE
    latency_ms: int | None = None
    started_at: float = 0.0
    metadata: Mapping[str, JSON] = EMPTY
    events: tuple[object, ...] = ()  # Messages and model calls, in order; an `Envelope` has a time of its own.


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One run of the source. `trials` reads the run and can be called several times."""

    source_id: str  # Unique within the format.
    name: str
    experiments: tuple[str, ...]
    dataset: Dataset[Any, Any]
    repeats: int
    rows: int  # The number of trials that the source has; those of the plan that it has not are missing.
    trials: Callable[[], Iterator[ImportedTrial]]
    content: str  # A hash of the files that were read, to detect a run that changed after it was imported.
    created_at: float
    finished_at: float
    status: Literal["finished", "stopped"] = "finished"
    stopped: str | None = None  # Why the run ended early.
    params: Mapping[str, JSON] = EMPTY  # Experiment name -> its parameters.
    tags: Mapping[str, str] = EMPTY
    origin: Mapping[str, JSON] = EMPTY
    remarks: tuple[str, ...] = ()  # Differences from the source, and data that is missing there.

    def __post_init__(self) -> None:
        # One number in a small file must not make a plan of billions of trials.
        planned = len(self.dataset) * len(self.experiments) * self.repeats
        check_limit(self.name, "planned trials", planned, max(_PLANNED, _PLANNED_PER_ROW * self.rows))


@dataclass(frozen=True, slots=True)
class TranslatedGrader:
    """A grader of the source and the evaluator that replaces it; `evaluator` is None if there is no equivalent."""

    name: str
    kind: str
    evaluator: str | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class ImportedSuite:
    """A dataset of the source with its graders and runs."""

    name: str  # A valid suite name.
    source_id: str
    title: str
    dataset: Dataset[Any, Any]
    graders: tuple[TranslatedGrader, ...] = ()
    runs: tuple[ImportedRun, ...] = ()
    code: Callable[[str], str] | None = None  # Name of the dataset's file -> source code of a suite file.


@dataclass(frozen=True, slots=True)
class Import:
    """The suites that an importer read, and notes on what it left out."""

    suites: tuple[ImportedSuite, ...]
    left_out: tuple[str, ...] = field(default=())


def merge_suites(imports: Sequence[Import]) -> Import:
    """Return one import. Suites of the same name become one, with the runs of all and every sample once."""
    merged: dict[str, ImportedSuite] = {}
    for suite in (suite for one in imports for suite in one.suites):
        before = merged.get(suite.name)
        if before is not None:
            known = {sample.id for sample in before.dataset}
            new = [sample for sample in suite.dataset if sample.id not in known]
            dataset: Dataset[Any, Any] = Dataset([*before.dataset, *new], name=before.dataset.name)
            suite = replace(before, dataset=dataset, runs=(*before.runs, *suite.runs))
        merged[suite.name] = suite
    return Import(tuple(merged.values()), tuple(text for one in imports for text in one.left_out))


class Importer(Protocol):
    """Reads what another tool has saved."""

    def recognizes(self, path: Path) -> bool:
        """Return whether a folder or file has this format."""
        ...

    def read(self, path: Path) -> Import:
        """Read a folder or file. Raises `DataError` with the file and line that cannot be read."""
        ...


def load_importer(format: str) -> Importer:
    """Return the importer of a format, an entry point of `fairtrial.importers`."""
    importer: Importer = load_plugin("importers", format, "--format")()
    return importer


def detect_format(path: Path) -> str | None:
    """Return the format of a folder or file; None if no importer recognizes it."""
    return next((name for name in plugin_names("importers") if load_importer(name).recognizes(path)), None)


_BATCH = 256

type State = Literal["imported", "present", "changed"]
"""Stored by this import; already stored; already stored with other content, and not changed."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A stored run, and whether this import or an earlier one stored it."""

    run: RunRecord
    state: State


def store_run(store: RunStore, suite: ImportedSuite, source: ImportedRun, format: str) -> StoredRun:
    """Store an imported run. Its id is derived from its origin, so that a second import finds the first."""
    record = _record(suite, source, format)
    try:
        stored: RunRecord | None = store.get_run(record.run_id)
    except UnknownRunError:
        stored = None
    if stored is not None:
        same = _content(stored) == source.content
        if stored.status != "running":
            return StoredRun(stored, "present" if same else "changed")
        if not same:  # An earlier import was interrupted, and the source has changed since.
            store.delete_run(stored.run_id)
            stored = None
    run = stored or store.create_run(record)
    samples = dict(enumerate(source.dataset))
    store.commit(run.run_id, (), samples)
    for results in batched(_results(run, source), _BATCH):
        places = {run.split(result.ordinal)[0] for result in results}
        refused = store.commit(run.run_id, results, {place: samples[place] for place in places}).refused
        if refused:
            raise StoreError(f"trial {refused[0][0]} of {source.source_id} cannot be stored: {refused[0][1]}")
    return _ended(store, replace(run, status=source.status, finished_at=source.finished_at))


def store_copy(store: RunStore, source: RunStore, run: RunRecord, content: str) -> StoredRun:
    """Copy a run from another store, with its id. The copy is never resumed.

    Args:
        store: Where it is stored.
        source: Where it is.
        run: The run.
        content: A digest of the file that it came in.
    """
    with contextlib.suppress(UnknownRunError):
        stored = store.get_run(run.run_id)
        if stored.status != "running" or _content(stored) != content:
            return StoredRun(stored, "present")
        store.delete_run(run.run_id)  # An earlier import was interrupted.
    origin = ImportNote("bundle", run.run_id, content, time.time())
    notes = {**run.notes, **write_notes(imported=origin)}
    copy_run(source, replace(run, status="running", finished_at=None, notes=notes), store)
    return _ended(store, run)


def _ended(store: RunStore, run: RunRecord) -> StoredRun:
    store.update_run(run.run_id, status=run.status, finished_at=run.finished_at)
    stored = store.get_run(run.run_id)
    write_column_file(store, stored)
    return StoredRun(stored, "imported")


def _record(suite: ImportedSuite, source: ImportedRun, format: str) -> RunRecord:
    origin = ImportNote(
        format, source.source_id, source.content, time.time(), tuple(source.remarks), origin=source.origin
    )
    return RunRecord(
        run_id=digest([format, source.source_id])[:12],
        suite=suite.name,
        dataset_name=source.dataset.name,
        dataset_version=source.dataset.version,
        dataset_fingerprint=source.dataset.fingerprint,
        dataset_size=len(source.dataset),
        experiments=source.experiments,
        repeats=source.repeats,
        params=source.params,
        tags={"origin": format, **source.tags},
        evaluator=f"{format} graders",
        code_hash=f"imported:{format}",
        created_at=source.created_at,
        notes=write_notes(order=source.dataset.order, stopped=source.stopped, imported=origin),
    )


def _content(run: RunRecord) -> object:
    origin = run.noted.imported
    return None if origin is None else origin.content


@dataclass(frozen=True, slots=True)
class _FixedClock:
    """A clock that always returns the time at which an imported trial started."""

    moment: float

    def time(self) -> float:
        return self.moment

    def monotonic(self) -> float:
        return 0.0


def _results(run: RunRecord, source: ImportedRun) -> Iterator[EvalResult]:
    for trial in source.trials():
        key = TrialKey(run.run_id, run.experiments[trial.experiment], source.dataset[trial.sample].id, trial.repeat)
        yield imported_result(key, run.ordinal(trial.sample, trial.experiment, trial.repeat), trial)


def imported_result(key: TrialKey, ordinal: int, trial: ImportedTrial) -> EvalResult:
    """Return the result of an imported trial, with its transcript."""
    metadata = dict(trial.metadata)
    if trial.latency_ms is None:
        metadata["untimed"] = True
    return EvalResult(
        key=key,
        ordinal=ordinal,
        outcome=trial.outcome,
        score=trial.score,
        output=trial.output,
        latency_ms=trial.latency_ms or 0,
        usage=trial.usage,
        error=trial.error,
        stage=trial.stage,
        started_at=trial.started_at,
        metadata=metadata,
        snapshot=_snapshot(key, trial),
    )


def _snapshot(key: TrialKey, trial: ImportedTrial) -> bytes | None:
    if not trial.events:
        return None
    session = Session(session_id=UUID(digest(list(key))[:32]), clock=_FixedClock(trial.started_at))
    for event in trial.events:
        if isinstance(event, Envelope):  # With a time of its own.
            session.extend((event,))
        else:
            session.record(event)
    return session.snapshot()


type FileState = Literal["written", "unchanged", "kept"]
"""Written; already present with the same content; already present with other content, and not overwritten."""


def _row(sample: Sample[Any, Any]) -> dict[str, Any]:
    row = {"id": sample.id, "input": sample.input, "expected": sample.expected, "metadata": dict(sample.metadata)}
    if not sample.has_expected:
        del row["expected"]
    return {name: value for name, value in row.items() if name in ("input", "expected") or value != {}}


def write_suite(suite: ImportedSuite, folder: Path) -> list[tuple[Path, FileState]]:
    """Write the dataset as JSONL that `Dataset.load` reads and, where graders were translated, a suite file."""
    lines = "".join(json.dumps(_row(sample)) + "\n" for sample in suite.dataset)
    data = folder / f"{suite.name}.jsonl"
    files = [(data, _write(data, lines))]
    if suite.code is not None:
        module = folder / f"{suite.name.replace('-', '_').replace('.', '_')}.py"
        try:
            code = suite.code(data.name)
        except DataError as error:
            raise DataError(f"{module}: {error}") from None
        files.append((module, _write(module, code)))
    return files


def _write(path: Path, text: str) -> FileState:
    if path.exists():
        return "unchanged" if path.read_text(encoding="utf-8", errors="replace") == text else "kept"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    replace_file(aside, path)
    return "written"
