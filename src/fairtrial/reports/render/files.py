"""The text of JSON files, and the elements of JUnit XML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any
from xml.sax.saxutils import escape, quoteattr

from fairtrial.base.types import JSON
from fairtrial.reports.render.safe_text import lines, plain, whole


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
