"""What travels between submitters, workers and collectors: data, and nothing that leads to code.

Every type here writes and reads itself (`fairtrial.mailbox.WireBody`). Reading checks every field it knows; what is not
one of these raises `CodecError`, and a mailbox sets it aside before a worker sees it. What only a newer version can
read raises `NewerFormatError`, and the mailbox hands it back.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fairtrial.codec import decode, dumps, from_json, to_json
from fairtrial.codec.escape import MARK, parse_json
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.fleet.fields import VERSION, Fields, is_count, read, write
from fairtrial.frozen import EMPTY, FrozenDict, freeze
from fairtrial.scoring.score import Metric, Score
from fairtrial.session.events import TokenUsage
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import NO_USAGE, EvalResult
from fairtrial.types import JSON

_OUTCOMES = frozenset({"scored", "task_error", "scorer_error", "timeout", "dead_letter", "not_run"})
_STAGES = frozenset({"setup", "task", "output", "score", "delivery", "store", None})
_REQUEST_FIELDS = frozenset(
    {"key", "ordinal", "sample_ordinal", "input", "expected", "suite", "fingerprint", "id", "at"}
)
_SCORED_FIELDS = frozenset(
    {"key", "ordinal", "sample_ordinal", "outcome", "latency_ms", "attempt", "execution", "started_at", "score"}
    | {"output", "id", "worker"}
)
_NO_CALLS = (None, 0, 0, 0)
_END_OF_TIME = 1e11
_MAX_ATTEMPT = 1 << 31
_AS_THEY_ARE = frozenset({str, int, float, bool})


def new_id() -> str:
    """A name nobody else gives."""
    return f"{random.getrandbits(96):024x}"  # Names, not secrets; and a hundred times quicker than a UUID.


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Please execute and score this trial.

    Attributes:
        key: The trial.
        sample: Its sample. Once it has travelled, input and expected are plain JSON values: `typed` reads them.
        ordinal: Its place in the plan.
        sample_ordinal: The sample's place in the dataset.
        attempt: Which attempt at the trial this is; more than 1 when errors are tried again.
        params: The experiment's parameters.
        suite: The suite it belongs to, for people; workers know their suite from their own command line.
        fingerprint: What the suite is made of; a worker made of something else refuses. Empty matches any.
        echo: Whether the reply brings the sample along, for collectors that do not have the dataset.
        request_id: The request's own name.
        created_at: When it was made, in seconds since the epoch.
        tags: Labels of the run, for the trial's session.
    """

    key: TrialKey
    sample: Sample[Any, Any]
    ordinal: int = 0
    sample_ordinal: int = 0
    attempt: int = 1
    params: Mapping[str, JSON] = EMPTY
    suite: str = ""
    fingerprint: str = ""
    echo: bool = False
    request_id: str = field(default_factory=new_id)
    created_at: float = field(default_factory=time.time)
    tags: Mapping[str, str] = EMPTY

    def __post_init__(self) -> None:
        if self.sample.id != self.key.sample_id:
            raise ConfigurationError(f"trial {self.key} is not one of sample {self.sample.id!r}")
        if type(self.params) is not FrozenDict:
            object.__setattr__(self, "params", freeze(dict(self.params)))

    @property
    def experiment(self) -> Experiment:
        """The variant to try: its name and parameters."""
        return Experiment(self.key.experiment, self.params)

    def typed(self, input_type: Any = object, expected_type: Any = object) -> Sample[Any, Any]:
        """The sample with input and expected as these types. Raises `CodecError` if they are not."""
        sample = self.sample
        given = _typed(input_type, sample.input, "input")
        wanted = None if sample.expected is None else _typed(expected_type, sample.expected, "expected")
        if given is sample.input and wanted is sample.expected:
            return sample
        return Sample(sample.id, given, wanted, sample.metadata)

    def to_wire(self) -> bytes:
        """The request as JSON."""
        sample = self.sample
        tree: dict[str, Any] = {
            "v": VERSION,
            "key": self.key,
            "ordinal": self.ordinal,
            "sample_ordinal": self.sample_ordinal,
            "input": sample.input,
        }
        if sample.expected is not None:
            tree["expected"] = sample.expected
        if sample.metadata:
            tree["metadata"] = sample.metadata
        if self.attempt != 1:
            tree["attempt"] = self.attempt
        if self.params:
            tree["params"] = self.params
        if self.suite:
            tree["suite"] = self.suite
        if self.fingerprint:
            tree["fingerprint"] = self.fingerprint
        if self.echo:
            tree["echo"] = True
        if self.tags:
            tree["tags"] = dict(self.tags)
        tree["id"] = self.request_id
        tree["at"] = self.created_at
        return write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The request from JSON."""
        tree = read(data, "an EvalRequest")
        if type(name := tree.get("suite", "")) is str and type(mark := tree.get("fingerprint", "")) is str:
            # The common case in one look; whatever is out of the ordinary is looked at field by field.
            get: Any = tree.get
            key, at, id, ordinal, sample_ordinal = map(get, ("key", "at", "id", "ordinal", "sample_ordinal"))
            if (
                _REQUEST_FIELDS.issuperset(tree)
                and _is_key(key)
                and is_count(ordinal)
                and is_count(sample_ordinal)
                and type(id) is str
                and type(at) is float
                and 0 <= at < _END_OF_TIME
            ):
                return cls(
                    TrialKey(*key),
                    Sample(key[2], tree.get("input"), tree.get("expected")),
                    ordinal,
                    sample_ordinal,
                    suite=name,
                    fingerprint=mark,
                    request_id=id,
                    created_at=at,
                )
        return cls._read(Fields(tree, "an EvalRequest"))

    @classmethod
    def _read(cls, fields: Fields) -> Self:
        key = fields.key("key")
        _experiment_name(key.experiment)
        return cls(
            key,
            Sample(key.sample_id, fields.any("input"), fields.any("expected"), fields.mapping("metadata")),
            fields.whole("ordinal"),
            fields.whole("sample_ordinal"),
            fields.whole("attempt", 1, least=1),
            fields.mapping("params"),
            fields.text("suite", ""),
            fields.text("fingerprint", ""),
            fields.flag("echo"),
            fields.text("id"),
            fields.number("at"),
            _tags(fields.mapping("tags")),
        )


def _tags(found: Mapping[str, Any]) -> Mapping[str, str]:
    if not all(type(value) is str for value in found.values()):
        raise CodecError("an EvalRequest's tags are texts")
    return found


@dataclass(frozen=True, slots=True)
class EvalReply:
    """This came of it.

    Attributes:
        result: The result, with `output_json` and `snapshot` on board, ready for a store.
        sample_ordinal: The sample's place in the dataset.
        sample: The sample, if the request asked for it back.
        request_id: The request this answers.
        worker: Who did it.
    """

    result: EvalResult
    sample_ordinal: int = 0
    sample: Sample[Any, Any] | None = None
    request_id: str = ""
    worker: str = ""

    @property
    def samples(self) -> Mapping[int, Sample[Any, Any]]:
        """The sample by its place, as `RunStore.commit` takes it; empty if it did not travel."""
        return EMPTY if self.sample is None else {self.sample_ordinal: self.sample}  # type: ignore[return-value]  # empty

    def to_wire(self) -> bytes:
        """The reply as JSON."""
        result = self.result
        tree: dict[str, Any] = {
            "v": VERSION,
            "key": result.key,
            "ordinal": result.ordinal,
            "sample_ordinal": self.sample_ordinal,
            "outcome": result.outcome,
            "latency_ms": result.latency_ms,
            "attempt": result.attempt,
            "execution": result.execution,
            "started_at": result.started_at,
        }
        if (score := result.score) is not None:
            tree["score"] = _score_tree(score)
        output = result.output_json
        if output is None and result.output is not None:
            output = dumps(result.output)
        if output is not None:
            tree["output"] = output
        if result.usage is not NO_USAGE:
            tree["usage"] = _usage_tree(result.usage)
        calls = (result.judge_cost_usd, result.cache_hits, result.unpriced_calls, result.unpriced_judge_calls)
        if calls != _NO_CALLS:
            tree["calls"] = calls
        if result.error is not None:
            tree["error"] = result.error
        if result.stage is not None:
            tree["stage"] = result.stage
        if result.metadata:
            tree["metadata"] = result.metadata
        if result.snapshot is not None:
            tree["snapshot"] = _snapshot_text(result.snapshot)
        if self.sample is not None:
            sample = self.sample
            tree["sample"] = [sample.input, sample.expected, sample.metadata]
        if self.request_id:
            tree["id"] = self.request_id
        if self.worker:
            tree["worker"] = self.worker
        return write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The reply from JSON."""
        tree = read(data, "an EvalReply")
        get: Any = tree.get
        key, ordinal, sample_ordinal, score = map(get, ("key", "ordinal", "sample_ordinal", "score"))
        latency, attempt, execution, started_at = map(get, ("latency_ms", "attempt", "execution", "started_at"))
        output, id, worker = get("output"), get("id", ""), get("worker", "")
        if (
            # The common case in one look; whatever is out of the ordinary is looked at field by field.
            _SCORED_FIELDS.issuperset(tree)
            and tree.get("outcome") == "scored"
            and _is_key(key)
            and type(score) is list
            and len(score) == 5
            and type(output) is type(id) is type(worker) is str
            and is_count(ordinal)
            and is_count(sample_ordinal)
            and is_count(latency)
            and is_count(execution)
            and type(attempt) is int
            and 1 <= attempt <= _MAX_ATTEMPT
            and type(started_at) is float
            and 0 <= started_at < _END_OF_TIME
        ):
            result = EvalResult(
                TrialKey(*key),
                ordinal,
                "scored",
                _read_score(score),
                _read_output(output),
                latency,
                attempt=attempt,
                execution=execution,
                started_at=started_at,
                output_json=output,
            )
            return cls(result, sample_ordinal, None, id, worker)
        return cls._read(Fields(tree, "an EvalReply"))

    @classmethod
    def _read(cls, fields: Fields) -> Self:
        key = fields.key("key")
        outcome: Any = fields.text("outcome")
        stage: Any = fields.text_or_none("stage")
        if outcome not in _OUTCOMES or stage not in _STAGES:
            raise CodecError(f"{outcome!r} at stage {stage!r} is not an outcome"[:200])
        output = fields.text_or_none("output")
        snapshot = fields.text_or_none("snapshot")
        score = _read_score(fields.array("score", 5)) if fields.has("score") else fields.any("score")
        judge_cost, hits, unpriced, unpriced_judges = fields.calls("calls", _NO_CALLS)
        result = EvalResult(
            key=key,
            ordinal=fields.whole("ordinal"),
            outcome=outcome,
            score=score,
            output=None if output is None else _read_output(output),
            latency_ms=fields.whole("latency_ms"),
            usage=fields.usage("usage", NO_USAGE),
            error=fields.text_or_none("error"),
            stage=stage,
            attempt=fields.whole("attempt", least=1),
            execution=fields.whole("execution"),
            started_at=fields.number("started_at"),
            metadata=fields.mapping("metadata"),
            judge_cost_usd=judge_cost,
            cache_hits=hits,
            unpriced_calls=unpriced,
            unpriced_judge_calls=unpriced_judges,
            output_json=output,
            snapshot=None if snapshot is None else snapshot.encode("utf-8", "surrogatepass"),
        )
        if (outcome == "scored") is (score is None):
            raise CodecError(f'a result has a score exactly if its outcome is "scored"; this one is {outcome!r}')
        return cls(
            result,
            fields.whole("sample_ordinal"),
            _read_sample(key, fields.array("sample", 3)) if fields.has("sample") else fields.any("sample"),
            fields.text("id", ""),
            fields.text("worker", ""),
        )


def by_run(replies: Iterable[EvalReply]) -> Mapping[str, tuple[list[EvalResult], dict[int, Sample[Any, Any]]]]:
    """Replies as what `RunStore.commit` takes: results, and the samples that travelled with them, per run."""
    runs: dict[str, tuple[list[EvalResult], dict[int, Sample[Any, Any]]]] = {}
    for reply in replies:
        results, samples = runs.setdefault(reply.result.key.run_id, ([], {}))
        results.append(reply.result)
        if reply.sample is not None:
            samples[reply.sample_ordinal] = reply.sample
    return runs


def without_payload(reply: EvalReply) -> EvalReply | None:
    """The same result without its transcript, then without its output; None if there is nothing left to leave out.

    For results that are too large to travel: the score was paid for and is worth more than nothing.
    """
    result = reply.result
    if result.snapshot is not None:
        smaller = replace(result, snapshot=None, metadata={**result.metadata, "dropped": ["transcript"]})
    elif result.output is not None or result.output_json is not None:
        dropped = ["transcript", "output"] if "dropped" in result.metadata else ["output"]
        smaller = replace(result, output=None, output_json=None, metadata={**result.metadata, "dropped": dropped})
    else:
        return None
    return replace(reply, result=smaller)


@dataclass(frozen=True, slots=True)
class MainLoopRequest:
    """Please execute this input.

    Attributes:
        input: What goes in; plain JSON once it has travelled.
        request_id: The request's own name; the result carries it.
        params: The experiment's parameters.
        experiment: The experiment's name.
        key: The trial it is for, if it is for one.
        metadata: The sample's facts. What should come out is not among them: it stays with the evaluator.
        seed: The run's seed.
        attempt: Which attempt at the trial this is.
        timeout_seconds: How long the answer is of use to anyone.
    """

    input: Any
    request_id: str = field(default_factory=new_id)
    params: Mapping[str, JSON] = EMPTY
    experiment: str = "baseline"
    key: TrialKey | None = None
    metadata: Mapping[str, JSON] = EMPTY
    seed: int = 0
    attempt: int = 1
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("params", "metadata"):
            if type(getattr(self, name)) is not FrozenDict:
                object.__setattr__(self, name, freeze(dict(getattr(self, name))))

    def typed(self, input_type: Any = object) -> Any:
        """The input as this type. Raises `CodecError` if it is not one."""
        return _typed(input_type, self.input, "input")

    def to_wire(self) -> bytes:
        """The request as JSON."""
        tree: dict[str, Any] = {"v": VERSION, "id": self.request_id, "input": self.input}
        if self.params:
            tree["params"] = self.params
        if self.experiment != "baseline":
            tree["experiment"] = self.experiment
        if self.key is not None:
            tree["key"] = self.key
        if self.metadata:
            tree["metadata"] = self.metadata
        if self.seed:
            tree["seed"] = self.seed
        if self.attempt != 1:
            tree["attempt"] = self.attempt
        if self.timeout_seconds is not None:
            tree["timeout_seconds"] = self.timeout_seconds
        return write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The request from JSON."""
        fields = Fields(read(data, "a MainLoopRequest"), "a MainLoopRequest")
        return cls(
            fields.any("input"),
            fields.text("id"),
            fields.mapping("params"),
            _experiment_name(fields.text("experiment", "baseline")),
            fields.key("key") if fields.has("key") else fields.any("key"),
            fields.mapping("metadata"),
            fields.whole("seed", 0),
            fields.whole("attempt", 1, least=1),
            fields.number_or_none("timeout_seconds"),
        )


@dataclass(frozen=True, slots=True)
class MainLoopResult:
    """This came out.

    Attributes:
        request_id: The request this answers.
        output: What came out; plain JSON once it has travelled.
        error: Why nothing came out, if so.
        session: The session's snapshot, if it travels with the result.
        session_id: Its name in the shared session store, if it lies there.
        usage: What the model calls used.
        latency_ms: How long it took.
    """

    request_id: str
    output: Any = None
    error: str | None = None
    session: bytes | None = None
    session_id: str | None = None
    usage: TokenUsage = NO_USAGE
    latency_ms: int = 0

    def to_wire(self) -> bytes:
        """The result as JSON."""
        tree: dict[str, Any] = {"v": VERSION, "id": self.request_id, "latency_ms": self.latency_ms}
        if self.output is not None:
            tree["output"] = self.output
        if self.error is not None:
            tree["error"] = self.error
        if self.session is not None:
            tree["session"] = _snapshot_text(self.session)
        if self.session_id is not None:
            tree["session_id"] = self.session_id
        if self.usage is not NO_USAGE:
            tree["usage"] = _usage_tree(self.usage)
        return write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The result from JSON."""
        fields = Fields(read(data, "a MainLoopResult"), "a MainLoopResult")
        snapshot = fields.text_or_none("session")
        return cls(
            fields.text("id"),
            fields.any("output"),
            fields.text_or_none("error"),
            None if snapshot is None else snapshot.encode("utf-8", "surrogatepass"),
            fields.text_or_none("session_id"),
            fields.usage("usage", NO_USAGE),
            fields.whole("latency_ms"),
        )


def _typed(kind: Any, value: Any, what: str) -> Any:
    if kind is object or kind is Any or (kind in _AS_THEY_ARE and type(value) is kind):
        return value
    try:
        return from_json(kind, to_json(value))
    except CodecError as error:
        raise error.under(what) from None


def _is_key(value: Any) -> bool:
    if type(value) is not list or len(value) != 4:
        return False
    run_id, experiment, sample_id, repeat = value
    return (
        type(run_id) is type(sample_id) is type(experiment) is str
        and bool(sample_id)
        and is_count(repeat)
        and bool(_experiment_name(experiment))
    )


def _score_tree(score: Score) -> list[Any]:
    metrics = [_metric_tree(metric) for metric in score.metrics]
    return [score.value, score.passed, score.reason, metrics, score.name]


def _metric_tree(metric: Metric) -> list[Any]:
    tree: list[Any] = [metric.name, metric.value, metric.weight, metric.metadata]
    return tree if metric.passed is None and not metric.reason else [*tree, metric.passed, metric.reason]


def _read_score(tree: list[Any]) -> Score:
    value, passed, reason, metrics, name = tree
    if type(value) not in (int, float) or type(passed) is not bool or type(metrics) is not list:
        raise CodecError("a score is value, verdict, reason, metrics and name").under("score")
    try:
        kept = [_read_metric(metric) for metric in metrics] if metrics else ()
        return Score(value, passed, reason, kept, name=name)
    except (TypeError, ValueError) as error:
        raise CodecError(str(error)[:500]).under("score") from None


def _read_metric(tree: Any) -> Metric:
    name, value, weight, metadata, *verdict = tree
    if type(name) is not str or not {type(value), type(weight)} <= {int, float} or type(metadata) is not dict:
        raise CodecError("a metric must be name, value, weight, metadata and, of a criterion, passed and reason")
    return Metric(name, value, weight, metadata, *verdict)


def _read_output(text: str) -> Any:
    """The output a reply carries as text: a store takes it as it is, so it must be JSON."""
    try:
        return decode(object, text) if MARK in text else parse_json(text)
    except CodecError as error:
        raise error.under("output") from None


def _read_sample(key: TrialKey, tree: list[Any]) -> Sample[Any, Any]:
    given, expected, metadata = tree
    if type(metadata) is not dict:
        raise CodecError("metadata is an object").under("sample")
    return Sample(key.sample_id, given, expected, metadata)


def _usage_tree(usage: TokenUsage) -> list[Any]:
    return [usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.cost_usd]


def _snapshot_text(snapshot: bytes) -> str:
    try:
        return snapshot.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CodecError(f"a session's snapshot is text in UTF-8: {error.reason}").under("snapshot") from None


@functools.lru_cache(maxsize=1024)
def _experiment_name(name: str) -> str:
    try:
        return Experiment(name).name
    except ConfigurationError as error:
        raise CodecError(str(error)[:200]).under("experiment") from None
