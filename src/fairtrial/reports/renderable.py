"""Base classes of objects that can be shown in terminals, notebooks, Markdown, HTML and JSON.

`fairtrial.reports.render` is imported when something is shown: a run that prints nothing must not load rich.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from fairtrial.base.types import JSON


class Renderable:
    """An object that can be shown and exported in every format.

    `print(x)` gives plain text, 80 columns wide unless a terminal is wider; a rich console and a notebook show tables.
    Text that models wrote is text in all of them, never markup.
    """

    __slots__ = ()

    def _record(self) -> object:
        """Return the record to render."""
        return self

    def to_json(self) -> dict[str, JSON]:
        """Return all figures as JSON values; docs/reference/json.md describes them."""
        from fairtrial.reports.render.files import json_of

        return json_of(self._record())

    def to_markdown(self) -> str:
        """Return Markdown for a pull request, with details of some trials."""
        from fairtrial.reports.render.documents import IN_MARKDOWN, document_of
        from fairtrial.reports.render.markdown import as_markdown

        return as_markdown(document_of(self._record(), IN_MARKDOWN))

    def to_html(self) -> str:
        """Return a self-contained web page with plots and trial details."""
        from fairtrial.reports.render.documents import IN_HTML, document_of
        from fairtrial.reports.render.html import as_page

        return as_page(document_of(self._record(), IN_HTML))

    def export(self, path: Path | str, format: Any = None) -> None:
        """Write html, md, json or, with test cases, xml (JUnit); the default format is that of the file extension."""
        from fairtrial.reports.render.files import write

        write(self._record(), Path(path), format, name=type(self).__name__)

    def __str__(self) -> str:
        from fairtrial.reports.render.documents import document_of
        from fairtrial.reports.render.terminal import WIDTH, as_text, width_of

        width, encoding = width_of(sys.stdout, WIDTH), getattr(sys.stdout, "encoding", None)
        return as_text(document_of(self._record(), 0), width=width, encoding=encoding)

    def __rich__(self) -> Any:
        from fairtrial.reports.render.documents import document_of
        from fairtrial.reports.render.terminal import RichDocument

        return RichDocument(document_of(self._record(), 0))

    def _repr_html_(self) -> str:
        from fairtrial.reports.render.documents import document_of
        from fairtrial.reports.render.html import as_fragment

        return as_fragment(document_of(self._record(), 0))


class WithTestCases(Renderable):
    """An object with test cases for CI systems."""

    __slots__ = ()

    def to_junit(self) -> str:
        """Return JUnit XML: a test case for every trial, or for every rule of a gate."""
        from fairtrial.reports.render.files import as_junit

        return as_junit(self._record())


class RenderableRecord(Renderable):
    """A record of `fairtrial.reports.figures` that can be shown and exported."""

    __slots__ = ()

    @classmethod
    def of(cls, record: Any, **changes: Any) -> Self:
        """Wrap a record."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(record)} | changes)
