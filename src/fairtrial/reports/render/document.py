"""The blocks of a document, independent of the output format.

Reports, comparisons and gates are put into words once, as a `Document`; the terminal, Markdown and HTML each show any
document. So no figure can have its interval in one format and lack it in another, and the rule for text that models
wrote is kept in one place for each format: **every string in a document is plain text, never markup.** A format
escapes all of it.
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
        """Return the position of a value on the scale, clipped to 0 to 1."""
        return min(1.0, max(0.0, (value - self.start) / (self.end - self.start)))


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text in a table, with its tone (good, bad, ...)."""

    text: str
    tone: Tone = ""


type Content = str | Cell | Bar | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: `name` columns hold names, which may be cut to `shortest` where space is short; figures never are.

    Names are cut so that they stay different; `prose` is cut at its end.

    Where cut names are not enough, bars are left out, then `optional` columns.
    Where there is no space for rows, each becomes a few lines under its `heading` columns: the names, unless told.
    """

    title: str
    align: Align = "right"
    name: bool = False
    bar: bool = False
    heading: bool | None = None
    shortest: int = 10
    optional: bool = False
    prose: bool = False
    lines: int = 1  # Maximum number of lines in a terminal.

    @property
    def heads_row(self) -> bool:
        """True if the column is part of the row heading."""
        return self.name if self.heading is None else self.heading


@dataclass(frozen=True, slots=True)
class Section:
    """A heading row for the rows below it."""

    title: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of figures under a caption. A row has one cell for each column."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Content, ...] | Section, ...]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The sentence that answers the question, with its tone."""

    word: str
    text: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Remarks:
    """Remarks needed to interpret the figures."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of several lines under a caption, to be read or copied as a whole."""

    caption: str
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing: SVG with escaped text. Only HTML shows it; a table has the same figures."""

    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class PictureFact:
    """A picture under its name: its bytes if they are recognised as those of `media_type`, or why it is not shown."""

    name: str
    media_type: str = ""
    content: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TrialDetails:
    """The details of one trial: title, outcome, and labelled texts.

    Pages also have what can be filtered by (`result` and `experiment`), a glance at input and output, pictures, and
    texts that are folded until they are asked for.
    """

    title: str
    outcome: str
    tone: Tone
    facts: tuple[tuple[str, str], ...]
    result: str = ""
    experiment: str = ""
    glance: tuple[str, str] | None = None
    folded: tuple[tuple[str, str], ...] = ()
    pictures: tuple[PictureFact, ...] = ()


@dataclass(frozen=True, slots=True)
class Cases:
    """A list of trial details. `items` may stream; `total` counts all, of which at most `shown` are included.

    On a page, those with a `filter` can be searched and filtered; `others` says where those are that are not shown.
    """

    caption: str
    total: int
    shown: int
    items: Iterable[TrialDetails]
    filter: bool = False
    others: str = ""


@dataclass(frozen=True, slots=True)
class TrialExample:
    """One trial of a group: what names it, and its input and output (empty if there is none)."""

    title: str
    sample_id: str
    experiment: str
    repeat: int
    input: str
    output: str


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """Trials with the same result for the same reason, and some of them as examples.

    `trials` counts all of them; with `at_least` only part of the trials was looked at.
    """

    result: str
    tone: Tone
    reason: str
    trials: int
    examples: tuple[TrialExample, ...]
    at_least: bool = False

    @property
    def title(self) -> str:
        """How many trials, their result, and why."""
        count = f"{self.trials:,}{'+' if self.at_least else ''} x " if self.trials > 1 else ""
        return f"{count}{self.result}: {self.reason}" if self.reason else f"{count}{self.result}"


@dataclass(frozen=True, slots=True)
class TrialGroups:
    """The worst trials, by reason; `others` counts the trials that failed and are in none of the groups."""

    groups: tuple[TrialGroup, ...]
    others: int = 0


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that a page folds until they are asked for. Terminals show them, if a document has them."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of a part of a page, with a line or two on what it is about. Shown by HTML and Markdown alone."""

    title: str
    about: tuple[str, ...] = ()


type Block = Table | Conclusion | Remarks | Passage | Plot | Cases | TrialGroups | Details | Heading


@dataclass(frozen=True, slots=True)
class Document:
    """A title, one or two introductory lines, and blocks."""

    title: str
    about: tuple[str, ...]
    blocks: tuple[Block, ...]
