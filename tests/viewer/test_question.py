"""Questions as query strings."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlencode

from hypothesis import given
from hypothesis import strategies as st

from fairtrial.viewer.question import (
    RANGES,
    SORTS,
    STATES,
    Links,
    Place,
    Question,
    Span,
    from_segment,
    read_question,
    segment,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.none() | st.floats(-1e12, 1e12, allow_nan=False)
places = st.none() | st.builds(Place, numbers, st.integers(0, 10**11))
spans = st.builds(Span, numbers, numbers).filter(lambda span: span != Span())


def unique(values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(values, unique=True, max_size=3).map(tuple)


questions = st.builds(
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


@given(questions)
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
        "after must be a place in the table (got 'x')",
    ]


def test_the_fields_of_a_form_make_a_range() -> None:
    question, complaints = read_question([("score.min", "0.25"), ("score.max", ""), ("tokens.max", "9")])
    assert (question.spans, complaints) == ((("score", Span(0.25)), ("tokens", Span(None, 9))), [])


def test_another_filter_starts_at_the_first_page() -> None:
    question = Question(after=Place(0.5, 7), scan_from=3)
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
