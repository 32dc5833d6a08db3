"""Render JUnit XML for CI systems: a test case for every trial, or for every rule of a gate.

A trial that was scored and did not pass is a failure; one that could not be scored is an error; one that was not run is
skipped. The elements and attributes are those that the common readers (Jenkins, GitLab, GitHub actions) agree on.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from typing import IO
from xml.sax.saxutils import escape, quoteattr

from fairtrial.reports.figures.experiment import ExperimentAnalysis, RunAnalysis
from fairtrial.reports.gate.checks import GateCheck
from fairtrial.reports.gate.decision import GateRecord
from fairtrial.reports.gate.document import rule
from fairtrial.reports.render.safe_text import lines, plain, shown
from fairtrial.trials.result import EvalResult

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
