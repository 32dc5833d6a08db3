"""Converts run records, labels and previews to rows and back, and loads what belongs to a stored result."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.base.codec import decode, dumps
from fairtrial.base.codec.escape import escape_text, restore_text
from fairtrial.data.sample import Sample
from fairtrial.data.session.views import SessionView
from fairtrial.errors import RunBusyError, StoreError
from fairtrial.store.notes import SAMPLING_WEIGHT
from fairtrial.store.protocol import Label, RunRecord, RunStore, TrialPreview
from fairtrial.store.redact import Redactor, refuse_secret
from fairtrial.store.rows import MAX_TRIALS, OUTCOME_NAMES, damage_refused, restored_text
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, ResultSource

_TEXT = ("run_id", "suite", "dataset_name", "dataset_version", "dataset_fingerprint", "evaluator", "code_hash")
_PLAIN = ("number", "status", "dataset_size", "repeats", "created_at", "finished_at", "revision")
_UNCHANGED = ("params", "config", "tags")
_JSON = (*_UNCHANGED, "notes")
_FIELDS = {
    "suite": "the suite's name",
    "dataset_name": "the dataset's name",
    "dataset_version": "the dataset's version",
    "evaluator": "the evaluator's name",
    "code_hash": "the suite's version",
    "experiments": "the name of an experiment",
    "params": "the parameters of an experiment",
    "config": "the suite's config",
    "tags": "the run's tags",
}

MAX_METADATA = 4_000
"""Metadata with more characters is left out of a preview."""
_LONGEST_ESCAPE = 12  # Two \uXXXX, a pair of surrogates.

# The numbers of `read_preview`, in this order.
READ_PREVIEW = (
    "ordinal", "outcome", "passed", "value", "latency_ms", "input_tokens", "output_tokens", "cost_usd", "attempt",
)  # fmt: skip


def check_epoch(run_id: str, current: int, epoch: int | None) -> None:
    """Raise `RunBusyError` if a run has been taken over since the epoch of a writer."""
    if epoch is not None and current != epoch:
        raise RunBusyError(
            f"run {run_id} was taken over by another process: this process stops and stores nothing more. "
            "Results stored so far are kept"
        )


def check_plan(run: RunRecord) -> None:
    """Raise `StoreError` if the plan of a run cannot be stored."""
    if not run.run_id or not run.experiments or run.repeats < 1 or run.dataset_size < 0:
        raise StoreError(f"run {run.run_id!r} must have an id, an experiment and at least one repeat")
    if len(set(run.experiments)) != len(run.experiments):
        raise StoreError(f"the experiments of run {run.run_id} must be unique (got {', '.join(run.experiments)})")
    if run.planned > MAX_TRIALS:
        raise StoreError(f"run {run.run_id} must have at most {MAX_TRIALS:,} trials (got {run.planned:,})")


def check_latest(run: RunRecord, number: int, expected: int | None) -> None:
    """Raise if the latest run of a run's suite has another number than expected."""
    if expected is not None and number != expected:
        raise RunBusyError(f"another run of suite {run.suite!r} was started at the same time: number {number}")


def experiment_index(run: RunRecord, experiment: str) -> int:
    """Return the index of an experiment in its run."""
    try:
        return run.experiments.index(experiment)
    except ValueError:
        known = ", ".join(run.experiments)
        raise StoreError(f"run {run.run_id} has no experiment {experiment!r}; it has {known}") from None


def new_revision() -> int:
    """Return a number that no other state of a run has."""
    return secrets.randbits(62)


def run_values(run: RunRecord, redactor: Redactor) -> dict[str, Any]:
    """Return the columns of a run. Raises `SecretInDataError` if a user-provided value contains a known secret."""
    values: dict[str, Any] = {name: escape_text(getattr(run, name)) for name in _TEXT}
    values |= {name: getattr(run, name) for name in _PLAIN}
    values |= {name: dumps(getattr(run, name)) for name in _UNCHANGED}
    values["notes"] = mapping_json(run.notes, redactor)
    values["experiments"] = dumps(run.experiments)
    if redactor.has_secrets:
        for name, field in _FIELDS.items():
            refuse_secret(redactor, field, values[name])
    values["revision"] = new_revision()
    values["parent_run"] = None if run.parent_run is None else escape_text(run.parent_run)
    values["identity"] = None if run.identity is None else dumps(run.identity)
    return values


def mapping_json(mapping: Mapping[str, Any], redactor: Redactor) -> str:
    """Return a mapping as JSON text without secrets; only the affected values are replaced."""
    return "{" + ",".join(f"{redactor.json(dumps(key))}:{redactor.json(dumps(mapping[key]))}" for key in mapping) + "}"


@damage_refused
def read_run(values: Mapping[str, Any]) -> RunRecord:
    """Return a run from its columns."""
    fields: dict[str, Any] = {name: restored_text(values[name]) for name in _TEXT}
    fields |= {name: values[name] for name in _PLAIN}
    fields |= {name: decode(dict[str, Any], values[name], frozen=True) for name in _JSON}
    fields["experiments"] = decode(tuple[str, ...], values["experiments"])
    fields["parent_run"] = None if values["parent_run"] is None else restored_text(values["parent_run"])
    identity = values.get("identity")
    fields["identity"] = None if identity is None else decode(dict[str, Any], identity, frozen=True)
    run = RunRecord(**fields)
    check_plan(run)
    return run


def label_values(label: Label, at: float, redactor: Redactor) -> dict[str, Any]:
    """Return the columns of a label, except its run. Raises `SecretInDataError` if it contains a known secret."""
    values: dict[str, Any] = {
        "experiment": escape_text(label.key.experiment),
        "sample_id": escape_text(label.key.sample_id),
        "repeat": label.key.repeat,
        "name": escape_text(label.name),
        "value": dumps(label.value),
        "annotator": escape_text(label.annotator),
        "at": label.at or at,
        "weight": float(label.weight),
    }
    if redactor.has_secrets:
        for name in ("sample_id", "name", "value", "annotator"):
            refuse_secret(redactor, f"the {name} of a label", values[name])
    return values


def read_label(run_id: str, values: Mapping[str, Any]) -> Label:
    """Return a label from its columns."""
    key = TrialKey(run_id, restored_text(values["experiment"]), restored_text(values["sample_id"]), values["repeat"])
    value: Any = decode(object, values["value"], frozen=True)
    return Label(
        key, restored_text(values["name"]), value, restored_text(values["annotator"]), values["at"], values["weight"]
    )


class StoreSource(ResultSource):
    """Loads samples and sessions of a run's results lazily from its store."""

    __slots__ = ("_run", "_store")

    def __init__(self, store: RunStore, run: RunRecord) -> None:
        self._store = store
        self._run = run

    def load_sample(self, result: EvalResult) -> Sample[Any, Any]:
        """Return the sample of a trial."""
        return self._store.sample(self._run.run_id, self._run.split(result.ordinal)[0])

    def load_session(self, result: EvalResult) -> SessionView:
        """Return the session of a trial."""
        return self._store.session(self._run.run_id, result.ordinal)

    def weight(self, result: EvalResult) -> float | None:
        """Return how many traces a trial of a live run stands for; None for other runs."""
        if self._run.noted.sampling is None:
            return None
        weight = self.load_sample(result).metadata.get(SAMPLING_WEIGHT)
        return float(weight) if isinstance(weight, int | float) else 1.0


def weight_of(result: EvalResult) -> float | None:
    """Return how many traces a stored result of a live run stands for; None for other results."""
    return result.source.weight(result) if isinstance(result.source, StoreSource) else None


def read_preview(row: Sequence[Any], size: int) -> TrialPreview:
    """Return a preview from its numbers, the sample's id, five texts and the metadata."""
    ordinal, outcome, passed, value, latency, tokens_in, tokens_out, cost, attempt, sample_id, *texts, metadata = row
    given, expected, output, error, reason = texts
    return TrialPreview(
        ordinal,
        "" if sample_id is None else restored_text(sample_id),
        OUTCOME_NAMES[outcome],
        None if passed is None else bool(passed),
        value,
        latency,
        tokens_in + tokens_out,
        cost,
        attempt,
        preview_text(given, size),
        preview_text(expected, size),
        preview_text(output, size),
        restored_text(error or reason or "")[:size],
        preview_metadata(metadata),
    )


def preview_text(stored: str | None, size: int) -> str:
    """Return the beginning of a stored JSON value: the text of a string, the JSON of anything else."""
    if stored is None:
        return ""
    if not stored.startswith('"'):
        return stored[:size]
    text = _string(stored)
    restored = restore_text(text)
    return (restored if isinstance(restored, str) else text)[:size]


def _string(stored: str) -> str:
    """Decode a JSON string whose end may be cut off, even within an escape."""
    for end in range(len(stored), max(len(stored) - _LONGEST_ESCAPE, 0), -1):
        for closing in ("", '"'):
            try:
                decoded = json.loads(stored[:end] + closing)
            except ValueError:
                continue
            if isinstance(decoded, str):
                half = closing and "\ud800" <= decoded[-1:] <= "\udbff"  # The cut went through a pair of surrogates.
                return decoded[:-1] if half else decoded
    return stored[1:]


def preview_metadata(stored: str | None) -> dict[str, Any] | None:
    """Return the metadata of a sample; None if it was left out or is no object."""
    if stored is None:
        return {}
    if len(stored) > MAX_METADATA:
        return None
    try:
        found = json.loads(stored)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
