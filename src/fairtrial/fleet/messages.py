"""The messages between clients and workers. They carry data only, never code.

Every type here serializes itself (`fairtrial.mailbox.WireBody`). Reading validates every known field. An invalid body
raises `CodecError`, and the mailbox moves it to the dead letters before a worker sees it. A body that only a newer
version can read raises `NewerFormatError`, and the mailbox hands it back.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Generic, Self, cast, get_args

from typing_extensions import TypeVar

from fairtrial.base.codec import dumps, from_json, to_json
from fairtrial.base.frozen import EMPTY, JSON, FrozenDict, allow_type_arguments, first_is, freeze
from fairtrial.data.sample import NOT_GIVEN, Sample
from fairtrial.data.session.events import NO_USAGE, TokenUsage
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.fleet import message_fields as wire
from fairtrial.store.redact import REDACTED, RedactingFilter, current
from fairtrial.trials.config import Experiment
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, OutputT, RedactedPart
from fairtrial.trials.sample_types import PLAIN, TypeName, value_type_name

# Here because every client and every worker imports this module.
logging.getLogger("fairtrial.fleet").addFilter(RedactingFilter())

_OUTCOMES = frozenset({"scored", "task_error", "scorer_error", "timeout", "dead_letter", "not_run", "user_error"})
_REDACTED_PARTS = get_args(RedactedPart.__value__)
_STAGES = frozenset({"setup", "task", "output", "score", "delivery", "store", None})
_NO_CALLS = (None, 0, 0, 0, 0)
_AS_THEY_ARE = frozenset({str, int, float, bool})

InputT = TypeVar("InputT", default=Any)
ExpectedT = TypeVar("ExpectedT", default=Any)


def new_id() -> str:
    """Return a unique random id."""
    return f"{random.getrandbits(96):024x}"  # Ids need not be secret; this is a hundred times faster than a UUID.


_IMPLICIT = "implicit-"
_implicit_run: str | None = None


def implicit_run() -> str:
    """Return the id of the run for requests without a key: one per process, until that run is collected."""
    global _implicit_run
    if _implicit_run is None:
        _implicit_run = f"{_IMPLICIT}{new_id()[:12]}"
    return _implicit_run


def current_implicit_run() -> str | None:
    """Return the id of the run for requests without a key, if there have been any since the last collection."""
    return _implicit_run


def is_implicit_run(run_id: str) -> bool:
    """Return whether the requests of a run were made without a key, and so have no position in a plan."""
    return run_id.startswith(_IMPLICIT)


def end_implicit_run(run_id: str) -> None:
    """Start a new run for later requests without a key, if this is the current one."""
    global _implicit_run
    if _implicit_run == run_id:
        _implicit_run = None


@first_is(TrialKey, NoneType)
@dataclass(frozen=True, slots=True)
class EvalRequest(Generic[InputT, ExpectedT]):
    """A request to execute and score one trial.

    `EvalRequest(sample=sample)` is a trial of the default experiment. All requests that a process makes without a key
    belong to one run. The reply includes the sample, and `collect_results` collects the run.

    Attributes:
        key: The key of the trial; derived from the sample by default.
        sample: The sample. After transport, input and expected are plain JSON values: decode them with `typed`.
        ordinal: The position of the trial in the plan.
        sample_ordinal: The position of the sample in the dataset.
        attempt: The number of the attempt; more than 1 when failed trials are retried.
        params: The experiment's parameters.
        suite: The name of the suite, for logs; a worker's suite comes from its own command line.
        fingerprint: The fingerprint of the suite's code. A worker with other code refuses the request. Empty matches
            any.
        echo: Whether the reply includes the sample, for collectors that do not have the dataset.
        request_id: The unique id of the request.
        created_at: Creation time, in seconds since the epoch.
        tags: Labels of the run, for the trial's session.
        types: The names of the types of input and expected value; determined when the request is sent by default. Empty
            for plain JSON.
        commit: Whether a worker whose queue is in the database of the run's store may store the result there itself,
            instead of sending it to the client.
        code: With `commit`, the index of the code version in the run's list.
    """

    key: TrialKey = None  # type: ignore[assignment]  # made from the sample
    sample: Sample[InputT, ExpectedT] = None  # type: ignore[assignment]  # checked below: it follows a default
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
    types: tuple[TypeName, TypeName] | None = field(default=None, compare=False)
    commit: bool = False
    code: int = 0

    def __post_init__(self) -> None:
        if self.sample is None:
            raise ConfigurationError("an EvalRequest must be given a sample: EvalRequest(sample=sample)")
        if cast("TrialKey | None", self.key) is None:
            object.__setattr__(self, "key", TrialKey(implicit_run(), Experiment().name, self.sample.id))
            object.__setattr__(self, "echo", True)
        elif self.sample.id != self.key.sample_id:
            raise ConfigurationError(f"the key must name sample {self.sample.id!r} (got {self.key})")
        if type(self.params) is not FrozenDict:
            object.__setattr__(self, "params", freeze(dict(self.params)))

    @property
    def experiment(self) -> Experiment:
        """The experiment: its name and parameters."""
        return Experiment(self.key.experiment, self.params)

    @property
    def type_names(self) -> tuple[TypeName, TypeName]:
        """The names of the types of input and expected value."""
        if self.types is not None:
            return self.types
        return value_type_name(self.sample.input), value_type_name(self.sample.expected)

    def typed(self, input_type: Any = object, expected_type: Any = object) -> Sample[Any, Any]:
        """Return the sample with input and expected decoded as these types. Raises `CodecError` if that fails."""
        sample = self.sample
        given = _typed(input_type, sample.input, "input")
        wanted = None if sample.expected is None else _typed(expected_type, sample.expected, "expected")
        if given is sample.input and wanted is sample.expected:
            return sample
        return replace(sample, input=given, expected=wanted)

    def to_wire(self) -> bytes:
        """The request as JSON."""
        sample = self.sample
        tree: dict[str, Any] = {
            "v": wire.VERSION,
            "key": self.key,
            "ordinal": self.ordinal,
            "sample_ordinal": self.sample_ordinal,
            "input": sample.input,
        }
        if sample.has_expected:
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
        names = self.type_names
        if names != PLAIN:
            tree["types"] = names
        if self.commit:
            tree["commit"] = True
            if self.code:
                tree["code"] = self.code
        tree["id"] = self.request_id
        tree["at"] = self.created_at
        return wire.write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The request from JSON."""
        key, given, expected, metadata, *rest = _REQUEST.read(data)
        return cls(key, Sample(key.sample_id, given, expected, metadata), *rest)


@dataclass(frozen=True, slots=True)
class EvalReply:
    """The reply to an `EvalRequest`: the result of one trial.

    Attributes:
        result: The result, including `output_json` and `snapshot`, ready to be stored.
        sample_ordinal: The position of the sample in the dataset.
        sample: The sample, if the request asked for it (`echo`).
        request_id: The id of the request.
        worker: The name of the worker.
    """

    result: EvalResult
    sample_ordinal: int = 0
    sample: Sample[Any, Any] | None = None
    request_id: str = ""
    worker: str = ""

    def to_wire(self) -> bytes:
        """The reply as JSON."""
        result = self.result
        tree: dict[str, Any] = {
            "v": wire.VERSION,
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
            tree["score"] = wire.score_tree(score)
        output = result.output_json
        if output is None and result.output is not None:
            output = dumps(result.output)
        if output is not None:
            tree["output"] = output
        if result.usage is not NO_USAGE:
            tree["usage"] = wire.usage_tree(result.usage)
        calls = (
            result.judge_cost_usd,
            result.cache_hits,
            result.unpriced_calls,
            result.unpriced_judge_calls,
            result.cut_off_calls,
        )
        if calls != _NO_CALLS:
            tree["calls"] = calls
        if result.refused_calls or result.unknown_endings:
            tree["endings"] = (result.refused_calls, dict(result.unknown_endings))
        if result.error is not None:
            tree["error"] = result.error
        if result.stage is not None:
            tree["stage"] = result.stage
        if result.redacted_parts:
            tree["redacted"] = result.redacted_parts
        if result.own_metadata:
            tree["metadata"] = result.own_metadata
        if result.snapshot is not None:
            tree["snapshot"] = wire.snapshot_text(result.snapshot)
        if self.sample is not None:
            sample = self.sample
            tree["sample"] = [sample.input, sample.expected, sample.metadata]
            if not sample.has_expected:
                tree["sample"].append(False)
        if self.request_id:
            tree["id"] = self.request_id
        if self.worker:
            tree["worker"] = self.worker
        return wire.write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The reply from JSON."""
        sample_ordinal, sample, request_id, worker, calls, endings, redacted, snapshot, *fields = _REPLY.read(data)
        key, ordinal, outcome, score, output_json, latency_ms, usage, error, stage, *rest = fields
        attempt, execution, started_at, metadata = rest
        judge_cost_usd, cache_hits, unpriced_calls, unpriced_judge_calls, cut_off_calls = calls
        result: EvalResult = EvalResult(
            key=key,
            ordinal=ordinal,
            outcome=outcome,
            score=score,
            output=None if output_json is None else wire.read_output(output_json),
            latency_ms=latency_ms,
            usage=usage,
            error=error,
            stage=stage,
            attempt=attempt,
            execution=execution,
            started_at=started_at,
            metadata=metadata,
            judge_cost_usd=judge_cost_usd,
            cache_hits=cache_hits,
            unpriced_calls=unpriced_calls,
            unpriced_judge_calls=unpriced_judge_calls,
            cut_off_calls=cut_off_calls,
            refused_calls=endings[0],
            unknown_endings=endings[1],
            redacted_parts=redacted,
            output_json=output_json,
            snapshot=snapshot,
        )
        if (result.outcome == "scored") is (result.score is None):
            raise CodecError(
                f'a result must have a score if and only if its outcome is "scored" (got {result.outcome!r})'
            )
        echoed = None if sample is None else Sample(result.key.sample_id, *sample[:3], has_expected=sample[3])
        return cls(result, sample_ordinal, echoed, request_id, worker)


def by_run(replies: Iterable[EvalReply]) -> Mapping[str, tuple[list[EvalResult], dict[int, Sample[Any, Any]]]]:
    """Group replies by run, as `RunStore.commit` takes them: results, and the samples that came with them."""
    runs: dict[str, tuple[list[EvalResult], dict[int, Sample[Any, Any]]]] = {}
    for reply in replies:
        results, samples = runs.setdefault(reply.result.key.run_id, ([], {}))
        results.append(reply.result)
        if reply.sample is not None:
            samples[reply.sample_ordinal] = reply.sample
    return runs


def without_secrets(reply: EvalReply) -> EvalReply:
    """Return the reply as it may be sent to a client, which does not know the secrets of this process."""
    result, redactor = reply.result, current()
    found = set(result.redacted_parts)

    def clean[T: (str, bytes)](part: RedactedPart, redact: Callable[[T], T], text: T) -> T:
        redacted = redact(text)
        if redacted is not text:
            found.add(part)
        return redacted

    changed: dict[str, Any] = {}
    output = result.output_json
    if output is None and result.output is not None:
        output = dumps(result.output)
    if output is not None and (text := clean("output", redactor.json, output)) is not output:
        try:
            changed |= {"output": wire.read_output(text), "output_json": text}
        except CodecError:  # A secret in bytes: nothing of them can be read.
            changed |= {"output": REDACTED, "output_json": dumps(REDACTED)}
    if result.error is not None:
        changed["error"] = clean("error", redactor.text, result.error)
    if result.snapshot is not None:
        changed["snapshot"] = clean("transcript", redactor.data, result.snapshot)
    if result.own_metadata:
        written = dumps(result.own_metadata)
        if (text := clean("metadata", redactor.json, written)) is not written:
            metadata = json.loads(text)
            changed["metadata"] = metadata if isinstance(metadata, dict) else {}
    endings = {redactor.text(name): many for name, many in result.unknown_endings.items()}
    if endings != result.unknown_endings:
        changed["unknown_endings"] = endings
    if (score := result.score) is not None:
        tree = wire.score_tree(score)
        written = dumps(tree)
        if redactor.json(written) is not written:
            tree[2] = clean("reason", redactor.text, score.reason)
            tree[3:] = [_clean_texts(lambda text: clean("score", redactor.text, text), part) for part in tree[3:]]
            names: list[str] = []
            for metric in tree[3]:
                while metric[0] in names:  # Two names that differed only in their secret.
                    metric[0] += "#2"
                names.append(metric[0])
            changed["score"] = wire.read_score(tree)
    if not found and "unknown_endings" not in changed:
        return reply
    parts = tuple(part for part in _REDACTED_PARTS if part in found)
    return replace(reply, result=replace(result, **changed, redacted_parts=parts))


def _clean_texts(clean: Callable[[str], str], tree: Any) -> Any:
    if isinstance(tree, str):
        return clean(tree)
    if isinstance(tree, Mapping):
        return {clean(name): _clean_texts(clean, part) for name, part in tree.items()}
    return [_clean_texts(clean, part) for part in tree] if isinstance(tree, list | tuple) else tree


def without_payload(reply: EvalReply) -> EvalReply | None:
    """Return the result without its transcript, or else without its output; None if nothing is left to remove.

    For results that exceed the size limit of the mailbox: the score is kept, because it was paid for.
    """
    result = reply.result
    if result.snapshot is not None:
        smaller = replace(result, snapshot=None, metadata={**result.own_metadata, "dropped": ["transcript"]})
    elif result.output is not None or result.output_json is not None:
        dropped = ["transcript", "output"] if "dropped" in result.own_metadata else ["output"]
        smaller = replace(result, output=None, output_json=None, metadata={**result.own_metadata, "dropped": dropped})
    else:
        return None
    return replace(reply, result=smaller)


@dataclass(frozen=True, slots=True)
class MainLoopRequest:
    """A request to execute the task for one input.

    Attributes:
        input: The input; plain JSON after transport.
        request_id: The unique id of the request; the result repeats it.
        params: The experiment's parameters.
        experiment: The experiment's name.
        key: The key of the trial, if there is one.
        metadata: The metadata of the sample. The expected value is not sent: only the evaluator sees it.
        seed: The run's seed.
        attempt: The number of the attempt.
        timeout_seconds: Time after which the sender no longer waits for the result.
        type_name: The name of the type of the input; determined when the request is sent by default.
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
    type_name: TypeName | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("params", "metadata"):
            if type(getattr(self, name)) is not FrozenDict:
                object.__setattr__(self, name, freeze(dict(getattr(self, name))))

    def typed(self, input_type: Any = object) -> Any:
        """Return the input decoded as this type. Raises `CodecError` if that fails."""
        return _typed(input_type, self.input, "input")

    def to_wire(self) -> bytes:
        """The request as JSON."""
        tree: dict[str, Any] = {"v": wire.VERSION, "id": self.request_id, "input": self.input}
        if name := value_type_name(self.input) if self.type_name is None else self.type_name:
            tree["type"] = [name]
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
        return wire.write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The request from JSON."""
        return cls(*_MAIN_REQUEST.read(data))


@dataclass(frozen=True, slots=True)
class MainLoopResult(Generic[OutputT]):  # noqa: UP046 - they have defaults
    """The reply to a `MainLoopRequest`: the output of the task, or its error.

    Attributes:
        request_id: The id of the request.
        output: The output; plain JSON after transport.
        error: The error, if the task failed.
        session_snapshot: The session, serialized, if it is sent with the result.
        session_id: The id of the session in the shared session store, if it is kept there.
        usage: What the model calls used.
        latency_ms: The duration of the call.
        type_name: The name of the type of the output; determined when the result is sent by default.
    """

    request_id: str
    output: OutputT = None  # type: ignore[assignment]  # a failed request has no output
    error: str | None = None
    session_snapshot: bytes | None = None
    session_id: str | None = None
    usage: TokenUsage = NO_USAGE
    latency_ms: int = 0
    type_name: TypeName | None = field(default=None, compare=False)

    def to_wire(self) -> bytes:
        """The result as JSON."""
        tree: dict[str, Any] = {"v": wire.VERSION, "id": self.request_id, "latency_ms": self.latency_ms}
        if self.output is not None:
            tree["output"] = self.output
            if name := value_type_name(self.output) if self.type_name is None else self.type_name:
                tree["type"] = [name]
        if self.error is not None:
            tree["error"] = self.error
        if self.session_snapshot is not None:
            tree["session"] = wire.snapshot_text(self.session_snapshot)
        if self.session_id is not None:
            tree["session_id"] = self.session_id
        if self.usage is not NO_USAGE:
            tree["usage"] = wire.usage_tree(self.usage)
        return wire.write(tree)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The result from JSON."""
        return cls(*_MAIN_RESULT.read(data))


def _typed(kind: Any, value: Any, what: str) -> Any:
    if kind is object or kind is Any or (kind in _AS_THEY_ARE and type(value) is kind):
        return value
    try:
        return from_json(kind, to_json(value))
    except CodecError as error:
        raise error.under(what) from None


def _read_redacted_parts(tree: list[Any]) -> tuple[RedactedPart, ...]:
    if not set(tree) <= set(_REDACTED_PARTS):
        raise ValueError(tree)
    return tuple(tree)


_KEY = "run, experiment, sample and repeat"
_USAGE = wire.array("usage", "counts and a cost", wire.read_usage, NO_USAGE)
_TYPE = wire.array("type", "the name of a type", lambda tree: wire.read_type_name(*tree), "")
_REQUEST = wire.BodyReader(
    "an EvalRequest",
    wire.array("key", _KEY, wire.read_key),
    wire.anything("input"),
    wire.anything("expected", NOT_GIVEN),
    wire.mapping("metadata"),
    wire.whole("ordinal"),
    wire.whole("sample_ordinal"),
    wire.whole("attempt", 1, least=1),
    wire.mapping("params"),
    wire.text("suite", ""),
    wire.text("fingerprint", ""),
    wire.flag("echo"),
    wire.text("id"),
    wire.number("at"),
    wire.mapping("tags", wire.read_tags),
    wire.array("types", "the names of two types", wire.read_types, PLAIN),
    wire.flag("commit"),
    wire.whole("code", 0),
)
_REPLY = wire.BodyReader(
    "an EvalReply",
    wire.whole("sample_ordinal"),
    wire.array("sample", "input, expected and metadata", wire.read_sample, None),
    wire.text("id", ""),
    wire.text("worker", ""),
    wire.array("calls", "a cost and four counts", wire.read_calls, (None, 0, 0, 0, 0)),
    wire.array("endings", "the refused calls and the unknown endings by name", wire.read_endings, (0, EMPTY)),
    wire.array("redacted", "parts of a result", _read_redacted_parts, ()),
    wire.text("snapshot", None, wire.snapshot_bytes),
    # The rest has the order of `EvalResult`.
    wire.array("key", _KEY, wire.read_key),
    wire.whole("ordinal"),
    wire.text("outcome", convert=wire.one_of(_OUTCOMES)),
    wire.array("score", "value, verdict, reason, metrics and name", wire.read_score, None),
    wire.text("output", None),
    wire.whole("latency_ms"),
    _USAGE,
    wire.text("error", None),
    wire.text("stage", None, wire.one_of(_STAGES)),
    wire.whole("attempt", least=1),
    wire.whole("execution"),
    wire.number("started_at"),
    wire.mapping("metadata"),
)
_MAIN_REQUEST = wire.BodyReader(
    "a MainLoopRequest",
    wire.anything("input"),
    wire.text("id"),
    wire.mapping("params"),
    wire.text("experiment", "baseline", wire.read_experiment),
    wire.array("key", _KEY, wire.read_key, None),
    wire.mapping("metadata"),
    wire.whole("seed", 0),
    wire.whole("attempt", 1, least=1),
    wire.number("timeout_seconds", None),
    _TYPE,
)
_MAIN_RESULT = wire.BodyReader(
    "a MainLoopResult",
    wire.text("id"),
    wire.anything("output"),
    wire.text("error", None),
    wire.text("session", None, wire.snapshot_bytes),
    wire.text("session_id", None),
    _USAGE,
    wire.whole("latency_ms"),
    _TYPE,
)


allow_type_arguments(EvalRequest)
allow_type_arguments(MainLoopResult)
