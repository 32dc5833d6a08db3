"""Text that models, datasets and users wrote, made safe for a page: plain, as JSON, as Markdown, and as differences.

`Html` is the only type that templates insert without escaping, and it is made here alone, of parts that are escaped.
"""

from __future__ import annotations

import difflib
import html
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fairtrial.base.codec import to_json
from fairtrial.reports.render.document import Document
from fairtrial.reports.render.html import document_parts
from fairtrial.reports.render.safe_text import lines

SHOWN = 40_000
"""Characters of one text that a page shows; the rest is a link away."""
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)
_WORDS = re.compile(r"\S+\s*|\s+")
_MAX_WORDS = 5_000
# Pairs of equal pieces that may be looked at. The comparison takes at least this many steps, and its square if one word
# is repeated: models that fall into a loop write such texts.
_MAX_PAIRS = 20_000


class Html:
    """HTML that templates insert as it is."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __html__(self) -> str:
        return self._text

    def __str__(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)


class ShownText(NamedTuple):
    """A text for a page. `cut` counts characters that are left out, `invisible` those that were removed."""

    text: str
    cut: int = 0
    invisible: int = 0


def shown(text: str, *, limit: int | None = SHOWN, named: bool = False) -> ShownText:
    """Return a text without control characters, escapes and marks that reorder it; `named` shows these by name."""
    part = text if limit is None else text[:limit]
    cut = len(text) - len(part)
    if named:
        return ShownText(lines(_INVISIBLE.sub(_name, part.replace("\r\n", "\n"))), cut)
    hidden = len(_INVISIBLE.findall(part.replace("\r\n", "\n"))) if not part.isascii() or "\x1b" in part else 0
    return ShownText(lines(_INVISIBLE.sub(_kept, part) if hidden else part), cut, hidden)


def _kept(found: re.Match[str]) -> str:
    """Leave to `lines` what it knows (escape sequences), and joiners, which emoji and many scripts need."""
    return found[0] if found[0] in "\x1b\r\u200c\u200d" else ""


def _name(found: re.Match[str]) -> str:
    name = unicodedata.name(found[0], "") or f"U+{ord(found[0]):04X}"
    return f"⟨{name}⟩"


def json_text(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(to_json(value), ensure_ascii=False, indent=2)


def fragment(document: Document) -> Html:
    """Return a document as HTML, every text in it escaped."""
    return Html("".join(document_parts(document)))


_TAGS = {
    "paragraph_open": "<p>", "paragraph_close": "</p>", "bullet_list_open": "<ul>", "bullet_list_close": "</ul>",
    "ordered_list_open": "<ol>", "ordered_list_close": "</ol>", "list_item_open": "<li>", "list_item_close": "</li>",
    "blockquote_open": "<blockquote>", "blockquote_close": "</blockquote>", "em_open": "<em>", "em_close": "</em>",
    "strong_open": "<strong>", "strong_close": "</strong>", "s_open": "<s>", "s_close": "</s>", "hr": "<hr>",
    "table_open": '<div class="scroll"><table>', "table_close": "</table></div>", "thead_open": "<thead>",
    "thead_close": "</thead>", "tbody_open": "<tbody>", "tbody_close": "</tbody>", "tr_open": "<tr>",
    "tr_close": "</tr>", "th_open": "<th>", "th_close": "</th>", "td_open": "<td>", "td_close": "</td>",
    "softbreak": "\n", "hardbreak": "<br>",
}  # fmt: skip


def markdown(text: str) -> Html:
    """Return Markdown as HTML of a closed set of tags: no images, no HTML, links to http and https only.

    A link is shown with its address, so that its text cannot hide where it leads.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "linkify": False, "typographer": False})
    parser.enable(["table", "strikethrough"]).disable(["image"])
    return Html(f'<div class="md">{"".join(_tokens(parser.parse(lines(text[:SHOWN]))))}</div>')


def _tokens(tokens: Sequence[Any]) -> Iterable[str]:
    targets: list[str] = []
    for token in tokens:
        if token.type == "inline":
            yield from _tokens(token.children or ())
        elif token.type in ("text", "html_block", "html_inline"):
            yield html.escape(token.content)
        elif token.type in ("code_block", "fence"):
            yield f"<pre><code>{html.escape(token.content)}</code></pre>"
        elif token.type == "code_inline":
            yield f"<code>{html.escape(token.content)}</code>"
        elif token.type in ("heading_open", "heading_close"):
            yield "<p><strong>" if token.type == "heading_open" else "</strong></p>"
        elif token.type == "link_open":
            targets.append(_address(token))
            if targets[-1]:
                yield f'<a href="{html.escape(targets[-1])}" rel="noreferrer noopener nofollow">'
        elif token.type == "link_close":
            target = targets.pop()
            if target:
                yield f"</a> <small>({html.escape(target)})</small>"
        else:
            yield _TAGS.get(token.type, html.escape(token.content))


def _address(token: Any) -> str:
    target = str(token.attrGet("href") or "")
    return target if re.match(r"https?://[^\s\"'<>\\]+\Z", target, re.IGNORECASE) else ""


class DiffPart(NamedTuple):
    """A part of a text: "same", or "changed" against the other text."""

    text: str
    changed: bool


def differences(first: str, second: str) -> tuple[list[DiffPart], list[DiffPart], str]:
    """Return both texts in parts, with what differs marked, and a remark if nothing could be marked.

    Words with the space after them are compared; texts of many words line by line.
    """
    if first == second:
        return [DiffPart(first, False)], [DiffPart(second, False)], "the texts are equal"
    words: list[list[str]] = [_WORDS.findall(text) for text in (first, second)]
    for pieces in (words, [first.splitlines(True), second.splitlines(True)]):
        before = _common(*pieces)
        after = _common(*(side[before:][::-1] for side in pieces))
        changed: list[list[str]] = [side[before : len(side) - after] for side in pieces]
        counts = [Counter(side) for side in changed]
        pairs = sum(count * counts[1][piece] for piece, count in counts[0].items())
        if max(map(len, changed)) <= _MAX_WORDS and pairs <= _MAX_PAIRS:
            break
    else:
        return [DiffPart(first, False)], [DiffPart(second, False)], "the texts are too long or repetitive to mark"
    matcher = difflib.SequenceMatcher(None, changed[0], changed[1], autojunk=False)
    if not before + after and matcher.quick_ratio() < 0.1 and max(map(len, changed)) > 200:
        return [DiffPart(first, False)], [DiffPart(second, False)], "the texts are too different to mark"
    sides: tuple[list[DiffPart], list[DiffPart]] = ([], [])
    if before:
        for parts in sides:
            parts.append(DiffPart("".join(pieces[0][:before]), False))
    for kind, a, b, c, d in matcher.get_opcodes():
        for parts, text in zip(sides, ("".join(changed[0][a:b]), "".join(changed[1][c:d])), strict=True):
            if text:
                parts.append(DiffPart(text, kind != "equal"))
    if after:
        for parts in sides:
            parts.append(DiffPart("".join(pieces[0][-after:]), False))
    return *sides, "" if pieces is words else "long texts: compared line by line"


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of pieces that both begin with."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
