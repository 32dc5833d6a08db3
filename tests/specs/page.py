"""The page of the specifications, from what the blocks came to (literal.json) and what they show (blocks.toml)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from fairtrial.base.formatting import count

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = Path(__file__).with_name("literal.json")
BLOCKS = Path(__file__).with_name("blocks.toml")


def status(result: dict[str, Any]) -> str:
    """What became of a block."""
    if result["differences"]:
        return "differs"
    return "drawing" if result["kind"] == "drawing" else "as spelled"


def render(results: list[dict[str, Any]], listed: dict[str, Any]) -> str:
    """Return the page."""
    found = {result["block"]: result for result in results}
    differing = [result["block"] for result in results if result["differences"]]
    literal = len(results) - len(differing)
    drawings = sum(status(result) == "drawing" for result in results)
    lines = [
        "# The specifications, block by block",
        "",
        f"Fairtrial began with five specifications. They have {count(len(results), 'block')} of code and drawings. "
        f"{count(literal, 'block')} {'is' if literal == 1 else 'are'} as spelled, with {count(drawings, 'drawing')} "
        f"among them. {count(len(differing), 'block')} {'differs' if len(differing) == 1 else 'differ'}.",
        *(line for text in listed["about"] for line in ("", text)),
        "",
        "## Readings and defaults that differ on purpose",
        "",
        "| | |",
        "|---|---|",
        *(f"| {letter} | {text} |" for letter, text in listed["readings"].items()),
    ]
    for specification in listed["specification"]:
        lines += ["", f"## {specification['title']}", ""]
        lines += ["| block | what it shows | digest | status | readings | test |", "|---|---|---|---|---|---|"]
        for entry in specification["blocks"]:
            result = found[entry["block"]]
            letters = ", ".join(entry.get("readings", []))
            about = (f"`{result['digest']}`", status(result), letters, f"`{entry['test']}`")
            lines.append(f"| {' | '.join((str(entry['block']), entry['shows'], *about))} |")
    lines += ["", "## What differs", "", "| block | found |", "|---|---|"]
    lines += [f"| {number} | {'; '.join(found[number]['differences'])} |" for number in differing]
    return "\n".join(lines) + "\n"


def read() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the recorded results and the list of blocks."""
    results: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results, tomllib.loads(BLOCKS.read_text(encoding="utf-8"))
