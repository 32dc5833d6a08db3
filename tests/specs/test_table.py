"""docs/reference/specifications.md has a line for every block, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ROW = re.compile(r"^\| (\d+) \| .+ \| (.+) \| (?:`(.+)`)? ?\|$", re.M)


def _tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{group.name}::{node.name}" for node in group.body if hasattr(node, "name")}
    return {f"{file}::{name}" for name in found}


@pytest.mark.proves("R151")
def test_every_block_has_a_line_and_every_test_that_is_named_exists() -> None:
    page = (ROOT / "docs" / "reference" / "specifications.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert [int(number) for number, _how, _test in rows] == list(range(1, 82))
    named = {test for _number, how, test in rows if how != "planned"}
    missing = [test for test in named if test not in _tests(test.partition("::")[0])]
    assert missing == []
    assert {letter for _n, how, _t in rows for letter in how.removeprefix("as written").split(", ")} - {
        "",
        "planned",
    } == set("AB")
    written = sum(how.startswith("as written") for _n, how, _t in rows)
    planned = sum(how == "planned" for _n, how, _t in rows)
    other = 81 - written - planned
    assert other <= 5
    counts = f"{written} blocks are as written, {other} need another spelling and {planned} are planned"
    assert counts in " ".join(page.split())
