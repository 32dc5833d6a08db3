"""How a run is carried out."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from fairtrial.errors import ConfigurationError
from fairtrial.trials.stopping import StopWhen


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """The settings of a run; change a copy with `dataclasses.replace`.

    Attributes:
        max_concurrent: How many trials are in flight at once.
        timeout_seconds: How long a task may take, and then again its scoring.
        max_retries: How often a trial whose task failed or timed out is tried again.
        stop_on_error: End the run at the first trial that is not scored.
        repeats: How often every sample is tried in every experiment.
        max_samples: Use only this many samples, from the start of the dataset.
        seed: Every trial's own seed is derived from it.
        warmup: Trials executed and thrown away first, so that cold starts are not measured.
        experiment_name: The name of the single experiment of a run that names none.
        max_cost_usd: End the run, resumably, when its model calls have cost this much, those of judges included. Calls
            whose price is not known count as 0, and a warning says so.
        strict_cost: Refuse a run whose cost cannot be known: before the first trial if a model has no price, else at
            the first call without one.
        stop_when: End the run once it has seen enough (`StopWhen`).
        max_output_bytes: An output larger than this is an error of its trial.
        close_seconds: How long closing a trial's resources may take.
        cluster: The metadata key whose value samples share when they are not independent (one passage, one
            repository): errors and intervals allow for it. "" if samples are independent whatever their metadata.
        grace_seconds: How long trials in flight may go on after an interrupt before they are cancelled.
    """

    max_concurrent: int = 10
    timeout_seconds: float = 300.0
    max_retries: int = 0
    stop_on_error: bool = False
    repeats: int = 1
    max_samples: int | None = None
    seed: int = 0
    warmup: int = 0
    experiment_name: str = ""
    max_cost_usd: float | None = None
    strict_cost: bool = False
    stop_when: StopWhen | None = None
    max_output_bytes: int = 16 * 1024 * 1024
    close_seconds: float = 10.0
    grace_seconds: float = 5.0
    cluster: str = "cluster"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in ("max_samples", "max_cost_usd"):
                continue
            whole = name not in _REAL
            fits = isinstance(value, int) if whole else isinstance(value, int | float)
            if not fits or isinstance(value, bool) or not math.isfinite(value) or value < least:
                kind = "a whole number" if whole else "a number"
                raise ConfigurationError(f"EvalConfig.{name} is {kind} of at least {least}, not {value!r}")
        if not isinstance(self.cluster, str):
            raise ConfigurationError(f"EvalConfig.cluster is the name of a metadata key, not {self.cluster!r}")
        if self.timeout_seconds <= 0:
            raise ConfigurationError("EvalConfig.timeout_seconds must be more than 0")
        if self.stop_when is not None:
            if not isinstance(self.stop_when, StopWhen):
                raise ConfigurationError(f"EvalConfig.stop_when is a StopWhen, not {self.stop_when!r}")
            if self.repeats > 1:
                raise ConfigurationError(
                    f"stop_when needs independent trials, and {self.repeats} repeats of a sample are not: "
                    "set repeats to 1, or leave stop_when out"
                )

    def __getitem__(self, name: str) -> Any:
        """`config["max_samples"]`: the same as the attribute, for code that treats a configuration as a mapping."""
        if name not in {field.name for field in fields(self)}:
            raise KeyError(name)
        return getattr(self, name)


_REAL = frozenset({"timeout_seconds", "max_cost_usd", "close_seconds", "grace_seconds"})
_LEAST: dict[str, float] = {
    "max_concurrent": 1,
    "timeout_seconds": 0,
    "max_retries": 0,
    "repeats": 1,
    "max_samples": 1,
    "seed": 0,
    "warmup": 0,
    "max_cost_usd": 0,
    "max_output_bytes": 1,
    "close_seconds": 0,
    "grace_seconds": 0,
}
