"""What a run is asked to do, and the trials that follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.runs.baseline import Baseline, SuiteCode
from fairtrial.runs.events import Observers
from fairtrial.scoring.evaluator import Scorer
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.store.redact import current
from fairtrial.store.rows import refuse_secrets
from fairtrial.trials.config import EvalConfig, Experiment
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import TrialRules

type Lifespan = Callable[[], AbstractAsyncContextManager[Any] | AbstractContextManager[Any]]


class Resume(NamedTuple):
    """Which run to resume; by default the latest run of the suite, if it is unfinished."""

    fresh: bool = False  # Start a new run.
    retry_errors: bool = False
    run_id: str | None = None


AUTO = Resume()


def parse_resume(text: str) -> Resume:
    """Read the `resume` of a run: "auto", "never", "errors", "errors:ID" or the id of a run."""
    if text in ("auto", "never"):
        return Resume(fresh=text == "never")
    errors, colon, run_id = text.partition(":")
    if errors == "errors" and (run_id or not colon):
        return Resume(retry_errors=True, run_id=run_id or None)
    if not text or colon:
        raise ConfigurationError(f"resume must be 'auto', 'never', 'errors' or the id of a run (got {text!r})")
    return Resume(run_id=text)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The parameters of a run, validated before the first call."""

    suite: str
    dataset: Dataset[Any, Any]
    experiments: tuple[Experiment, ...]
    scorer: Scorer
    rules: TrialRules
    config: EvalConfig
    store: RunStore
    tags: Mapping[str, str]
    observers: Observers
    code: SuiteCode  # What the suite executes.
    lifespan: Lifespan | None = None
    version: str | None = None
    resume: Resume = AUTO
    allow_changed_code: bool = False  # Resume even if the code differs.
    once: str | None = None  # The key of a run that is executed once.
    evaluator: Any = None  # The original evaluator.
    adapter: Any = None
    baseline: Baseline | None = None  # What it executed when it was made.
    home: str = ""  # The file that defines the suite.
    plan: AnalysisPlan | None = None  # What will be compared, stored before the first trial.

    @property
    def roots(self) -> dict[str, Any]:
        """The callables and objects that determine what the suite does, by the names that messages use."""
        return roots_of(self.rules, self.evaluator, self.adapter, self.lifespan)


def roots_of(rules: TrialRules, evaluator: Any, adapter: Any, lifespan: Lifespan | None) -> dict[str, Any]:
    """Return the callables and objects that determine what a suite does."""
    tasks = [task.fn for task in rules.tasks]
    same = all(task is tasks[0] for task in tasks)
    named = zip(rules.experiments, tasks, strict=True)
    called = {"task": tasks[0]} if same else {f"task of {experiment.name}": task for experiment, task in named}
    return {"evaluator": evaluator, **called, "adapter": adapter, "lifespan": lifespan}


_NEAR = 64


class PlannedTrial(NamedTuple):
    """One trial to execute."""

    key: TrialKey
    ordinal: int
    sample_ordinal: int
    experiment: int
    sample: Sample[Any, Any]
    attempt: int = 1
    stored: EvalResult | None = None  # The result whose output is rescored; None calls the task.


class StoredTrials:
    """Trials from stored results, read page by page in a thread. Workers share it as an async iterator.

    Args:
        load: Returns a page of results after an ordinal, in plan order; empty at the end.
        plan: Returns the trial for a stored result, or None to skip it.
    """

    def __init__(
        self, load: Callable[[int], Sequence[EvalResult]], plan: Callable[[EvalResult], PlannedTrial | None]
    ) -> None:
        self._load = load
        self._plan = plan
        self._page: deque[PlannedTrial] = deque()
        self._after: int | None = -1
        self._lock = anyio.Lock()

    def __aiter__(self) -> StoredTrials:
        return self

    async def __anext__(self) -> PlannedTrial:
        if not self._page:
            async with self._lock:
                while not self._page and self._after is not None:
                    self._page.extend(await anyio.to_thread.run_sync(self._next_page, self._after))
        if not self._page:
            raise StopAsyncIteration
        return self._page.popleft()

    def _next_page(self, after: int) -> list[PlannedTrial]:
        results = self._load(after)
        self._after = results[-1].ordinal if results else None
        planned = (self._plan(result) for result in results)
        return [trial for trial in planned if trial is not None]


class TrialFeed:
    """Trials from several sources, one after the other. Workers share it as an async iterator."""

    def __init__(self, *sources: Iterator[PlannedTrial] | AsyncIterator[PlannedTrial]) -> None:
        self._sources = deque(sources)

    def __aiter__(self) -> TrialFeed:
        return self

    async def __anext__(self) -> PlannedTrial:
        while self._sources:
            source = self._sources[0]
            try:
                return await anext(source) if isinstance(source, AsyncIterator) else next(source)
            except (StopIteration, StopAsyncIteration):
                if self._sources and self._sources[0] is source:  # Another worker may have removed it.
                    self._sources.popleft()
        raise StopAsyncIteration


def missing_trials(run: RunRecord, dataset: Dataset[Any, Any], done: bytearray) -> Iterator[PlannedTrial]:
    """Yield the trials without a result, in plan order; samples are read and checked lazily.

    Raises:
        SecretInDataError: a sample contains a known secret; none of its trials has started.
    """
    redactor = current()
    cursor = _Cursor(dataset)
    split, run_id, experiments = run.split, run.run_id, run.experiments
    for ordinal in missing_ordinals(run.planned, done):
        sample_ordinal, experiment, repeat = split(ordinal)
        if cursor.position == sample_ordinal:
            sample = cursor.current
        else:
            sample = cursor.at(sample_ordinal)
            refuse_secrets(redactor, sample, sample_ordinal)
        key = TrialKey(run_id, experiments[experiment], sample.id, repeat)
        yield PlannedTrial(key, ordinal, sample_ordinal, experiment, sample)


def missing_ordinals(planned: int, done: bytearray) -> Iterator[int]:
    """Yield the ordinals below `planned` whose bit is not set."""
    for start in range(0, planned, 8):
        index = start >> 3
        for bit in _UNSET_BITS[done[index] if index < len(done) else 0]:
            if start + bit < planned:
                yield start + bit


_UNSET_BITS = [[bit for bit in range(8) if not byte >> bit & 1] for byte in range(256)]


class _Cursor:
    """Reads samples by position: sequentially if positions are close, else with a seek."""

    def __init__(self, dataset: Dataset[Any, Any]) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Sample[Any, Any]] | None = None
        self._next = 0
        self.position = -1
        self.current: Sample[Any, Any]

    def at(self, position: int) -> Sample[Any, Any]:
        """Return the sample at a position."""
        if 0 <= position - self._next < _NEAR:
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            while self._next <= position:
                self.current = next(self._iterator)
                self._next += 1
        else:
            self.current = self._dataset[position]
        self.position = position
        return self.current
