"""Multiple choice: extraction of letters, seeded orders, and whole runs."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample
from fairtrial.base.codec import from_json, to_json
from fairtrial.models import ScriptedAdapter, choice_task
from fairtrial.scoring import ChoiceQuestion, ChoicesShown, extract_choice, multiple_choice
from fairtrial.testing import session_of

REPLIES: list[tuple[str, str | None]] = [
    ("ANSWER: B", "B"),
    ("Answer: b", "B"),
    ("answer : C", "C"),
    ("Let me think. A is wrong.\n\nANSWER: D", "D"),
    ("ANSWER: A\nNo, wait.\nANSWER: C", "C"),
    ("**Answer: B**", "B"),
    ("**Answer:** B", "B"),
    ("Answer: **B**", "B"),
    ("Answer: (B)", "B"),
    ("Answer: $B$", "B"),
    ("Answer: B) Paris", "B"),
    ("Answer: B. Paris", "B"),
    ("Final answer: C.", "C"),
    ("Answer: Option D", "D"),
    ("Answer:\nB", "B"),
    (r"\boxed{B}", "B"),
    (r"So $\boxed{\text{C}}$.", "C"),
    (r"\boxed{(D)}", "D"),
    (r"Answer: \text{B}", "B"),
    ("The answer is B.", "B"),
    ("The correct answer is (C), because of the capital.", "C"),
    ("So the answer is **A**", "A"),
    ("The correct option is D", "D"),
    ("The best choice is B", "B"),
    ("B", "B"),
    ("(B)", "B"),
    ("B.", "B"),
    ("**C**", "C"),
    (" D \n", "D"),
    ("B) Paris", "B"),
    ("(C) Rome", "C"),
    ("A. It is in France.", "A"),
    ("Some reasoning first.\n\nC", "C"),
    ("Paris", "B"),
    ("paris.", "B"),
    # No choice: what must not be taken for one.
    ("", None),
    ("I do not know.", None),
    ("A capital is a city.", None),
    ("The answer is a matter of taste.", None),
    ("Answer: none of these", None),
    ("ANSWER: E", None),
    ("E", None),
    ("Berlin or Paris", None),
    ("The answer isn't clear to me.", None),
]
CHOICES = ("Berlin", "Paris", "Rome", "Madrid")


@pytest.mark.proves("R157")
@pytest.mark.parametrize(("reply", "letter"), REPLIES)
def test_the_chosen_letter_is_extracted(reply: str, letter: str | None) -> None:
    assert extract_choice(reply, 4, CHOICES) == letter


def test_what_a_plain_search_for_answer_colon_finds_is_found_too() -> None:
    # The pattern that published evaluations of MMLU and GPQA use, written anew; the last match counts here.
    plain = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\b")
    compared = [(reply, letter) for reply, letter in REPLIES if plain.search(reply)]
    assert len(compared) > 8
    assert all(plain.findall(reply)[-1].upper() == letter for reply, letter in compared)


@pytest.mark.parametrize("text", ["answer" * 200_000, "answer " * 150_000, "(" * 1_000_000, "A " * 500_000])
def test_long_outputs_are_searched_in_linear_time(text: str) -> None:
    began = time.process_time()
    assert extract_choice(text, 4, CHOICES) is None
    assert time.process_time() - began < 3


QUESTION = ChoiceQuestion("The capital of France?", CHOICES)


@pytest.mark.parametrize("expected", ["B", "b", "Paris", 1])
def test_the_right_answer_may_be_a_letter_a_text_or_a_number(expected: Any) -> None:
    sample: Sample[Any, Any] = Sample("q", QUESTION, expected)
    score = multiple_choice(sample, "ANSWER: B", session_of())
    assert (score.value, score.passed, score.metric("extracted")) == (1.0, True, 1.0)
    # Presented in another order, Paris is D.
    shown = session_of(ChoicesShown(("Rome", "Madrid", "Berlin", "Paris")))
    assert multiple_choice(sample, "ANSWER: D", shown).passed
    assert multiple_choice(sample, "ANSWER: B", shown).reason == "chose B, expected D"


def test_a_reply_without_a_letter_fails_with_its_own_metric() -> None:
    score = multiple_choice(Sample("q", QUESTION, "B"), "Let me think about it.", session_of())
    assert (score.passed, score.metric("extracted"), score.reason) == (False, 0.0, "no letter found, expected B")


def test_letters_in_a_text_input_are_compared_as_they_are() -> None:
    sample = Sample("q", "A) one B) two", "B")
    assert multiple_choice(sample, "Answer: b", session_of()).passed
    with pytest.raises(TypeError, match="must be a letter"):
        multiple_choice(Sample("q", "A) one B) two", "two"), "B", session_of())


@pytest.mark.parametrize("expected", ["E", "Lisbon", 4, -1, None, True])
def test_an_expected_value_that_is_no_choice_is_an_error(expected: Any) -> None:
    with pytest.raises(TypeError, match="must be a letter, the text of a choice or its number"):
        multiple_choice(Sample("q", QUESTION, expected), "B", session_of())


def test_a_letter_that_is_the_text_of_another_choice_is_refused() -> None:
    blood = ChoiceQuestion("Which blood group?", ("B", "A", "0"))
    with pytest.raises(ValueError, match="use its number from 0"):
        multiple_choice(Sample("q", blood, "A"), "A", session_of())
    assert multiple_choice(Sample("q", blood, 1), "ANSWER: B", session_of()).passed


@pytest.mark.parametrize("choices", [("only",), ("same", "same"), tuple(str(n) for n in range(27))])
def test_choices_must_be_several_and_different(choices: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="choices must be 2 to 26 different texts"):
        ChoiceQuestion("?", choices)


def test_a_seed_gives_one_order_and_all_orders_are_as_likely() -> None:
    assert QUESTION.shuffle(7) == QUESTION.shuffle(7)
    firsts = Counter(QUESTION.shuffle(seed).choices[0] for seed in range(4000))
    assert set(firsts) == set(CHOICES)
    assert all(850 < count < 1150 for count in firsts.values())


def test_a_question_is_read_from_json_and_written_back() -> None:
    assert from_json(ChoiceQuestion, to_json(QUESTION)) == QUESTION


@pytest.mark.proves("R157")
def test_a_model_that_always_answers_a_is_right_by_chance_only() -> None:
    questions = Dataset(
        [Sample(f"q{n}", ChoiceQuestion(f"{n}?", ("yes", "no", "maybe", "never")), "A") for n in range(60)],
        name="first",
    )
    suite = EvalSuite(
        "choices",
        questions,
        choice_task(ScriptedAdapter(lambda messages: "ANSWER: A")),
        multiple_choice,
        config=EvalConfig(repeats=3),
    )
    report = suite.run_sync(store="memory:")
    assert report.pass_rate is not None
    assert 0.1 < report.pass_rate < 0.4  # Unshuffled it would be 1.
    orders = {
        (result.sample_id, result.repeat): result.session[ChoicesShown].all()[-1].choices for result in report.results
    }
    assert len({orders["q0", repeat] for repeat in range(3)}) > 1
    fixed = EvalSuite(
        "fixed",
        questions,
        choice_task(ScriptedAdapter(lambda messages: "ANSWER: A"), shuffle=False),
        multiple_choice,
    )
    assert fixed.run_sync(store="memory:").pass_rate == 1.0


def test_choices_given_as_a_list_cannot_be_changed_later() -> None:
    given = ["red", "blue"]
    question = ChoiceQuestion("Which?", given)  # type: ignore[arg-type]
    given.append("green")
    assert question == ChoiceQuestion("Which?", ("red", "blue"))
