"""Code that type checkers must refuse. It is never run: mypy and pyright read it (`scripts/types`).

An ignored error that is not one is an error: mypy by `warn_unused_ignores`, pyright by
`reportUnnecessaryTypeIgnoreComment`.
"""

from __future__ import annotations

from fairtrial import Dataset, EvalSuite, Sample, Score, SessionView, evaluate_sync, exact_match
from fairtrial import EvalSuit as A  # type: ignore[attr-defined]
from fairtrial.fleet import NoSuchThing as B  # type: ignore[attr-defined]
from fairtrial.mailbox import NoSuchThing as C  # type: ignore[attr-defined]
from fairtrial.models import NoSuchThing as D  # type: ignore[attr-defined]
from fairtrial.testing import NoSuchThing as E  # type: ignore[attr-defined]

MISSING = (A, B, C, D, E)
WORDS = Dataset.of({"one": 1})


def count(text: str) -> int:
    return len(text)


async def count_later(text: str) -> int:
    return len(text)


def square(number: int) -> int:
    return number * number


def join(one: str, two: str, three: str, four: str) -> int:
    return 4


def nothing() -> int:
    return 0


def of_text(output: str, expected: int) -> bool:
    return output == str(expected)


def of_text_in_other_order(expected: int, output: str) -> bool:
    return output == str(expected)


def of_other_expected(output: int, expected: str) -> bool:
    return str(output) == expected


def of_other_input(input: int, output: int, expected: int) -> bool:
    return output == expected


def of_text_with_session(output: str, expected: int, session: SessionView) -> Score:
    return Score(1.0)


def of_other_sample(sample: Sample[int, int], output: int) -> bool:
    return True


def returns_text(output: int, expected: int) -> str:
    return "good"


EvalSuite("s", WORDS, square, exact_match)  # type: ignore[arg-type]
EvalSuite("s", WORDS, join, exact_match)  # type: ignore[arg-type]
EvalSuite("s", WORDS, nothing, exact_match)  # type: ignore[arg-type]
EvalSuite("s", WORDS, "count", exact_match)  # type: ignore[call-overload]
EvalSuite("s", WORDS, count, of_text)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count_later, of_text)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, of_text_in_other_order)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, of_other_expected)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, of_other_input)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, of_text_with_session)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, of_other_sample)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, returns_text)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, [exact_match])  # type: ignore[call-overload]
EvalSuite("s", {"one": 1}, count, exact_match)  # type: ignore[call-overload]
evaluate_sync(WORDS, square, exact_match)  # type: ignore[arg-type]
evaluate_sync(WORDS, count_later, of_text)  # type: ignore[arg-type]
report = evaluate_sync(WORDS, count, exact_match)
report.results[0].output.upper()  # type: ignore[attr-defined]
