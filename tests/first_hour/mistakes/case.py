"""One mistake of a user: files, what is typed, what must be said, and a verdict that a person can check."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

type Verdict = Literal["good", "acceptable"]

NEVER = (
    "Traceback (most recent",
    "this is a bug in Fairtrial",
    "NoneType",
    "Input should be",
    "ValidationError",
    "sqlalchemy",
)
"""What no message contains: traces, internal errors, and words of libraries that the user does not know."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake. The last of the steps is judged by its exit code and its output."""

    name: str
    files: Mapping[str, str]
    steps: str  # One command per line: `fairtrial ...`, `python ...`, or anything that a shell takes.
    code: int
    says: tuple[str, ...]
    why: str  # Why the verdict is what it is.
    verdict: Verdict = "good"
    never: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # Modules that are not part of the smallest installation.
    programs: tuple[str, ...] = ()  # Other programs that it calls.
    slow: bool = False  # It starts a new Python, or waits.
    traceback: bool = False  # A program in Python ends with one; its last lines are judged.
    interrupt: str = ""  # Ctrl-C follows once this text is printed,
    steps_after: int = 0  # in the step that this many others follow.
    environment: Mapping[str, str] = field(default_factory=dict)

    def faults(self, code: int, text: str) -> list[str]:
        """What is wrong with the exit code and the output of the last step."""
        flat = " ".join(text.split())
        never = tuple(word for word in NEVER if not (self.traceback and word.startswith("Traceback"))) + self.never
        return [
            *([f"exit code {code}, not {self.code}"] if code != self.code else []),
            *(f"does not say {part!r}" for part in self.says if " ".join(part.split()) not in flat),
            *(f"says {part!r}" for part in never if part in flat),
        ]


SUITE = """
from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, contains, exact_match
data = Dataset.of({f"q{i}": f"a{i}" for i in range(6)}, name="d")
def task(x: str) -> str:
    return x.replace("q", "a")
"""
GOOD = {"evals.py": SUITE + 'suite = EvalSuite("s", data, task, exact_match)\n'}
RUN = "fairtrial run evals.py"
RAN = "fairtrial run evals.py -q"
"""A first step that is quick: what it stores of the good suite is made once and copied."""


def suite(body: str, **files: str) -> dict[str, str]:
    """The files of a suite whose last lines are wrong."""
    return {"evals.py": SUITE + textwrap.dedent(body).lstrip("\n"), **files}


def loads(file: str, text: str, call: str = "") -> dict[str, str]:
    """The files of a suite that loads its dataset from a file."""
    return {file: text, **suite(f"suite = EvalSuite('s', Dataset.load({call or repr(file)}), task, exact_match)\n")}


def program(body: str, **files: str) -> dict[str, str]:
    """A program beside a good suite."""
    return {**GOOD, "x.py": textwrap.dedent(body).lstrip("\n"), **files}
