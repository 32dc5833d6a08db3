"""Render a document in a terminal: tables without wrapped rows, with bars for intervals.

Widths are worked out here, not by rich: at 80 columns a name is cut before a figure is, bars give way before both, and
where not even that is enough, every row becomes a few short lines.
"""

from __future__ import annotations

import codecs
import io
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fairtrial.base.formatting import AS_WIDE
from fairtrial.reports.render import document as doc
from fairtrial.reports.render.safe_text import lines, plain

WIDTH = 80
"""How wide text is that no terminal shows."""

_GAP = 2
_WIDEST = 140
_FAIR_NAME = 32  # Minimum length of names when there are bars.
_SHORTEST_BAR, _LONGEST_BAR = 10, 41
_STYLES: dict[doc.Tone, str] = {"": "", "good": "green", "bad": "red", "unsure": "yellow", "dim": "dim"}
_CASES = 10


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of bars."""

    track: str
    line: str
    low: str
    high: str
    mean: str
    mark: str


UNICODE = Glyphs("·", "─", "├", "┤", "●", "│")
ASCII = Glyphs(".", "-", "[", "]", "o", "|")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return the glyphs that an encoding can represent."""
    try:
        "".join(getattr(UNICODE, name) for name in UNICODE.__slots__).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def writable(text: str, encoding: str | None) -> str:
    """Replace characters that the encoding cannot represent by "?"."""
    try:
        encoding = codecs.lookup(encoding or "utf-8").name
    except LookupError:
        encoding = "ascii"
    return text.encode(encoding, AS_WIDE).decode(encoding)


def width_of(stream: object, otherwise: int) -> int:
    """Return the width for a stream: that of the terminal, within limits, or `otherwise`."""
    if not getattr(stream, "isatty", lambda: False)():
        return otherwise
    return max(40, min(shutil.get_terminal_size((otherwise, 24)).columns, _WIDEST))


@dataclass(frozen=True, slots=True)
class RichDocument:
    """A document, or one block, as a renderable of rich."""

    content: doc.Document | doc.Block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield each line as text that never wraps."""
        for line in _lines(self.content, options.max_width, glyphs_for(options.encoding)):
            line.plain = writable(line.plain, options.encoding)
            line.no_wrap = True
            line.overflow = "crop"
            yield line


def as_text(document: doc.Document, *, width: int = WIDTH, encoding: str | None = None) -> str:
    """Return the document as plain text for an encoding (default: UTF-8)."""
    buffer = io.StringIO()
    console = _console(buffer, width)
    for line in _document(document, width, glyphs_for(encoding)):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    return writable("\n".join(line.rstrip() for line in buffer.getvalue().splitlines()), encoding)


def _console(file: io.StringIO, width: int) -> Console:
    # In a notebook, a console would display each line as a cell's output and write nothing into the file.
    return Console(
        file=file, width=width, color_system=None, highlight=False, markup=False, emoji=False, force_jupyter=False
    )


def _lines(content: doc.Document | doc.Block, width: int, glyphs: Glyphs) -> Iterator[Text]:
    return _document(content, width, glyphs) if isinstance(content, doc.Document) else _block(content, width, glyphs)


def _document(document: doc.Document, width: int, glyphs: Glyphs) -> Iterator[Text]:
    yield from _paragraph(document.title, width, "bold")
    for line in document.about:
        yield from _paragraph(line, width, "dim")
    for block in document.blocks:
        shown = list(_block(block, width, glyphs))
        if shown:
            yield Text("")
            yield from shown


def _block(block: doc.Block, width: int, glyphs: Glyphs) -> Iterator[Text]:
    match block:
        case doc.Table():
            yield from _table(block, width, glyphs)
        case doc.Conclusion():
            first, *rest = _paragraph(f"{block.word}: {block.text}", width)
            first.stylize(f"bold {_STYLES[block.tone]}", 0, len(plain(block.word)) + 1)
            yield first
            yield from rest
        case doc.Remarks():
            for remark in block.lines:
                yield from _paragraph(remark, width, hanging=2)
        case doc.Passage():
            yield Text(plain(block.caption), style="bold")
            for row in lines(block.text).split("\n"):
                for line in list(_paragraph(row, width - 2)) or [Text("")]:
                    yield Text("  ") + line
        case doc.Cases():
            yield from _cases(block, width)
        case doc.TrialGroups():
            yield from _groups(block, width)
        case doc.Details():
            for at, part in enumerate(block.blocks):
                shown = list(_block(part, width, glyphs))
                yield from ([Text(""), *shown] if at and shown else shown)
        case _:  # Plots are skipped: a table has the same figures.
            return


def _paragraph(text: str, width: int, style: str = "", *, hanging: int = 0) -> Iterator[Text]:
    """Wrap text; a word longer than a line is broken."""
    console = _console(io.StringIO(), max(width - hanging, 10))
    for at, line in enumerate(Text(plain(text), style=style).wrap(console, max(width - hanging, 10))):
        line.rstrip()
        yield Text(" " * hanging if at else "") + line if hanging else line


def _cases(block: doc.Cases, width: int) -> Iterator[Text]:
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


def _groups(block: doc.TrialGroups, width: int) -> Iterator[Text]:
    """Yield a line for each group, and one for each of its examples: as much as fits of input and output."""
    for group in block.groups:
        line = Text(plain(group.title))
        line.stylize(_STYLES[group.tone], 0, len(plain(group.title).partition(":")[0]))
        line.truncate(width, overflow="ellipsis")
        yield line
        titles = [plain(one.title) for one in group.examples]
        most = 2 * width // 5
        short = cut_names(titles, most)
        titles = [
            _fitted(short.get(title, title), doc.Column("", "left"), min(most, cell_len(title))) for title in titles
        ]
        texts = [[" ".join(plain(text).split()) for text in (one.input, one.output)] for one in group.examples]
        room = width - 4 - max(map(cell_len, titles), default=0)
        longest = max((cell_len(text) for _, text in texts), default=0)
        half = max(room // 2 - 2, room - 4 - longest) if longest else room
        inputs = cut_names({text for text, _ in texts}, max(half, 10))
        for title, (asked, answered) in zip(titles, texts, strict=True):
            line = Text("  ").append(title, style="bold").append(f"  {inputs.get(asked, asked)}")
            if answered:
                line.append(" -> ", style="dim").append(answered)
            line.truncate(width, overflow="ellipsis")
            yield line
    if block.others:
        yield Text(f"and {block.others:,} more", style="dim")


def _table(table: doc.Table, width: int, glyphs: Glyphs) -> Iterator[Text]:
    if not table.rows:
        return
    if table.caption:
        yield from _paragraph(table.caption, width, "bold")
    widths = _widths(table, width)
    if widths is None:
        yield from _stacked(table, width)
        return
    columns = [at for at, column in enumerate(table.columns) if widths[at] or not (column.bar or column.optional)]
    tall = max((len(_title(table.columns[at])) for at in columns), default=0)
    for place in range(tall):
        # Titles with several lines are aligned at the bottom.
        titles = [[""] * (tall - len(_title(table.columns[at]))) + _title(table.columns[at]) for at in columns]
        yield _row([doc.Cell(title[place], "dim") for title in titles], table, columns, widths, glyphs)
    titles_cut = cut_names({plain(row.title) for row in table.rows if isinstance(row, doc.Section)}, width)
    table = _with_short_names(table, columns, widths)
    for row in _indented(table):
        if isinstance(row, doc.Section):
            title = plain(row.title)
            line = Text(titles_cut.get(title, title), style="bold")
            line.truncate(width, overflow="ellipsis")
            yield line
        else:
            yield from _rows(row, table, columns, widths, glyphs)


def _with_short_names(table: doc.Table, columns: list[int], widths: list[int]) -> doc.Table:
    """Return the table with its names cut to the widths of their columns."""
    below = any(isinstance(row, doc.Section) for row in table.rows)
    rows = list(table.rows)
    for at in columns:
        column = table.columns[at]
        if not column.name or column.prose or column.lines > 1:
            continue
        size = widths[at] - (2 if below and at == 0 else 0)  # Rows below a section are indented.
        cut = cut_names({_words(row[at]) for row in rows if not isinstance(row, doc.Section)}, size)
        if cut:
            rows = [row if isinstance(row, doc.Section) else _replaced_cell(row, at, cut) for row in rows]
    return replace(table, rows=tuple(rows))


def _replaced_cell(row: tuple[doc.Content, ...], at: int, cut: dict[str, str]) -> tuple[doc.Content, ...]:
    content, text = row[at], cut.get(_words(row[at]))
    if text is None:
        return row
    return (*row[:at], replace(content, text=text) if isinstance(content, doc.Cell) else text, *row[at + 1 :])


def cut_names(names: Collection[str], size: int) -> dict[str, str]:
    """Return how each name that is wider than `size` is cut: at its end, unless two names would then look the same.

    Names with the same beginning are cut in the middle; if they also have the same end, what is the same is left out.
    """
    long = [name for name in dict.fromkeys(names) if cell_len(name) > size]
    short = {name for name in names if cell_len(name) <= size}
    head = (size - 1) // 2
    same = next((at for at, letters in enumerate(zip(*long, strict=False)) if len(set(letters)) > 1), 0)

    def at_end(name: str) -> str:
        return set_cell_size(name, size - 1) + "…"

    def in_middle(name: str) -> str:
        return set_cell_size(name, head) + "…" + _last(name, size - 1 - head)

    def at_start(name: str) -> str:
        rest = name[same:]
        return "…" + (rest if cell_len(rest) < size else set_cell_size(rest, size - 2) + "…")

    for cut in (at_end, in_middle, at_start) if size > 2 else ():
        cuts = {name: cut(name) for name in long}
        if len({*cuts.values()} | short) == len(long) + len(short):
            return cuts
    return {}


def _last(text: str, size: int) -> str:
    """Return the end of a text, at most `size` wide."""
    while cell_len(text) > size:
        text = text[1 if size < 1 else max(1, (cell_len(text) - size) // 2) :]
    return text


def _rows(
    row: tuple[doc.Content, ...], table: doc.Table, columns: list[int], widths: list[int], glyphs: Glyphs
) -> Iterator[Text]:
    """Yield the lines of a row: as many as its longest text needs, at most `Column.lines`."""
    wrapped = {at: _wrapped(_words(row[at]), widths[at], table.columns[at].lines) for at in columns}
    yield _row([row[at] if len(wrapped[at]) < 2 else wrapped[at][0] for at in columns], table, columns, widths, glyphs)
    for place in range(1, max(map(len, wrapped.values()), default=0)):
        cells: list[doc.Content] = ["".join(wrapped[at][place : place + 1]) for at in columns]
        yield _row(cells, table, columns, widths, glyphs)


def _wrapped(text: str, width: int, most: int) -> list[str]:
    if most == 1 or width < 1 or cell_len(text) <= width:
        return [text]
    pieces = [line.plain for line in _paragraph(text[: 2 * width * most], width)]
    return pieces if len(pieces) <= most else [*pieces[: most - 1], " ".join(pieces[most - 1 :])]


def _title(column: doc.Column) -> list[str]:
    return [plain(line) for line in column.title.split("\n")]


def _indented(table: doc.Table) -> list[tuple[doc.Content, ...] | doc.Section]:
    """Yield the rows, indented below a section."""
    below, rows = False, list[tuple[doc.Content, ...] | doc.Section]()
    for row in table.rows:
        below = below or isinstance(row, doc.Section)
        rows.append(row if isinstance(row, doc.Section) or not below else ("  " + _words(row[0]), *row[1:]))
    return rows


def _words(content: doc.Content) -> str:
    return (
        plain(content.text if isinstance(content, doc.Cell) else content) if isinstance(content, str | doc.Cell) else ""
    )


def _widths(table: doc.Table, width: int) -> list[int] | None:
    """Return the width of each column (0: left out), or None if the table does not fit in rows."""
    rows = [row for row in _indented(table) if not isinstance(row, doc.Section)]
    full = [
        max([*map(cell_len, _title(column)), *(cell_len(_words(row[at])) for row in rows)])
        for at, column in enumerate(table.columns)
    ]
    bars = [at for at, column in enumerate(table.columns) if column.bar]
    names = [at for at, column in enumerate(table.columns) if column.name]
    for bar in bars:
        full[bar] = 0
    for at in names:
        full[at] = min(full[at], width)  # Limits the number of steps of the loop below.
    taken = sum(full) + _GAP * (len(full) - len(bars) - 1)
    smallest = len(bars) * (_SHORTEST_BAR + _GAP)
    optional = [at for at, column in enumerate(table.columns) if column.optional]
    shortest = [table.columns[at].shortest for at in names]
    # First with bars and longer names, then without bars and with the shortest names.
    for beside, limits in ((smallest, [_FAIR_NAME] * len(names)), (0, shortest), (0, shortest)):
        short = _shortened([full[at] for at in names], taken + beside - width, limits)
        if short is not None:
            for at, size in zip(names, short, strict=True):
                taken += size - full[at]
                full[at] = size
            for bar in bars:
                full[bar] = min(_LONGEST_BAR, (width - taken) // len(bars) - _GAP) if beside else 0
            return full
        if limits is shortest:
            for at in optional:
                taken -= full[at] + _GAP
                full[at] = 0
            optional = []
    return None


def _shortened(names: list[int], excess: int, shortest: list[int]) -> list[int] | None:
    """Shorten name columns, the widest first, by `excess` in total; None if one would be too short."""
    sizes = list(names)
    for _ in range(excess):
        longer = [at for at, size in enumerate(sizes) if size > shortest[at]]
        if not longer:
            return None
        sizes[max(longer, key=sizes.__getitem__)] -= 1
    return sizes


def _row(cells: list[doc.Content], table: doc.Table, columns: list[int], widths: list[int], glyphs: Glyphs) -> Text:
    line = Text()
    for position, (at, content) in enumerate(zip(columns, cells, strict=True)):
        column, size = table.columns[at], widths[at]
        if position:
            line.append(" " * _GAP)
        if isinstance(content, doc.Bar):
            line.append_text(bar(content, size, glyphs))
            continue
        style = _STYLES[content.tone] if isinstance(content, doc.Cell) else ""
        line.append(_fitted(_words(content), column, size), style=style)
    line.rstrip()
    return line


def _fitted(text: str, column: doc.Column, size: int) -> str:
    if cell_len(text) > size:
        text = set_cell_size(text, size - 1) + "…"
    space = " " * (size - cell_len(text))
    return text + space if column.align == "left" else space + text


def _stacked(table: doc.Table, width: int) -> Iterator[Text]:
    """Show every cell on a separate line, for narrow screens."""
    for row in table.rows:
        if isinstance(row, doc.Section):
            yield from _paragraph(row.title, width, "bold")
            continue
        names = [_words(content) for column, content in zip(table.columns, row, strict=True) if column.heads_row]
        yield from _paragraph("  ".join(name for name in names if name), width, "bold")
        for column, content in zip(table.columns, row, strict=True):
            if not column.heads_row and not column.bar and _words(content):
                title = " ".join(part for part in (plain(column.title), _words(content)) if part)
                yield from (Text("  ") + line for line in _paragraph(title, width - 2))


def bar(content: doc.Bar, width: int, glyphs: Glyphs = UNICODE) -> Text:
    """Draw an interval and its estimate in `width` characters."""
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
