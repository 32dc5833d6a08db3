"""Records as JSON and JUnit, and in files by suffix."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import singledispatch
from pathlib import Path
from typing import IO, Any, cast, get_args
from xml.sax.saxutils import escape, quoteattr

from fairtrial.base.codec import to_json
from fairtrial.base.types import JSON
from fairtrial.errors import ConfigurationError
from fairtrial.reports.calibrate.numbers import CalibrationRecord
from fairtrial.reports.compare.comparison import ComparisonRecord
from fairtrial.reports.figures.error_groups import read_error_groups
from fairtrial.reports.figures.experiment import ExperimentAnalysis, RunAnalysis
from fairtrial.reports.figures.metrics import code_versions
from fairtrial.reports.gate.checks import GateCheck
from fairtrial.reports.gate.decision import GateRecord
from fairtrial.reports.gate.document import rule
from fairtrial.reports.leaderboard.table import LeaderboardRecord
from fairtrial.reports.plan.plan_check import check_run
from fairtrial.reports.plan.planning import SamplePlanRecord
from fairtrial.reports.render.documents import IN_HTML, IN_MARKDOWN, document_of
from fairtrial.reports.render.html import write_page
from fairtrial.reports.render.markdown import as_markdown
from fairtrial.reports.render.run_json import report_run, tokens_of
from fairtrial.reports.render.safe_text import lines, plain, shown, whole
from fairtrial.store.export import ExportFormat, export_results, opened
from fairtrial.trials.result import EvalResult

REPORT_FORMAT = "fairtrial.report/1"
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


# Characters that XML 1.0 does not allow; `lines` removes other control characters.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LIMIT = 4_000


def attributes(**values: object) -> str:
    """Format attributes of an element, with a space before each."""
    return "".join(f" {name}={quoteattr(_ILLEGAL.sub('', plain(str(value))))}" for name, value in values.items())


def content(text: str, limit: int = _LIMIT) -> str:
    """Escape text between tags."""
    return escape(_ILLEGAL.sub("", lines(text, limit=limit)))


def properties(values: Mapping[str, object]) -> Iterator[str]:
    """Format the properties of a suite or a case."""
    if values:
        yield "<properties>"
        for name, value in values.items():
            yield f"<property{attributes(name=name, value=value)}/>"
        yield "</properties>"


def case(classname: str, name: str, seconds: float, inside: Iterable[str]) -> str:
    """Format one test case."""
    body = "".join(inside)
    return f"<testcase{attributes(classname=classname, name=name, time=f'{seconds:.3f}')}>{body}</testcase>\n"


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


def write_suites(file: IO[str], name: str, suites: Iterable[tuple[Mapping[str, object], Iterable[str]]]) -> None:
    """Write a file of test suites, streaming their test cases."""
    file.write('<?xml version="1.0" encoding="UTF-8"?>\n')
    file.write(f"<testsuites{attributes(name=name)}>\n")
    for facts, inside in suites:
        file.write(f"<testsuite{attributes(**facts)}>\n")
        for part in inside:
            file.write(part)
        file.write("</testsuite>\n")
    file.write("</testsuites>\n")


@singledispatch
def write_junit(record: object, file: IO[str]) -> None:
    """Write a record as JUnit XML; raises if it has no test cases."""
    raise TypeError(f"a {type(record).__name__} has no test cases")


def as_junit(record: object) -> str:
    """Return a record as JUnit XML text; raises if it has no test cases."""
    buffer = io.StringIO()
    write_junit(record, buffer)
    return buffer.getvalue()


@write_junit.register
def _write_run(analysis: RunAnalysis, file: IO[str]) -> None:
    """Write a test suite for each experiment of a run, with a test case for each result."""
    suite = analysis.run.suite
    write_suites(file, suite, ((_suite_facts(part), _trial_cases(part)) for part in analysis.parts))


def _suite_facts(part: ExperimentAnalysis) -> Mapping[str, object]:
    outcomes = part.totals.outcomes
    return {
        "name": f"{part.run.suite}.{part.name}",
        "tests": sum(outcomes.values()),
        "failures": part.successful - part.totals.passed,
        "errors": sum(part.errors.values()),
        "skipped": outcomes.get("not_run", 0),
        "time": f"{part.totals.latency_sum / 1000:.3f}",
    }


def _trial_cases(part: ExperimentAnalysis) -> Iterator[str]:
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


@write_junit.register
def _write_gate(result: GateRecord, file: IO[str]) -> None:
    """Write a test case for each rule: a failed rule is a failure, an inconclusive one an error."""
    counts = {
        status: sum(check.status == status for check in result.checks) for status in ("pass", "fail", "inconclusive")
    }
    facts = {
        "name": f"gate.{result.candidate}",
        "tests": len(result.checks),
        "failures": counts["fail"],
        "errors": counts["inconclusive"],
        "skipped": 0,
        "time": "0.000",
    }
    write_suites(file, "gate", [(facts, _rule_cases(result))])


def _rule_cases(result: GateRecord) -> Iterator[str]:
    name = f"gate.{result.candidate}"
    for check in result.checks:
        attributes = {key: "" if value is None else value for key, value in _figures(check)}
        inside = [*properties(attributes)]
        if check.status != "pass":
            element = "failure" if check.status == "fail" else "error"
            inside.append(_problem(element, check.status, check.reason))
        yield case(name, rule(check), 0.0, inside)


def _problem(element: str, what: str, reason: str) -> str:
    return f"<{element}{attributes(type=what, message=reason)}>{content(reason)}</{element}>"


def _figures(check: GateCheck) -> Iterator[tuple[str, object]]:
    for name in ("value", "low", "high", "bound", "n", "p"):
        yield name, getattr(check, name)


_TABLES: tuple[str, ...] = get_args(ExportFormat.__value__)


def write(record: object, path: Path, format: str | None = None, *, name: str, tables: bool = False) -> None:
    """Write a record atomically.

    `name` is what an error calls it. With `tables`, the results of a whole run can be written one row per trial.
    """
    chosen = format or path.suffix.lstrip(".").lower()
    formats = ["html", "md", "json"]
    if isinstance(record, RunAnalysis | GateRecord):
        formats.append("xml")
    if tables:
        formats += _TABLES
    if chosen not in formats:
        kinds = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise ConfigurationError(f"{name} can be exported as {kinds} (got {chosen!r}); name the format")
    if isinstance(record, RunAnalysis) and chosen in _TABLES:
        export_results(record.store, record.run.run_id, path, cast("ExportFormat", chosen))
        return
    with opened(path, binary=False) as file:
        match chosen:
            case "html":
                write_page(document_of(record, IN_HTML), file)
            case "xml":
                write_junit(record, file)
            case "md":
                file.write(as_markdown(document_of(record, IN_MARKDOWN)))
            case _:
                file.write(as_text(json_of(record)))
