"""Comparisons and gates as they are shown: several candidates, slices, undefined differences, hostile names."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fairtrial import EvalReport, Metric, compare, gate
from fairtrial.base import formatting
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.render import terminal
from fairtrial.reports.render.renderable import Renderable
from tests.reports.browser import Browser
from tests.reports.made import FAIL, HOSTILE, PASS, TASK_ERROR, Made, hostile_report, made_report
from tests.reports.test_pages import read


def three(**changes: Any) -> EvalReport:
    share = {"plain": 10, "terse": 3, "kind": 9}

    def trial(place: int, experiment: str, repeat: int) -> Made:
        if place == 7 and experiment == "terse":
            return TASK_ERROR
        value = 1.0 if place % share[experiment] else 0.0
        return Made(
            value, reason=f"because of {place}", output=f"{experiment} says", metrics=(Metric("cost", 50.0 + place),)
        )

    options: dict[str, Any] = {"samples": 60, "experiments": ("plain", "terse", "kind")}
    return made_report(trial, **{**options, **changes})


def flat(said: Renderable) -> str:
    return " ".join(str(said).split())


def test_several_candidates_stand_below_each_other_under_their_names() -> None:
    report = three()
    compared = compare(report["plain"], report["terse"], report["kind"], metrics=None)
    text = str(compared)
    assert text.splitlines()[0] == "support@1: 2 candidates against plain"
    assert re.search(r"^terse\n  passed .*\n  cost .*\nkind\n  passed ", text, re.MULTILINE)
    assert text.count("60 samples on both sides; none is on one side only") == 1
    assert re.search(r"Adjusted p-values allow for \d tests made together\.", str(compared.in_detail()))
    page = read(compared.to_html()).text
    assert "Lost by terse: " in page
    assert "Wins and losses, passed: kind" in page
    assert "because of 3" in page
    assert "task error: ValueError: no" in page


def test_samples_of_a_metric_without_a_declared_direction_are_not_won_or_lost() -> None:
    def trial(place: int, experiment: str, _: int) -> Made:
        shift = 0 if experiment == "plain" else 1 if place % 3 else -1
        return Made(1.0, metrics=(Metric("words", 50.0 + place + shift), Metric("marks", 1.0, higher_is_better=True)))

    report = made_report(trial, samples=30, experiments=("plain", "terse"))
    alone = compare(report["plain"], report["terse"], metrics=["words"])
    assert re.search(r"\| metric .*\| higher \| lower \| tied \|", alone.to_markdown())
    assert "Higher and lower, words" in read(alone.to_html()).text
    mixed = compare(report["plain"], report["terse"], metrics=["words", "marks"]).to_markdown()
    assert re.search(r"\| words .*\| 20 higher \| 10 lower \| 0 \|", mixed)
    assert re.search(r"\| marks .*\| 0 \| 0 \| 30 \|", mixed)


def test_the_title_of_a_comparison_of_two_runs_names_runs_and_experiments() -> None:
    before = three()
    after = three(run_id="run0000002", store=before.store)
    assert str(compare(before["plain"], after["plain"])).splitlines()[0] == "support@2:plain against support@1:plain"
    assert str(compare(before["plain"], after["terse"])).splitlines()[0] == "support@2:terse against support@1:plain"


def test_five_candidates_of_which_nothing_can_be_told_take_half_a_screen_at_80_columns() -> None:
    names = tuple(f"model-{number}" for number in range(6))
    report = made_report(lambda place, name, _: Made(float(place % 2 == 0)), samples=40, experiments=names)
    compared = compare(*(report[name] for name in names))
    lines = str(compared).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    said = "passed: no detectable difference between model-0 and model-1, model-2, model-3, model-4, model-5."
    assert said in flat(compared)
    assert len(re.findall("passed: no detectable difference", str(compared.in_detail()))) == 5


def test_every_difference_has_its_interval_counts_and_both_kinds_of_errors() -> None:
    report = three()
    compared = compare(report["plain"], report["terse"])
    text = str(compared)
    assert re.search(r"passed +90\.0% +65\.0% +-25\.0 +-\d+\.\d to -\d+\.\d ", text)
    assert "Trials" not in text
    detailed = str(compared.in_detail())
    assert re.search(r"passed +60 +0\.00\d ", detailed)
    assert re.search(r"terse +run0000001 +60 +60 +59 +1 +0", detailed)
    assert "on the 59 pairs scored on both sides" in flat(compared.in_detail())
    assert len(text.splitlines()) < 0.6 * len(detailed.splitlines())


def test_slices_are_in_the_table_and_in_the_plot_of_wins_and_losses() -> None:
    report = three(metadata=lambda place: {"topic": "even" if place % 2 == 0 else "odd"})
    compared = compare(report["plain"], report["terse"], slice_by="topic", metrics=["passed", "cost"])
    text = terminal.as_text(compared.document(0), width=140)
    assert re.search(r"^  topic = even +30 ", text, re.MULTILINE)
    page = compared.to_html()
    assert "Wins and losses by slice, passed" in page
    plot = page[page.index("Wins and losses by slice") :]
    assert "topic = odd: " in plot[: plot.index("</desc>")]
    both = compare(report["plain"], report["terse"], report["kind"], slice_by="topic")
    assert "Slices of kind" in str(both)


def test_samples_on_one_side_only_are_counted() -> None:
    small = made_report(lambda *_: PASS, samples=10)
    large = made_report(lambda *_: PASS, samples=14, name=lambda place: f"sample-{place + 2:02d}")
    assert "8 samples on both sides; 2 only in the baseline and 6 only in the candidate are left out" in flat(
        compare(small, large)
    )


def test_where_nothing_can_be_compared_every_figure_is_a_dash() -> None:
    report = made_report(lambda *_: PASS, samples=3)
    other = made_report(lambda *_: PASS, samples=3, name="other-{}".format)
    compared = compare(report, other)
    text = str(compared)
    assert re.search(r"passed +- +- +- +- +- +0 +0 +0$", text, re.MULTILINE)
    assert "cannot be compared" in flat(compared)
    assert "no sample in common" in flat(compared)
    assert "<svg" in compared.to_html()


def test_a_comparison_of_numbers_alone_shows_all_but_the_samples() -> None:
    sides = [Columns.of({"value": [0.1 * place for place in range(9)], "passed": [1] * 9}, name=name) for name in "ab"]
    page = compare_columns(sides[0], [sides[1]], metrics=["value"]).to_html()
    assert "b against a" in page
    assert "Lost" not in page
    assert "<h2>Scores" not in page


def test_repeats_of_a_flipped_sample_are_read_side_by_side() -> None:
    report = made_report(
        lambda place, name, repeat: PASS if name == "a" or (place + repeat) % 3 else FAIL,
        samples=12,
        repeats=2,
        experiments=("a", "b"),
    )
    page = read(compare(report["a"], report["b"]).to_html()).text
    assert "candidate, repeat 1" in page


def test_margins_of_graded_metrics_and_ceilings_are_rules_in_words() -> None:
    report = three()
    rules = {"floors": {"value": 0.1}, "ceilings": {"cost": 200.0}, "margins": {"value": 0.05}}
    result = gate(report["terse"], rules, report["plain"])
    text = terminal.as_text(result.document(0), width=120)
    assert "value at least 0.100" in text
    assert "cost at most 200.0" in text
    assert "value at most 0.050 worse" in text
    shown = io.StringIO()
    Console(file=shown, width=100).print(result)
    assert "value at most 0.050 worse" in shown.getvalue()


def test_a_rule_about_nothing_is_open_and_its_figures_are_dashes() -> None:
    report = made_report(lambda *_: TASK_ERROR, samples=3)
    result = gate(report, {"floors": {"value": 0.5}})
    assert "<table>" in result._repr_html_()
    assert gate(made_report(lambda *_: None, samples=3), {"min_pass_rate": 0.5}).status == "inconclusive"
    assert re.search(
        r"passed at least 50\.0% +inconclusive +- +- +0",
        str(gate(made_report(lambda *_: None, samples=3), {"min_pass_rate": 0.5})),
    )


@pytest.mark.parametrize("render", ["to_html", "_repr_html_", "to_markdown", "__str__"])
def test_hostile_names_are_text(render: str) -> None:
    report = hostile_report(samples=40)
    first, second = report.experiments
    compared = compare(report[first], report[second], slice_by="topic", metrics=None)
    decided = gate(report[first], {"min_pass_rate": 0.5, "margin": 0.1}, report[second])
    for said in (compared, decided):
        text = getattr(said, render)()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202e]", text)
        if "html" in render:
            tags = {tag for tag, _ in read(text).tags}
            assert not tags & {"script", "img", "a", "iframe", "b"}


def test_a_comparison_in_a_real_browser_fetches_nothing(tmp_path: Path) -> None:
    report = hostile_report(samples=12)
    first, second = report.experiments
    with Browser(tmp_path) as browser:
        dom = browser.open(compare(report[first], report[second], slice_by="topic").to_html())
        assert browser.requests == []
    assert HOSTILE[:39] in read(dom).text
    assert "<title>owned" not in dom


class TestWords:
    @pytest.mark.parametrize(
        ("value", "shown"),
        [(None, "-"), (0.0, "0.0%"), (0.0001, "<0.1%"), (0.9999, ">99.9%"), (1.0, "100.0%"), (0.12345, "12.3%")],
    )
    def test_rates(self, value: float | None, shown: str) -> None:
        assert formatting.rate(value) == shown

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (None, "-"), (0.0, "0.000"), (1e-5, "1.00e-05"), (0.5, "0.500"), (123.45, "123.5"), (54321.0, "54,321"),
            (2e9, "2.00e+09"),
        ],
    )  # fmt: skip
    def test_numbers(self, value: float | None, shown: str) -> None:
        assert formatting.number(value) == shown

    def test_a_sentence_does_not_write_out_hundreds_of_digits(self) -> None:
        assert formatting.mean_text(5.61e299, percent=False) == "5.61e+299"
        assert formatting.mean_text(1e9 + 2, percent=False) == "1,000,000,002"

    @pytest.mark.parametrize(
        ("value", "percent", "shown"),
        [
            (None, True, "-"), (0.051, True, "+5.1"), (-0.051, True, "-5.1"), (-1e-9, True, "0.0"),
            (0.0, False, "0.000"), (1e-5, False, "+1.00e-05"), (12.34, False, "+12.3"), (-4321.0, False, "-4,321"),
        ],
    )  # fmt: skip
    def test_differences(self, value: float | None, percent: bool, shown: str) -> None:
        assert formatting.signed(value, percent=percent) == shown

    def test_times_money_and_p_values(self) -> None:
        assert [formatting.duration(value) for value in (None, 12, 999.7, 61_000, 180_000)] == [
            "-", "12 ms", "1.0 s", "61.0 s", "3.0 min",
        ]  # fmt: skip
        assert [formatting.money(value) for value in (None, 0.01, 1234.5)] == ["-", "$0.0100", "$1,234.50"]
        assert [formatting.p_value(value) for value in (None, 1e-9, 0.04)] == ["-", "<0.001", "0.040"]
        assert (formatting.level(0.95), formatting.level(0.999)) == ("95%", "99.9%")
