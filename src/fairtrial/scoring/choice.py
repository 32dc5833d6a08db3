"""Multiple-choice questions: present them in a seeded order, extract the chosen letter, compare it."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.base.frozen import first_is
from fairtrial.data.sample import Sample
from fairtrial.data.session.views import SessionView
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import SHARE, Metric, Score
from fairtrial.scoring.text import text_of

_LETTERS = string.ascii_uppercase
# Repetitions are bounded, so that a search stays linear in the length of the output.
_GAP = r"[\s*_`:$({\[\"']{0,12}"
_LETTER = r"(?:\\?(?:text|mathrm|mathbf)?\{)?([A-Za-z])(?![A-Za-z'’])"
_MARKED = re.compile(rf"(?i:answer){_GAP}(?i:is|=)?{_GAP}(?i:option|choice)?{_GAP}{_LETTER}")
_COLON = re.compile(rf"(?i:answer)[\s*_`]{{0,6}}[:=]{_GAP}(?i:option|choice)?{_GAP}{_LETTER}")
_BOXED = re.compile(rf"\\boxed\{{{_GAP}{_LETTER}")
_NAMED = re.compile(rf"(?i:correct|right|best)\s{{1,4}}(?i:option|choice)\s{{1,4}}(?i:is){_GAP}{_LETTER}")
_ALONE = re.compile(r"[\s*_`($\[\"']{0,8}([A-Z])[\s*_`)$\].:\"']{0,8}")
_LED = re.compile(r"[\s*_`]{0,8}(?:\(([A-Z])\)|([A-Z])[).:])[\s*_`]{1,8}\S")


@first_is(str)
@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """A question with choices, in the order of the dataset. Use it as the input type of a dataset."""

    question: str
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        choices = tuple(self.choices)
        object.__setattr__(self, "choices", choices)
        if not 2 <= len(choices) <= len(_LETTERS) or len(set(choices)) != len(choices):
            raise ValueError(f"choices must be 2 to {len(_LETTERS)} different texts (got {list(choices)!r})")

    def shuffle(self, seed: int) -> ChoiceQuestion:
        """Return the question with its choices in the order of a seed, such as `ctx.seed`."""
        return ChoiceQuestion(self.question, tuple(random.Random(seed).sample(self.choices, len(self.choices))))  # noqa: S311

    def prompt(self) -> str:
        """Return the question, the lettered choices and how to answer."""
        listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(_LETTERS, self.choices, strict=False))
        return (
            f"{self.question}\n\n{listed}\n\n"
            "Think first if you need to. The last line of your reply must be 'ANSWER: X', where X is the letter of the "
            "choice."
        )


@dataclass(frozen=True, slots=True)
class ChoicesShown:
    """The order in which the choices of a question were presented."""

    choices: tuple[str, ...]


def extract_choice(text: str, count: int = len(_LETTERS), choices: Sequence[str] = ()) -> str | None:
    """Return the letter that a reply chooses, or None if it names none.

    In this order: the last "ANSWER: X", the last boxed letter, the last "answer is X", a reply or last line that is a
    letter, a reply that begins with a lettered choice, and a reply that is the text of one choice. A letter inside a
    sentence is not taken: "A" and "I" are words.

    Args:
        text: The reply.
        count: The number of choices; other letters are not accepted.
        choices: The choices as presented, to recognise a reply that repeats one of them.
    """
    valid = _LETTERS[:count]
    for pattern in (_COLON, _BOXED, _MARKED, _NAMED):
        found = [letter.upper() for letter in pattern.findall(text) if _is_letter(letter, pattern)]
        if found:
            return found[-1] if found[-1] in valid else None
    lines = [line for line in text.strip().splitlines() if line.strip()]
    for part in (text, *lines[-1:]):
        alone = _ALONE.fullmatch(part)
        if alone is not None:
            return alone[1] if alone[1] in valid else None
    led = _LED.match(text)
    if led is not None:
        letter = led[1] or led[2]
        return letter if letter in valid else None
    said = _plain(text)
    same = [letter for letter, choice in zip(valid, choices, strict=False) if said and _plain(choice) == said]
    return same[0] if len(same) == 1 else None


def _is_letter(letter: str, pattern: re.Pattern[str]) -> bool:
    """Without a colon or a box, a small letter is a word: "the answer is a matter of taste"."""
    return letter.isupper() or pattern in (_COLON, _BOXED)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .*_`\"'")


@evaluator(inline=True, needs_expected=True)
def multiple_choice(sample: Sample[Any, Any], output: object, session: SessionView) -> Score:
    """Passes if the reply chooses the right letter. The metric `extracted` is 0 if no letter was found.

    The expected value is a letter, the text of a choice, or its number from 0, in the order of the dataset. The order
    in which the choices were presented is that of the last `ChoicesShown` event, else that of the dataset. If the input
    is not a `ChoiceQuestion`, letters are compared as they are.

    Hendrycks et al. (2021), Measuring Massive Multitask Language Understanding, arXiv:2009.03300. Order matters: Zheng
    et al. (2024), Large Language Models Are Not Robust Multiple Choice Selectors, arXiv:2309.03882.
    """
    known = sample.input.choices if isinstance(sample.input, ChoiceQuestion) else ()
    shown = session[ChoicesShown].all()
    presented: Sequence[str] = shown[-1].choices if shown else known
    right = _right_letter(sample.expected, known or presented, presented)
    chosen = extract_choice(text_of(output, "multiple_choice"), len(presented) or len(_LETTERS), presented)
    passed = chosen == right
    reason = "" if passed else f"chose {chosen}, expected {right}" if chosen else f"no letter found, expected {right}"
    extracted = Metric("extracted", float(chosen is not None), higher_is_better=True, bounds=SHARE)
    return Score(float(passed), passed, reason, [extracted])


def _right_letter(expected: Any, choices: Sequence[str], presented: Sequence[str]) -> str:
    """Return the letter under which the right choice was presented."""
    if not choices:
        if isinstance(expected, str) and len(expected.strip()) == 1 and expected.strip().upper() in _LETTERS:
            return expected.strip().upper()
        raise TypeError(f"the expected value of multiple_choice must be a letter (got {expected!r})")
    place: int | None = None
    if isinstance(expected, int) and not isinstance(expected, bool):
        place = expected
    elif isinstance(expected, str):
        as_text = choices.index(expected) if expected in choices else None
        letter = expected.strip().upper()
        as_letter = _LETTERS.index(letter) if len(letter) == 1 and letter in _LETTERS[: len(choices)] else None
        if as_text is not None and as_letter is not None and as_text != as_letter:
            raise ValueError(f"expected {expected!r} is a letter and the text of another choice: use its number from 0")
        place = as_letter if as_text is None else as_text
    if place is None or not 0 <= place < len(choices) or choices[place] not in presented:
        raise TypeError(
            f"the expected value of multiple_choice must be a letter, the text of a choice or its number from 0 (got "
            f"{expected!r})"
        )
    return _LETTERS[presented.index(choices[place])]
