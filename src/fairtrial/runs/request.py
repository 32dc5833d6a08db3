"""The validated request to execute a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fairtrial.data.dataset import Dataset
from fairtrial.runs.events import Observers
from fairtrial.scoring.evaluator import Scorer
from fairtrial.store.protocol import RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment
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
    lifespan: Lifespan | None = None
    version: str | None = None
    fresh: bool = False
    retry_errors: bool = False
    run_id: str | None = None  # The run to resume.
    force: bool = False  # Resume even if the code differs.
    evaluator: Any = None  # The original evaluator.
    evaluator_digest: str = ""
    adapter: Any = None
    home: str = ""  # The file that defines the suite.
