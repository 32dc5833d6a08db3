"""What commands print."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from fairtrial.reports.render.document import Column, Table
from fairtrial.reports.render.safe_text import lines, plain
from fairtrial.reports.render.terminal import RichDocument
from fairtrial.runs.events import LogFormat
from fairtrial.runs.events import start_logging as log_to_stderr


def make_exact(stream: IO[str]) -> None:
    """Switch a stream to UTF-8, so that data for files and other programs loses nothing."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


_PIPED_WIDTH = 120  # Width of files and pipes: wide enough for every table, narrow enough to read.


@dataclass(frozen=True, slots=True)
class ScreenTable:
    """A table to which rows are added."""

    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]]


def out() -> Console:
    """Return a console for standard output, without colours if it is not a terminal or NO_COLOR is set."""
    return _console(sys.stdout)


def err() -> Console:
    """Return a console for standard error: progress, notes and errors; log records while a command logs JSON."""
    return _console(_log_lines or sys.stderr)


class _LogLines(io.TextIOBase):
    """A stream that logs its lines: error messages at level ERROR, the rest at level INFO."""

    def __init__(self) -> None:
        self._log = logging.getLogger("fairtrial.cli")
        self._rest = ""
        self._level = logging.INFO

    def write(self, text: str) -> int:
        """Log each whole line."""
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            if line.strip():
                if not line.startswith(" "):
                    self._level = logging.ERROR if line.startswith(("error: ", "exit ")) else logging.INFO
                self._log.log(self._level, line.strip())
        return len(text)


_log_lines: _LogLines | None = None
_undo_logging: Callable[[], None] | None = None


def start_logging(log_format: LogFormat, level: int) -> None:
    """Log to standard error until `stop_logging`; as JSON, with everything else that goes there."""
    global _log_lines, _undo_logging
    stop_logging()
    _undo_logging = log_to_stderr(log_format, level)
    _log_lines = _LogLines() if log_format == "json" else None


def stop_logging() -> None:
    """Undo `start_logging`; without it, do nothing."""
    global _log_lines, _undo_logging
    undo, _log_lines, _undo_logging = _undo_logging, None, None
    if undo is not None:
        undo()


def _console(file: Any) -> Console:
    terminal = file.isatty()
    width = None if terminal or os.environ.get("COLUMNS") else _PIPED_WIDTH
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def sentence(console: Console, text: str, *, style: str | None = None) -> None:
    """Print text: wrapped at words in a terminal, on one line in a pipe."""
    text = lines(text)  # It may contain text from datasets, suites or other programs.
    head, colon, rest = text.partition(": ")
    styled = Text.assemble((head + colon, style), rest) if style and colon else Text(text, style=style or "")
    console.print(styled, soft_wrap=not console.is_terminal)


class _Held(io.StringIO):
    """Keeps what is written to a stream, with the properties of the stream that consoles look at."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # not writable here either
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return bool(self._stream.isatty())


@contextmanager
def held_output() -> Iterator[None]:
    """Keep what is printed until the end of the block, and discard it after an error: the block can be repeated."""
    shown, errors = _Held(sys.stdout), _Held(sys.stderr)
    with redirect_stdout(shown), redirect_stderr(errors):
        yield
    for stream, held in ((sys.stdout, shown), (sys.stderr, errors)):
        stream.write(held.getvalue())
        stream.flush()


def note(text: str) -> None:
    """Print a note on standard error."""
    sentence(err(), text, style="dim")


def print_json(facts: Any) -> None:
    """Print JSON on standard output."""
    text = json.dumps(facts, indent=2, default=str, allow_nan=False)  # ASCII only: independent of encodings.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def make_table(
    *titles: str, right: Sequence[str] = (), cut: Sequence[str] = (), prose: Sequence[str] = ()
) -> ScreenTable:
    """Create a table for `add_row(table, ...)`. Columns in `cut` and `prose` are shortened in narrow terminals."""
    columns = [
        Column(
            title,
            "right" if title in right else "left",
            name=title in cut or title in prose,
            prose=title in prose,
            heading=at == 0,
            shortest=8,
        )
        for at, title in enumerate(titles)
    ]
    return ScreenTable(tuple(columns), [])


def add_row(table: ScreenTable, *cells: str) -> None:
    """Add a row of cells; each cell is printed on one line."""
    table.rows.append(cells)


def print_table(console: Console, table: ScreenTable) -> None:
    """Print a table; if it does not fit, its cells one below the other."""
    console.print(RichDocument(Table("", table.columns, tuple(table.rows))))


def commands(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print commands to run next, with a remark on each if there is room."""
    rows = [(plain(command), plain(remark)) for command, remark in rows]
    if not rows:
        return
    if title:
        console.print(Text(title, style="bold"))
    widest = max(len(command) for command, _ in rows)
    for command, remark in rows:
        line = Text("  ").append(command, style="cyan")
        if 2 + widest + 3 + len(remark) <= console.width:
            line.append(" " * (widest - len(command) + 3)).append(remark, style="dim")
        console.print(line, soft_wrap=True)  # A command is one line, so that it can be copied.


def listed(names: Iterable[str]) -> str:
    """Join names for a sentence."""
    return ", ".join(names)


def confirm(question: str) -> bool:
    """Ask for confirmation; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
