"""Reports as Markdown: text of models is escaped, tables keep their shape, and nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fairtrial import compare, gate
from fairtrial.reports.render.document import Cell, Column, Conclusion, Document, Remarks, Table
from fairtrial.reports.render.markdown import as_markdown, escaped, quoted
from fairtrial.reports.render.safe_text import plain
from tests.reports.made import FAIL, HOSTILE, PASS, TASK_ERROR, hostile_report, made_report

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
LINKS = re.compile(r"@\w|#\d|\bGH-\d|\b\w+://|\bwww\.", re.IGNORECASE)


def tokens(text: str) -> Iterator[Token]:
    for token in READER.parse(text):
        yield token
        yield from token.children or ()


def spoken(text: str) -> str:
    """The words a reader sees, outside of code."""
    return "".join(token.content for token in tokens(text) if token.type == "text")


def test_text_of_models_is_escaped() -> None:
    text = hostile_report().to_markdown()
    kinds = {token.type for token in tokens(text)}
    assert not kinds & {"link_open", "image", "html_inline", "fence", "code_block", "hr", "em_open", "s_open"}
    assert all(
        re.fullmatch(r"</details>|<details><summary>(Errors|Did not pass): [\w ,]+</summary>", token.content.strip())
        for token in tokens(text)
        if token.type == "html_block"
    )
    assert not LINKS.search(spoken(text))
    assert "<script>document.title='owned'</script>" in spoken(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    text = hostile_report().to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    opened = [token for token in tokens(text) if token.type in ("table_open", "th_open", "td_open", "tr_open")]
    tables: list[list[int]] = []
    for token in opened:
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append(0)
        else:
            tables[-1][-1] += 1
    assert sum(len(table) for table in tables) == len(rows) - len(tables)  # All but the lines below the heads.
    assert all(len(set(table)) == 1 for table in tables)


@given(st.text())
def test_any_text_is_shown_as_it_is(text: str) -> None:
    shown = spoken(f"x{escaped(text)}x").replace("\u200b", "")
    assert shown == f"x{plain(text)}x".replace("\u200b", "")
    found = {token.type for token in tokens(f"| a |\n|--|\n| {escaped(text)} |")}
    assert found <= {
        "table_open", "thead_open", "tr_open", "th_open", "th_close", "tr_close", "thead_close", "tbody_open",
        "td_open", "td_close", "tbody_close", "table_close", "inline", "text",
    }  # fmt: skip


@given(st.text(alphabet="`a |\\\n~", max_size=12))
def test_any_text_is_quoted_as_it_is(text: str) -> None:
    quote = quoted(text, 100)
    found = [token for token in tokens(f"- {quote}") if token.type == "code_inline"]
    if plain(text).strip():
        assert [token.content.strip() for token in found] == [plain(text).strip()]
    else:
        assert quote == "(empty)"


@pytest.mark.parametrize("text", ["- a", "1. a", "1) a", "# a", "> a", "+ a", "=== a", "10. a"])
def test_a_remark_that_begins_like_a_list_or_a_heading_is_neither(text: str) -> None:
    kinds = [token.type for token in tokens(as_markdown(Document(text, (), (Remarks((text,)),))))]
    assert kinds.count("heading_open") == 1
    assert kinds.count("bullet_list_open") == 1
    assert not {"ordered_list_open", "blockquote_open"} & set(kinds)


@pytest.mark.proves("R44", "R46")
def test_a_report_for_a_pull_request_has_intervals_n_and_errors() -> None:
    text = made_report(lambda place, *_: TASK_ERROR if place == 9 else FAIL if place < 3 else PASS).to_markdown()
    assert "| pass rate | 66.7% | 29.9% to 92.5% | 9 |" in text
    assert "| with errors as failures | 60.0% | 26.2% to 87.8% | 10 |" in text
    assert "| baseline | 10 | 9 | 1 | 0 | 0 | 0 |" in text
    assert "<details><summary>Errors: 1 trial</summary>" in text
    assert "- `sample-09` task error" in text


def test_a_comparison_and_a_gate_say_their_verdict_first() -> None:
    report = made_report(
        lambda place, name, _: PASS if name == "a" or place % 3 else FAIL, samples=60, experiments=("a", "b")
    )
    compared = compare(report["a"], report["b"]).to_markdown()
    assert compared.splitlines()[0] == "### support@\u200b1: b against a"
    assert "❌ **passed**: b is worse than a" in compared
    decided = gate(report["b"], {"margin": 0.02}, report["a"]).to_markdown()
    assert "❌ **fail**" in decided
    assert "<summary>Lost: 20 samples, the first 10 shown</summary>" in decided
    assert "- and 10 more" in decided


def test_a_hostile_comparison_is_text_too() -> None:
    report = hostile_report(samples=40)
    first, second = report.experiments
    for said in (compare(report[first], report[second], slice_by="topic"), gate(report[first], {"min_pass_rate": 0.5})):
        text = said.to_markdown()
        assert not {"link_open", "image", "html_inline"} & {token.type for token in tokens(text)}
        assert not LINKS.search(spoken(text))


def test_tones_have_signs_and_empty_parts_leave_nothing() -> None:
    table = Table("", (Column("a"), Column("bar", bar=True)), ((Cell("1", "good"), None),))
    text = as_markdown(Document("t", (), (table, Remarks(()), Conclusion("w", HOSTILE, "unsure"), Table("no", (), ()))))
    assert "| ✅ 1 |" in text
    assert "bar" not in text.split("❔")[0]
    assert "**no**" not in text
