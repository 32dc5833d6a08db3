"""What is said, apart from how it is shown: the blocks that every rendering is made of.

Reports, comparisons and gates are put into words once, as a `Document`; the terminal, Markdown and HTML each show any
document. So no figure can have its interval in one format and lack it in another, and the rule for text that models
wrote is kept in one place for each format: **every string in a document is plain text, never markup.** Whoever shows a
document escapes all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

type Tone = Literal["", "good", "bad", "unsure", "dim"]
type Align = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval and its estimate, to be drawn on a scale from `start` to `end`; `mark` is a value to compare with."""

    low: float
    mean: float
    high: float
    start: float = 0.0
    end: float = 1.0
    mark: float | None = None

    def place(self, value: float) -> float:
        """Where a value lies on the scale, from 0 to 1; what lies outside is put at the nearer end."""
        return min(1.0, max(0.0, (value - self.start) / (self.end - self.start)))


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text in a table, with what it means for the reader."""

    text: str
    tone: Tone = ""


type Content = str | Cell | Bar | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: `name` columns hold names, which may be cut to `shortest` where space is short; figures never are.

    Where there is no space for rows, each becomes a few lines under its `heading` columns: the names, unless told.
    """

    title: str
    align: Align = "right"
    name: bool = False
    bar: bool = False
    heading: bool | None = None
    shortest: int = 10

    @property
    def heads_row(self) -> bool:
        """Whether the column is part of a row's heading."""
        return self.name if self.heading is None else self.heading


@dataclass(frozen=True, slots=True)
class Section:
    """A row that names the rows below it."""

    title: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of figures under a caption. A row has one cell for each column."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Content, ...] | Section, ...]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The one sentence that answers the question, and why."""

    word: str
    text: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Remarks:
    """Sentences a reader must know to read the figures rightly."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing: SVG in which all text is already escaped. Shown by HTML alone; a table always says the same."""

    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class Case:
    """One trial to read: what it is called, what came of it, and labelled texts."""

    title: str
    outcome: str
    tone: Tone
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """Trials to read one by one. `items` may stream; `total` counts all there are, of which at most `shown` come."""

    caption: str
    total: int
    shown: int
    items: Iterable[Case]


type Block = Table | Conclusion | Remarks | Plot | Cases


@dataclass(frozen=True, slots=True)
class Document:
    """A title, a line or two on what it is about, and blocks."""

    title: str
    about: tuple[str, ...]
    blocks: tuple[Block, ...]
