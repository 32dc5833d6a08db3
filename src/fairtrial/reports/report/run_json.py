"""A report for other programs: JSON and JUnit XML."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from fairtrial.base.codec import to_json
from fairtrial.data.session.events import TokenUsage
from fairtrial.reports.figures.analysis_plan import check_run
from fairtrial.reports.figures.error_groups import read_error_groups
from fairtrial.reports.figures.metrics import code_versions
from fairtrial.reports.figures.summaries import TotalsAnalysis
from fairtrial.reports.render.renderable import attributes, case, content, properties, write_suites
from fairtrial.reports.render.safe_text import plain, shown
from fairtrial.store.protocol import RunRecord, Totals
from fairtrial.trials.result import EvalResult

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
            "user_error": part.errors.get("user_error", 0),
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


def write_run(report: RunReport, file: IO[str]) -> None:
    """Write a test suite for each experiment of a run, with a test case for each result."""
    write_suites(file, report.run.suite, ((_suite_facts(part), _trial_cases(part)) for part in report.parts))


def _suite_facts(part: ExperimentReport) -> Mapping[str, object]:
    outcomes = part.totals.outcomes
    return {
        "name": f"{part.run.suite}.{part.name}",
        "tests": sum(outcomes.values()),
        "failures": part.successful - part.totals.passed,
        "errors": sum(part.errors.values()),
        "skipped": outcomes.get("not_run", 0),
        "time": f"{part.totals.latency_sum / 1000:.3f}",
    }


def _trial_cases(part: ExperimentReport) -> Iterator[str]:
    run = part.run
    attributes: dict[str, object] = {"run": run.run_id, "dataset": run.dataset_name, "planned": part.planned}
    attributes |= {"scored": part.successful, "not_run": part.not_run}
    for estimate in part.estimates:
        # Undefined figures are empty, never 0.
        for name, value in ((estimate.name, estimate.value), ("low", estimate.low), ("high", estimate.high)):
            key = name if name == estimate.name else f"{estimate.name}.{name}"
            attributes[key] = "" if value is None else value
        attributes[f"{estimate.name}.n"] = estimate.n
    yield from properties(attributes)
    yield "\n"
    for result in part.store.results(run.run_id, experiment=part.name):
        yield trial(result, run.suite, run.repeats)


def trial(result: EvalResult, suite: str, repeats: int) -> str:
    """Format the test case of one trial."""
    name = result.sample_id if repeats == 1 else f"{result.sample_id} [repeat {result.repeat}]"
    return case(f"{suite}.{result.experiment}", name, result.latency_ms / 1000, _describe_result(result))


def _describe_result(result: EvalResult) -> Iterator[str]:
    score = result.score
    if result.outcome == "not_run":
        yield "<skipped/>"
        return
    if score is None:
        message = plain(result.error or result.outcome, limit=300)
        yield f"<error{attributes(type=result.outcome, message=message)}>{content(result.error or '')}</error>"
        return
    facts: dict[str, object] = {"value": score.value}
    if score.reward != score.value:
        facts["reward"] = score.reward
    facts |= {f"metric.{metric.name}": metric.value for metric in score.metrics}
    facts |= {f"passed.{metric.name}": metric.passed for metric in score.criteria}
    yield from properties(facts)
    if not score.passed:
        why = score.explain()
        reason = plain(why or f"value {score.value:g}", limit=300)
        text = f"{why}\n\noutput: {shown(result.output)}" if why else f"output: {shown(result.output)}"
        yield f"<failure{attributes(type='not passed', message=reason)}>{content(text)}</failure>"
