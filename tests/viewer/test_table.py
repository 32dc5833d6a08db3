"""The table of trials against a plain loop over the stored results."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fairtrial.viewer
from fairtrial import EvalResult, Metric, Sample, Score, TokenUsage, TrialKey, open_store
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.viewer import trial_table
from fairtrial.viewer.question import (
    RANGES,
    SORTS,
    STATES,
    Links,
    Question,
    RowCursor,
    Span,
    from_segment,
    read_question,
    segment,
)
from fairtrial.viewer.text import differences, markdown, shown
from fairtrial.viewer.trial_table import chosen_ordinals, count_trials, find_page, neighbours
from tests.viewer.conftest import record

OUTCOMES: tuple[Any, ...] = ("task_error", "scorer_error", "timeout")


class Table:
    """Columns of a run, and the same trials as plain facts."""

    def __init__(self, path: Path) -> None:
        store = open_store(path)
        run = store.create_run(record("r1", size=17, repeats=2))
        self.facts: dict[int, dict[str, Any]] = {}
        samples: dict[int, Sample[Any, Any]] = {
            at: Sample(f"q{at}", at, None, {"kind": "ab"[at % 2], "level": at % 3} if at % 5 else {"level": "0"})
            for at in range(17)
        }
        results = []
        for ordinal in range(run.planned):
            if ordinal % 11 == 3:
                continue  # Not stored.
            place, experiment, repeat = run.split(ordinal)
            name = run.experiments[experiment]
            key = TrialKey("r1", name, f"q{place}", repeat)
            value = None if ordinal % 7 == 2 else (ordinal * 5 % 4) / 3
            score = None if value is None else Score(value, value > 0.5, metrics=[Metric("m", -value)] if value else [])
            outcome: Any = OUTCOMES[ordinal % 3] if score is None else "scored"
            results.append(
                EvalResult(
                    key=key,
                    ordinal=ordinal,
                    outcome=outcome,
                    score=score,
                    latency_ms=ordinal % 6,
                    usage=TokenUsage(ordinal % 4, 1),
                    execution=ordinal + 1,
                )
            )
            state = outcome if score is None else "passed" if score.passed else "failed"
            self.facts[ordinal] = {
                "experiment": name, "outcome": state, "score": value, "latency_ms": ordinal % 6,
                "tokens": ordinal % 4 + 1, "cost_usd": None, "ordinal": ordinal, "metric:m": -value if value else None,
                "metadata": {key: str(found) for key, found in samples[place].metadata.items()},
            }  # fmt: skip
        store.commit("r1", results, samples)
        store.update_run("r1", status="finished", finished_at=5.0)
        self.columns = TrialColumns.open(store, store.get_run("r1"))

    def matches(self, facts: dict[str, Any], question: Question, without: str = "") -> bool:
        if question.experiments and without != "experiment" and facts["experiment"] not in question.experiments:
            return False
        if question.states and without != "outcome" and facts["outcome"] not in question.states:
            return False
        for key, texts in question.metadata:
            if without != f"m.{key}" and facts["metadata"].get(key, "") not in texts:
                return False
        for name, span in question.spans:
            number = facts[name]
            if number is None or not (
                (-math.inf if span.low is None else span.low)
                <= number
                <= (math.inf if span.high is None else span.high)
            ):
                return False
        return True

    def order(self, question: Question) -> list[int]:
        def key(ordinal: int) -> tuple[Any, ...]:
            number = self.facts[ordinal][question.sort]
            sign = -1 if question.descending else 1
            if question.sort == "ordinal":
                return (sign * ordinal,)
            return (number is None, 0 if number is None else sign * number, ordinal)

        return sorted((at for at, facts in self.facts.items() if self.matches(facts, question)), key=key)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    made = Table(tmp_path_factory.mktemp("table") / "runs.db")
    yield made
    made.columns.store.close()


questions = st.builds(
    Question,
    experiments=st.sampled_from([(), (), ("baseline",), ("careful", "unknown"), ("unknown",)]),
    states=st.sampled_from([(), (), *((state,) for state in STATES), ("passed", "task_error")]),
    metadata=st.sampled_from(
        [
            (),
            (),
            (("kind", ("a",)),),
            (("kind", ("a", "")),),
            (("level", ("0",)),),
            (("level", ("1", "2")), ("kind", ("b",))),
        ]
    ),
    spans=st.sampled_from(
        [
            (),
            (),
            (("score", Span(1 / 3, 1.0)),),
            (("latency_ms", Span(2.0)),),
            (("tokens", Span(None, 2.0)),),
            (("cost_usd", Span(0.0)),),
        ]
    ),
    sort=st.sampled_from(["ordinal", "score", "latency_ms", "tokens", "cost_usd", "metric:m"]),
    descending=st.booleans(),
)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(questions, st.integers(3, 20), st.sampled_from([16, 1 << 18]))
@pytest.mark.proves("R118")
def test_pages_visit_every_selected_trial_once_in_order_and_back(
    table: Table, question: Question, limit: int, block: int
) -> None:
    expected = table.order(question)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_table, "_BLOCK", block)
        patch.setattr(trial_table, "_NEAR", block)
        seen: list[int] = []
        page = find_page(table.columns, question, limit=limit)
        pages = [page]
        seen += page.ordinals
        while page.next is not None:
            page = find_page(table.columns, replace(question, after=page.next), limit=limit)
            pages.append(page)
            seen += page.ordinals
        assert seen == expected
        assert count_trials(table.columns, question).total == len(expected)
        for earlier, later in pairwise(pages):
            assert later.previous is not None
            back = find_page(table.columns, replace(question, before=later.previous), limit=limit)
            assert back.ordinals == earlier.ordinals
        assert sorted(chosen_ordinals(table.columns, question)) == sorted(expected)


@quick
@given(questions)
def test_facets_are_counted_under_all_other_filters(table: Table, question: Question) -> None:
    page = count_trials(table.columns, question)
    for facet in page.facets:
        counted: dict[str, int] = {}
        for facts in table.facts.values():
            if table.matches(facts, question, without=facet.name):
                key = facet.name.removeprefix("m.")
                value = facts["metadata"].get(key, "") if facet.name.startswith("m.") else facts[facet.name]
                counted[value] = counted.get(value, 0) + 1
        shown: dict[str, int] = {}
        for value in facet.values:
            shown[value.text] = shown.get(value.text, 0) + value.trials
        assert {text: count for text, count in shown.items() if count} == counted
        assert {value.text for value in facet.values if value.chosen} <= set(question.selected(facet.name))


@quick
@given(questions, st.integers(0, 67))
def test_neighbours_are_those_of_the_order(table: Table, question: Question, ordinal: int) -> None:
    expected = table.order(question)
    if ordinal in expected:
        place = expected.index(ordinal)
        before = expected[place - 1] if place else None
        after = expected[place + 1] if place + 1 < len(expected) else None
        assert neighbours(table.columns, question, ordinal) == (before, after)


def test_counts_are_of_everything_that_is_selected(table: Table) -> None:
    page = count_trials(table.columns, Question(experiments=("baseline",)))
    chosen = [facts for facts in table.facts.values() if facts["experiment"] == "baseline"]
    assert page.total == len(chosen)
    assert page.scored == sum(facts["score"] is not None for facts in chosen)
    assert page.passed == sum(facts["outcome"] == "passed" for facts in chosen)


def test_an_unknown_metadata_key_selects_nothing(table: Table) -> None:
    question = Question(metadata=(("nothing", ("x",)),))
    assert count_trials(table.columns, question).total == 0
    assert find_page(table.columns, question).ordinals == ()


# Questions as query strings.


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.none() | st.floats(-1e12, 1e12, allow_nan=False)
places = st.none() | st.builds(RowCursor, numbers, st.integers(0, 10**11))
spans = st.builds(Span, numbers, numbers).filter(lambda span: span != Span())


def unique(values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(values, unique=True, max_size=3).map(tuple)


any_question = st.builds(
    Question,
    experiments=unique(text.filter(bool)),
    states=unique(st.sampled_from(STATES)),
    metadata=st.dictionaries(text.filter(bool), unique(text).filter(bool), max_size=2).map(lambda d: tuple(d.items())),
    spans=st.dictionaries(st.sampled_from(RANGES), spans, max_size=2).map(lambda d: tuple(d.items())),
    sort=st.sampled_from(SORTS),
    descending=st.booleans(),
    text=text.map(str.strip),
    after=places,
    before=places,
    scan_from=st.integers(0, 10**11),
)


@given(any_question)
def test_a_question_survives_its_query_string(question: Question) -> None:
    query = urlencode(question.pairs())
    assert read_question(parse_qsl(query, keep_blank_values=True)) == (question, [])


@given(
    st.lists(
        st.tuples(st.sampled_from(["e", "outcome", "sort", "after", "score", "score.min", "from", "m.x"]) | text, text)
    )
)
def test_no_query_string_raises(pairs: list[tuple[str, str]]) -> None:
    question, complaints = read_question(pairs)
    assert read_question(question.pairs())[0] == question
    assert all(complaint.endswith(")") for complaint in complaints)


def test_what_is_wrong_is_said_and_left_out() -> None:
    question, complaints = read_question(
        [("outcome", "odd"), ("score", "high"), ("sort", "-latency_ms"), ("after", "x")]
    )
    assert question == Question(sort="latency_ms", descending=True)
    assert complaints[0].startswith("outcome must be one of passed, failed, ")
    assert complaints[1:] == [
        "score must be a range such as 0.5..1 (got 'high')",
        "after must be a row of the table (got 'x')",
    ]


def test_the_fields_of_a_form_make_a_range() -> None:
    question, complaints = read_question([("score.min", "0.25"), ("score.max", ""), ("tokens.max", "9")])
    assert (question.spans, complaints) == ((("score", Span(0.25)), ("tokens", Span(None, 9))), [])


def test_another_filter_starts_at_the_first_page() -> None:
    question = Question(after=RowCursor(0.5, 7), scan_from=3)
    assert question.with_value("m.kind", "refund", True) == Question(metadata=(("kind", ("refund",)),))
    assert question.sorted_by("score") == Question(sort="score", descending=True)
    assert question.sorted_by("score").sorted_by("score") == Question(sort="score")


def test_metadata_named_like_a_column_is_another_filter() -> None:
    question = Question().with_value("m.outcome", "failed", True)
    assert (question.states, question.metadata) == ((), (("outcome", ("failed",)),))
    assert read_question(question.pairs())[0] == question


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_id_is_one_part_of_a_path(sample_id: str) -> None:
    made = segment(sample_id)
    assert "/" not in unquote(made)
    assert unquote(made) not in (".", "..")
    assert from_segment(unquote(made)) == sample_id


def test_links_are_relative_to_their_page() -> None:
    assert [Links(path).runs() for path in ("", "support@3", "support@3/trials", "s/t/a/b/1")] == [
        "./", "./", "../", "../../../../",
    ]  # fmt: skip


def test_a_lone_surrogate_in_a_name_has_an_address() -> None:
    made = segment("a\ud800/b")
    assert made.isascii()
    assert from_segment(unquote(made)) == "a\ud800/b"


# Text of models on pages.


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
