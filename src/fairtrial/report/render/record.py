"""Reports as JSON for programs. docs/reference/json.md describes what is in it.

The first field names the format and its version. Fields may be added to a version; none is taken away or changes its
meaning. What is undefined is null, with the reason in the `note` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fairtrial.codec import to_json
from fairtrial.report.estimates import Estimate
from fairtrial.report.untrusted import whole
from fairtrial.store.protocol import RunRecord
from fairtrial.types import JSON

if TYPE_CHECKING:
    from fairtrial.report.report import ExperimentReport

REPORT_FORMAT = "fairtrial.report/1"


def as_text(record: dict[str, JSON]) -> str:
    """JSON text, in ASCII, so that no tool between here and its reader can spoil it."""
    return json.dumps(_clean(record), indent=2, allow_nan=False) + "\n"


def _clean(value: Any) -> Any:
    """Text that every reader of JSON takes: half a character is none."""
    match value:
        case str():
            return whole(value)
        case dict():
            return {whole(key): _clean(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_clean(entry) for entry in value]
        case _:
            return value


def estimate_record(estimate: Estimate) -> dict[str, Any]:
    """An estimate, field by field."""
    return asdict(estimate)


def run_record(run: RunRecord) -> dict[str, Any]:
    """What identifies a run."""
    return {
        "run_id": run.run_id,
        "suite": run.suite,
        "status": run.status,
        "dataset": run.dataset_name,
        "dataset_version": run.dataset_version,
        "dataset_fingerprint": run.dataset_fingerprint,
        "samples": run.dataset_size,
        "repeats": run.repeats,
        "evaluator": run.evaluator,
        "code_versions": run.code_versions,
        "tags": dict(run.tags),
        "created_at": run.created_at,
        "finished_at": run.finished_at,
        "notes": to_json(dict(run.notes)),
    }


def report_record(run: RunRecord, parts: Sequence[ExperimentReport]) -> dict[str, JSON]:
    """Every figure of a report."""
    return {
        "format": REPORT_FORMAT,
        "run": run_record(run),
        "experiments": [_part(part) for part in parts],
    }


def _part(part: ExperimentReport) -> dict[str, Any]:
    figures, totals = part.figures, part.totals
    split = figures.split
    return {
        "name": part.name,
        "trials": {
            "planned": part.planned,
            "finished": part.total,
            "scored": part.successful,
            "passed": totals.passed,
            "task_error": part.errors.get("task_error", 0),
            "scorer_error": part.errors.get("scorer_error", 0),
            "timeout": part.errors.get("timeout", 0),
            "dead_letter": part.errors.get("dead_letter", 0),
            "not_run": part.not_run,
        },
        "level": figures.level,
        "adaptive": figures.adaptive is not None,
        "estimates": [estimate_record(estimate) for estimate in figures.estimates],
        "variance": None
        if split is None
        else {
            "between": split.between,
            "within": split.within,
            "correlation": split.correlation,
            "note": split.reason,
        },
        "distribution": {"start": 0.0, "end": 1.0, "counts": list(figures.distribution)},
        "latency_ms": {"mean": part.mean_latency_ms, "max": totals.latency_max if totals.timed else None},
        "tokens": {
            "input": totals.input_tokens,
            "output": totals.output_tokens,
            "cached": totals.cached_tokens,
        },
        "cost_usd": part.cost_usd,
        "judge_cost_usd": part.judge_cost_usd,
        "cache_hits": part.cache_hits,
        "unpriced_calls": part.unpriced_calls,
    }
