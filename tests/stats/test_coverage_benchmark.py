"""The command that measures coverage and errors: verdicts, the table, and the choice of designs."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.coverage_designs import COVERAGE, Finding, monte_carlo_error, share_or_warned
from benchmarks.coverage_designs._run import designs_of, families, measure_designs
from benchmarks.coverage_designs._tables import markdown, read_finding, summary

COMMAND = Path(__file__).parents[2] / "benchmarks" / "coverage.py"


def finding(figure: float, runs: int, *, unwarned: float | None = None, cell: str = "") -> Finding:
    error = monte_carlo_error(figure, runs)
    return Finding("rates", "made up", cell, "coverage", COVERAGE, figure, error, runs, unwarned, 0.0)


def test_a_figure_fails_beyond_three_monte_carlo_errors_and_an_exact_one_at_once() -> None:
    assert finding(0.90, 4_000).verdict == "FAILS"
    assert finding(0.92, 4_000).verdict == "holds"
    assert finding(0.92, 0).verdict == "FAILS"
    assert finding(0.93, 0).verdict == "holds"


def test_a_figure_beyond_its_limit_is_warned_only_if_it_holds_without_the_warned_runs() -> None:
    assert finding(0.80, 4_000, unwarned=0.95).verdict == "warned"
    assert finding(0.80, 4_000, unwarned=0.90).verdict == "FAILS"
    assert finding(0.95, 4_000, unwarned=0.95).verdict == "holds"


def test_warned_runs_count_as_covered_and_as_no_error() -> None:
    outcomes = iter([(True, False), (False, True), (False, False), (True, True)] * 2)
    rng = np.random.default_rng(0)
    covered = share_or_warned(lambda _: next(outcomes))(4, rng)
    assert (covered.figure, covered.unwarned) == (0.5, 0.75)
    errors = share_or_warned(lambda _: next(outcomes), good=False)(4, rng)
    assert (errors.figure, errors.unwarned) == (0.5, 0.25)


@pytest.mark.parametrize("family", families())
def test_every_family_has_quick_designs_with_names_of_their_own(family: str) -> None:
    found = designs_of(family)
    assert any(one.quick for one in found)
    assert len({(one.name, one.cell, one.what) for one in found}) == len(found)


def test_a_figure_is_the_same_alone_and_among_others() -> None:
    alone = list(measure_designs(["scores"], runs=20, cell="1, but 10% partial credit, n 50"))
    among = list(measure_designs(["scores"], runs=20, cell="n 50"))
    assert len(alone) == 1
    assert [one.figure for one in among if one.cell == alone[0].cell] == [alone[0].figure]


def test_the_table_shows_the_worst_cell_of_a_design() -> None:
    cells = [finding(0.995, 4_000, cell="n 20"), finding(0.94, 4_000, cell="n 50"), finding(0.96, 0, cell="n 200")]
    assert markdown(cells).splitlines()[2:] == [
        "| rates | made up | coverage | at least 0.93 | 3 | 0.940 ± 0.004 | n 50 | 4,000 | holds |"
    ]
    assert summary(cells) == (
        "3 cells, 1 of them enumerated: 3 within the limit, 0 beyond it with a warning, 0 failed."
    )


def test_the_command_prints_cells_as_json_and_fails_with_a_design(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    monkeypatch.setattr(sys, "argv", [str(COMMAND), "--only", "scores", "--cell", "n 50", "--runs", "20", "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(COMMAND), run_name="__main__")
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"design", "what", "limit", "figure", "error", "runs", "verdict", "commit"} <= cells[0].keys()
    assert ended.value.code == int(any(one["verdict"] == "FAILS" for one in cells))
    assert [read_finding(json.dumps(one)).figure for one in cells] == [one["figure"] for one in cells]


def test_cells_that_a_file_has_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    kept = tmp_path / "cells.jsonl"
    for cell, lines in (("10% partial credit, n 50", 1), ("partial credit, n 50", 2), ("partial credit, n 50", 2)):
        command = [str(COMMAND), "--only", "scores", "--cell", cell, "--runs", "20", "--into", str(kept)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            runpy.run_path(str(COMMAND), run_name="__main__")
        assert len(kept.read_text(encoding="utf-8").splitlines()) == lines
