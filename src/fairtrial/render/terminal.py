"""A document in a terminal: tables whose rows never wrap, with small bars for intervals.

Widths are worked out here, not by rich: at 80 columns a name is cut before a figure is, bars give way before both, and
where not even that is enough, every row becomes a few short lines.
"""

from __future__ import annotations

import codecs
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fairtrial.render.document import (
    Bar,
    Block,
    Cases,
    Cell,
    Column,
    Conclusion,
    Content,
    Document,
    Remarks,
    Section,
    Table,
    Tone,
)
from fairtrial.render.safe_text import AS_WIDE, plain

WIDTH = 80
"""How wide text is that no terminal shows."""

_GAP = 2
_WIDEST = 140
_FAIR_NAME = 32  # A name may be cut to this much to make room for a bar.
_SHORTEST_BAR, _LONGEST_BAR = 10, 41
_STYLES: dict[Tone, str] = {"": "", "good": "green", "bad": "red", "unsure": "yellow", "dim": "dim"}
_CASES = 10


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What bars are drawn with."""

    track: str
    line: str
    low: str
    high: str
    mean: str
    mark: str


UNICODE = Glyphs("·", "─", "├", "┤", "●", "│")
ASCII = Glyphs(".", "-", "[", "]", "o", "|")


def glyphs_for(encoding: str | None) -> Glyphs:
    """The glyphs that text in this encoding can hold: not every file and every console takes more than ASCII."""
    try:
        "".join(getattr(UNICODE, name) for name in UNICODE.__slots__).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def writable(text: str, encoding: str | None) -> str:
    """`text` with "?" for what the encoding lacks: a report that cannot be shown whole is still shown."""
    try:
        encoding = codecs.lookup(encoding or "utf-8").name
    except LookupError:
        encoding = "ascii"
    return text.encode(encoding, AS_WIDE).decode(encoding)


def width_of(stream: object, otherwise: int) -> int:
    """How wide to write to a stream: as wide as the terminal it is, within reason, or `otherwise`."""
    if not getattr(stream, "isatty", lambda: False)():
        return otherwise
    return max(40, min(shutil.get_terminal_size((otherwise, 24)).columns, _WIDEST))


@dataclass(frozen=True, slots=True)
class RichDocument:
    """A document, or one block, that a rich console can print, at whatever width it has."""

    content: Document | Block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Each line as text of its own, marked never to wrap."""
        for line in _lines(self.content, options.max_width, glyphs_for(options.encoding)):
            line.plain = writable(line.plain, options.encoding)
            line.no_wrap = True
            line.overflow = "crop"
            yield line


def as_text(document: Document, *, width: int = WIDTH, encoding: str | None = None) -> str:
    """The document as plain text that an encoding, UTF-8 unless given, can hold."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    for line in _document(document, width, glyphs_for(encoding)):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    return writable("\n".join(line.rstrip() for line in buffer.getvalue().splitlines()), encoding)


def _lines(content: Document | Block, width: int, glyphs: Glyphs) -> Iterator[Text]:
    return _document(content, width, glyphs) if isinstance(content, Document) else _block(content, width, glyphs)


def _document(document: Document, width: int, glyphs: Glyphs) -> Iterator[Text]:
    yield from _paragraph(document.title, width, "bold")
    for line in document.about:
        yield from _paragraph(line, width, "dim")
    for block in document.blocks:
        shown = list(_block(block, width, glyphs))
        if shown:
            yield Text("")
            yield from shown


def _block(block: Block, width: int, glyphs: Glyphs) -> Iterator[Text]:
    match block:
        case Table():
            yield from _table(block, width, glyphs)
        case Conclusion():
            first, *rest = _paragraph(f"{block.word}: {block.text}", width)
            first.stylize(f"bold {_STYLES[block.tone]}", 0, len(plain(block.word)) + 1)
            yield first
            yield from rest
        case Remarks():
            for remark in block.lines:
                yield from _paragraph(remark, width, hanging=2)
        case Cases():
            yield from _cases(block, width)
        case _:  # A plot: a table says the same.
            return


def _paragraph(text: str, width: int, style: str = "", *, hanging: int = 0) -> Iterator[Text]:
    """Words over as many lines as they need; a word longer than a line is broken."""
    console = Console(width=max(width - hanging, 10), file=io.StringIO(), color_system=None)
    for at, line in enumerate(Text(plain(text), style=style).wrap(console, max(width - hanging, 10))):
        line.rstrip()
        yield Text(" " * hanging if at else "") + line if hanging else line


def _cases(block: Cases, width: int) -> Iterator[Text]:
    shown = 0
    yield Text(plain(block.caption), style="bold")
    for case in block.items:
        if shown == _CASES:
            break
        shown += 1
        line = Text()
        line.append(f"{plain(case.outcome)}  ", style=_STYLES[case.tone])
        line.append(plain(case.title), style="bold")
        line.append("  " + "  ".join(f"{label}: {plain(text)}" for label, text in case.facts))
        line.truncate(width, overflow="ellipsis")
        yield line
    if shown < block.total:
        yield Text(f"and {block.total - shown:,} more", style="dim")


def _table(table: Table, width: int, glyphs: Glyphs) -> Iterator[Text]:
    if table.caption:
        yield from _paragraph(table.caption, width, "bold")
    widths = _widths(table, width)
    if widths is None:
        yield from _stacked(table, width)
        return
    columns = [at for at, column in enumerate(table.columns) if widths[at] or not column.bar]
    tall = max((len(_title(table.columns[at])) for at in columns), default=0)
    for place in range(tall):
        # Titles of several lines stand at the bottom of their row.
        titles = [[""] * (tall - len(_title(table.columns[at]))) + _title(table.columns[at]) for at in columns]
        yield _row([Cell(title[place], "dim") for title in titles], table, columns, widths, glyphs)
    for row in _indented(table):
        if isinstance(row, Section):
            line = Text(plain(row.title), style="bold")
            line.truncate(width, overflow="ellipsis")
            yield line
        else:
            yield _row([row[at] for at in columns], table, columns, widths, glyphs)


def _title(column: Column) -> list[str]:
    return [plain(line) for line in column.title.split("\n")]


def _indented(table: Table) -> list[tuple[Content, ...] | Section]:
    """The rows; those below a section begin further in."""
    below, rows = False, list[tuple[Content, ...] | Section]()
    for row in table.rows:
        below = below or isinstance(row, Section)
        rows.append(row if isinstance(row, Section) or not below else ("  " + _words(row[0]), *row[1:]))
    return rows


def _words(content: Content) -> str:
    return plain(content.text if isinstance(content, Cell) else content) if isinstance(content, str | Cell) else ""


def _widths(table: Table, width: int) -> list[int] | None:
    """How wide each column is, 0 for one that is left out, or None if the table cannot be shown in rows."""
    rows = [row for row in _indented(table) if not isinstance(row, Section)]
    full = [
        max([*map(cell_len, _title(column)), *(cell_len(_words(row[at])) for row in rows)])
        for at, column in enumerate(table.columns)
    ]
    bars = [at for at, column in enumerate(table.columns) if column.bar]
    names = [at for at, column in enumerate(table.columns) if column.name]
    for bar in bars:
        full[bar] = 0
    for at in names:
        full[at] = min(full[at], width)  # What is cut one by one below is then little, however long a text is.
    taken = sum(full) + _GAP * (len(full) - len(bars) - 1)
    smallest = len(bars) * (_SHORTEST_BAR + _GAP)
    # First with bars and names of a fair length, then without bars and with names as short as may be.
    for beside, shortest in ((smallest, [_FAIR_NAME] * len(names)), (0, [table.columns[at].shortest for at in names])):
        short = _shortened([full[at] for at in names], taken + beside - width, shortest)
        if short is not None:
            for at, size in zip(names, short, strict=True):
                taken += size - full[at]
                full[at] = size
            for bar in bars:
                full[bar] = min(_LONGEST_BAR, (width - taken) // len(bars) - _GAP) if beside else 0
            return full
    return None


def _shortened(names: list[int], excess: int, shortest: list[int]) -> list[int] | None:
    """The widths of name columns, the widest cut first, with `excess` less in all; None if one would be too short."""
    sizes = list(names)
    for _ in range(excess):
        longer = [at for at, size in enumerate(sizes) if size > shortest[at]]
        if not longer:
            return None
        sizes[max(longer, key=sizes.__getitem__)] -= 1
    return sizes


def _row(cells: list[Content], table: Table, columns: list[int], widths: list[int], glyphs: Glyphs) -> Text:
    line = Text()
    for place, (at, content) in enumerate(zip(columns, cells, strict=True)):
        column, size = table.columns[at], widths[at]
        if place:
            line.append(" " * _GAP)
        if isinstance(content, Bar):
            line.append_text(bar(content, size, glyphs))
            continue
        style = _STYLES[content.tone] if isinstance(content, Cell) else ""
        line.append(_fitted(_words(content), column, size), style=style)
    line.rstrip()
    return line


def _fitted(text: str, column: Column, size: int) -> str:
    if cell_len(text) > size:
        text = set_cell_size(text, size - 1) + "…"
    space = " " * (size - cell_len(text))
    return text + space if column.align == "left" else space + text


def _stacked(table: Table, width: int) -> Iterator[Text]:
    """Every row as lines of their own, for screens too narrow for rows."""
    for row in table.rows:
        if isinstance(row, Section):
            yield from _paragraph(row.title, width, "bold")
            continue
        names = [_words(content) for column, content in zip(table.columns, row, strict=True) if column.heads_row]
        yield from _paragraph("  ".join(name for name in names if name), width, "bold")
        for column, content in zip(table.columns, row, strict=True):
            if not column.heads_row and not column.bar and _words(content):
                title = " ".join(part for part in (plain(column.title), _words(content)) if part)
                yield from (Text("  ") + line for line in _paragraph(title, width - 2))


def bar(content: Bar, width: int, glyphs: Glyphs = UNICODE) -> Text:
    """An interval drawn in `width` characters: where it lies on its scale, and the estimate in it."""
    drawn = [glyphs.track] * width
    low, mean, high = (round(content.place(value) * (width - 1)) for value in (content.low, content.mean, content.high))
    for at in range(low, high + 1):
        drawn[at] = glyphs.line
    drawn[low], drawn[high] = glyphs.low, glyphs.high
    if content.mark is not None:
        drawn[round(content.place(content.mark) * (width - 1))] = glyphs.mark
    drawn[mean] = glyphs.mean
    line = Text("".join(drawn), style="dim")
    line.stylize("not dim cyan", low, high + 1)
    return line
