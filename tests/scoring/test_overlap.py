"""ROUGE, BLEU and chrF: the values of the reference implementations, and plain recomputations of two of them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import sacrebleu
from rouge_score import rouge_scorer

from fairtrial import ConfigurationError, Dataset, EvalSuite
from fairtrial.scoring import bleu, chrf, rouge

TEXTS: list[tuple[str, str]] = [
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("the cat sat on the mat", "the cat lay on the mat"),
    ("the cat", "the cat sat on the mat"),
    ("the cat sat on the mat today", "the cat"),
    ("mat the on sat cat the", "the cat sat on the mat"),
    ("a completely different sentence", "the cat sat on the mat"),
    ("", "the cat sat on the mat"),
    ("The Cat sat. On the mat!", "the cat sat on the mat"),
    ("police killed the gunman", "police kill the gunman"),
    ("the gunman kill police", "police kill the gunman"),
    ("the gunman police killed", "police kill the gunman"),
    ("Die Katze sitzt auf der Matte.", "Die Katze saß auf der Matte."),
    ("Le chat est assis.", "Le chat était assis sur le tapis."),
    ("It is a guide to action which ensures that the military always obeys the commands of the party",
     "It is a guide to action that ensures that the military will forever heed Party commands"),
    ("It is to insure the troops forever hearing the activity guidebook that party direct",
     "It is a guide to action that ensures that the military will forever heed Party commands"),
    ("the the the the the the the", "the cat is on the mat"),
    ("one", "one"),
    ("one", "two"),
    ("1 2 3 4 5 6 7 8", "1 2 3 4 8 7 6 5"),
    ("running runs ran", "run running runner"),
    ("hello world", "hello there world"),
    ("hello, world", "hello world"),
    ("x y z", "a b c x y z"),
    ("summary of the report", "the report is summarised"),
    ("first line\nsecond line", "first line\nanother line"),
    ("don't stop", "do not stop"),
    ("50% of 1,000", "50 percent of 1000"),
    ("état", "etat"),
    ("word " * 50, "word " * 40),
    ("The quick brown fox jumps over the lazy dog", "A quick brown dog jumps over the lazy fox"),
    ("I like green eggs and ham", "green eggs and ham I like"),
    ("no common words here", "nothing shared at all"),
]  # fmt: skip


@pytest.mark.proves("R157")
@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL", "rougeLsum"])
def test_rouge_is_that_of_rouge_score(kind: str) -> None:
    reference = rouge_scorer.RougeScorer([kind])
    check = rouge(kind)  # type: ignore[arg-type]  # a parameter
    for output, expected in TEXTS:
        wanted = reference.score(expected, output)[kind]
        score = check(output, expected)
        assert score.value == wanted.fmeasure
        assert (score.metric("precision"), score.metric("recall")) == (wanted.precision, wanted.recall)


def test_rouge_agrees_with_counted_words_and_with_the_example_of_the_paper() -> None:
    # Lin (2004), section 3: of "police kill the gunman", "police killed the gunman" has 3 words in order.
    assert rouge("rougeL")("police killed the gunman", "police kill the gunman").value == 0.75
    assert rouge("rougeL")("the gunman kill police", "police kill the gunman").value == 0.5
    for output, expected in TEXTS[:8]:
        one, other = ("".join(c if c.isalnum() else " " for c in text.lower()).split() for text in (output, expected))
        common = sum((Counter(one) & Counter(other)).values())
        f1 = 2 * common / (len(one) + len(other)) if one and other else 0.0
        assert math.isclose(rouge("rouge1")(output, expected).value, f1)


@pytest.mark.proves("R157")
def test_bleu_and_chrf_are_those_of_sacrebleu() -> None:
    for output, expected in TEXTS:
        wanted = sacrebleu.sentence_bleu(output, [expected], use_effective_order=True).score / 100
        assert bleu()(output, expected).value == pytest.approx(min(wanted, 1.0), abs=1e-12)
        assert chrf()(output, expected).value == pytest.approx(sacrebleu.sentence_chrf(output, [expected]).score / 100)
        plus = sacrebleu.sentence_chrf(output, [expected], word_order=2).score / 100
        assert chrf(word_order=2)(output, expected).value == pytest.approx(plus)


def test_the_best_of_several_references_counts() -> None:
    several = ["something else", "the cat sat on the mat"]
    assert rouge()("the cat sat on the mat", several).passed
    assert chrf()("the cat sat on the mat", several).value == pytest.approx(1.0)
    assert bleu()("the cat sat on the mat", several).value == pytest.approx(1.0)


def test_wrong_options_and_references_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="kind of rouge"):
        rouge("rouge9")  # type: ignore[arg-type]  # refused
    with pytest.raises(ConfigurationError, match="pass_at of bleu"):
        bleu(pass_at=2)
    with pytest.raises(TypeError, match="expected value of chrf"):
        chrf()("x", None)
    with pytest.raises(TypeError, match="expected value of rouge"):
        rouge()("x", [])


def test_a_run_scores_with_all_three() -> None:
    from fairtrial import all_of

    texts = Dataset.of({f"text number {n}": f"text number {n}" for n in range(12)}, name="texts")
    report = EvalSuite("texts", texts, lambda text: text, all_of(rouge(), bleu(), chrf())).run_sync(store="memory:")
    assert report.pass_rate == 1.0
    assert set(report.criteria) == {"rougeL", "bleu", "chrf"}
