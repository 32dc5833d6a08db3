"""JUnit XML, which every CI system shows: a test case for every trial, streamed.

A trial that was scored and did not pass is a failure; one that could not be scored is an error; one that was not run is
skipped. The elements and attributes are those that the common readers (Jenkins, GitLab, GitHub actions) agree on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any
from xml.sax.saxutils import escape, quoteattr

from fairtrial.codec import dumps
from fairtrial.report.untrusted import lines, plain
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
    facts |= {f"metric.{metric.name}": metric.value for metric in score.metrics}
    yield from properties(facts)
    if not score.passed:
        reason = plain(score.reason or f"value {score.value:g}", limit=300)
        text = f"{score.reason}\n\noutput: {shown(result.output)}" if score.reason else f"output: {shown(result.output)}"
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
