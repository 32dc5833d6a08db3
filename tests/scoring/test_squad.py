"""SQuAD exact match and F1, against an independent implementation and worked examples."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import ConfigurationError
from fairtrial.scoring import squad
from fairtrial.scoring.answers import normalize_answer, token_f1

PAIRS: list[tuple[str, list[str]]] = [
    ("Denver Broncos", ["Denver Broncos", "The Denver Broncos"]),
    ("the Broncos", ["Denver Broncos"]),
    ("Santa Clara", ["Santa Clara, California", "Levi's Stadium"]),
    ("in Santa Clara, California.", ["Santa Clara, California"]),
    ("February 7, 2016", ["February 7", "February 7, 2016"]),
    ("24–10", ["24-10"]),
    ("24-10", ["24–10", "24 10"]),
    ("gold", ["gold", "golden"]),
    ("a golden anniversary", ["golden anniversary"]),
    ("an apple a day", ["apple day"]),
    ("", ["Paris"]),
    ("", [""]),
    ("Paris", [""]),
    ("the", [""]),
    ("...", [""]),
    ("no answer", []),
    ("", []),
    ("New York New York", ["New York"]),
    ("New York", ["New York New York"]),
    ("it's", ["its"]),
    ("U.S.A.", ["USA"]),
    ("theatre", ["the atre"]),
    ("A THE AN", ["x"]),
    ("Zürich", ["zürich"]),
    ("ZÜRICH", ["zurich"]),
    ("one two three", ["three two one"]),
    ("one two three", ["one two", "two three four five"]),
    ("1,000", ["1000"]),
    ("$5 million", ["5 million dollars"]),
    ("  many   spaces\there\n", ["many spaces here"]),
    ("well-known", ["well known", "wellknown"]),
    ("Queen Elizabeth II", ["Elizabeth II of England"]),
    ("cat cat dog", ["cat dog dog"]),
    ("北京", ["北京"]),
    ("(the) answer", ["answer"]),
]


def reference(output: str, references: list[str]) -> tuple[float, float]:
    """The same two numbers, computed another way: characters one by one, precision and recall apart."""

    def words(text: str) -> list[str]:
        kept = "".join(
            c for c in text.lower() if not (ord(c) < 128 and not c.isalnum() and c.isprintable() and c != " ")
        )
        return [word for word in re.split(r"\s+", re.sub(r"\b(?:a|an|the)\b", " ", kept)) if word]

    def f1(one: list[str], other: list[str]) -> float:
        if not one or not other:
            return 1.0 if one == other else 0.0
        left = list(other)
        hits = 0
        for word in one:
            if word in left:
                left.remove(word)
                hits += 1
        if hits == 0:
            return 0.0
        precision, recall = hits / len(one), hits / len(other)
        return 2 * precision * recall / (precision + recall)

    wanted = [words(text) for text in references if words(text)] or [[]]
    said = words(output)
    return max(float(said == each) for each in wanted), max(f1(said, each) for each in wanted)


@pytest.mark.proves("R157")
@pytest.mark.parametrize(("output", "references"), PAIRS)
def test_exact_match_and_f1_agree_with_another_implementation(output: str, references: list[str]) -> None:
    exact, f1 = reference(output, references)
    score = squad()(output, references)
    assert score.metric("exact_match") == exact
    assert math.isclose(score.metric("f1") or 0.0, f1, abs_tol=1e-12)
    assert score.passed == bool(exact)
    assert score.value == score.metric("f1")


@given(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=3))
def test_any_text_agrees_with_another_implementation(output: str, references: list[str]) -> None:
    def has_control(text: str) -> bool:
        return any(not c.isprintable() and not c.isspace() for c in text)

    if has_control(output) or any(map(has_control, references)):
        return  # Only how the other implementation finds punctuation differs there.
    exact, f1 = reference(output, references)
    score = squad()(output, references)
    assert (score.metric("exact_match"), round(score.value, 9)) == (exact, round(f1, 9))


def test_worked_examples() -> None:
    assert normalize_answer("The  Quick, brown (fox)!") == "quick brown fox"
    assert token_f1("the cat sat", "cat sat down") == 0.8  # 2 of 2 and 2 of 3 words.
    assert squad(pass_at=0.8)("the cat sat", "cat sat down").passed
    assert not squad()("the cat sat", "cat sat down").passed
    assert squad()("Broncos", ["Denver Broncos"]).reason == "F1 0.67 with 'Denver Broncos'"


@pytest.mark.parametrize("expected", [None, 3, [3], b"bytes"])
def test_references_must_be_texts(expected: Any) -> None:
    with pytest.raises(TypeError, match="must be a text or a list of texts"):
        squad()("x", expected)


def test_a_threshold_outside_of_its_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pass_at of squad"):
        squad(pass_at=0)
