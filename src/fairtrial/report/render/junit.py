"""JUnit XML, which every CI system shows: a test case for every trial, streamed.

A trial that was scored and did not pass is a failure; one that could not be scored is an error; one that was not run is
skipped. The elements and attributes are those that the common readers (Jenkins, GitLab, GitHub actions) agree on.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from fairtrial.codec import dumps
from fairtrial.report.untrusted import lines, plain
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.report.report import ExperimentReport

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


def shown(value: Any) -> str:
    """A value as text: itself, or its JSON."""
    return value if isinstance(value, str) else dumps(value)


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


def write_junit(store: RunStore, run: RunRecord, parts: Sequence[ExperimentReport], file: IO[str]) -> None:
    """Write a test suite for each experiment of a run and a test case for each result, as they are read."""
    write_suites(file, run.suite, (_suite(store, run, part) for part in parts))


def as_junit(store: RunStore, run: RunRecord, parts: Sequence[ExperimentReport]) -> str:
    """The same as text."""
    buffer = io.StringIO()
    write_junit(store, run, parts, buffer)
    return buffer.getvalue()


def _suite(store: RunStore, run: RunRecord, part: ExperimentReport) -> tuple[Mapping[str, object], Iterable[str]]:
    outcomes = part.totals.outcomes
    facts = {
        "name": f"{run.suite}.{part.name}",
        "tests": sum(outcomes.values()),
        "failures": part.successful - part.totals.passed,
        "errors": sum(part.errors.values()),
        "skipped": outcomes.get("not_run", 0),
        "time": f"{part.totals.latency_sum / 1000:.3f}",
    }
    return facts, _cases(store, run, part)


def _cases(store: RunStore, run: RunRecord, part: ExperimentReport) -> Iterator[str]:
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
    for result in store.results(run.run_id, experiment=part.name):
        yield trial(result, run.suite, run.repeats)
