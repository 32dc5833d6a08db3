"""Code that type checkers must refuse. It is never run: mypy and pyright read it (`scripts/types`).

An ignored error that is not one is an error: mypy by `warn_unused_ignores`, pyright by
`reportUnnecessaryTypeIgnoreComment`.
"""

from __future__ import annotations

from fairtrial import Dataset, EvalSuite, evaluate_sync, exact_match
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


def returns_text(output: int, expected: int) -> str:
    return "good"


EvalSuite("s", WORDS, square, exact_match)  # type: ignore[arg-type]
EvalSuite("s", WORDS, join, exact_match)  # type: ignore[arg-type]
EvalSuite("s", WORDS, nothing, exact_match)  # type: ignore[arg-type]
EvalSuite("s", WORDS, "count", exact_match)  # type: ignore[call-overload]
EvalSuite("s", WORDS, count, returns_text)  # type: ignore[arg-type]
EvalSuite("s", WORDS, count, [exact_match])  # type: ignore[call-overload]
EvalSuite("s", {"one": 1}, count, exact_match)  # type: ignore[call-overload]
evaluate_sync(WORDS, square, exact_match)  # type: ignore[arg-type]
report = evaluate_sync(WORDS, count, exact_match)
report.results[0].output.upper()  # type: ignore[attr-defined]
