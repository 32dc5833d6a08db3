"""What every importer returns, whatever the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from fairtrial.data.dataset import Dataset
from fairtrial.frozen import EMPTY
from fairtrial.scoring.score import Score
from fairtrial.session.events import TokenUsage
from fairtrial.trials.result import NO_USAGE, Outcome, Stage
from fairtrial.types import JSON


@dataclass(frozen=True, slots=True)
class ImportedTrial:
    """One trial: its place in the run, and what came of it. `latency_ms` None means that it is not known."""

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
    events: tuple[object, ...] = ()  # Messages and model calls, in order.


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One run of the source. `trials` can be called again: a run is read when it is stored."""

    source_id: str  # Unique within the format.
    name: str
    experiments: tuple[str, ...]
    dataset: Dataset[Any, Any]
    repeats: int
    trials: Callable[[], Iterator[ImportedTrial]]
    content: str  # A hash of what was read: a run that has changed since it was imported is noticed.
    created_at: float
    finished_at: float
    status: Literal["finished", "stopped"] = "finished"
    stopped: str | None = None  # Why the source ended early.
    params: Mapping[str, JSON] = EMPTY  # Experiment name -> its parameters.
    tags: Mapping[str, str] = EMPTY
    origin: Mapping[str, JSON] = EMPTY
    remarks: tuple[str, ...] = ()  # What is different from the source, or missing there.


@dataclass(frozen=True, slots=True)
class TranslatedGrader:
    """A grader of the source and the evaluator it became; `evaluator` None means that we have no equivalent."""

    name: str
    kind: str
    evaluator: str | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class ImportedSuite:
    """What belongs together in the source: a dataset, its graders and its runs."""

    name: str  # Usable as the name of a suite.
    source_id: str
    title: str
    dataset: Dataset[Any, Any]
    graders: tuple[TranslatedGrader, ...] = ()
    runs: tuple[ImportedRun, ...] = ()
    code: Callable[[str], str] | None = None  # The text of a suite file, given the name of the dataset's file.


@dataclass(frozen=True, slots=True)
class Import:
    """Everything an importer found, and what it had to leave out."""

    suites: tuple[ImportedSuite, ...]
    left_out: tuple[str, ...] = field(default=())


class Importer(Protocol):
    """Reads what another tool has saved."""

    def recognizes(self, path: Path) -> bool:
        """Whether a folder or file has this format."""
        ...

    def read(self, path: Path) -> Import:
        """Everything in it. Raises `DataError` with the file and line of what cannot be read."""
        ...
