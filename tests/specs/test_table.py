"""The page of the specifications follows from what the blocks came to, and the runner notices what differs."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fairtrial import specifications
from tests.specs import definitions, literal
from tests.specs.page import ROOT, read, render, status


def _tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{group.name}::{node.name}" for node in group.body if hasattr(node, "name")}
    return {f"{file}::{name}" for name in found}


@pytest.mark.proves("R151")
def test_the_page_follows_from_what_the_blocks_came_to() -> None:
    results, listed = read()
    page = render(results, listed)
    assert [result["digest"] for result in results if f"`{result['digest']}`" not in page] == []
    assert [result["block"] for result in results] == list(range(1, 82))
    assert len({result["digest"] for result in results}) == 81
    entries = {entry["block"]: entry for specification in listed["specification"] for entry in specification["blocks"]}
    assert sorted(entries) == list(range(1, 82))
    assert [
        entry["test"] for entry in entries.values() if entry["test"] not in _tests(entry["test"].split("::")[0])
    ] == []
    assert {letter for entry in entries.values() for letter in entry.get("readings", [])} == set(listed["readings"])
    unexplained = [r["block"] for r in results if r["differences"] and not entries[r["block"]].get("readings")]
    assert unexplained == []
    assert sum(status(result) != "differs" for result in results) >= 74
    assert page.count("| differs |") == sum(bool(result["differences"]) for result in results) > 0


def test_every_name_that_is_lent_exists() -> None:
    assert [name for name in specifications.__all__ if getattr(specifications, name, None) is None] == []
    assert dir(specifications) == specifications.__all__
    with pytest.raises(AttributeError, match="no attribute 'EvalSuit'"):
        specifications.EvalSuit  # type: ignore[attr-defined]


class TestRunner:
    def test_blocks_are_read_in_the_order_of_the_files(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_text("text\n```\nthree\n```\n")
        (tmp_path / "a.txt").write_text("```python\none = 1\n```\nand\n```\ntwo\n\n```\n")
        assert literal.read_blocks(tmp_path) == {1: "one = 1\n", 2: "two\n\n", 3: "three\n"}

    def test_a_record_is_compared_by_position_keyword_default_and_member(self) -> None:
        @dataclass(frozen=True)
        class Score:
            value: float
            passed: bool
            reason: str = ""

        @dataclass(frozen=True)
        class Metric:
            value: float
            name: str
            weight: float = 1.0

            def halved(self) -> float:
                return self.value / 2

        @dataclass(frozen=True)
        class Dataset:
            samples: tuple[Any, ...]
            owner: str = field(default="me", init=False)

            def load(self, path: str, folder: str = "x") -> None:
                return None

        @dataclass(frozen=True)
        class Unknown:
            value: float

        assert list(definitions.compare_record(Score)) == []
        found = list(definitions.compare_record(Metric))
        assert found[0].startswith("Metric is refused by position: the name of a metric must be text")
        assert found[1:] == ["Metric.weight is 0.0 by default, not 1.0", "Metric.halved does not exist"]
        assert list(definitions.compare_record(Dataset)) == ["Dataset.load has no parameter folder"]
        assert list(definitions.compare_record(Unknown)) == ["Unknown does not exist"]

    def test_functions_are_compared_by_place_name_and_default(self) -> None:
        def specified(name: str, *, min_count: int = 0) -> None: ...
        def same(name: str, *, min_count: int = 0, more: int = 1) -> None: ...
        def other(first: str, name: str, *, min_count: int = 1) -> None: ...

        assert list(definitions.compare_parameters("f", specified, same)) == []
        assert list(definitions.compare_parameters("f", specified, other)) == [
            "f has name in another place",
            "f has min_count=1, not 0",
        ]

    def test_a_block_that_fails_or_defines_an_unknown_name_differs(self, tmp_path: Path) -> None:
        literal.lend()
        text = "from weakincentives.evals import Score\nscore = Score('tone', 0.5, False, 'terse')\n"
        world = literal.World({2: text, 3: "LOUD = 1\n", 5: "1 / 0\n"}, tmp_path, 0)
        assert [literal.try_block(world, number) for number in (2, 3, 5)] == [
            [],
            ["LOUD does not exist"],
            ["ZeroDivisionError: division by zero"],
        ]
