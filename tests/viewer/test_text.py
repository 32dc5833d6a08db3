"""Text of models on pages."""

from __future__ import annotations

import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fairtrial.viewer
from fairtrial.viewer.text import differences, markdown, shown

FOLDER = Path(fairtrial.viewer.__file__).parent
TAGS = {
    "div", "p", "ul", "ol", "li", "blockquote", "em", "strong", "s", "hr", "table", "thead", "tbody", "tr", "th", "td",
    "br", "pre", "code", "a", "small",
}  # fmt: skip
PAYLOADS = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))",
    "[a](data:text/html,x)", "![x](http://127.0.0.1:1/leak.png)", "```\n</code></pre><script>alert(1)</script>\n```",
    "| a |\n|--|\n| <img src=x onerror=alert(1)> |", "[x](http://127.0.0.1:1/ \"onmouseover=alert(1)\")",
    "<http://a\">", "[a]: javascript:alert(1)\n[a]", "# <svg/onload=alert(1)>", "[x](//evil.example)",
)  # fmt: skip


class Tags(HTMLParser):
    """Collects what a browser would make of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        self.attributes += attrs


def check(text: str) -> None:
    found = Tags(str(markdown(text)))
    assert found.seen <= TAGS
    for name, value in found.attributes:
        assert name in ("href", "rel", "class"), text
        if name == "href":
            assert value is not None
            assert value.lower().startswith(("http://", "https://")), text


@pytest.mark.parametrize("payload", PAYLOADS)
def test_markdown_makes_no_tag_but_those_of_a_closed_set(payload: str) -> None:
    check(payload)


@given(
    st.text() | st.lists(st.sampled_from([*PAYLOADS, "\n\n", "* ", "> ", "`", "[", "](", ")", "<", '"'])).map("".join)
)
def test_no_text_makes_markdown_unsafe(text: str) -> None:
    check(text)


def test_markdown_is_rendered_and_links_show_where_they_lead() -> None:
    made = str(markdown("**bold** [click](https://example.org/x)\n\n| a | b |\n|--|--|\n| 1 | 2 |"))
    assert "<strong>bold</strong>" in made
    assert '<a href="https://example.org/x" rel="noreferrer noopener nofollow">click</a>' in made
    assert "<small>(https://example.org/x)</small>" in made
    assert "<td>1</td>" in made


REPEATED = (
    "*a ", "_a_", "[", "[a](", "> ", "**", "a**b", "|", "&#x", "<a ", "<http:", "[a]: /x\n", "\\", "~~a", "*_", "![",
    "`a ``", "\n", "\x1b[", "\x1b]", "\u202e\x1b[31m", " - a\n", "\0",
)  # fmt: skip


@pytest.mark.parametrize("part", REPEATED, ids=repr)
def test_no_text_takes_long(part: str) -> None:
    text = part * (8_000 // len(part))
    started = time.process_time()
    markdown(text)
    shown(text * 10, limit=None)
    assert time.process_time() - started < 3.0  # At most half a second on an idle core.


def test_control_and_reordering_characters_are_removed_and_counted() -> None:
    found = shown("a\u202eb\u200bc\x1b[31md")
    assert found.text == "abcd"
    assert found.invisible >= 3
    assert shown("a\u202eb", named=True).text == "a⟨RIGHT-TO-LEFT OVERRIDE⟩b"
    assert shown("plain\ttext\n").invisible == 0


def test_joined_emoji_are_left_whole() -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert shown(family).text == family


def test_long_text_is_cut_with_the_number_of_characters_left_out() -> None:
    found = shown("x" * 50_000)
    assert (len(found.text), found.cut) == (40_000, 10_000)


@given(
    st.lists(st.sampled_from(["a", "b ", "c\n", " "])).map("".join),
    st.lists(st.sampled_from(["a", "b ", "d"])).map("".join),
)
def test_differences_contain_both_texts_in_full(first: str, second: str) -> None:
    left, right, _ = differences(first, second)
    assert "".join(part.text for part in left) == first
    assert "".join(part.text for part in right) == second
    if first == second:
        assert not any(part.changed for part in [*left, *right])


def test_changed_words_are_marked() -> None:
    left, right, _ = differences("it arrives on Friday for sure", "it arrives on Monday for sure")
    assert [part.text for part in left if part.changed] == ["Friday "]
    assert [part.text for part in right if part.changed] == ["Monday "]


def test_texts_of_many_words_are_compared_by_lines() -> None:
    first = "\n".join(f"line {n} with words" for n in range(3000))
    second = first.replace("line 7 ", "line seven ").replace("line 2990 ", "line 2,990 ")
    left, right, remark = differences(first, second)
    assert [part.text for part in left if part.changed] == ["line 7 with words\n", "line 2990 with words\n"]
    assert [part.text for part in right if part.changed] == ["line seven with words\n", "line 2,990 with words\n"]
    assert "line by line" in remark
    assert [part.text for part in differences(first, first.replace("line 7 ", "line seven "))[0] if part.changed] == [
        "7 "
    ]


def test_texts_that_repeat_words_are_given_up_instead_of_compared_for_minutes() -> None:
    for times in (100, 1000):
        first = "again\n" * 3 * times
        second = "once more\n" + "again\n" * 2 * times + "stop\n" + "again\n" * times + "end"
        start = time.process_time()
        left, right, remark = differences(first, second)
        assert time.process_time() - start < 5
        assert remark == "the texts are too long or repetitive to mark"
        assert not any(part.changed for part in [*left, *right])
    first = "again\n" * 3000
    left, right, remark = differences(first, "again\n" * 2000 + "stop")
    assert ([part.text for part in right if part.changed], remark) == (["stop"], "")
    assert "".join(part.text for part in left) == first


def test_templates_leave_escaping_switched_on() -> None:
    for path in (FOLDER / "templates").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        for forbidden in ("|safe", "| safe", "Markup", "autoescape", "<style", "style=", "onclick", "javascript:"):
            assert forbidden not in text, f"{path.name}: {forbidden}"
        assert "={{" not in text, f"{path.name} has an attribute without quotes"


def test_scripts_are_small_and_never_make_html() -> None:
    scripts = list((FOLDER / "static").glob("*.js"))
    assert 0 < sum(path.stat().st_size for path in scripts) < 15_000
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert forbidden not in text, f"{path.name}: {forbidden}"


def test_all_files_together_are_small() -> None:
    files = [*(FOLDER / "static").iterdir(), *(FOLDER / "templates").iterdir()]
    assert sum(path.stat().st_size for path in files) < 120_000
