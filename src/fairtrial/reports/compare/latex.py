"""Render the differences of a comparison as a LaTeX table, without packages. All foreign text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fairtrial.reports.compare.comparison import ComparisonRecord
from fairtrial.reports.compare.document import comparison_document
from fairtrial.reports.render.document import Cell, Column, Content, Section, Table
from fairtrial.reports.render.safe_text import plain

_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "`": r"\textasciigrave{}",
    '"': r"{\char34}",  # Packages for languages make a quote the start of a command.
    "[": "{[}", "]": "{]}", "*": "{*}",  # After the end of a row, they would be its arguments.
}  # fmt: skip
_SPECIAL = re.compile("[" + re.escape("".join(_ESCAPES)) + "]")
_MINUS = re.compile(r"(?<![\w.])-(?=\d)")


def latex_text(text: str) -> str:
    """Escape text for LaTeX, on one line: no character of it is a command."""
    escaped = _SPECIAL.sub(lambda found: _ESCAPES[found[0]], plain(text))
    return re.sub(r"([-'!?,])(?=[-'`,])", r"\1{}", escaped)  # Ligatures would join these.


def comparison_table(comparison: ComparisonRecord) -> str:
    """Return the tables of a comparison, of all samples and of slices, as LaTeX."""
    document = comparison_document(comparison, 0)
    tables = [block for block in document.blocks if isinstance(block, Table) and block.rows]
    return "\n".join("\n".join(_table(f"{document.title}. {table.caption}.", table)) + "\n" for table in tables)


def _table(caption: str, table: Table) -> Iterator[str]:
    kept = [(at, column) for at, column in enumerate(table.columns) if not column.bar]
    yield r"\begin{table}"
    yield rf"\caption{{{latex_text(caption)}}}"
    yield r"\centering"
    yield r"\begin{tabular}{" + "".join("l" if column.align == "left" else "r" for _, column in kept) + "}"
    yield r"\hline"
    yield " & ".join(latex_text(column.title) for _, column in kept) + r" \\"
    yield r"\hline"
    for row in table.rows:
        if isinstance(row, Section):
            yield rf"\multicolumn{{{len(kept)}}}{{l}}{{\textit{{{latex_text(row.title)}}}}} \\"
        else:
            yield " & ".join(_cell(row[at], column) for at, column in kept) + r" \\"
    yield r"\hline"
    yield r"\end{tabular}"
    yield r"\end{table}"


def _cell(content: Content, column: Column) -> str:
    text = content.text if isinstance(content, Cell) else content if isinstance(content, str) else ""
    escaped = latex_text(text)
    return escaped if column.align == "left" else _MINUS.sub("$-$", escaped)
