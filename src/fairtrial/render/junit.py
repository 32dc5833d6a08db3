"""JUnit XML, which every CI system shows: a test case for every trial, streamed, or for every rule of a gate.

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

from fairtrial.analysis.checks import GateCheck
from fairtrial.analysis.experiment import ExperimentAnalysis, RunAnalysis
from fairtrial.analysis.gate import GateRecord
from fairtrial.render.gate_document import rule
from fairtrial.render.safe_text import lines, plain, shown
from fairtrial.trials.result import EvalResult

# What XML 1.0 cannot hold in any form; `lines` takes the rest of what is unfit to show.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LIMIT = 4_000


def attributes(**values: object) -> str:
    """Attributes of an element, with a space before each."""
    return "".join(f" {name}={quoteattr(_ILLEGAL.sub('', plain(str(value))))}" for name, value in values.items())


def content(text: str, limit: int = _LIMIT) -> str:
    """Text between tags."""
    return escape(_ILLEGAL.sub("", lines(text, limit=limit)))


def properties(values: Mapping[str, object]) -> Iterator[str]:
    """The facts of a suite or a case."""
    if values:
        yield "<properties>"
        for name, value in values.items():
            yield f"<property{attributes(name=name, value=value)}/>"
        yield "</properties>"


def case(classname: str, name: str, seconds: float, inside: Iterable[str]) -> str:
    """One test case."""
    body = "".join(inside)
    return f"<testcase{attributes(classname=classname, name=name, time=f'{seconds:.3f}')}>{body}</testcase>\n"


def trial(result: EvalResult, suite: str, repeats: int) -> str:
    """The test case of one trial."""
    name = result.sample_id if repeats == 1 else f"{result.sample_id} [repeat {result.repeat}]"
    return case(f"{suite}.{result.experiment}", name, result.latency_ms / 1000, _came_of(result))


def _came_of(result: EvalResult) -> Iterator[str]:
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
    """Write a whole file: suites, each with its attributes and what it holds, as they come."""
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
    """Write a record as JUnit XML, as far as it has test cases."""
    raise TypeError(f"a {type(record).__name__} has no test cases")


def as_junit(record: object) -> str:
    """The same as text."""
    buffer = io.StringIO()
    write_junit(record, buffer)
    return buffer.getvalue()


@write_junit.register
def _write_run(analysis: RunAnalysis, file: IO[str]) -> None:
    """A test suite for each experiment of a run and a test case for each result, as they are read."""
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
    found: dict[str, object] = {"run": run.run_id, "dataset": run.dataset_name, "planned": part.planned}
    found |= {"scored": part.successful, "not_run": part.not_run}
    for estimate in part.estimates:
        # Undefined is an empty value: a reader of numbers must not find a 0.
        for name, value in ((estimate.name, estimate.value), ("low", estimate.low), ("high", estimate.high)):
            key = name if name == estimate.name else f"{estimate.name}.{name}"
            found[key] = "" if value is None else value
        found[f"{estimate.name}.n"] = estimate.n
    yield from properties(found)
    yield "\n"
    for result in part.store.results(run.run_id, experiment=part.name):
        yield trial(result, run.suite, run.repeats)


@write_junit.register
def _write_gate(result: GateRecord, file: IO[str]) -> None:
    """A test case for each rule: a broken rule is a failure, an open one an error, for neither lets through."""
    counts = {
        status: sum(check.status == status for check in result.checks) for status in ("pass", "fail", "inconclusive")
    }
    # Too many missing trials leave a gate open although each rule may be met.
    missing = result.status == "inconclusive" and not counts["inconclusive"]
    facts = {
        "name": f"gate.{result.candidate}",
        "tests": len(result.checks) + missing,
        "failures": counts["fail"],
        "errors": counts["inconclusive"] + missing,
        "skipped": 0,
        "time": "0.000",
    }
    write_suites(file, "gate", [(facts, _rule_cases(result, missing=missing))])


def _rule_cases(result: GateRecord, *, missing: bool) -> Iterator[str]:
    name = f"gate.{result.candidate}"
    if missing:
        reason = result.reasons[0] if result.reasons else ""
        yield case(name, "missing trials", 0.0, [_problem("error", "inconclusive", reason)])
    for check in result.checks:
        found = {key: "" if value is None else value for key, value in _figures(check)}
        inside = [*properties(found)]
        if check.status != "pass":
            kind = "failure" if check.status == "fail" else "error"
            inside.append(_problem(kind, check.status, check.reason))
        yield case(name, rule(check), 0.0, inside)


def _problem(kind: str, what: str, reason: str) -> str:
    return f"<{kind}{attributes(type=what, message=reason)}>{content(reason)}</{kind}>"


def _figures(check: GateCheck) -> Iterator[tuple[str, object]]:
    for name in ("value", "low", "high", "bound", "n", "p"):
        yield name, getattr(check, name)
