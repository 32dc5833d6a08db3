"""What can be shown: in a terminal, in a notebook, as Markdown, as a web page, as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.types import JSON

if TYPE_CHECKING:
    from fairtrial.report.render.document import Document

IN_MARKDOWN, IN_HTML = 10, 200
"""How many trials of a kind are there to read."""


class Rendered:
    """Something that says what it has to say as a document, which every format can show.

    `print(x)` gives plain text, 80 columns wide unless a terminal is wider; a rich console and a notebook show tables.
    Text that models wrote is text in all of them, never markup.
    """

    __slots__ = ()

    def _document(self, cases: int) -> Document:
        """What is said, with at most this many single trials to read."""
        raise NotImplementedError

    def to_json(self) -> dict[str, JSON]:
        """All figures as JSON values; docs/reference/json.md says what is in them."""
        raise NotImplementedError

    def to_markdown(self) -> str:
        """Markdown for a pull request, with some of the trials to read."""
        from fairtrial.report.render.markdown import as_markdown

        return as_markdown(self._document(IN_MARKDOWN))

    def to_html(self) -> str:
        """One web page with plots and with trials to read, up to a number it states. It fetches nothing."""
        from fairtrial.report.render.html import as_page

        return as_page(self._document(IN_HTML))

    def export(self, path: Path | str, format: Any = None) -> None:
        """Write it as html, md or json, and what has test cases as xml (JUnit); by the file's suffix unless given."""
        from fairtrial.report.render.files import write

        write(self, Path(path), format)

    def __str__(self) -> str:
        from fairtrial.report.render.terminal import WIDTH, as_text, width_of

        width, encoding = width_of(sys.stdout, WIDTH), getattr(sys.stdout, "encoding", None)
        return as_text(self._document(0), width=width, encoding=encoding)

    def __rich__(self) -> Any:
        from fairtrial.report.render.terminal import Shown

        return Shown(self._document(0))

    def _repr_html_(self) -> str:
        from fairtrial.report.render.html import as_fragment

        return as_fragment(self._document(0))
