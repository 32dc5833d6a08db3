"""Comparisons for papers: a table that is LaTeX whatever the names are, and a paragraph of what was done."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fairtrial import AnalysisPlan, Metric, Score, compare
from fairtrial.reports.compare.methods import latex_text
from tests.reports.build import stored
from tests.reports.made import HOSTILE, hostile_report
from tests.reports.sides import GRADED, one, planned


def test_foreign_text_is_no_latex() -> None:
    report = hostile_report()
    names = report.experiments
    found = compare(report[names[0]], report[names[-1]], metrics=None)
    evil = '\\input{/etc/passwd} $x^2$ ^^5cinput %& #1 ~_|<>`"a[2pt]*--' + HOSTILE
    found = replace(found, baseline=replace(found.baseline, name=evil))
    named = tuple(replace(metric, metric=f"{evil} {place}") for place, metric in enumerate(found.candidates[0].metrics))
    found = replace(found, candidates=(replace(found.candidates[0], metrics=named),))
    for text in (found.to_latex(), latex_text(found.methods())):
        assert "input" in text
        _check_latex(text)


def test_a_row_that_begins_with_a_bracket_or_star_is_no_argument() -> None:
    sides = {
        name: [
            Score(1.0, metrics=[Metric("[2pt]", float(place % 2 + shift)), Metric("*", 1.0 * place)])
            for place in range(12)
        ]
        for shift, name in enumerate(("plain", "terse"))
    }
    table = one(stored(sides), metrics=None).to_latex()
    assert "{[}2pt{]} & " in table
    assert "{*} & " in table


def test_several_candidates_have_rows_of_their_own() -> None:
    report = stored({**GRADED, "other": GRADED["plain"]})
    found = compare(report["plain"], report["terse"], report["other"])
    assert "\\multicolumn{9}{l}{\\textit{terse}} \\\\\npassed & 75.0\\% & " in found.to_latex()
    _check_latex(found.to_latex())
    assert found.methods().startswith("terse and other were each compared with plain on 60 samples that both have, ")


def test_sides_without_a_common_sample_have_methods_without_a_test() -> None:
    other = stored({"terse": [1.0] * 3}, ids=["a", "b", "c"], run_id="r2")
    said = compare(stored({"plain": [1.0] * 3}), other).methods()
    assert said.startswith("terse was compared with plain on 0 samples that both have, ")
    assert "Samples of one side only (up to 6) were left out." in said
    assert "level" not in said


def test_the_methods_follow_what_was_done() -> None:
    sides: dict[str, list[Any]] = {**GRADED, "terse": ["task_error", "scorer_error", *GRADED["terse"][2:]]}
    metadata = [{"cluster": place // 3, "topic": "odd" if place % 2 else "even"} for place in range(60)]
    said = one(stored(sides, metadata=metadata), metrics=["passed", "calm"], slice_by="topic").methods()
    for part in (
        "terse was compared with plain on 60 samples that both have, with 1 trial of each sample and side.",
        "tests and intervals are based on 20 clusters",
        "The p-values of 2 tests were adjusted by Holm's method, at 0.05 over all of them.",
        "repeated on 2 slices by topic; their 4 p-values were adjusted by Benjamini and Hochberg's method",
        "1 trial ended in a task error or timeout and counted as a failure.",
        "1 trial was not run or not scored, and left out of means and intervals.",
        "Sides whose interval in passed lies within 5.0 points of 0 are called equally good.",
        "No analysis plan was stored with the runs.",
    ):
        assert part in said
    plain = one(stored({"plain": [0.0, 1.0] * 20, "terse": [1.0] * 40})).methods()
    assert "Differences in passed were assessed by the mid-p McNemar test (95% interval: " in plain
    assert "The level of the test is 0.05." in plain
    assert "No trial ended in a task error or timeout. No trial is missing." in plain
    assert "Holm" not in plain
    assert "cluster" not in plain
    plan = AnalysisPlan(samples=50)
    late = one(planned({"plain": [0.0, 1.0] * 20, "terse": [1.0] * 40}, plan)).methods()
    assert "50 samples had been planned, for a power of 0.8." in late
    assert "with these deviations: 40 samples are compared, planned were 50." in late


OURS = re.compile(
    r"\\begin\{tabular\}\{[lr]+\}|\\(begin|end)\{(table|tabular)\}|\\caption\{|\\centering\b|\\hline\b| \\\\$"
    r"|\\textit\{"
    r"|\\multicolumn\{\d\}\{l\}\{|\\text(backslash|asciicircum|asciitilde|less|greater|bar|asciigrave)\{\}"
    r"|\{\\char34\}|\\[{}$&#%_]|\{[\[\]*]\}|\$-\$| & |[-'!?,]\{\}",
    re.MULTILINE,
)


def _check_latex(text: str) -> None:
    """What is left without our own commands and the escapes has no character that TeX treats specially."""
    left = OURS.sub("", text)
    assert not set(left.replace("}", "")) & set('\\{$&#%_^~<>|`"[]*'), left
