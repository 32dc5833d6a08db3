"""No forbidden word, such as a metaphor, occurs in code, messages, documents and names of tests."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests/forbidden_words.toml"
PROSE = ("*.md", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md", "deploy/*.yaml", "pyproject.toml")
CODE = ("src/**/*.py", "examples/**/*.py", "benchmarks/**/*.py", "deploy/**/*.py", "scripts/*")
TESTS = ("tests/**/test_*.py",)


class Forbidden(NamedTuple):
    """One entry of the list."""

    pattern: re.Pattern[str]
    use: str
    exceptions: tuple[str, ...]

    def matches(self, text: str, lowered: str) -> Iterator[re.Match[str]]:
        """Yield the occurrences that begin a word, also a word inside an identifier."""
        for match in self.pattern.finditer(lowered):
            start = match.start()
            if start == 0 or not text[start - 1].isalpha() or text[start].isupper():
                yield match


def read_list() -> list[Forbidden]:
    entries = tomllib.loads(LIST.read_text())["forbidden"]
    # Lower-case text and no condition in front: the search for a literal is many times faster.
    return [
        Forbidden(re.compile(entry["word"].replace(" ", "[ _]?")), entry["use"], tuple(entry.get("except", ())))
        for entry in entries
    ]


def names_of_tests(source: str) -> str:
    """Return the names of the tests in a file, each on its own line."""
    lines = (re.match(r"\s*(?:async )?def (test_\w+)|class (Test\w+)", line) for line in source.splitlines())
    return "\n".join("" if line is None else line[1] or line[2] for line in lines)


def checked_texts() -> Iterator[tuple[str, str]]:
    """Yield every file that is checked, with its text; of tests, only their names."""
    for pattern in (*PROSE, *CODE, *TESTS):
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                text = path.read_text()
                yield path.relative_to(ROOT).as_posix(), names_of_tests(text) if pattern in TESTS else text


def find_words(name: str, text: str, forbidden: list[Forbidden]) -> Iterator[str]:
    lowered = text.lower()
    for word in forbidden:
        for match in word.matches(text, lowered):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in word.exceptions):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{name}:{line}: {match[0]!r} is forbidden, use: {word.use}"


def test_no_forbidden_word_occurs_in_code_messages_documents_and_test_names() -> None:
    forbidden, texts = read_list(), dict(checked_texts())
    assert len(texts) > 300
    assert [problem for name, text in texts.items() for problem in find_words(name, text, forbidden)] == []


def test_a_forbidden_word_is_found_in_identifiers_and_in_sentences() -> None:
    (broker, *_) = read_list()
    for text in ("open_post_office(url)", "class RedisPostOffice:", "The post office", "POST_OFFICE = 1"):
        assert list(find_words("x.py", text, [broker])), text
    assert not list(find_words("x.py", "compost office", [broker]))


def test_in_files_of_tests_only_names_of_tests_are_checked() -> None:
    source = "class TestPostOffice:\n    async def test_it(self) -> None:\n        office = 1\n"
    assert names_of_tests(source).split() == ["TestPostOffice", "test_it"]


def test_every_entry_of_the_list_is_unique_and_has_a_replacement() -> None:
    entries = tomllib.loads(LIST.read_text())["forbidden"]
    assert [entry for entry in entries if set(entry) - {"word", "use", "except"} or not entry["use"].strip()] == []
    words = [entry["word"] for entry in entries]
    assert len(words) == len(set(words))
    assert words == [word.lower() for word in words]
