"""The stored record of one trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fairtrial.data.sample import Sample
from fairtrial.errors import FairtrialError
from fairtrial.frozen import EMPTY
from fairtrial.scoring.score import Score
from fairtrial.session.events import TokenUsage
from fairtrial.session.trajectory import Trajectory
from fairtrial.session.views import SessionView
from fairtrial.trials.keys import TrialKey
from fairtrial.types import JSON

type Outcome = Literal["scored", "task_error", "scorer_error", "timeout", "dead_letter", "not_run"]
type RedactedPart = Literal["output", "transcript", "error", "reason", "score", "metadata"]
"""A part of a stored result; `score` stands for the name of the score and for what belongs to its metrics."""
type Stage = Literal["setup", "task", "output", "score", "delivery", "store"]
"""Where a trial failed: before the task, in it, in encoding its output, in scoring it, on its way, or in storing it."""

NO_USAGE = TokenUsage()


class ResultSource(Protocol):
    """Where a result read back from a store gets its heavy parts when they are asked for."""

    def load_sample(self, result: EvalResult) -> Sample[Any, Any]:
        """The sample of the trial."""
        ...

    def load_session(self, result: EvalResult) -> SessionView:
        """What was recorded in the trial."""
        ...


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What came of one trial. `score` is None unless the outcome is "scored": an error is never a zero.

    `usage` is what the task used; what its judges cost is in `judge_cost_usd`. `cache_hits` counts model calls that the
    response cache answered, `unpriced_calls` and `unpriced_judge_calls` those whose cost is not known: where there are
    any, the costs are lower bounds.

    `ordinal` is the trial's place in the plan and `execution` a random number for this one execution of it. While a
    result is on its way into a store, `output_json` and `snapshot` carry the encoded output and session; results read
    from a store load `sample`, `session` and `trajectory` when they are asked for. `redacted_parts` names the parts in
    which the store has replaced secrets.
    """

    key: TrialKey
    ordinal: int
    outcome: Outcome
    score: Score | None = None
    output: Any = None
    latency_ms: int = 0
    usage: TokenUsage = NO_USAGE
    error: str | None = None
    stage: Stage | None = None
    attempt: int = 1
    execution: int = 0
    started_at: float = 0.0
    metadata: Mapping[str, JSON] = EMPTY
    judge_cost_usd: float | None = None
    cache_hits: int = 0
    unpriced_calls: int = 0
    unpriced_judge_calls: int = 0
    redacted_parts: tuple[RedactedPart, ...] = ()
    code: int = 0  # Which of the run's code versions executed the trial.
    output_json: str | None = field(default=None, repr=False, compare=False)
    snapshot: bytes | None = field(default=None, repr=False, compare=False)
    source: ResultSource | None = field(default=None, repr=False, compare=False)

    @property
    def sample_id(self) -> str:
        """Which sample."""
        return self.key.sample_id

    @property
    def experiment(self) -> str:
        """Which experiment."""
        return self.key.experiment

    @property
    def repeat(self) -> int:
        """Which repeat, from 0."""
        return self.key.repeat

    @property
    def known_latency_ms(self) -> int | None:
        """How long the trial took; None where whoever executed it did not say (`metadata["untimed"]` is True)."""
        return None if self.metadata.get("untimed") is True else self.latency_ms

    @property
    def success(self) -> bool:
        """True if the trial was scored, whatever the score."""
        return self.outcome == "scored"

    @property
    def passed(self) -> bool:
        """True if the trial was scored and passed."""
        return self.score is not None and self.score.passed

    @property
    def total_cost_usd(self) -> float:
        """What the task's and the judges' calls are known to have cost."""
        return (self.usage.cost_usd or 0.0) + (self.judge_cost_usd or 0.0)

    @property
    def redacted(self) -> bool:
        """True if a secret was replaced in the stored output, transcript, error, reason, score or metadata."""
        return bool(self.redacted_parts)

    @property
    def sample(self) -> Sample[Any, Any]:
        """The sample, from the store."""
        return self._loaded().load_sample(self)

    @property
    def session(self) -> SessionView:
        """What was recorded in the trial, from the store."""
        return self._loaded().load_session(self)

    @property
    def trajectory(self) -> Trajectory:
        """The messages recorded in the trial, from the store."""
        return self.session.trajectory

    def _loaded(self) -> ResultSource:
        if self.source is None:
            raise FairtrialError(f"trial {self.key} is not attached to a store, which holds its sample and session")
        return self.source
