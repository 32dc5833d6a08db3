"""The JSON of a run, in reports and in lists of runs.

`listed_run` is an entry of `fairtrial.runs/1`, what commands list; `report_run` is the head of `fairtrial.report/1`.
They were given different forms for times (text in UTC, or seconds) and for the dataset (an object, or fields beside
the others), which stay as they are until a new version of a format. All other fields are made once, in `_shared`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import to_json
from fairtrial.data.session.events import TokenUsage
from fairtrial.reports.figures.analysis_plan import check_run
from fairtrial.reports.figures.error_groups import read_error_groups
from fairtrial.reports.figures.metrics import code_versions
from fairtrial.reports.figures.summaries import TotalsAnalysis
from fairtrial.store.protocol import RunRecord, Totals

if TYPE_CHECKING:
    from fairtrial.reports.report.experiment import ExperimentReport, RunReport

REPORT_FORMAT = "fairtrial.report/1"
_ERROR_GROUPS = 20


def moment(seconds: float | None) -> str | None:
    """Format a time as ISO 8601 in UTC."""
    if seconds is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _shared(run: RunRecord, *names: str) -> dict[str, Any]:
    """Return the fields with these names."""
    made = {"tags": dict(run.tags), "notes": to_json(dict(run.notes))}
    return {name: made[name] if name in made else getattr(run, name) for name in names}


def report_run(run: RunRecord, versions: int) -> dict[str, Any]:
    """Return the JSON of a run in its report; `versions` is the number of code versions of its results."""
    return {
        **_shared(run, "run_id", "suite", "status"),
        "dataset": run.dataset_name,
        "dataset_version": run.dataset_version,
        "dataset_fingerprint": run.dataset_fingerprint,
        "samples": run.dataset_size,
        **_shared(run, "repeats", "evaluator"),
        "code_versions": versions,
        **_shared(run, "tags", "created_at", "finished_at", "notes"),
    }


def report_json(report: RunReport) -> dict[str, Any]:
    """Return the JSON of the report of a run, or of one of its experiments."""
    return {
        "format": REPORT_FORMAT,
        "run": report_run(report.run, code_versions(report.store, report.run)),
        "experiments": [_part(part) for part in report.parts],
        "plan": to_json(check_run(report.run)),
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


def listed_run(run: RunRecord, totals: Iterable[Totals]) -> dict[str, Any]:
    """Return the JSON of a run in a list, with the figures of its experiments."""
    return {
        "run_id": run.run_id,
        "name": run.name,
        **_shared(run, "suite", "number", "status"),
        "created_at": moment(run.created_at),
        "finished_at": moment(run.finished_at),
        "dataset": {
            "name": run.dataset_name,
            "version": run.dataset_version,
            "fingerprint": run.dataset_fingerprint,
            "samples": run.dataset_size,
        },
        **_shared(run, "evaluator", "repeats", "planned", "tags", "parent_run", "notes"),
        "experiments": [totals_record(part, to_json(run.params.get(part.experiment))) for part in totals],
    }


def totals_record(totals: Totals, params: Any = None) -> dict[str, Any]:
    """Return the figures of one experiment or slice; undefined ones are null, never 0."""
    figures = TotalsAnalysis(totals)
    return {
        "experiment": totals.experiment,
        "params": params or {},
        "trials": figures.total,
        "scored": figures.successful,
        "passed": totals.passed,
        "errors": {name: count for name, count in totals.outcomes.items() if name in figures.errors},
        "pass_rate": figures.pass_rate,
        "pass_rate_all": figures.pass_rate_all,
        "mean_score": figures.mean_score,
        "mean_reward": figures.mean_reward,
        "mean_latency_ms": figures.mean_latency_ms,
        "tokens": tokens_of(totals),
        "cost_usd": figures.cost_usd,
        "judge_cost_usd": figures.judge_cost_usd,
        "cache_hits": figures.cache_hits,
        "unpriced_calls": figures.unpriced_calls,
        "cut_off_calls": figures.cut_off_calls,
        "refused_calls": figures.refused_calls,
        "unknown_endings": dict(figures.unknown_endings),
    }


def tokens_of(spent: Totals | TokenUsage) -> dict[str, int]:
    """Return the tokens of the task's model calls."""
    kinds = ("input", "output", "cached", "cache_write", "reasoning")
    return {kind: getattr(spent, f"{kind}_tokens") for kind in kinds}
