"""Experiments of LangSmith."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO
from urllib.parse import urlsplit
from uuid import UUID

import anyio

from fairtrial._version import __version__
from fairtrial.base.codec import dumps, to_json
from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError, TraceSendError
from fairtrial.integrations.tracing.facts import (
    FAILED_OUTCOMES,
    error_type,
    evaluations_of,
    output_text,
    trials_with_samples,
)
from fairtrial.integrations.tracing.sender import FROM_ENVIRONMENT, HttpAnswer, HttpPoster, write_whole
from fairtrial.store.records import weight_of
from fairtrial.store.redact import Redactor, current, register_guess
from fairtrial.store.totals import SampleSums, sample_means
from fairtrial.trials.context import trace_id_of

if TYPE_CHECKING:
    from fairtrial.data.sample import Sample
    from fairtrial.store.protocol import RunRecord, RunStore
    from fairtrial.trials.result import EvalResult


MAX_ROWS = 1_000
"""The rows of one request, unless set: LangSmith publishes no limit."""
_MAX_BYTES = 16 * 1024 * 1024  # Of the rows of one request; LangSmith's limit for other uploads is 20 MiB.


class UploadRequest(NamedTuple):
    """The request that creates one experiment."""

    name: str
    body: bytes
    sample_ids: tuple[str, ...]  # Of its rows, in order.


class _Row(NamedTuple):
    sample_id: str
    tree: dict[str, Any]
    start: float
    end: float
    passed: bool | None
    weight: float | None  # Of a live trace.


def upload_requests(
    store: RunStore, run: RunRecord, *, content: bool = False, max_rows: int = MAX_ROWS
) -> Iterator[UploadRequest]:
    """Yield the requests that create the experiments of a stored run.

    Args:
        store: The store of the run.
        run: The run.
        content: Include inputs, outputs, expected values, parameters, errors and reasons; secrets are replaced.
        max_rows: The largest number of rows of a request.
    """
    converter = _RunConverter(run, content, max_rows)
    for experiment in run.experiments:
        yield from converter.requests(store, experiment)


@dataclass(slots=True)
class _RunConverter:
    run: RunRecord
    content: bool
    max_rows: int
    redactor: Redactor = field(default_factory=current)

    def requests(self, store: RunStore, experiment: str) -> Iterator[UploadRequest]:
        rows: list[_Row] = []
        size, part = 0, 1
        for result, sample in trials_with_samples(store, self.run, content=self.content, experiment=experiment):
            row = self._row(result, sample)
            length = len(_encoded(row.tree))
            if rows and (len(rows) >= self.max_rows or size + length > _MAX_BYTES):
                yield self._request(experiment, rows, part)
                rows, size, part = [], 0, part + 1
            rows.append(row)
            size += length
        if rows:
            yield self._request(experiment, rows, part)

    def _request(self, experiment: str, rows: list[_Row], part: int) -> UploadRequest:
        run = self.run
        results = [row.tree for row in rows]
        # What has changed, because the run was resumed or content was added, is another experiment.
        digest = hashlib.blake2b(_encoded([run.run_id, experiment, part, results]), digest_size=4).hexdigest()
        name = self._text(f"{run.name}:{experiment}" + (f" part {part}" if part > 1 else "")) + f" {digest}"
        body = {
            "experiment_name": name,
            "experiment_start_time": _moment(min(row.start for row in rows)),
            "experiment_end_time": _moment(max(row.end for row in rows)),
            "dataset_name": self._text(self._dataset),
            "experiment_metadata": self._metadata(experiment, part),
            "summary_experiment_scores": _summary(rows),
            "results": results,
        }
        return UploadRequest(name, _encoded(body), tuple(row.sample_id for row in rows))

    @property
    def _dataset(self) -> str:
        """The name under which LangSmith compares experiments: rows with content and without are not the same."""
        name = self.run.dataset_name or self.run.suite
        return name if self.content else f"{name} (without content)"

    def _metadata(self, experiment: str, part: int) -> dict[str, Any]:
        run = self.run
        found: dict[str, Any] = {
            "fairtrial_version": __version__,
            "run_id": run.run_id,
            "run": run.name,
            "suite": run.suite,
            "experiment": experiment,
            "evaluator": run.evaluator,
            "dataset_version": run.dataset_version,
            "dataset_fingerprint": run.dataset_fingerprint,
            "part": part,
        }
        if self.content:
            found |= {"params": to_json(run.params.get(experiment)), "tags": dict(run.tags)}
        return {name: self._value(value) for name, value in found.items()}

    def _row(self, result: EvalResult, sample: Sample[Any, Any] | None) -> _Row:
        key = result.key
        end = result.started_at + result.latency_ms / 1000
        given: dict[str, Any] = {"sample_id": self._text(key.sample_id)}
        expected: dict[str, Any] | None = None
        if sample is not None:
            given = self._object("input", dumps(sample.input))
            if sample.has_expected:
                expected = self._object("output", dumps(sample.expected))
        tree: dict[str, Any] = {
            "row_id": self._row_id(key.sample_id, key.repeat, given, expected),
            "inputs": given,
            "evaluation_scores": self._feedback(result),
            "start_time": _moment(result.started_at),
            "end_time": _moment(end),
            "run_name": self._text(f"{self.run.suite}/{key.sample_id}"),
            "run_metadata": self._facts(result),
        }
        if expected is not None:
            tree["expected_outputs"] = expected
        output = output_text(result) if self.content else None
        if output is not None:
            tree["actual_outputs"] = self._object("output", output)
        if result.outcome in FAILED_OUTCOMES:
            error = result.error or result.outcome
            tree["error"] = self._text(error if self.content else error_type(error, result.outcome))
        passed = None if result.score is None else result.score.passed
        return _Row(key.sample_id, tree, result.started_at, end, passed, weight_of(result))

    def _row_id(self, sample_id: str, repeat: int, given: Any, expected: Any) -> str:
        """Return the id of the example in LangSmith: the same in every run, as long as the sample is the same."""
        content = _encoded([self._dataset, sample_id, repeat, given, expected])
        return str(UUID(bytes=hashlib.blake2b(content, digest_size=16).digest(), version=5))

    def _facts(self, result: EvalResult) -> dict[str, Any]:
        usage = result.usage
        found: dict[str, Any] = {
            "sample_id": self._text(result.sample_id),
            "repeat": result.repeat,
            "attempt": result.attempt,
            "outcome": result.outcome,
            "trace_id": trace_id_of(result.key, result.attempt).hex(),
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
        }
        if usage.cost_usd is not None:
            found["cost_usd"] = usage.cost_usd
        return found

    def _feedback(self, result: EvalResult) -> list[dict[str, Any]]:
        if result.outcome == "scorer_error" and result.score is None:
            error = result.error or ""
            problem = error if self.content else error_type(error, "scorer_error")
            return [
                {"key": self._text(self.run.evaluator or "score"), "value": "error", "comment": self._text(problem)}
            ]
        found = []
        for each in evaluations_of(result, self.run.evaluator):
            feedback: dict[str, Any] = {"key": self._text(each.name), "score": each.value}
            if each.passed is not None:
                feedback["value"] = "pass" if each.passed else "fail"
            if self.content and each.reason:
                feedback["comment"] = self._text(each.reason)
            found.append(feedback)
        return found

    def _object(self, name: str, text: str) -> dict[str, Any]:
        """Return JSON text as an object, without secrets; another value under this name."""
        value = json.loads(self.redactor.json(text))
        return value if isinstance(value, dict) else {name: value}

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        return json.loads(self.redactor.json(dumps(value)))

    def _text(self, text: str) -> str:
        return self.redactor.text(text)


def _summary(rows: list[_Row]) -> list[dict[str, Any]]:
    scored = [row.passed for row in rows if row.passed is not None]
    if not scored:
        return []
    comment = f"{sum(scored):,} of {len(scored):,} scored trials passed, {len(rows) - len(scored):,} without a score"
    samples, weights = SampleSums(), {row.sample_id: row.weight or 1.0 for row in rows}
    for row in rows:
        samples.add(row.sample_id, row.passed, 0.0, 0.0)
    if len(set(weights.values())) > 1:
        comment += "; the rate is weighted"
    return [
        {"key": "pass_rate", "score": sample_means(samples.shares(weights.__getitem__)).pass_rate, "comment": comment}
    ]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def _encoded(tree: Any) -> bytes:
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")  # Lone surrogates become question marks.


def rejected_rows(answer: bytes, request: UploadRequest) -> Mapping[str, str]:
    """Return what a validating server says about rows: sample id -> message. Empty if it names none."""
    try:
        details = json.loads(answer)["detail"]
        found = {}
        for detail in details:
            where = detail["loc"]
            place = where.index("results") + 1
            found[request.sample_ids[int(where[place])]] = f"{'.'.join(map(str, where[place + 1 :]))}: {detail['msg']}"
        return found
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


_CLOUD = "https://api.smith.langchain.com"
_PATH = "/datasets/upload-experiment"
_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_CONFLICT = 409  # It has an experiment of this name.
_TIMEOUT_SECONDS = 120.0
_NAMED_ROWS = 3  # Rows that an error message names.


@first_is(int)
@dataclass(slots=True)
class UploadTotals:
    """What became of the experiments of a run, and the number of trials in those that were created."""

    created: int = 0
    existing: int = 0  # LangSmith had them already: they were uploaded before.
    unconfirmed: int = 0  # LangSmith has them since an attempt that it did not answer.
    trials: int = 0


def upload_run(
    store: RunStore,
    run: RunRecord,
    url: str = FROM_ENVIRONMENT,
    *,
    content: bool = False,
    max_rows: int = MAX_ROWS,
    patience_seconds: float = 60.0,
) -> UploadTotals:
    """Upload a stored run to LangSmith: each of its experiments becomes one there, in the dataset of its name.

    The key is read from LANGSMITH_API_KEY, the workspace from LANGSMITH_WORKSPACE_ID. Uploading again creates nothing
    twice and continues where an earlier upload ended.

    Args:
        store: The store of the run.
        run: The run.
        url: The address of LangSmith; "env" for LANGSMITH_ENDPOINT, or else its cloud.
        content: Include inputs, outputs, expected values, parameters, errors and reasons; secrets are replaced.
        max_rows: The largest number of trials in a request. An experiment with more is uploaded in parts.
        patience_seconds: For how long a request is repeated while the server is busy or away.

    Raises:
        TraceSendError: If the server refuses an experiment, or stays busy or away.
    """
    _check_rows(max_rows)
    address, headers = resolve_langsmith(url)
    poster = HttpPoster("uploading experiments", _RETRIED_STATUSES, _TIMEOUT_SECONDS, patience_seconds)

    async def upload() -> UploadTotals:
        totals = UploadTotals()
        async with poster:
            for request in upload_requests(store, run, content=content, max_rows=max_rows):
                try:
                    answer = await poster.post(f"experiment {request.name!r}", address, request.body, headers)
                    _count(totals, request, answer)
                except TraceSendError as error:
                    raise TraceSendError(f"{error}{_progress(totals)}") from None
        return totals

    return anyio.run(upload)


def write_experiments(
    store: RunStore, run: RunRecord, target: Path | TextIO, *, content: bool = False, max_rows: int = MAX_ROWS
) -> int:
    """Write the requests of an upload as JSON lines; returns their number. A file appears when it is complete."""
    _check_rows(max_rows)

    def write(file: TextIO) -> int:
        count = 0
        for request in upload_requests(store, run, content=content, max_rows=max_rows):
            file.write(request.body.decode("utf-8") + "\n")
            count += 1
        return count

    return write_whole(target, write)


def resolve_langsmith(url: str, environ: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str]]:
    """Return the address of the endpoint and the headers of its requests."""
    base, key = langsmith_address(environ, "upload experiments", None if url == FROM_ENVIRONMENT else url)
    version = "" if base.endswith("/api/v1") else "/v1" if base.endswith("/api") else "/api/v1"
    headers = {"Content-Type": "application/json", "x-api-key": key}
    workspace = environ.get("LANGSMITH_WORKSPACE_ID", "").strip()
    return f"{base}{version}{_PATH}", headers | ({"x-tenant-id": workspace} if workspace else {})


def langsmith_address(environ: Mapping[str, str], purpose: str, url: str | None = None) -> tuple[str, str]:
    """Return the address of LangSmith, from the environment unless it is given, and the key, a secret from then on."""
    base = environ.get("LANGSMITH_ENDPOINT") or _CLOUD if url is None else url
    base = base.strip().rstrip("/").removesuffix(_PATH)
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"the address of LangSmith must be an http:// or https:// URL (got {base!r})")
    key = environ.get("LANGSMITH_API_KEY", "").strip()
    if not key:
        raise ConfigurationError(f"LANGSMITH_API_KEY must be set to {purpose} (it is not set)")
    register_guess(key, "key", "the value of $LANGSMITH_API_KEY")
    return base, key


def _count(totals: UploadTotals, request: UploadRequest, answer: HttpAnswer) -> None:
    if answer.status == _CONFLICT:
        if answer.attempts > 1:
            totals.unconfirmed += 1
        else:
            totals.existing += 1
    elif answer.accepted and _names_experiment(answer.body):
        totals.created += 1
        totals.trials += len(request.sample_ids)
    elif answer.accepted:
        raise TraceSendError(f"{answer}, but not with an experiment: is this the address of LangSmith?")
    else:
        raise TraceSendError(f"experiment {request.name!r} was refused: {_reason(answer, request)}")


def _names_experiment(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body)["experiment"], dict)
    except (ValueError, LookupError, TypeError):
        return False


def _reason(answer: HttpAnswer, request: UploadRequest) -> str:
    rows = rejected_rows(answer.body, request)
    if not rows:
        return str(answer)
    named = "; ".join(f"sample {sample_id!r}: {problem}" for sample_id, problem in list(rows.items())[:_NAMED_ROWS])
    more = len(rows) - _NAMED_ROWS
    return f"the server answered {answer.status}: {named}" + (f"; and {more:,} more" if more > 0 else "")


def _progress(totals: UploadTotals) -> str:
    there = totals.created + totals.existing + totals.unconfirmed
    return f" ({there:,} of its experiments are there)" if there else ""


def _check_rows(max_rows: int) -> None:
    if max_rows < 1:
        raise ConfigurationError(f"max_rows must be at least 1 (got {max_rows!r})")
