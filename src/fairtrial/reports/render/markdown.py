"""Render a document as Markdown.

Nothing in a document is markup, so all of it is escaped: tables keep their shape, nobody is mentioned, no image is
fetched, no HTML gets through.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from fairtrial.reports.render import document as doc
from fairtrial.reports.render.safe_text import lines, plain

_BREAK = "\u200b"  # A zero-width character that prevents GitHub and GitLab from creating links.
_MARKUP = "\\`*_[]|~$"  # The backslash first: the others are escaped with one.
# Mentions, issue numbers, addresses and commits become links (and mails to people) after Markdown is read, so a
# backslash does not help. Each pattern is looked for only where its text occurs: foreign text can be megabytes.
_LINKS = tuple(
    (text, re.compile(rf"(?<={text[:-1]}){re.escape(text[-1])}", re.IGNORECASE))
    for text in ("gh-", "mailto:", "xmpp:", "www.")
)
_BLOCK_START = re.compile(r"^(\s*)([-+=#>]+|\d+[.)])(?=\s|$)")
_SIGNS: dict[doc.Tone, str] = {"good": "✅ ", "bad": "❌ ", "unsure": "❔ ", "dim": "", "": ""}
_CASES, _FACTS = 10, 8  # Input, expected value, and three repeats of two sides.


def escaped(text: str) -> str:
    """Escape text for Markdown, on one line."""
    clean = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in _MARKUP:
        clean = clean.replace(mark, f"\\{mark}")
    return _without_links(clean)


def _without_links(text: str) -> str:
    text = text.replace("@", f"@{_BREAK}").replace("://", f":{_BREAK}//")
    for digit in "0123456789":
        text = text.replace(f"#{digit}", f"#{_BREAK}{digit}")
    lowered = text.lower()
    for prefix, ending in _LINKS:
        if prefix in lowered:
            text = ending.sub(_BREAK + prefix[-1], text)
    return text


def quoted(text: str, limit: int) -> str:
    """Format text as a code span, cut to `limit` characters; spaces are kept."""
    clean = plain(text, limit=limit)
    if not clean.strip():
        return "(empty)"
    fence = "`" * (max((len(run) for run in re.findall("`+", clean)), default=0) + 1)
    # Inside a code span nothing is a link. One space on either side is taken off again by Markdown.
    space = " " if clean[0] in "` " or clean[-1] in "` " else ""
    return f"{fence}{space}{clean}{space}{fence}"


def as_markdown(document: doc.Document) -> str:
    """Return the document as Markdown text."""
    parts = [f"### {_opening(document.title)}", "\n".join(escaped(line) + "  " for line in document.about).rstrip()]
    parts += ["\n".join(_block(block)) for block in document.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _opening(text: str) -> str:
    """Escape text at the start of a line, where a dash or a number would start a list."""
    return _BLOCK_START.sub(lambda found: f"{found[1]}{found[2][:-1]}\\{found[2][-1]}", escaped(text))


def _block(block: doc.Block) -> Iterator[str]:
    match block:
        case doc.Table():
            yield from _table(block)
        case doc.Conclusion():
            yield f"{_SIGNS[block.tone]}**{escaped(block.word)}**: {escaped(block.text)}"
        case doc.Remarks():
            for remark in block.lines:
                yield f"- {_opening(remark)}"
        case doc.Passage():
            text = lines(block.text)
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
            yield from (f"**{escaped(block.caption)}**", "", fence, text, fence)
        case doc.Cases():
            yield from _cases(block)
        case doc.TrialGroups():
            for group in block.groups:
                yield f"- {_SIGNS[group.tone]}{escaped(group.title)}"
                for one in group.examples:
                    came = f" → {quoted(one.output, 200)}" if one.output else ""
                    yield f"  - {escaped(one.title)}: {quoted(one.input, 200)}{came}"
            if block.others:
                yield f"- and {block.others:,} more"
        case doc.Details():
            yield f"<details><summary>{_without_links(html.escape(plain(block.title)))}</summary>"
            for part in block.blocks:
                yield from ("", *_block(part))
            yield from ("", "</details>")
        case doc.Heading():
            yield f"#### {_opening(block.title)}"
            yield from ("", *(escaped(line) + "  " for line in block.about))
        case _:  # Plots are skipped: a table has the same figures.
            return


def _table(table: doc.Table) -> Iterator[str]:
    if not table.rows:
        return
    if table.caption:
        yield f"**{escaped(table.caption)}**"
        yield ""
    kept = [at for at, column in enumerate(table.columns) if not column.bar]
    yield _line([escaped(table.columns[at].title) for at in kept])
    yield _line([":--" if table.columns[at].align == "left" else "--:" for at in kept])
    for row in table.rows:
        if isinstance(row, doc.Section):
            yield _line([f"**{escaped(row.title)}**", *[""] * (len(kept) - 1)])
        else:
            yield _line([_cell(row[at]) for at in kept])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(content: doc.Content) -> str:
    match content:
        case doc.Cell():
            return _SIGNS[content.tone] + escaped(content.text)
        case str():
            return escaped(content)
        case doc.Bar() | None:
            return ""


def _cases(block: doc.Cases) -> Iterator[str]:
    if not block.total:
        return
    # Inside HTML no backslash is an escape.
    caption = _without_links(html.escape(plain(block.caption)))
    yield f"<details><summary>{caption}</summary>"
    yield ""
    shown = 0
    for case in block.items:
        if shown == _CASES:
            break
        shown += 1
        yield f"- {quoted(case.title, 80)} {escaped(case.outcome)}"
        for label, text in case.facts[:_FACTS]:
            yield f"  - {escaped(label)}: {quoted(text, 200)}"
    if shown < block.total:
        yield f"- and {block.total - shown:,} more"
    yield ""
    yield "</details>"
