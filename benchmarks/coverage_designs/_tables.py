"""Findings as text and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields

from . import Finding, Limit


def limit_text(limit: Limit) -> str:
    """Return a limit in words."""
    low, high = limit
    if low <= 0:
        return f"at most {high:g}"
    return f"at least {low:g}" if high >= 1 else f"{low:g} to {high:g}"


def figure_text(one: Finding) -> str:
    """Return a figure with its Monte Carlo error, and the figure without warned runs where that decides."""
    error = f" ± {one.error:.3f}" if one.runs else ""
    warned = f" ({one.unwarned:.3f} with warned runs set aside)" if one.unwarned is not None else ""
    return f"{one.figure:.3f}{error}{warned}"


def runs_text(one: Finding) -> str:
    """Return the number of runs."""
    return f"{one.runs:,}" if one.runs else "exact"


def worst_cells(found: Sequence[Finding]) -> Iterator[tuple[Finding, int]]:
    """Return the worst cell of each design, and how many cells it has."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in found:
        groups.setdefault((one.family, one.design, one.what, str(one.limit)), []).append(one)
    for cells in groups.values():
        yield max(cells, key=lambda one: (one.verdict == "FAILS", one.verdict == "warned", one.excess)), len(cells)


def summary(found: Sequence[Finding]) -> str:
    """Return how many cells were measured, and how many of them hold."""
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("holds", "warned", "FAILS")}
    exact = sum(not one.runs for one in found)
    return (
        f"{len(found)} cells, {exact} of them enumerated: {counts['holds']} within the limit, {counts['warned']} "
        f"beyond it with a warning, {counts['FAILS']} failed."
    )


def markdown(found: Sequence[Finding]) -> str:
    """Return the table of designs, each with its worst cell."""
    lines = [
        "| family | design | what | limit | cells | worst figure | where | runs | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.family} | {one.design} | {one.what} | {limit_text(one.limit)} | {cells} | {figure_text(one)} "
        f"| {one.cell} | {runs_text(one)} | {one.verdict} |"
        for one, cells in worst_cells(found)
    ]
    return "\n".join(lines)


def read_finding(line: str) -> Finding:
    """Read a finding from a line of `--json`."""
    values = json.loads(line)
    values["limit"] = tuple(values["limit"])
    return Finding(**{one.name: values[one.name] for one in fields(Finding)})
