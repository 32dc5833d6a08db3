"""The records that importers return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from fairtrial.base.foreign import check_limit
from fairtrial.base.frozen import EMPTY
from fairtrial.base.types import JSON
from fairtrial.data.dataset import Dataset
from fairtrial.data.session.events import NO_USAGE, TokenUsage
from fairtrial.scoring.score import Score
from fairtrial.trials.result import Outcome, Stage

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
