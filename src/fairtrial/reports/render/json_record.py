"""Render records as JSON; docs/reference/json.md describes the fields.

The first field names the format and its version. Fields may be added to a version; none is taken away or changes its
meaning. What is undefined is null, with the reason in the `note` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import singledispatch
from typing import Any

from fairtrial.base.codec import to_json
from fairtrial.base.types import JSON
from fairtrial.reports.calibrate.calibration import CalibrationRecord
from fairtrial.reports.compare.comparison import ComparisonRecord
from fairtrial.reports.figures.error_groups import read_error_groups
from fairtrial.reports.figures.experiment import ExperimentAnalysis, RunAnalysis
from fairtrial.reports.figures.source import code_versions
from fairtrial.reports.gate.decision import GateRecord
from fairtrial.reports.leaderboard.table import LeaderboardRecord
from fairtrial.reports.plan.plan_check import check_run
from fairtrial.reports.plan.planning import SamplePlanRecord
from fairtrial.reports.render.run_json import report_run, tokens_of
from fairtrial.reports.render.safe_text import whole

REPORT_FORMAT = "fairtrial.reports/1"
_ERROR_GROUPS = 20


def as_text(record: dict[str, JSON]) -> str:
    """Return JSON text in ASCII, independent of encodings."""
    return json.dumps(_clean(record), indent=2, allow_nan=False) + "\n"


def _clean(value: Any) -> Any:
    """Replace lone surrogates, which JSON readers reject."""
    match value:
        case str():
            return whole(value)
        case dict():
            return {whole(key): _clean(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_clean(entry) for entry in value]
        case _:
            return value


@singledispatch
def json_of(record: object) -> dict[str, JSON]:
    """Return all figures of a record as JSON values, with the format name first."""
    raise TypeError(f"a {type(record).__name__} has no JSON format")


@json_of.register
def _report(analysis: RunAnalysis) -> dict[str, JSON]:
    return {
        "format": REPORT_FORMAT,
        "run": report_run(analysis.run, code_versions(analysis.store, analysis.run)),
        "experiments": [_part(part) for part in analysis.parts],
        "plan": to_json(check_run(analysis.run)),
    }


@json_of.register
def _comparison(comparison: ComparisonRecord) -> dict[str, JSON]:
    return {"format": "fairtrial.comparison/1", **_fields(comparison, without=("changes", "sources"))}


@json_of.register
def _leaderboard(leaderboard: LeaderboardRecord) -> dict[str, JSON]:
    return {"format": "fairtrial.leaderboard/1", **_fields(leaderboard), "may_be_best": list(leaderboard.may_be_best)}


@json_of.register
def _gate(result: GateRecord) -> dict[str, JSON]:
    return {
        "format": "fairtrial.gate/1",
        **_fields(result, without=("comparison",)),
        "exit_code": result.exit_code,
        "comparison": None if result.comparison is None else json_of(result.comparison),
    }


@json_of.register
def _calibration(calibration: CalibrationRecord) -> dict[str, JSON]:
    return {"format": "fairtrial.calibration/1", **_fields(calibration)}


@json_of.register
def _plan(plan: SamplePlanRecord) -> dict[str, JSON]:
    return {"format": "fairtrial.plan/1", **_fields(plan)}


def _fields(
    record: ComparisonRecord | LeaderboardRecord | GateRecord | CalibrationRecord | SamplePlanRecord,
    *,
    without: Sequence[str] = (),
) -> dict[str, JSON]:
    return {field.name: to_json(getattr(record, field.name)) for field in fields(record) if field.name not in without}


def _part(part: ExperimentAnalysis) -> dict[str, Any]:
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
        "errors": [asdict(group) for group in read_error_groups(part.store, part.run.run_id, part.name)[:_ERROR_GROUPS]]
        if part.errors
        else [],
        "level": figures.level,
        "adaptive": figures.adaptive is not None,
        "estimates": [asdict(estimate) for estimate in figures.estimates],
        "per_trial": [asdict(estimate) for estimate in figures.per_trial],
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
        "tokens": tokens_of(totals),
        "cost_usd": part.cost_usd,
        "judge_cost_usd": part.judge_cost_usd,
        "cache_hits": part.cache_hits,
        "unpriced_calls": part.unpriced_calls,
        "cut_off_calls": part.cut_off_calls,
        "refused_calls": part.refused_calls,
        "unknown_endings": dict(part.unknown_endings),
    }
