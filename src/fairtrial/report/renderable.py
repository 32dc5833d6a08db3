"""What people hold and can look at: in a terminal, in a notebook, as Markdown, as a web page, as JSON.

`fairtrial.render` is imported when something is shown: a run that prints nothing must not load rich.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from fairtrial.types import JSON


class Renderable:
    """Something whose record can be put into a document, which every format can show.

    `print(x)` gives plain text, 80 columns wide unless a terminal is wider; a rich console and a notebook show tables.
    Text that models wrote is text in all of them, never markup.
    """

    __slots__ = ()

    def _record(self) -> object:
        """What is shown: a record that `fairtrial.render` knows."""
        return self

    def to_json(self) -> dict[str, JSON]:
        """All figures as JSON values; docs/reference/json.md says what is in them."""
        from fairtrial.render.json_record import json_of

        return json_of(self._record())

    def to_markdown(self) -> str:
        """Markdown for a pull request, with some of the trials to read."""
        from fairtrial.render.documents import IN_MARKDOWN, document_of
        from fairtrial.render.markdown import as_markdown

        return as_markdown(document_of(self._record(), IN_MARKDOWN))

    def to_html(self) -> str:
        """One web page with plots and with trials to read, up to a number it states. It fetches nothing."""
        from fairtrial.render.documents import IN_HTML, document_of
        from fairtrial.render.html import as_page

        return as_page(document_of(self._record(), IN_HTML))

    def export(self, path: Path | str, format: Any = None) -> None:
        """Write it as html, md or json, and what has test cases as xml (JUnit); by the file's suffix unless given."""
        from fairtrial.render.files import write

        write(self._record(), Path(path), format, name=type(self).__name__)

    def __str__(self) -> str:
        from fairtrial.render.documents import document_of
        from fairtrial.render.terminal import WIDTH, as_text, width_of

        width, encoding = width_of(sys.stdout, WIDTH), getattr(sys.stdout, "encoding", None)
        return as_text(document_of(self._record(), 0), width=width, encoding=encoding)

    def __rich__(self) -> Any:
        from fairtrial.render.documents import document_of
        from fairtrial.render.terminal import RichDocument

        return RichDocument(document_of(self._record(), 0))

    def _repr_html_(self) -> str:
        from fairtrial.render.documents import document_of
        from fairtrial.render.html import as_fragment

        return as_fragment(document_of(self._record(), 0))


class WithTestCases(Renderable):
    """What has test cases for CI systems."""

    __slots__ = ()

    def to_junit(self) -> str:
        """JUnit XML: a test case for every trial, or for every rule of a gate."""
        from fairtrial.render.junit import as_junit

        return as_junit(self._record())


class RenderableRecord(Renderable):
    """A record of `fairtrial.analysis` with the ways to look at it."""

    __slots__ = ()

    @classmethod
    def of(cls, record: Any, **changes: Any) -> Self:
        """The same record, to be held and looked at."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(record)} | changes)
