"""Converts results and samples to rows and back. All stores use the same rows."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fairtrial.base.codec import decode, dumps
from fairtrial.base.codec.encode import compact
from fairtrial.base.codec.escape import MARK, escape_text, parse_long_json, restore_text
from fairtrial.base.frozen import EMPTY, JSON, FrozenDict
from fairtrial.data.fingerprint import input_hash
from fairtrial.data.sample import NOT_GIVEN, Sample
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import CodecError, StoreError
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.store.protocol import (
    METRIC_CODES,
    REWARD_PLACE,
    RunRecord,
    ScoreRow,
    split_facts,
)
from fairtrial.store.redact import Redactor, refuse_secret
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, Outcome, RedactedPart, ResultSource, Stage

OUTCOMES: dict[Outcome, int] = {
    "scored": 1, "task_error": 2, "scorer_error": 3, "timeout": 4, "dead_letter": 5, "not_run": 6, "user_error": 7,
}  # fmt: skip
OUTCOME_NAMES: dict[int, Outcome] = {code: name for name, code in OUTCOMES.items()}
SCORED, NOT_RUN = OUTCOMES["scored"], OUTCOMES["not_run"]
STAGES: dict[Stage | None, int | None] = {
    None: None, "setup": 1, "task": 2, "output": 3, "score": 4, "delivery": 5, "store": 6,
}  # fmt: skip
STAGE_NAMES: dict[int | None, Stage | None] = {code: name for name, code in STAGES.items()}

RESULT_COLUMNS = (
    "run", "ordinal", "experiment", "sample", "repeat", "outcome", "timed", "passed", "value", "latency_ms",
    "started_at", "input_tokens", "output_tokens", "cached_tokens", "cost_usd", "judge_cost_usd", "cache_hits",
    "unpriced_calls", "unpriced_judge_calls", "cut_off_calls", "refused_calls", "reasoning_tokens",
    "cache_write_tokens", "attempt", "stage", "execution",
    "metrics", "redacted", "reward", "verdicts", "code", "unknown_endings",
)  # fmt: skip
EXTRA_USAGE = (
    "cached_tokens", "cache_hits", "unpriced_calls", "unpriced_judge_calls", "cut_off_calls", "refused_calls",
    "reasoning_tokens", "cache_write_tokens",
)  # fmt: skip
"""Columns that are 0 in most runs; `runs.extra_usage` tells whether they are 0 in a whole run."""
# Bit i of the column `redacted`: secrets were replaced in this part of the result.
REDACTED_PARTS: tuple[RedactedPart, ...] = ("output", "transcript", "error", "reason", "score", "metadata")
DETAIL_COLUMNS = ("run", "ordinal", "execution", "error", "reason", "score", "metadata", "output", "transcript")
SAMPLE_COLUMNS = ("ordinal", "id", "input", "expected", "metadata", "input_hash")

_OUTCOME, _ATTEMPT = RESULT_COLUMNS.index("outcome"), RESULT_COLUMNS.index("attempt")
EXECUTION = RESULT_COLUMNS.index("execution")
_INT64 = (1 << 63) - 1
_SHORT = 4_096  # Characters of a text that is searched for secrets together with others.
_APART = "\n" * 128  # Farther than a format of a credential looks beside a match.
MAX_TRIALS = (1 << 32) - 1  # Sums find the slowest trial by packing its ordinal into 32 bits.


class RefusedEntryError(Exception):
    """A result cannot be stored as it is; the message has the reason."""


class Entry(NamedTuple):
    """The rows of one result."""

    ordinal: int
    sample: int
    key: TrialKey
    row: tuple[Any, ...]
    detail: tuple[Any, ...] | None
    problem: str | None = None  # Why this entry is an error instead of the result itself.


def replaces(new_outcome: int, new_attempt: int, outcome: int, attempt: int) -> bool:
    """Return whether a result replaces a stored one."""
    return outcome != SCORED and (new_outcome == SCORED or new_attempt > attempt)


def state(row: tuple[Any, ...]) -> tuple[int, int]:
    """Return (outcome, attempt) of a result row."""
    return row[_OUTCOME], row[_ATTEMPT]


class Encoder:
    """Encodes the results of one run as rows."""

    def __init__(self, run: RunRecord, number: int, redactor: Redactor, compress: Callable[[bytes], bytes]) -> None:
        self._run = run
        self._number = number
        self._planned = run.planned
        self._redactor = redactor
        self._compress = compress
        self._redacted: set[RedactedPart] = set()  # Of the current result.
        self._score_names: dict[str, str] = {}  # As JSON, those without secrets.
        self._ids_are_clean = self._texts_are_clean = False
        self.extra_usage = False  # Whether a result had one of `EXTRA_USAGE` or an unknown ending.

    def search_batch(self, results: Sequence[EvalResult]) -> None:
        """Search all ids, then all short texts, for secrets at once; each by itself only if that finds one."""
        with suppress(AttributeError, TypeError, UnicodeError):  # Something is no result: `entry` refuses it.
            self._ids_are_clean = self._redactor.find("\n".join(result.key[2] for result in results)) is None
            texts = [text for result in results if (text := result.output_json) and len(text) <= _SHORT]
            texts += [data.decode("utf-8") for result in results if (data := result.snapshot) and len(data) <= _SHORT]
            self._texts_are_clean = self._redactor.text(joined := _APART.join(texts)) is joined

    def entry(self, result: EvalResult) -> Entry:
        """Return the rows of one result or, if it cannot be stored, of the error that replaces it.

        Raises:
            RefusedEntryError: the result is not in the run's plan.
        """
        try:
            return self._entry(result)
        except RefusedEntryError as error:
            problem = str(error)
        except (CodecError, UnicodeError) as error:
            problem = f"it cannot be encoded: {error}"
        except Exception as error:  # Encoding calls user code: properties, serializers, __repr__.
            problem = f"it is not a valid result: {_described(error)}"
        return self.error_entry(result, problem)

    def error_entry(self, result: EvalResult, problem: str) -> Entry:
        """Return the rows of the error that replaces a result that cannot be stored. Raises `RefusedEntryError`."""
        try:
            return self._entry(_store_error(result, problem))._replace(problem=problem)
        except (AttributeError, TypeError, KeyError, UnicodeError) as error:
            raise RefusedEntryError(f"it is not a valid result: {_described(error)}") from None

    def _entry(self, result: EvalResult) -> Entry:
        run, ordinal, key = self._run, result.ordinal, result.key
        if not 0 <= ordinal < self._planned:
            raise RefusedEntryError(f"ordinal {ordinal} is not in the run's plan of {self._planned} trials")
        rest, repeat = divmod(ordinal, run.repeats)
        sample, experiment = divmod(rest, len(run.experiments))
        if key[0] != run.run_id or key[1] != run.experiments[experiment] or key[3] != repeat:
            raise RefusedEntryError(
                f"ordinal {ordinal} of run {run.run_id} is repeat {repeat} of experiment "
                f"{run.experiments[experiment]!r}, not {key}"
            )
        if not self._ids_are_clean and self._redactor.find(key[2]) is not None:
            raise RefusedEntryError("the id of its sample contains a secret")
        outcome, score, usage = OUTCOMES[result.outcome], result.score, result.usage
        if (outcome == SCORED) is (score is None):
            raise RefusedEntryError(
                f'a result must have a score if and only if its outcome is "scored" (got {result.outcome!r})'
            )
        attempt, execution, latency = result.attempt, result.execution, result.latency_ms
        cost, judge_cost = usage.cost_usd, result.judge_cost_usd
        # All of them at once: a negative number or one of more than 31 bits leaves something over.
        extra = usage.cached_tokens | usage.reasoning_tokens | usage.cache_write_tokens | result.cache_hits
        extra |= result.unpriced_calls | result.unpriced_judge_calls | result.cut_off_calls | result.refused_calls
        if extra or result.unknown_endings:
            self.extra_usage = True
        counts = latency | usage.input_tokens | usage.output_tokens | attempt | extra
        if counts >> 31 or not -_INT64 <= execution <= _INT64:
            raise RefusedEntryError("a latency, token count, attempt or execution number is out of range")
        if not math.isfinite(result.started_at) or (cost is not None and not math.isfinite(cost)):
            raise RefusedEntryError("a time or a cost is not a finite number")
        if judge_cost is not None and not math.isfinite(judge_cost):
            raise RefusedEntryError("a judge's cost is not a finite number")
        metadata = result.own_metadata
        untimed = metadata and (metadata.get("warmup") is True or metadata.get("untimed") is True)
        timed = 0 if outcome == NOT_RUN or untimed else 1
        redactor, redacted = self._redactor, self._redacted
        redacted.clear()
        redacted.update(result.redacted_parts)
        passed = value = metrics = reward = verdicts = reason = rest_json = None
        if score is not None:
            passed, value = 1 if score.passed else 0, score.value
            if score.reason:
                reason = self._text("reason", score.reason)
            if score.metrics:
                metrics = self._metrics(score)
                reward = _other(score.reward, score.value)
                verdicts = _verdicts(score)
            rest_json = self._score_rest(score)
        error = None if result.error is None else self._text("error", result.error)
        metadata_json = self._json("metadata", dumps(metadata)) if metadata else None
        output = self._output(result)
        transcript = None
        if (snapshot := result.snapshot) is not None:
            if not (self._texts_are_clean and len(snapshot) <= _SHORT):
                snapshot = redactor.data(snapshot)
                if snapshot is not result.snapshot:
                    redacted.add("transcript")
            transcript = self._compress(snapshot)
        row = (
            self._number, ordinal, experiment, sample, repeat, outcome, timed, passed, value, latency,
            result.started_at, usage.input_tokens, usage.output_tokens, usage.cached_tokens, cost, judge_cost,
            result.cache_hits, result.unpriced_calls, result.unpriced_judge_calls, result.cut_off_calls,
            result.refused_calls,
            usage.reasoning_tokens, usage.cache_write_tokens, attempt,
            STAGES[result.stage], execution, metrics, _mask(redacted) if redacted else 0, reward, verdicts,
            result.code, self._json_of_endings(result.unknown_endings) if result.unknown_endings else None,
        )  # fmt: skip
        detail = (
            (self._number, ordinal, execution, error, reason, rest_json, metadata_json, output, transcript)
            if error or output or transcript or reason or rest_json or metadata_json
            else None
        )
        return Entry(ordinal, sample, key, row, detail)

    def _output(self, result: EvalResult) -> str | None:
        text = result.output_json
        if text is None:
            if result.output is None:
                return None
            text = dumps(result.output)
        if "\0" in text:
            raise RefusedEntryError("its output_json holds a NUL; the codec would have escaped it")
        searched = self._texts_are_clean and text is result.output_json and len(text) <= _SHORT
        return text if searched else self._json("output", text)

    def _text(self, part: RedactedPart, text: str) -> str:
        escaped = escape_text(text)
        redacted = self._redactor.text(escaped)
        if redacted is not escaped:
            self._redacted.add(part)
        return redacted

    def _json(self, part: RedactedPart, text: str) -> str:
        redacted = self._redactor.json(text)
        if redacted is not text:
            self._redacted.add(part)
        return redacted

    def _metrics(self, score: Score) -> str:
        values: dict[str, float] = {}
        for metric in score.metrics:
            name = self._redactor.text(metric.name)
            if name is not metric.name:
                self._redacted.add("score")
            while name in values:  # Two names that differed only in their secret.
                name += "#2"
            values[name] = metric.value
        return dumps(values)

    def _json_of_endings(self, endings: Mapping[str, int]) -> str:
        return self._redactor.json(dumps(endings))

    def _score_name(self, name: str) -> str:
        """Return the name of a score as JSON; most results of a run have the same."""
        text = self._score_names.get(name)
        if text is None:
            written = dumps(name)
            text = self._json("score", written)
            if text is written:
                self._score_names[name] = text
        return text

    def _score_rest(self, score: Score) -> str | None:
        """Return the parts of a score without a column; only their text can contain secrets."""
        parts: list[str] = []
        if score.name:
            parts.append(f'"name":{self._score_name(score.name)}')
        if score.metrics:
            if any(metric.weight for metric in score.metrics):
                parts.append(f'"weights":{dumps([metric.weight for metric in score.metrics])}')
            if any(metric.metadata for metric in score.metrics):
                facts = dumps([metric.metadata for metric in score.metrics])
                parts.append(f'"metadata":{self._json("score", facts)}')
            if any(metric.reason for metric in score.metrics):
                reasons = dumps([metric.reason for metric in score.metrics])
                parts.append(f'"reasons":{self._json("score", reasons)}')
        return "{" + ",".join(parts) + "}" if parts else None


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _store_error(result: EvalResult, problem: str) -> EvalResult:
    """Return the error result that replaces a result that cannot be stored, with its cost if possible."""
    usage = result.usage
    return EvalResult(
        key=result.key,
        ordinal=result.ordinal,
        outcome="task_error",
        latency_ms=_count(result.latency_ms),
        usage=TokenUsage(
            _count(usage.input_tokens),
            _count(usage.output_tokens),
            _count(usage.cached_tokens),
            _cost(usage.cost_usd),
            _count(usage.reasoning_tokens),
            _count(usage.cache_write_tokens),
        ),
        judge_cost_usd=_cost(result.judge_cost_usd),
        cache_hits=_count(result.cache_hits),
        unpriced_calls=_count(result.unpriced_calls),
        unpriced_judge_calls=_count(result.unpriced_judge_calls),
        cut_off_calls=_count(result.cut_off_calls),
        refused_calls=_count(result.refused_calls),
        error=f"the result could not be stored: {problem}",
        stage="store",
        attempt=max(1, _count(result.attempt)),
        execution=result.execution if type(result.execution) is int and abs(result.execution) <= _INT64 else 0,
        started_at=result.started_at if math.isfinite(result.started_at) else 0.0,
    )


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def _cost(value: Any) -> float | None:
    return value if type(value) is float and 0.0 <= value < math.inf else None


def _mask(parts: set[RedactedPart]) -> int:
    return sum(1 << bit for bit, part in enumerate(REDACTED_PARTS) if part in parts)


_VERDICTS: dict[tuple[bool | None, bool | None], str] = {facts: code for code, facts in METRIC_CODES.items()}


def _verdicts(score: Score) -> str | None:
    codes = "".join([_VERDICTS[metric.passed, metric.higher_is_better] for metric in score.metrics])
    ranges = [_range(place, metric.bounds) for place, metric in enumerate(score.metrics) if metric.bounds is not None]
    if (reward := score.reward_bounds) != SHARE:
        ranges.append(_range(REWARD_PLACE, reward))
    return codes + "".join(ranges) if ranges or codes.strip("-") else None


def _range(place: int, bounds: tuple[float, float] | None) -> str:
    return f" {place}" if bounds is None else f" {place}:{bounds[0]}:{bounds[1]}"


def _other(reward: float, value: float) -> float | None:
    return None if reward == value else reward


def stored_id(sample_id: str) -> str:
    """Return a sample's id as it is stored."""
    return escape_text(sample_id)


def sample_row(ordinal: int, sample: Sample[Any, Any], redactor: Redactor) -> tuple[Any, ...]:
    """Return a sample as a row, except its dataset. It is never redacted.

    Raises:
        CodecError: it cannot be stored.
        SecretInDataError: it contains a known secret.
    """
    texts = _sample_texts(sample)
    if redactor.has_secrets:
        _refuse_secrets(redactor, texts, sample, ordinal)
    return (ordinal, *texts, input_hash(sample.input, texts[1]))


type _SampleTexts = tuple[str, str, str | None, str | None]
"""The id, input, expected value and metadata of a sample as they are stored."""


def _sample_texts(sample: Sample[Any, Any]) -> _SampleTexts:
    return (
        stored_id(sample.id),
        _json(sample.input),
        _json(sample.expected) if sample.has_expected else None,
        _json(sample.metadata) if sample.metadata else None,
    )


def _refuse_secrets(redactor: Redactor, texts: _SampleTexts, sample: Sample[Any, Any], ordinal: int) -> None:
    # All at once: stored texts have no NUL, so nothing is found across two of them.
    if redactor.find("\0".join(filter(None, texts))) is None:
        return
    # An id that contains the secret must not be in the message.
    shown = repr(sample.id) if redactor.find(texts[0]) is None else f"number {ordinal + 1}"
    for field, text in zip(("id", "input", "expected value", "metadata"), texts, strict=True):
        refuse_secret(redactor, f"the {field} of sample {shown}", text)


def refuse_secrets(redactor: Redactor, sample: Sample[Any, Any], ordinal: int) -> None:
    """Raise `SecretInDataError` if a sample contains a known secret; other errors are reported by its trial."""
    if redactor.has_secrets:
        with suppress(CodecError, UnicodeError):
            _refuse_secrets(redactor, _sample_texts(sample), sample, ordinal)


def _json(value: Any) -> str:
    """Return the same text as `dumps`, but faster for plain JSON values."""
    if type(value) is dict or type(value) is FrozenDict:
        try:
            text = compact(value)
        except (TypeError, ValueError, RecursionError):  # It contains itself: `dumps` says where.
            return dumps(value)
        if text.isascii() and "\\u0000" not in text:
            return text
    return dumps(value)


def damage_refused[**P, T](read: Callable[P, T]) -> Callable[P, T]:
    """Make a function that reads rows raise `StoreError` for damaged data, such as in a foreign file."""

    @functools.wraps(read)
    def reading(*args: P.args, **named: P.kwargs) -> T:
        try:
            return read(*args, **named)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, CodecError) as error:
            raise StoreError(f"the store is damaged: {type(error).__name__}: {error}") from error

    return reading


def restored_text(stored: str) -> str:
    """Return the original text of stored text."""
    text = restore_text(stored)
    if not isinstance(text, str):  # It stands for a number or bytes.
        raise StoreError(f"the store is damaged: text must be text (got {type(text).__name__})")
    return text


@damage_refused
def read_sample(sample_id: str, input_: str | None, expected: str | None, metadata: str | None) -> Sample[Any, Any]:
    """Return a sample from its row."""
    name = restored_text(sample_id)
    if input_ is None:
        raise StoreError(f"sample {name!r} was never stored, only results that refer to it")
    return Sample(
        name,
        decode(object, input_),
        NOT_GIVEN if expected is None else decode(object, expected),
        read_metadata(metadata),
    )


# The columns of `read_result`, in this order; the last two are optional.
READ_RESULT = (
    "ordinal", "experiment", "repeat", "outcome", "passed", "value", "latency_ms", "started_at", "input_tokens",
    "output_tokens", "cached_tokens", "cost_usd", "judge_cost_usd", "cache_hits", "unpriced_calls",
    "unpriced_judge_calls", "cut_off_calls", "refused_calls", "reasoning_tokens", "cache_write_tokens", "attempt",
    "stage", "execution", "metrics", "redacted", "verdicts", "code", "unknown_endings",
)  # fmt: skip
READ_DETAIL = ("error", "reason", "score", "metadata")


@damage_refused
def read_result(
    run: RunRecord,
    source: ResultSource,
    row: tuple[Any, ...],
    sample_id: str | None,
    detail: tuple[Any, ...],
    output: str | None,
    snapshot: bytes | None,
) -> EvalResult:
    """Return a result from its rows."""
    (
        ordinal, experiment, repeat, outcome, passed, value, latency, started_at, input_tokens,
        output_tokens, cached_tokens, cost, judge_cost, cache_hits, unpriced, unpriced_judges,
        cut_off, refused, reasoning_tokens, cache_write_tokens, attempt, stage, execution, metrics, redacted, verdicts,
        code, unknown_endings,
    ) = row  # fmt: skip
    error, reason, score, metadata = detail
    if sample_id is None:
        raise StoreError(f"the store is damaged: the sample of trial {ordinal} of run {run.run_id} is missing")
    return EvalResult(
        key=TrialKey(run.run_id, run.experiments[experiment], restored_text(sample_id), repeat),
        ordinal=ordinal,
        outcome=OUTCOME_NAMES[outcome],
        score=None if value is None else _score(value, bool(passed), reason, metrics, verdicts, score),
        output=None if output is None else decode(object, output),
        latency_ms=latency,
        usage=TokenUsage(input_tokens, output_tokens, cached_tokens, cost, reasoning_tokens, cache_write_tokens),
        error=None if error is None else restored_text(error),
        stage=STAGE_NAMES[stage],
        attempt=attempt,
        execution=execution,
        started_at=started_at,
        metadata=read_metadata(metadata),
        judge_cost_usd=judge_cost,
        cache_hits=cache_hits,
        unpriced_calls=unpriced,
        unpriced_judge_calls=unpriced_judges,
        cut_off_calls=cut_off,
        refused_calls=refused,
        unknown_endings=EMPTY if unknown_endings is None else read_endings(unknown_endings),
        redacted_parts=_parts(redacted) if redacted else (),
        code=code,
        output_json=output,
        snapshot=snapshot,
        source=source,
    )


def read_endings(text: Any) -> Mapping[str, int]:
    """Return the counts of unknown endings from their column."""
    return decode(dict[str, int], restored_text(text))


def _parts(mask: int) -> tuple[RedactedPart, ...]:
    return tuple(part for bit, part in enumerate(REDACTED_PARTS) if mask >> bit & 1)


# The columns of `read_scores`, in this order.
READ_SCORES = (
    "ordinal", "outcome", "passed", "value", "timed", "latency_ms", "input_tokens", "output_tokens", "cost_usd",
    "metrics", "reward", "verdicts",
)  # fmt: skip


def read_scores(rows: Sequence[Sequence[Any]]) -> Iterator[ScoreRow]:
    """Return the numbers of results from their rows."""
    for row, metrics in zip(rows, all_metrics([row[9] for row in rows]), strict=True):
        ordinal, outcome, passed, value, timed, latency, tokens_in, tokens_out, cost, _metrics, reward, verdicts = row
        yield ScoreRow(
            ordinal,
            OUTCOME_NAMES[outcome],
            None if passed is None else bool(passed),
            value,
            latency if timed else None,
            tokens_in + tokens_out,
            cost,
            metrics,
            value if reward is None else reward,
            verdicts,
        )


@damage_refused
def all_metrics(texts: Sequence[str | None]) -> Sequence[Mapping[str, float]]:
    """Parse the metrics of many results at once, which is faster and shares their names."""
    whole = "[" + ",".join("{}" if text is None else text for text in texts) + "]"
    if MARK in whole:
        return [EMPTY if text is None else read_metrics(text) for text in texts]
    found: list[dict[str, float]] = parse_long_json(whole)
    return found


def facts_reader(keys: Sequence[str]) -> Callable[[str | None], tuple[JSON, ...]]:
    """Return a function that reads some keys of a sample's metadata; None for missing keys."""
    needles, nothing = [_json(key) for key in keys], (None,) * len(keys)

    def read(text: str | None) -> tuple[JSON, ...]:
        # If metadata has none of the keys, a text search is much cheaper than parsing it.
        if text is not None:
            for needle in needles:
                if needle in text:
                    found = read_metadata(text)
                    return tuple(found.get(key) for key in keys)
        return nothing

    return read


def read_metrics(text: str) -> Mapping[str, float]:
    """Return metric values by name, in the order of the score."""
    values: dict[str, float] = json.loads(text)
    return values if MARK not in text else {restored_text(name): value for name, value in values.items()}


def read_metadata(text: str | None) -> Mapping[str, Any]:
    """Return metadata from its JSON text."""
    tree = EMPTY if text is None else decode(object, text, frozen=True)
    return tree if isinstance(tree, Mapping) else EMPTY  # Replaced completely as a secret.


def _score(
    value: float, passed: bool, reason: str | None, metrics: str | None, verdicts: str | None, rest_json: str | None
) -> Score:
    rest = read_metadata(rest_json)
    parts: list[Metric] = []
    if metrics is not None:
        values = read_metrics(metrics)
        # A list that was replaced completely as a secret is text.
        weights, facts, reasons = (_listed(rest.get(name)) for name in ("weights", "metadata", "reasons"))
        letters, ranges = split_facts(verdicts or "-" * len(values))
        codes = [METRIC_CODES[code] for code in letters]
        parts = [
            Metric(
                name,
                number,
                weights[place] if weights else 0.0,
                facts[place] if facts else EMPTY,
                codes[place][0],
                reasons[place] if reasons else "",
                codes[place][1],
                ranges.get(place),
            )
            for place, (name, number) in enumerate(values.items())
        ]
    return Score(value, passed, "" if reason is None else restored_text(reason), parts, name=rest.get("name", ""))


def _listed(found: Any) -> Sequence[Any]:
    return found if isinstance(found, list) else ()
