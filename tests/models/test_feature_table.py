"""docs/reference/providers.md: every feature that works has a test that exists (features.toml)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "providers.md"
TESTS = tomllib.loads(Path(__file__).with_name("features.toml").read_text(encoding="utf-8"))
PROTOCOLS = "RCAGB"
PLAIN = {"yes", "parameter", "refused", "n/a"}


def rows() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    everywhere = [[feature, *["yes"] * len(PROTOCOLS)] for feature in re.findall(r"^- (.*)$", text, re.M)]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return everywhere + [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_cell_has_its_test_or_a_reason(row: list[str]) -> None:
    feature, *cells = row
    covered: dict[str, str] = {}
    for letters, reference in re.findall(r"((?:[RCAGB] ?)+): ([^;]+)", TESTS.get(feature, "")):
        path, _, name = reference.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"def {re.escape(name)}\(", text), f"{feature}: there is no test {reference}"
        covered |= dict.fromkeys(letters.split(), reference)
    page = PAGE.read_text(encoding="utf-8")
    assert len(cells) == len(PROTOCOLS)
    for protocol, cell in zip(PROTOCOLS, cells, strict=True):
        note = re.fullmatch(r"(no|later|yes|refused) \((\d+)\)", cell)
        assert cell in PLAIN or note, f"{feature}, {protocol}: {cell!r} is not a value of the table"
        if note:
            assert re.search(rf"^{note[2]}\. ", page, re.M), f"{feature}, {protocol}: note {note[2]} is missing"
        if cell != "n/a" and not (note and note[1] in ("no", "later")):
            assert protocol in covered, f"{feature}, {protocol}: no test is named"


def test_the_table_is_there() -> None:
    assert len(rows()) > 20
    assert set(TESTS) <= {feature for feature, *_ in rows()}
