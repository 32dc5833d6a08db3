"""The validated request to execute a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fairtrial.data.dataset import Dataset
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.runs.baseline import Baseline, SuiteCode
from fairtrial.runs.events import Observers
from fairtrial.scoring.evaluator import Scorer
from fairtrial.store.protocol import RunStore
from fairtrial.trials.config import EvalConfig, Experiment
from fairtrial.trials.run_trial import TrialRules

type Lifespan = Callable[[], AbstractAsyncContextManager[Any] | AbstractContextManager[Any]]


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
    fresh: bool = False
    retry_errors: bool = False
    run_id: str | None = None  # The run to resume.
    once: str | None = None  # The key of a run that is executed once.
    force: bool = False  # Resume even if the code differs.
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
    alike = all(task is tasks[0] for task in tasks)
    named = zip(rules.experiments, tasks, strict=True)
    called = {"task": tasks[0]} if alike else {f"task of {experiment.name}": task for experiment, task in named}
    return {"evaluator": evaluator, **called, "adapter": adapter, "lifespan": lifespan}
