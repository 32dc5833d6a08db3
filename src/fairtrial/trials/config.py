"""Settings of runs: limits, repeats, experiments, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from fairtrial.base.frozen import EMPTY, FrozenDict, first_is, freeze
from fairtrial.errors import ConfigurationError
from fairtrial.trials.task import Task


@dataclass(frozen=True, slots=True)
class StopWhen:
    """End a run once it has enough results, with figures that stay valid under repeated evaluation.

    Give one of `narrower_than` and `decides`. Samples are evaluated in plan order, never in the order in which they
    finish; the plan is shuffled, so that its order is unrelated to difficulty. Samples that share a cluster are
    refused. `decides` compares scores from 0 to 1, and the means of repeats; `narrower_than` is for single pass/fail
    outcomes and refuses repeats and graded scores.

    Attributes:
        narrower_than: Stop when the interval of every experiment's pass rate is at most this wide: .2 is 20 points, 10
            to each side.
        decides: Stop when these two experiments can be told apart by their mean scores: (baseline, candidate).
        level: The confidence of intervals and decisions.
        every: Evaluate after every this many samples.
        verdicts: Use the verdict of graded scores, passed or not, in place of the score.
        shuffle: Use an order drawn from `EvalConfig.seed`. False keeps the order of the dataset, for a dataset that is
            already in random order.
    """

    narrower_than: float | None = None
    _: KW_ONLY
    decides: tuple[str, str] | None = None
    level: float = 0.95
    every: int = 10
    verdicts: bool = False
    shuffle: bool = True

    def __post_init__(self) -> None:
        if (self.narrower_than is None) == (self.decides is None):
            raise ConfigurationError("StopWhen requires exactly one of narrower_than and decides")
        for name, value in (("narrower_than", self.narrower_than), ("level", self.level)):
            if value is not None and not _inside(value):
                raise ConfigurationError(f"StopWhen.{name} must be between 0 and 1 (got {value!r})")
        every: object = self.every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(f"StopWhen.every must be a whole number of at least 1 (got {self.every!r})")
        for name in ("verdicts", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"StopWhen.{name} must be True or False (got {getattr(self, name)!r})")
        if self.decides is not None:
            pair: Any = self.decides
            if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
                raise ConfigurationError(f"StopWhen.decides must name two experiments (got {pair!r})")
            if pair[0] == pair[1]:
                raise ConfigurationError(f"StopWhen.decides must name different experiments (got {pair[0]!r} twice)")
            object.__setattr__(self, "decides", tuple(pair))


def _inside(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 < value < 1  # type: ignore[arg-type,operator]  # a number by now


@first_is(str)
@dataclass(frozen=True, slots=True)
class Experiment:
    """A named variant: parameters that the task reads from `ctx.experiment`, or a separate task."""

    name: str = "baseline"
    params: Mapping[str, Any] = EMPTY
    task: Task | None = None

    def __post_init__(self) -> None:
        if not self.name or any(mark in self.name for mark in ":@/\n"):
            raise ConfigurationError(f"invalid experiment name {self.name!r}: it must be text without ':', '@' or '/'")
        if type(self.params) is not FrozenDict:
            object.__setattr__(self, "params", freeze(dict(self.params)))


_TIMEOUT_SECONDS = 300.0
_MOST_RUNS = 1_000  # More earlier runs than anyone has reason to read.


class _Converted(float):
    """A time limit that was converted from the other unit, so that `replace` may give either of the two."""

    __slots__ = ()


@first_is()
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """The settings of a run; create a modified copy with `dataclasses.replace`.

    Attributes:
        max_concurrent: Number of trials executed at once, in all processes together.
        processes: Number of processes of this machine that execute the trials of a run, for tasks and evaluators that
            keep a processor busy. Each has a lifespan of its own. With 1, trials are executed in this process.
        timeout_seconds: Time limit of a task, and separately of its scoring.
        max_retries: How often a trial whose task failed or timed out is retried.
        stop_on_error: End the run at the first trial that is not scored.
        max_same_errors: Stop an experiment, so that it can be resumed, if its first trials to finish, this many, all
            ended in the same programming error (a NameError, AttributeError, TypeError, ImportError, KeyError or
            IndexError) at the same line of your code. 0 never stops it.
        repeats: How often every sample is executed in every experiment.
        refusals: What becomes of a trial whose task ended because the model or a filter declined to answer: "error", or
            "score", which gives the text of the refusal to the evaluator as the output. Reports count both.
        max_samples: Use only this many samples, from the start of the dataset.
        seed: The seed from which the seed of every trial is derived.
        warmup: Number of trials to execute first and discard, so that cold starts are not measured.
        experiment_name: The name of the only experiment of a run without named experiments.
        max_cost_usd: End the run, so that it can be resumed, when its model calls have cost this much, including those
            of judges. Calls without a known price count as 0, with a warning.
        strict_cost: Refuse a run with unknown costs: before the first trial if a model has no price, else at the first
            call without one.
        strict_packages: Start a new run, and refuse requests of a fleet, if the version of an installed package that
            the project imports has changed. Otherwise the change is only named.
        stop_when: End the run once it has enough results (`StopWhen`).
        max_output_bytes: The size limit of outputs; a larger output is an error of its trial.
        close_seconds: Time limit for closing a trial's resources.
        cluster: The metadata key whose value samples share when they are not independent (one passage, one
            repository): errors and intervals allow for it. "" if samples are independent whatever their metadata.
        history: Earlier runs of the same samples whose results make the figures of a report more precise: their names
            (`support@3`, `support@3:careful`) or ids, or how many of the latest runs of the suite. Only runs that ended
            before this one began are used.
        grace_seconds: How long trials in flight may continue after an interrupt before they are cancelled.
        timeout_per_sample_ms: `timeout_seconds` in milliseconds; give one of the two.
    """

    max_concurrent: int = 10
    processes: int = 1
    timeout_seconds: float = _TIMEOUT_SECONDS
    max_retries: int = 0
    stop_on_error: bool = False
    max_same_errors: int = 20
    repeats: int = 1
    refusals: Literal["error", "score"] = "error"
    max_samples: int | None = None
    seed: int = 0
    warmup: int = 0
    experiment_name: str = ""
    max_cost_usd: float | None = None
    strict_cost: bool = False
    strict_packages: bool = False
    stop_when: StopWhen | None = None
    max_output_bytes: int = 16 * 1024 * 1024
    close_seconds: float = 10.0
    grace_seconds: float = 5.0
    cluster: str = "cluster"
    history: int | tuple[str, ...] = 0
    if TYPE_CHECKING:
        timeout_per_sample_ms: float | None = None
    else:
        timeout_per_sample_ms: InitVar[float | None] = None

    def __post_init__(self, timeout_per_sample_ms: float | None = None) -> None:  # noqa: RUF033 - an InitVar
        seconds, milliseconds = self.timeout_seconds, timeout_per_sample_ms
        # `replace` passes what it reads from the other object: that gives way to a value which was given.
        if milliseconds is not None and (type(milliseconds) is not _Converted or seconds is _TIMEOUT_SECONDS):
            if seconds != _TIMEOUT_SECONDS and type(seconds) is not _Converted:
                raise ConfigurationError(
                    "timeout_seconds and timeout_per_sample_ms are mutually exclusive "
                    f"(got {seconds} s and {milliseconds} ms)"
                )
            if type(milliseconds) not in (int, float, _Converted):
                raise ConfigurationError(f"timeout_per_sample_ms must be a number (got {milliseconds!r})")
            object.__setattr__(self, "timeout_seconds", _Converted(milliseconds / 1000))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in ("max_samples", "max_cost_usd"):
                continue
            whole = name not in _REAL
            fits = isinstance(value, int) if whole else isinstance(value, int | float)
            if not fits or isinstance(value, bool) or not math.isfinite(value) or value < least:
                kind = "a whole number" if whole else "a number"
                raise ConfigurationError(f"EvalConfig.{name} must be {kind} of at least {least} (got {value!r})")
        if self.refusals not in ("error", "score"):
            raise ConfigurationError(f'EvalConfig.refusals must be "error" or "score" (got {self.refusals!r})')
        if not isinstance(self.cluster, str):
            raise ConfigurationError(f"EvalConfig.cluster must be the name of a metadata key (got {self.cluster!r})")
        object.__setattr__(self, "history", check_history(self.history, "EvalConfig.history"))
        if self.timeout_seconds <= 0:
            raise ConfigurationError("EvalConfig.timeout_seconds must be more than 0")
        if self.stop_when is not None:
            if not isinstance(self.stop_when, StopWhen):
                raise ConfigurationError(f"EvalConfig.stop_when must be a StopWhen (got {self.stop_when!r})")
            if self.repeats > 1 and self.stop_when.narrower_than is not None:
                raise ConfigurationError(
                    f"repeats must be 1 with narrower_than, which requires independent trials (got {self.repeats}): "
                    "set repeats to 1, or remove stop_when"
                )

    def __getitem__(self, name: str) -> Any:
        """Return an attribute by name, for code that treats a configuration as a mapping."""
        if name not in {field.name for field in fields(self)}:
            raise KeyError(name)
        return getattr(self, name)


def check_history(value: object, name: str) -> int | tuple[str, ...]:
    """Return declared earlier runs: a number of them, or their names."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) and one and one.isprintable() for one in value):
        return tuple(dict.fromkeys(value))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_RUNS:
        return value
    raise ConfigurationError(
        f"{name} must be a number of earlier runs or a list of their names, such as 3 or ['support@3'] (got {value!r})"
    )


# The field is only an argument, which dataclasses leave on the class as its default.
if not TYPE_CHECKING:
    EvalConfig.timeout_per_sample_ms = property(lambda config: _Converted(config.timeout_seconds * 1000))

_REAL = frozenset({"timeout_seconds", "max_cost_usd", "close_seconds", "grace_seconds"})
_LEAST: dict[str, float] = {
    "max_concurrent": 1,
    "processes": 1,
    "timeout_seconds": 0,
    "max_retries": 0,
    "max_same_errors": 0,
    "repeats": 1,
    "max_samples": 1,
    "seed": 0,
    "warmup": 0,
    "max_cost_usd": 0,
    "max_output_bytes": 1,
    "close_seconds": 0,
    "grace_seconds": 0,
}
