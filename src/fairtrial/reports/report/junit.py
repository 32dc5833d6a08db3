"""The report of a run as JUnit XML: a test suite for each experiment, a test case for each trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING

from fairtrial.reports.render.files import attributes, case, content, properties, write_suites
from fairtrial.reports.render.safe_text import plain, shown
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.reports.report.experiment import ExperimentReport, RunReport


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
