"""The validated request to execute a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.runs.baseline import Baseline, SuiteCode
from fairtrial.runs.events import Observers
from fairtrial.scoring.evaluator import Scorer
from fairtrial.store.protocol import RunStore
from fairtrial.trials.config import EvalConfig, Experiment
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
