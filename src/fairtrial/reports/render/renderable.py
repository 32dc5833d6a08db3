"""Base classes of objects that can be shown in terminals, notebooks, Markdown, HTML and JSON.

The other modules of this folder are imported when something is shown: a run that prints nothing must not load rich.
"""

from __future__ import annotations

import io
import sys
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from fairtrial.base.codec import to_json
from fairtrial.base.types import JSON
from fairtrial.errors import ConfigurationError
from fairtrial.store.export import opened

if TYPE_CHECKING:
    from fairtrial.reports.render.document import Document

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
            from fairtrial.reports.render.files import as_text

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
