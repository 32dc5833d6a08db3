"""Simulations of the stated power, and of the number of samples that is recommended."""

from __future__ import annotations

import pytest

from benchmarks.coverage_designs import Design, Finding
from benchmarks.coverage_designs._run import measure_designs
from benchmarks.coverage_designs.power import designs

DESIGNS = {(design.name, design.cell): design for design in designs()}
EFFECT, COMPARE, PLAN, GATE = (
    "difference of the minimum detectable effect",
    "number of samples named by compare",
    "number of samples named by plan",
    "number of samples named by a gate",
)


def measured(name: str, cell: str, runs: int) -> tuple[Design, Finding]:
    found = list(measure_designs(["power"], runs=runs, cell=f"{name}, {cell}"))
    assert len(found) == 1
    return DESIGNS[name, cell], found[0]


@pytest.mark.long
@pytest.mark.proves("R44", "R149")
@pytest.mark.parametrize(
    ("name", "cell", "runs"),
    [
        (EFFECT, "8 clusters, 1 test", 100),
        (EFFECT, "6 clusters, 2 tests", 50),
        (EFFECT, "30 samples x 5 repeats, 1 test", 50),
        (EFFECT, "40 pass/fail pairs, 1 test", 200),
        (EFFECT, "200 pass/fail pairs, 1 test", 200),
        (COMPARE, "pilot of 100 pass/fail pairs", 150),
        (PLAN, "pilot of 100 pass/fail pairs", 150),
        (PLAN, "pilot of 8 clusters of 10", 80),
        (PLAN, "pilot of 60 samples x 5 repeats", 60),
        (GATE, "margin 0.05, pilot of 100 pairs, truly equal", 100),
        (GATE, "floor 0.8, pilot of 100 samples, truth 0.85", 150),
    ],
)
def test_the_stated_difference_is_found_with_the_stated_power(name: str, cell: str, runs: int) -> None:
    _, found = measured(name, cell, runs)
    assert found.verdict == "holds", (found.figure, found.limit)


def test_every_kind_of_comparison_has_a_design() -> None:
    cells = {cell for name, cell in DESIGNS if name == EFFECT}
    assert {"8 clusters, 8 tests", "20 clusters, 8 tests", "30 samples x 5 repeats, 5 tests"} <= cells
    assert {name for name, _ in DESIGNS} == {EFFECT, COMPARE, PLAN, GATE}
