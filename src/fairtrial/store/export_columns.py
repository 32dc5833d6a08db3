"""The results of a run as columns, read from the rows of a database without making a record of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fairtrial.base.codec import decode, dumps
from fairtrial.base.codec.escape import MARK, parse_json
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import StoreError
from fairtrial.store.notes import SAMPLING_WEIGHT
from fairtrial.store.protocol import METRIC_CODES, RunRecord, split_facts
from fairtrial.store.rows import (
    OUTCOME_NAMES,
    STAGE_NAMES,
    all_metrics,
    damage_refused,
    read_metadata,
    restored_text,
)


class ColumnNames(NamedTuple):
    """The names that differ from run to run: of metrics, of criteria and of the metadata of samples."""

    metrics: Sequence[str]
    criteria: Sequence[str]
    metadata: Sequence[str]


def cell_text(value: Any) -> str | None:
    """Return a value as text, or as JSON, without characters that UTF-8 or readers of tables reject."""
    if value is None:
        return None
    text = value if isinstance(value, str) else dumps(value)
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@damage_refused
def column_values(
    run: RunRecord, names: ColumnNames, weighted: bool, of: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    """Return the cells of results by the names of their columns, from a page of what the database has of them."""
    if None in of["sample_id"]:
        ordinal = of["ordinal"][of["sample_id"].index(None)]
        raise StoreError(f"the store is damaged: the sample of trial {ordinal} of run {run.run_id} is missing")
    scored = [value is not None for value in of["value"]]
    cells: dict[str, list[Any]] = {
        "run": [cell_text(run.run_id)] * len(scored),
        "suite": [cell_text(run.suite)] * len(scored),
        "experiment": _named([cell_text(name) for name in run.experiments], of["experiment"]),
        "sample_id": _texts(of["sample_id"]),
        "repeat": list(of["repeat"]),
        "outcome": _named(OUTCOME_NAMES, of["outcome"]),
        "passed": [bool(passed) if is_scored else None for passed, is_scored in zip(of["passed"], scored, strict=True)],
        "value": list(of["value"]),
        "reward": list(of["reward"]),
        "reason": [
            (_text(reason) or "") if is_scored else None for reason, is_scored in zip(of["reason"], scored, strict=True)
        ],
    }
    facts = _each(of["metadata"], _metadata)
    if weighted:
        cells["weight"] = [float(one.get(SAMPLING_WEIGHT, 1.0)) for one in facts]
    if names.metrics:
        numbers = [one if is_scored else {} for one, is_scored in zip(all_metrics(of["metrics"]), scored, strict=True)]
        cells |= {f"metrics.{name}": [one.get(name) for one in numbers] for name in names.metrics}
        if names.criteria:
            cells |= _criteria(names.criteria, list(map(_judged, numbers, of["verdicts"], of["score"])))
    cells["latency_ms"] = [
        None if metadata is not None and read_metadata(metadata).get("untimed") is True else latency
        for latency, metadata in zip(of["latency_ms"], of["untimed"], strict=True)
    ]
    for name in ("tokens", "cost", "judge_cost", "cache_hits", "unpriced_calls"):
        cells[name] = list(of[name])
    cells["error"] = _texts(of["error"])
    cells["stage"] = _named(STAGE_NAMES, of["stage"])
    cells["output"] = list(map(_json_cell, of["output"]))
    cells["expected"] = _each(of["expected"], _json_cell)
    cells["input"] = _each(of["input"], _json_cell)
    return cells | {f"metadata.{key}": [cell_text(one.get(key)) for one in facts] for key in names.metadata}


@damage_refused
def metadata_keys(texts: Iterable[str]) -> list[str]:
    """Return the keys of the metadata of samples, in the order in which they first have them."""
    return list(dict.fromkeys(key for text in texts for key in _metadata(text)))


def _named(names: Mapping[Any, Any] | Sequence[Any], codes: Sequence[Any]) -> list[Any]:
    return [names[code] for code in codes]


def _each[T](texts: Sequence[str | None], read: Callable[[str | None], T]) -> list[T]:
    """Return what a function makes of texts, called once for equal neighbours: the trials of a sample."""
    cells: list[T] = []
    last: str | None = None
    cell = read(None)
    for text in texts:
        if text is not last and text != last:
            last, cell = text, read(text)
        cells.append(cell)
    return cells


def _text(stored: str | None) -> str | None:
    """Return stored text as a cell."""
    return stored if stored is None or MARK not in stored else cell_text(restored_text(stored))


def _texts(column: Sequence[str | None]) -> list[str | None]:
    return list(map(_text, column))


def _json_cell(stored: str | None) -> str | None:
    """Return stored JSON as a cell: text as it is, other values as their JSON, which is what is stored."""
    if stored is None or stored == "null":
        return None
    if stored[0] != '"':
        return stored
    if "\\" not in stored and MARK not in stored:
        return stored[1:-1]
    return cell_text(decode(object, stored))


def _metadata(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return EMPTY
    if MARK in text:
        return read_metadata(text)
    found = parse_json(text)
    return found if isinstance(found, dict) else EMPTY  # Replaced completely as a secret.


def _judged(
    numbers: Mapping[str, float], verdicts: str | None, score: str | None
) -> Mapping[str, tuple[bool | None, str]]:
    """Return whether each metric of a score passed, and why."""
    letters = split_facts(verdicts)[0] if verdicts is not None else "-" * len(numbers)
    reasons = read_metadata(score).get("reasons")
    listed = reasons if isinstance(reasons, list) else [""] * len(numbers)
    return {
        name: (METRIC_CODES[letter][0], reason) for name, letter, reason in zip(numbers, letters, listed, strict=False)
    }


def _criteria(
    names: Sequence[str], judged: Sequence[Mapping[str, tuple[bool | None, str]]]
) -> Iterator[tuple[str, list[Any]]]:
    for name in names:
        found = [one.get(name) for one in judged]
        yield f"passed.{name}", [one and one[0] for one in found]
        yield f"reason.{name}", [one and cell_text(one[1]) for one in found]
