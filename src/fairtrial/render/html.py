"""A document as one web page that fetches nothing and runs nothing, or as a piece of one for a notebook.

Everything is escaped, and a content security policy stands behind the escaping: no scripts at all, no images, no fonts,
no frames, no requests; the one style sheet is allowed by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
from collections.abc import Iterator
from typing import IO

from fairtrial.render.document import (
    Bar,
    Block,
    Case,
    Cases,
    Cell,
    Column,
    Conclusion,
    Content,
    Document,
    Plot,
    Remarks,
    Section,
    Table,
)
from fairtrial.render.plots import STYLE as PLOT_STYLE
from fairtrial.render.safe_text import lines, plain

_LIMIT = 4_000

_STYLE = """
.ft{--ink:#1f2328;--muted:#59636e;--rule:#d1d9e0;--paper:#ffffff;--soft:#f6f8fa;--blue:#0969da;--good:#1a7f37;
--bad:#cf222e;--unsure:#9a6700;color:var(--ink);background:var(--paper);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
@media (prefers-color-scheme:dark){.ft{--ink:#e6edf3;--muted:#9198a1;--rule:#3d444d;--paper:#0d1117;--soft:#151b23;
--blue:#4493f8;--good:#3fb950;--bad:#f85149;--unsure:#d29922}}
body.ft{margin:0}.ft main{max-width:1000px;margin:0 auto;padding:24px 20px 60px}
.ft h1{font-size:22px;line-height:1.3;margin:0 0 6px;overflow-wrap:anywhere}
.ft .title{font-size:17px;font-weight:600}
.ft h2{font-size:15px;margin:30px 0 8px;overflow-wrap:anywhere}
.ft p{margin:2px 0;overflow-wrap:anywhere}.ft .about{color:var(--muted)}
.ft .scroll{overflow-x:auto;margin-top:18px}.ft h2+.scroll{margin-top:0}
.ft table{border-collapse:collapse;font-variant-numeric:tabular-nums;background:none;margin:0}
.ft th,.ft td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap;
background:none;color:inherit;font-size:14px}
.ft thead th{color:var(--muted);font-weight:500;vertical-align:bottom}
.ft .left{text-align:left}.ft td.name,.ft th.name{max-width:320px;overflow:hidden;text-overflow:ellipsis}
.ft tbody th{font-weight:400}.ft tr.section th{font-weight:600;padding-top:14px}
.ft tr.section~tr:not(.section) th.name{padding-left:14px}
.ft svg.bar{display:block;width:180px;height:14px}
.ft svg.bar .track{stroke:var(--rule)}.ft svg.bar .span{stroke:var(--blue);stroke-width:2}
.ft svg.bar .dot{fill:var(--blue)}.ft svg.bar .mark{stroke:var(--muted);stroke-dasharray:2 2}
.ft .good{color:var(--good)}.ft .bad{color:var(--bad)}.ft .unsure{color:var(--unsure)}.ft .dim{color:var(--muted)}
.ft .verdict{margin:20px 0;padding:10px 14px;background:var(--soft);border-left:4px solid var(--muted)}
.ft .verdict.good{border-color:var(--good)}.ft .verdict.bad{border-color:var(--bad)}
.ft .verdict.unsure{border-color:var(--unsure)}.ft .verdict span{color:var(--ink)}
.ft ul{margin:16px 0;padding-left:20px}.ft figure{margin:0}
.ft details{border-bottom:1px solid var(--rule)}.ft summary{padding:6px 0;cursor:pointer;overflow-wrap:anywhere}
.ft dl{margin:0 0 10px 18px}.ft dt{color:var(--muted)}.ft dd{margin:0 0 6px}
.ft pre{margin:0;padding:8px 10px;background:var(--soft);white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;color:inherit}
"""
_SHEET = _STYLE + PLOT_STYLE
_PAGE_SHEET = "html{color-scheme:light dark}" + _SHEET  # Not for a notebook: it is not ours to colour.
_HASH = base64.b64encode(hashlib.sha256(_PAGE_SHEET.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
"""The content security policy of every page."""


def write_page(document: Document, file: IO[str]) -> None:
    """Write the document as a page of its own; cases to read are written as they come."""
    title = escaped(document.title)
    file.write(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        # Without this a browser asks the server for an icon.
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_PAGE_SHEET}</style>\n</head>\n"
        f'<body class="ft">\n<main>\n<h1>{title}</h1>\n'
    )
    for part in _inside(document):
        file.write(part)
    file.write("</main>\n</body>\n</html>\n")


def as_page(document: Document) -> str:
    """The document as a page of its own."""
    buffer = io.StringIO()
    write_page(document, buffer)
    return buffer.getvalue()


def as_fragment(document: Document) -> str:
    """The document for a notebook: a piece of a page, with its style and without cases to read."""
    kept = Document(
        document.title, document.about, tuple(block for block in document.blocks if not isinstance(block, Cases))
    )
    inside = "".join(_inside(kept))
    return f'<div class="ft"><style>{_SHEET}</style><p class="title">{escaped(document.title)}</p>\n{inside}</div>'


def escaped(text: str, limit: int = _LIMIT) -> str:
    """Any text, on one line, to stand between tags or in a quoted attribute."""
    return html.escape(plain(text, limit=limit))


def _inside(document: Document) -> Iterator[str]:
    for line in document.about:
        yield f'<p class="about">{escaped(line)}</p>\n'
    for block in document.blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Table():
            yield from _table(block)
        case Conclusion():
            yield (
                f'<p class="verdict {block.tone}"><strong>{escaped(block.word)}:</strong> '
                f"<span>{escaped(block.text)}</span></p>\n"
            )
        case Remarks():
            if block.lines:
                yield "<ul>\n" + "".join(f"<li>{escaped(line)}</li>\n" for line in block.lines) + "</ul>\n"
        case Plot():
            yield f"<h2>{escaped(block.caption)}</h2>\n<figure>{block.svg}</figure>\n"
        case Cases():
            yield from _cases(block)


def _table(table: Table) -> Iterator[str]:
    if not table.rows:
        return
    if table.caption:
        yield f"<h2>{escaped(table.caption)}</h2>\n"
    titles = "".join(f'<th scope="col"{_kind(column)}>{escaped(column.title)}</th>' for column in table.columns)
    yield f'<div class="scroll"><table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n'
    for row in table.rows:
        if isinstance(row, Section):
            yield (
                f'<tr class="section"><th class="left name" scope="rowgroup" colspan="{len(table.columns)}">'
                f"{escaped(row.title)}</th></tr>\n"
            )
            continue
        cells = "".join(
            _cell(content, column, first=at == 0)
            for at, (content, column) in enumerate(zip(row, table.columns, strict=True))
        )
        yield f"<tr>{cells}</tr>\n"
    yield "</tbody></table></div>\n"


def _kind(column: Column) -> str:
    kinds = [kind for kind, given in (("left", column.align == "left" or column.bar), ("name", column.name)) if given]
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _cell(content: Content, column: Column, *, first: bool) -> str:
    text = content.text if isinstance(content, Cell) else content if isinstance(content, str) else ""
    whole = f' title="{escaped(text)}"' if column.name and text else ""
    if isinstance(content, Bar):
        inside = _bar(content)
    elif isinstance(content, Cell) and content.tone:
        inside = f'<span class="{content.tone}">{escaped(text)}</span>'
    else:
        inside = escaped(text)
    tag = 'th scope="row"' if first else "td"
    return f"<{tag}{_kind(column)}{whole}>{inside}</{'th' if first else 'td'}>"


def _bar(bar: Bar) -> str:
    """A small drawing of an interval; the numbers stand beside it, so readers of the page aloud are spared it."""
    low, mean, high = (round(5 + 170 * bar.place(value), 1) for value in (bar.low, bar.mean, bar.high))
    mark = ""
    if bar.mark is not None:
        x = round(5 + 170 * bar.place(bar.mark), 1)
        mark = f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="14"/>'
    return (
        '<svg class="bar" viewBox="0 0 180 14" aria-hidden="true"><line class="track" x1="5" x2="175" y1="7" y2="7"/>'
        f'{mark}<line class="span" x1="{low}" x2="{high}" y1="7" y2="7"/>'
        f'<line class="span" x1="{low}" x2="{low}" y1="3" y2="11"/>'
        f'<line class="span" x1="{high}" x2="{high}" y1="3" y2="11"/>'
        f'<circle class="dot" cx="{mean}" cy="7" r="3.5"/></svg>'
    )


def _cases(block: Cases) -> Iterator[str]:
    if not block.total:
        return
    yield f"<h2>{escaped(block.caption)}</h2>\n"
    for case in block.items:
        yield _case(case)
    if block.shown < block.total:
        yield f'<p class="dim">{block.total - block.shown:,} more are not shown here.</p>\n'


def _case(case: Case) -> str:
    facts = "".join(
        f"<dt>{escaped(label)}</dt><dd><pre>{html.escape(lines(text, limit=_LIMIT)) or ' '}</pre></dd>"
        for label, text in case.facts
    )
    return (
        f'<details><summary><span class="{case.tone}">{escaped(case.outcome)}</span> '
        f"{escaped(case.title)}</summary><dl>{facts}</dl></details>\n"
    )
