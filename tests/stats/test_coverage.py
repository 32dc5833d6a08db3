"""The least coverage of intervals, by exact enumeration, and clusters too few for an interval or a verdict."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from benchmarks.coverage_designs import COVERAGE, Finding, draw_outcomes, draw_rates, monte_carlo_error, share_or_warned
from benchmarks.coverage_designs._run import designs_of, families, measure_designs
from benchmarks.coverage_designs._tables import markdown, read_finding, summary
from benchmarks.coverage_designs.comparisons import worst_coverage
from fairtrial import GateRules, stats
from fairtrial.base.rates import FEW_OUTCOMES
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.compare.verdicts import AdjustedDifference, verdict_of
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.gate.gate import gate_columns


def least_coverage(n: int) -> float:
    """The coverage of the interval of a rate, at the rate where it is worst: right beside an end of some interval."""
    found = [stats.rate_interval(passes, n) for passes in range(n + 1)]
    low, high = (
        np.asarray([getattr(one, end) for one in found if isinstance(one, stats.Interval)]) for end in ("low", "high")
    )
    assert np.all(np.diff(low) > 0)
    assert np.all(np.diff(high) > 0)
    ends = np.concatenate([low, high])
    rates = np.concatenate([ends - 1e-9, ends + 1e-9])
    rates = rates[(rates > 0) & (rates < 1)]
    first, last = np.searchsorted(high, rates), np.searchsorted(low, rates, "right") - 1
    return float(np.min(scipy_stats.binom.cdf(last, n, rates) - scipy_stats.binom.cdf(first - 1, n, rates)))


@pytest.mark.proves("R44")
@pytest.mark.parametrize("n", [1, 2, 5, 10, 22, 26, 30, 36, 50, 55, 89, 100, 149, 176, 300, 1000])
def test_the_interval_of_a_rate_covers_at_every_rate(n: int) -> None:
    assert least_coverage(n) >= 0.93


@pytest.mark.proves("R44")
def test_the_limit_of_few_outcomes_is_the_smallest_that_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.stats.intervals.FEW_OUTCOMES", FEW_OUTCOMES - 2)
    assert least_coverage(89) < 0.93


@pytest.mark.proves("R44")
@pytest.mark.parametrize("n", [10, 20, 30])
def test_the_interval_of_a_difference_of_paired_rates_covers_at_every_rate(n: int) -> None:
    """Bonett and Price's alone covers in 90% of runs of 10 pairs, 61% won and 39% lost, and in 92.8% of 20, 20% won."""
    assert worst_coverage(n) >= 0.94


@pytest.mark.proves("R44")
@pytest.mark.parametrize(("wins", "losses"), [(5, 0), (6, 0), (0, 6), (0, 0), (15, 5), (20, 0), (14, 6)])
@pytest.mark.parametrize("exact", [False, True])
def test_exact_tails_of_paired_rates_agree_with_the_test(wins: int, losses: int, exact: bool) -> None:
    a, b = (np.repeat([*ends, 0.0], [wins, losses, 20 - wins - losses]) for ends in ((1.0, 0.0), (0.0, 1.0)))
    for level in (0.8, 0.9, 0.95, 0.99):
        found = stats.paired_difference(a, b, level=level, test="exact" if exact else "midp")
        assert found.p_value is not None
        assert found.differs == (found.p_value <= 1 - level)


CORRELATIONS = pytest.mark.parametrize("correlation", [0.1, 0.5, 0.9])


def clustered_outcomes(sizes: list[int], correlation: float, rate: float, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    return draw_outcomes(rng, np.repeat(draw_rates(rng, rate, correlation, len(sizes)), sizes))


@pytest.mark.proves("R44")
@CORRELATIONS
def test_one_cluster_gives_no_interval_and_a_sentence(correlation: float) -> None:
    labels = np.zeros(40, dtype=np.intp)
    sides = [clustered_outcomes([40], correlation, 0.7, seed) for seed in (1, 2)]
    means = [stats.mean_interval(sides[0], clusters=labels), stats.mean_interval(0.5 + sides[0] / 4, clusters=labels)]
    difference = stats.paired_difference(*sides, clusters=labels)
    results: list[stats.MeanEstimate | stats.PairedDifference] = [*means, difference]
    for found in results:
        assert (found.interval, found.clusters) == (None, 1)
        assert found.reason == "All samples are in one cluster, so the variance between clusters is not known."
    assert verdict_of(AdjustedDifference(difference), ComparisonSettings(), lower=False) == "unknown"


@pytest.mark.proves("R44")
@CORRELATIONS
@pytest.mark.parametrize("sizes", [[50] * 3, [100, 20, 10, 5], [150, 10, 10, 10, 10]])
def test_clusters_worth_fewer_than_about_4_have_an_interval_and_no_verdict(
    sizes: list[int], correlation: float
) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    old, new = (clustered_outcomes(sizes, correlation, rate, 3) for rate in (0.95, 0.05))  # Far apart.
    found = stats.paired_difference(new, old, clusters=labels, draws=199)
    assert found.interval is not None
    assert found.effective_clusters is not None
    assert found.effective_clusters < stats.FEW_CLUSTERS
    assert found.notes[0].endswith("about 4 are the least for a verdict.")
    assert verdict_of(AdjustedDifference(found), ComparisonSettings(), lower=False) == "unknown"
    sides = [Columns.of({"passed": side}, name=name, clusters=labels) for side, name in ((new, "new"), (old, "old"))]
    assert gate_columns(sides[0], GateRules(margin=0.02), sides[1]).status == "inconclusive"


@pytest.mark.proves("R44")
def test_four_equal_clusters_have_a_verdict() -> None:
    labels = np.repeat(np.arange(4), 50)
    old, new = (clustered_outcomes([50] * 4, 0.1, rate, 3) for rate in (0.95, 0.05))
    found = stats.paired_difference(new, old, clusters=labels, draws=199)
    assert verdict_of(AdjustedDifference(found), ComparisonSettings(), lower=False) == "worse"


@pytest.mark.proves("R44")
@pytest.mark.parametrize(
    ("sizes", "rate"), [([2, 3, 5, 8, 12, 20, 40, 60] * 2 + [4] * 4, 0.5), ([3] * 20 + [30] * 10, 0.8)]
)
def test_the_rate_of_unequal_clusters_of_similar_values_is_covered(sizes: list[int], rate: float) -> None:
    """At ICC .9, the model of independent samples covered in 92.5% of 20,000 and 90.6% of 8,000 runs."""
    labels, rng = np.repeat(np.arange(len(sizes)), sizes), np.random.default_rng(6)
    covered = 0
    for _ in range(500):
        found = stats.mean_interval(draw_outcomes(rng, draw_rates(rng, rate, 0.6, len(sizes))[labels]), clusters=labels)
        assert found.interval is not None
        covered += found.interval.contains(rate)
    assert covered / 500 >= 0.93


@pytest.mark.proves("R44")
def test_degrees_of_freedom_of_equal_clusters_do_not_depend_on_the_working_model() -> None:
    rng = np.random.default_rng(2)
    for correlation in (0.1, 0.9):
        outcomes = clustered_outcomes([10] * 12, correlation, 0.6, 4)
        assert stats.mean_interval(outcomes, clusters=np.repeat(np.arange(12), 10)).df == pytest.approx(11)
    unequal = [40] * 3 + [5] * 9
    similar, apart = (
        stats.mean_interval(values, clusters=np.repeat(np.arange(12), unequal), bounds=None).df
        for values in (np.repeat(rng.normal(size=12), unequal), rng.normal(size=sum(unequal)))
    )
    assert similar is not None
    assert apart is not None
    assert similar + 0.5 < apart


# The command that measures coverage and errors: verdicts, the table, and the choice of designs.


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
