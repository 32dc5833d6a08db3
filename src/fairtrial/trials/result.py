"""The result of a trial, and the figures that every trial has beside its score."""

from __future__ import annotations

import random
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, Protocol, get_args
from uuid import UUID

from typing_extensions import TypeVar

from fairtrial.base.frozen import EMPTY, JSON, FrozenDict, allow_type_arguments
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import NO_USAGE, TokenUsage
from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import Trajectory
from fairtrial.data.session.views import RecordedView, SessionView
from fairtrial.errors import FairtrialError
from fairtrial.scoring.score import Score, mean_value, merge, outer_names
from fairtrial.trials.context import TrialKey


@dataclass(frozen=True, slots=True)
class TrialFigure:
    """A number that every trial has and of which less is better.

    Attributes:
        name: Its name as a metric.
        title: Its name on screens.
        unit: What it is counted in.
        columns: The columns of stored results whose sum it is.
        type: The type of its columns in column files. Whole numbers ("i4") are always known, amounts ("f8") may not be.
    """

    name: str
    title: str
    unit: Literal["ms", "tokens", "usd"]
    columns: tuple[str, ...]
    type: Literal["i4", "f8"]


TRIAL_FIGURES = {
    figure.name: figure
    for figure in (
        TrialFigure("latency_ms", "latency", "ms", ("latency_ms",), "i4"),
        TrialFigure("tokens", "tokens", "tokens", ("input_tokens", "output_tokens"), "i4"),
        TrialFigure("cost_usd", "cost", "usd", ("cost_usd",), "f8"),
    )
}
COUNTS = tuple(name for figure in TRIAL_FIGURES.values() if figure.type == "i4" for name in figure.columns)
"""The columns with whole numbers."""
AMOUNTS = tuple(name for figure in TRIAL_FIGURES.values() if figure.type == "f8" for name in figure.columns)
"""The columns with amounts, which are empty where they are not known."""


type Outcome = Literal["scored", "task_error", "scorer_error", "timeout", "dead_letter", "not_run", "user_error"]
"""How a trial ended. Only "scored" has a score; "user_error": the simulated user of a conversation was at fault."""
type RedactedPart = Literal["output", "transcript", "error", "reason", "score", "metadata"]
"""A part of a stored result; `score` covers the name of the score and its metrics."""
type Stage = Literal["setup", "task", "output", "score", "delivery", "store"]
"""The stage at which a trial failed: setup, task, output encoding, scoring, delivery or storing."""

_OUTCOMES = frozenset(get_args(Outcome.__value__))

# With a default, which the syntax of PEP 695 has only from Python 3.13: a plain `EvalResult` is one of any output.
OutputT = TypeVar("OutputT", default=Any, covariant=True)

_LONGEST_ERROR = 10_000


class ResultSource(Protocol):
    """Loads the sample and the session of a stored result lazily."""

    def load_sample(self, result: EvalResult) -> Sample[Any, Any]:
        """Return the sample of a trial."""
        ...

    def load_session(self, result: EvalResult) -> SessionView:
        """Return the session of a trial."""
        ...


class ResultMetadata(FrozenDict[str, Any]):
    """The metadata of a trial, then those of its sample, as one mapping; the sample is loaded when it is needed."""

    __slots__ = ("_key", "_ordinal", "_source", "own")

    def __init__(self, own: Mapping[str, Any], source: ResultSource, key: TrialKey, ordinal: int) -> None:
        super().__init__(own)
        self.own = own if type(own) is FrozenDict else FrozenDict(own)
        self._source: ResultSource | None = source
        self._key, self._ordinal = key, ordinal

    def _loaded(self) -> dict[str, Any]:
        if self._source is not None:
            result: EvalResult = EvalResult(key=self._key, ordinal=self._ordinal, outcome="not_run")
            sample = self._source.load_sample(result)
            self._source = None
            # Not `self.update`, which a frozen mapping refuses.
            dict.update(self, {name: value for name, value in sample.metadata.items() if name not in self.own})
        return self

    def __missing__(self, name: str) -> Any:
        if self._source is None:
            raise KeyError(name)
        return self._loaded()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, the default if there is none."""
        return dict.get(self if name in self.own else self._loaded(), name, default)

    def __contains__(self, name: object) -> bool:
        return name in self.own or dict.__contains__(self._loaded(), name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._loaded())

    def __reversed__(self) -> Iterator[str]:
        return dict.__reversed__(self._loaded())

    def __len__(self) -> int:
        return dict.__len__(self._loaded())

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # dict_keys is one
        """Return the keys."""
        return dict.keys(self._loaded())

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return the values."""
        return dict.values(self._loaded())

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return keys and values."""
        return dict.items(self._loaded())

    def copy(self) -> dict[str, Any]:
        """Return the mapping as a dict."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return dict.__eq__(self._loaded(), other._loaded() if isinstance(other, ResultMetadata) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = FrozenDict.__hash__

    def __repr__(self) -> str:
        try:
            return dict.__repr__(self._loaded())
        except FairtrialError:  # The sample is not stored, or the store is closed: debuggers and logs must not fail.
            return dict.__repr__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (self.copy(),)


@dataclass(frozen=True, slots=True)
class _DirectSource:
    """The sample and the session of a result that was created directly."""

    sample: Sample[Any, Any] | None
    session: SessionView | None

    def load_sample(self, result: EvalResult) -> Sample[Any, Any]:
        return Sample(result.sample_id, None) if self.sample is None else self.sample

    def load_session(self, result: EvalResult) -> SessionView:
        return RecordedView(UUID(int=0), EMPTY, ()) if self.session is None else self.session


@dataclass(frozen=True, slots=True)
class EvalResult(Generic[OutputT]):
    """The result of one trial. `score` is None unless the outcome is "scored": an error is not a score of 0.

    `usage` is the usage of the task; the cost of judges is in `judge_cost_usd`. `cache_hits` counts model calls
    answered by the response cache, `unpriced_calls` and `unpriced_judge_calls` those with unknown cost: if there are
    any, the costs are lower bounds. `cut_off_calls` counts model answers truncated at a token limit, `refused_calls`
    those that the model or a filter declined, and `unknown_endings` those that ended with an unknown reason, by name.

    `ordinal` is the position of the trial in the plan and `execution` a random id of this execution. Until a result is
    stored, `output_json` and `snapshot` have the encoded output and session; results read from a store load `sample`,
    `session` and `trajectory` lazily. `redacted_parts` names the parts in which the store has replaced secrets.

    A result created directly needs no key: `EvalResult("7", Score(1.0), 12)` has the id of the sample, the score and
    the latency, and a fourth argument is the error; everything else is given by name. There may be `sample=` instead of
    the id, `scores=` instead of one score, `tokens_used=` instead of `usage`, and `trajectory=` for the messages.
    `EvalReport.of` creates a report from such results.
    """

    key: TrialKey
    ordinal: int
    outcome: Outcome
    score: Score | None
    output: OutputT
    latency_ms: int
    usage: TokenUsage
    error: str | None
    stage: Stage | None
    attempt: int
    execution: int
    started_at: float
    metadata: Mapping[str, JSON]
    judge_cost_usd: float | None
    cache_hits: int
    unpriced_calls: int
    unpriced_judge_calls: int
    cut_off_calls: int
    refused_calls: int
    unknown_endings: Mapping[str, int]
    redacted_parts: tuple[RedactedPart, ...]
    code: int  # The index of the code version that executed the trial.
    output_json: str | None = field(compare=False)
    snapshot: bytes | None = field(compare=False)
    source: ResultSource | None = field(compare=False)

    def __init__(
        self,
        sample_id: str | None = None,
        score: Score | None = None,
        latency_ms: int = 0,
        error: str | None = None,
        *,
        key: TrialKey | None = None,
        ordinal: int = 0,
        outcome: Outcome | None = None,
        output: OutputT = None,  # type: ignore[assignment]  # a failed trial has no output
        usage: TokenUsage = NO_USAGE,
        stage: Stage | None = None,
        attempt: int = 1,
        execution: int = 0,
        started_at: float = 0.0,
        metadata: Mapping[str, JSON] = EMPTY,
        judge_cost_usd: float | None = None,
        cache_hits: int = 0,
        unpriced_calls: int = 0,
        unpriced_judge_calls: int = 0,
        cut_off_calls: int = 0,
        refused_calls: int = 0,
        unknown_endings: Mapping[str, int] = EMPTY,
        redacted_parts: tuple[RedactedPart, ...] = (),
        code: int = 0,
        output_json: str | None = None,
        snapshot: bytes | None = None,
        source: ResultSource | None = None,
        sample: Sample[Any, Any] | None = None,
        trajectory: Trajectory | None = None,
        scores: Sequence[Score] = (),
        tokens_used: int | None = None,
        success: bool | None = None,
    ) -> None:
        if sample_id is not None or type(key) is not TrialKey or type(latency_ms) is not int:
            _check_arguments(key, sample_id, score, latency_ms, error)
        if key is None:
            key = TrialKey("", "baseline", _sample_id(sample_id, sample))
        elif sample_id is not None and sample_id != key.sample_id:
            raise ValueError(f"sample_id must be that of the key, {key.sample_id!r} (got {sample_id!r})")
        if scores:
            if score is not None:
                raise ValueError("score and scores are mutually exclusive")
            parts = [(part.name or f"criterion {place}", part) for place, part in enumerate(scores, 1)]
            score = merge(parts, value=mean_value(parts), passed=all(part.passed for part in scores))
        if outcome is None:
            if error is None and score is None:
                raise ValueError("a result must have a score or an error")
            outcome = "scored" if error is None else "task_error"
            score = score if error is None else None  # An error is not a score of 0.
        elif outcome not in _OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(sorted(_OUTCOMES))} (got {outcome!r})")
        if success is not None and success is not (outcome == "scored"):
            raise ValueError(f"success must be {outcome == 'scored'} (got {success}): it follows from the outcome")
        if tokens_used is not None:
            usage = TokenUsage(tokens_used)
        if sample is not None or trajectory is not None:
            source = _DirectSource(sample, _session_of(trajectory))
        if source is not None and type(metadata) is not ResultMetadata:
            metadata = ResultMetadata(metadata, source, key, ordinal)
        made: Any = self if type(self) is EvalResult else object.__new__(_Unfrozen)
        if made is self:
            object.__setattr__(self, "__class__", _Unfrozen)
        _fill(
            made,
            key, ordinal, outcome, score, output, latency_ms, usage, error, stage, attempt, execution, started_at,
            metadata, judge_cost_usd, cache_hits, unpriced_calls, unpriced_judge_calls, cut_off_calls, refused_calls,
            unknown_endings, redacted_parts, code, output_json, snapshot, source,
        )  # fmt: skip
        if made is self:
            made.__class__ = EvalResult
        else:  # A subclass, which may have another layout.
            for name in _Unfrozen.__slots__:
                object.__setattr__(self, name, getattr(made, name))

    def __eq__(self, other: object) -> bool:
        """Compare what the trial gave: a stored result, which knows its sample, equals the one that was stored."""
        return self._compared() == other._compared() if type(other) is EvalResult else NotImplemented

    def __hash__(self) -> int:
        return hash((self.key, self.execution))  # Outputs and metadata may have no hash.

    def _compared(self) -> tuple[Any, ...]:
        values = (getattr(self, name) for name in _COMPARED)
        return (*values, self.own_metadata)

    def __repr__(self) -> str:
        """Return a line: the key, and what came of the trial. Output, metrics and usage are asked for by name."""
        place = f"{self.sample_id!r} of {self.experiment}" + (f", repeat {self.repeat}" if self.repeat else "")
        if self.score is not None:
            verdict = "passed" if self.score.passed else "failed"
            return f"<EvalResult {place}: {verdict} with {self.score.value:g}>"
        error = f": {self.error.partition(chr(10))[0][:80]}" if self.error else ""
        return f"<EvalResult {place}: {self.outcome}{error}>"

    @property
    def sample_id(self) -> str:
        """The id of the sample."""
        return self.key.sample_id

    @property
    def experiment(self) -> str:
        """The name of the experiment."""
        return self.key.experiment

    @property
    def repeat(self) -> int:
        """The number of the repeat, from 0."""
        return self.key.repeat

    @property
    def own_metadata(self) -> Mapping[str, JSON]:
        """The metadata of the trial without those of its sample."""
        return self.metadata.own if type(self.metadata) is ResultMetadata else self.metadata

    @property
    def known_latency_ms(self) -> int | None:
        """The duration of the trial; None if unknown (`metadata["untimed"]` is True)."""
        return None if self.own_metadata.get("untimed") is True else self.latency_ms

    @property
    def success(self) -> bool:
        """Whether the trial was scored, with any score."""
        return self.outcome == "scored"

    @property
    def passed(self) -> bool:
        """Whether the trial was scored and passed."""
        return self.score is not None and self.score.passed

    @property
    def scores(self) -> tuple[Score, ...]:
        """A named score for every criterion; the score itself if there are none; empty without a score."""
        if self.score is None:
            return ()
        criteria = {metric.name: metric for metric in self.score.criteria}
        outer = [m for m in criteria.values() if not any(name in criteria for name in outer_names(m.name))]
        if not outer:
            return (self.score,)
        return tuple(Score(min(max(m.value, 0.0), 1.0), m.passed, m.reason, name=m.name) for m in outer)

    @property
    def aggregate_score(self) -> float | None:
        """The mean value of `scores`; None without a score."""
        found = self.scores
        return sum(score.value for score in found) / len(found) if found else None

    @property
    def tokens_used(self) -> int:
        """Input and output tokens of the task's model calls."""
        return self.usage.total_tokens

    @property
    def total_cost_usd(self) -> float:
        """The known costs of the task's and the judges' calls."""
        return (self.usage.cost_usd or 0.0) + (self.judge_cost_usd or 0.0)

    @property
    def redacted(self) -> bool:
        """Whether a secret was replaced in the stored output, transcript, error, reason, score or metadata."""
        return bool(self.redacted_parts)

    @property
    def sample(self) -> Sample[Any, Any]:
        """The sample, loaded from the store."""
        return self._loaded().load_sample(self)

    @property
    def session(self) -> SessionView:
        """The session, loaded from the store."""
        return self._loaded().load_session(self)

    @property
    def trajectory(self) -> Trajectory:
        """The messages recorded in the trial, loaded from the store."""
        return self.session.trajectory

    def _loaded(self) -> ResultSource:
        if self.source is None:
            raise FairtrialError(f"trial {self.key} has no store from which its sample and session can be loaded")
        return self.source


allow_type_arguments(EvalResult)


class _Unfrozen(Generic[OutputT]):
    """What a result is while it is made: the same object, to which 25 fields are assigned in a quarter of the time."""

    __slots__ = EvalResult.__slots__


def _fill(
    made: Any,
    key: Any, ordinal: Any, outcome: Any, score: Any, output: Any, latency_ms: Any, usage: Any, error: Any,
    stage: Any, attempt: Any, execution: Any, started_at: Any, metadata: Any, judge_cost_usd: Any, cache_hits: Any,
    unpriced_calls: Any, unpriced_judge_calls: Any, cut_off_calls: Any, refused_calls: Any, unknown_endings: Any,
    redacted_parts: Any, code: Any, output_json: Any, snapshot: Any, source: Any,
) -> None:  # fmt: skip
    made.key = key
    made.ordinal = ordinal
    made.outcome = outcome
    made.score = score
    made.output = output
    made.latency_ms = latency_ms
    made.usage = usage
    made.error = error
    made.stage = stage
    made.attempt = attempt
    made.execution = execution
    made.started_at = started_at
    made.metadata = metadata
    made.judge_cost_usd = judge_cost_usd
    made.cache_hits = cache_hits
    made.unpriced_calls = unpriced_calls
    made.unpriced_judge_calls = unpriced_judge_calls
    made.cut_off_calls = cut_off_calls
    made.refused_calls = refused_calls
    made.unknown_endings = unknown_endings
    made.redacted_parts = redacted_parts
    made.code = code
    made.output_json = output_json
    made.snapshot = snapshot
    made.source = source


def unchecked_result(*values: Any) -> EvalResult[Any]:
    """Return a result with these values of all its fields, in their order: `EvalResult(...)` in a quarter of its time.

    For `run_trial`, which knows that they are valid.
    """
    made: Any = object.__new__(_Unfrozen)
    _fill(made, *values)
    made.__class__ = EvalResult
    result: EvalResult[Any] = made
    return result


def new_execution() -> int:
    """Return a random id of an execution, of 62 bits: the most that messages of a fleet carry."""
    return random.getrandbits(62)


def failed_result(key: TrialKey, ordinal: int, attempt: int, outcome: Outcome, stage: Stage, error: str) -> EvalResult:
    """Return the result of a trial that could not be executed to its end."""
    return EvalResult(
        key=key,
        ordinal=ordinal,
        outcome=outcome,
        error=error[:_LONGEST_ERROR],
        stage=stage,
        attempt=attempt,
        execution=new_execution(),
        started_at=time.time(),
    )


def _check_arguments(key: Any, sample_id: Any, score: Any, latency_ms: Any, error: Any) -> None:
    expected = (
        ("key", key, TrialKey, "a TrialKey"),
        ("sample_id", sample_id, str, "text"),
        ("score", score, Score, "a Score"),
        ("error", error, str, "text"),
    )
    for name, value, kind, what in expected:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} of a result must be {what} (got {value!r:.80})\n{_POSITIONS}")
    if type(latency_ms) is not int:
        raise TypeError(f"latency_ms of a result must be an int (got {latency_ms!r:.80})\n{_POSITIONS}")


_POSITIONS = "by position, it takes the id of the sample, the score, the latency and the error; give the rest by name"


def _sample_id(sample_id: str | None, sample: Sample[Any, Any] | None) -> str:
    named = sample.id if sample_id is None and sample is not None else sample_id
    if named is None:
        raise ValueError("a result must have a key, a sample_id or a sample")
    if sample is not None and sample.id != named:
        raise ValueError(f"sample_id must be that of the sample, {sample.id!r} (got {named!r})")
    return named


def _session_of(trajectory: Trajectory | None) -> SessionView | None:
    if trajectory is None:
        return None
    session = Session()
    for message in trajectory.messages:
        session.record(message)
    return session.view()


_COMPARED = tuple(each.name for each in fields(EvalResult) if each.compare and each.name != "metadata")
