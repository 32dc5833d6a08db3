"""What can be shown and saved: in a terminal, a notebook, a page, a file."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar
from xml.sax.saxutils import escape, quoteattr

from fairtrial.base.codec import to_json
from fairtrial.base.frozen import JSON
from fairtrial.errors import ConfigurationError
from fairtrial.reports.render.safe_text import lines, plain, whole
from fairtrial.store.export import opened

if TYPE_CHECKING:
    from fairtrial.reports.render.document import Document


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


IN_MARKDOWN, IN_HTML = 10, 200
"""How many trials of a kind are there to read."""


class Renderable:
    """An object that can be shown and exported in every format.

    `print(x)` gives plain text, 80 columns wide unless a terminal is wider; a rich console and a notebook show tables.
    Text that models wrote is text in all of them, never markup.
    """

    __slots__ = ()
    json_format: ClassVar[str] = ""
    file_formats: ClassVar[tuple[str, ...]] = ("html", "md", "json")

    def document(self, cases: int) -> Document:
        """Return what is shown, with at most `cases` trials of each kind."""
        raise NotImplementedError

    def to_json(self) -> dict[str, JSON]:
        """Return all figures as JSON values; docs/reference/json.md describes them."""
        if not self.json_format:
            raise TypeError(f"a {type(self).__name__} has no JSON format")
        record: Any = self
        figures = {field.name: getattr(self, field.name) for field in fields(record) if field.compare}
        inside = {name: one.to_json() if isinstance(one, Renderable) else to_json(one) for name, one in figures.items()}
        return {"format": self.json_format, **inside}

    def to_markdown(self) -> str:
        """Return Markdown for a pull request, with details of some trials."""
        from fairtrial.reports.render.markdown import as_markdown

        return as_markdown(self.document(IN_MARKDOWN))

    def to_html(self) -> str:
        """Return a self-contained web page with plots and trial details."""
        from fairtrial.reports.render.html import as_page

        return as_page(self.document(IN_HTML))

    def export(self, path: Path | str, format: Any = None) -> None:
        """Write html, md, json or, with test cases, xml (JUnit); the default format is that of the file extension."""
        chosen = self._file_format(path, format)
        with opened(Path(path), binary=False) as file:
            self._write(file, chosen)

    def _file_format(self, path: Path | str, format: str | None) -> str:
        chosen = format or Path(path).suffix.lstrip(".").lower()
        if chosen not in self.file_formats:
            kinds = f"{', '.join(self.file_formats[:-1])} or {self.file_formats[-1]}"
            name = type(self).__name__
            raise ConfigurationError(f"{name} can be exported as {kinds} (got {chosen!r}); name the format")
        return chosen

    def _write(self, file: IO[str], format: str) -> None:
        if format == "html":
            from fairtrial.reports.render.html import write_page

            write_page(self.document(IN_HTML), file)
        elif format == "md":
            file.write(self.to_markdown())
        else:
            file.write(as_text(self.to_json()))

    def __str__(self) -> str:
        from fairtrial.reports.render.terminal import WIDTH, as_text, width_of

        width, encoding = width_of(sys.stdout, WIDTH), getattr(sys.stdout, "encoding", None)
        return as_text(self.document(0), width=width, encoding=encoding)

    def __rich__(self) -> Any:
        from fairtrial.reports.render.terminal import RichDocument

        return RichDocument(self.document(0))

    def _repr_html_(self) -> str:
        from fairtrial.reports.render.html import as_fragment

        return as_fragment(self.document(0))


class WithTestCases(Renderable):
    """An object with test cases for CI systems."""

    __slots__ = ()
    file_formats: ClassVar[tuple[str, ...]] = (*Renderable.file_formats, "xml")

    def write_junit(self, file: IO[str]) -> None:
        """Write JUnit XML to an open file."""
        raise NotImplementedError

    def _write(self, file: IO[str], format: str) -> None:
        if format == "xml":
            self.write_junit(file)
        else:
            Renderable._write(self, file, format)

    def to_junit(self) -> str:
        """Return JUnit XML: a test case for every trial, or for every rule of a gate."""
        buffer = io.StringIO()
        self.write_junit(buffer)
        return buffer.getvalue()
