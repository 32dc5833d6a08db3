"""Pages, JUnit files, LaTeX tables and the JSON of runs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fairtrial import AnalysisPlan, ConfigurationError, Metric, Score, Session, ToolInvoked, compare, gate, open_store
from fairtrial.reports.compare.methods import latex_text
from fairtrial.reports.render import plots
from fairtrial.reports.render.document import Bar
from fairtrial.reports.render.html import POLICY, SCRIPT
from fairtrial.reports.report.run_json import listed_run, report_run, totals_record
from fairtrial.store.notes import write_notes
from fairtrial.trials import EvalResult, TrialKey
from tests.reports.browser import Browser
from tests.reports.build import stored
from tests.reports.made import FAIL, HOSTILE, PASS, TASK_ERROR, Made, hostile_report, made_report
from tests.reports.sides import GRADED, one, planned

# Reports as web pages: nothing is fetched, no foreign code runs, and all text can be read.


HOSTILE_SCRIPT = (
    "<script>document.title='owned'</script><img src='http://evil.example/x' onerror=\"document.title='owned'\">"
)


class Reader(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("render", ["to_html", "_repr_html_"])
def test_text_of_models_is_escaped_on_a_page_and_in_a_notebook(render: str) -> None:
    page = getattr(hostile_report(), render)()
    found = read(page)
    allowed = {
        "html", "head", "meta", "link", "title", "style", "body", "main", "div", "h1", "h2", "p", "span", "strong",
        "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "figure", "details", "summary", "dl", "dt", "dd",
        "pre", "svg", "desc", "line", "circle", "rect", "text", "script", "input", "select", "option", "output",
    }  # fmt: skip
    assert {tag for tag, _ in found.tags} <= allowed
    for tag, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcdoc")], tag
        assert tag == "link" or "href" not in attributes
    # Of scripts there is one at most, our own.
    assert page.count("<script>") == page.count(f"<script>{SCRIPT}</script>") == (1 if render == "to_html" else 0)
    assert "<script>document.title='owned'</script>" in found.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202e]", page)


@pytest.mark.proves("R46")
def test_a_page_in_a_real_browser_fetches_nothing_and_runs_nothing_of_others(browser: Browser) -> None:
    dom = browser.open(hostile_report().to_html())
    assert browser.requests == []
    found = read(dom)
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "embed")]
    assert [tag for tag, _ in found.tags].count("script") == 1
    assert "12 of 12" in found.text  # Ours ran, under the policy.
    assert "<title>owned" not in dom
    assert "<script>document.title='owned'</script>" in found.text


def test_should_escaping_ever_fail_the_policy_stops_scripts_and_images(browser: Browser) -> None:
    page = made_report(lambda *_: PASS).to_html()
    dom = browser.open(page.replace("</main>", f"{HOSTILE_SCRIPT}</main>"))
    assert "<title>support" in dom
    assert browser.requests == []


def test_the_browser_of_these_tests_would_have_run_and_fetched_it(browser: Browser) -> None:
    dom = browser.open(f"<!doctype html><title>mine</title>{HOSTILE_SCRIPT}")
    assert "<title>owned" in dom
    assert browser.requests == ["http://evil.example/x"]


def test_the_style_is_applied_under_the_policy_in_light_and_in_dark(browser: Browser) -> None:
    page = made_report(lambda *_: PASS).to_html()
    assert html.escape(POLICY) in page
    assert "unsafe" not in POLICY
    assert browser.background(page, dark=False) == "#ffffff"
    assert browser.background(page, dark=True) == "#0d1117"


def test_in_a_notebook_every_rule_of_style_is_about_the_report_alone() -> None:
    found = re.search("<style>(.*?)</style>", made_report(lambda *_: PASS)._repr_html_(), re.DOTALL)
    assert found is not None
    rules = re.sub(r"@media[^{]*\{|\n", "", found[1])
    selectors = [one for group in re.findall(r"([^{}]+)\{", rules) for one in group.split(",")]
    assert len(selectors) > 20
    assert [one for one in selectors if not one.strip().startswith((".ft", "body.ft"))] == []


def typed(page: str, words: str, **picks: str) -> str:
    """The page without its policy, and with somebody who types words into its filter and picks values."""
    chosen = "".join(f"document.querySelector('select[name={name}]').value = '{one}';" for name, one in picks.items())
    act = f"<script>let box = document.querySelector('input'); {chosen} box.value = '{words}';" + (
        "box.dispatchEvent(new Event('input'))</script>"
    )
    return re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</main>", f"{act}</main>")


def test_trials_are_filtered_by_result_experiment_and_words(browser: Browser) -> None:
    def trial(place: int, experiment: str, repeat: int) -> Made:
        return Made(float(place % 2), output=f"Answer {place} of {experiment}")

    page = made_report(trial, experiments=("a", "b"), metadata=lambda at: {"kind": ["x", "y"][at % 2]}).to_html()
    assert "20 of 20" in read(browser.open(page)).text
    assert "10 of 20" in read(browser.open(typed(page, "KIND=X"))).text
    assert "5 of 20" in read(browser.open(typed(page, "", result="failed", experiment="b"))).text
    dom = browser.open(typed(page, "answer 7", experiment="b"))
    assert "1 of 20" in read(dom).text
    assert len(re.findall('<details class="trial"[^>]*hidden', dom)) == 19


def test_a_page_has_the_date_parameters_slices_sessions_and_tracebacks() -> None:
    store = open_store("memory:")
    session = Session()
    session.record(ToolInvoked("retrieve", {"query": "refund"}, result=["doc-1"]))
    params = {"baseline": {"model": "rag-large", "k": 3}}
    report = made_report(
        lambda place, *_: None if place == 3 else PASS,
        store=store, params=params, metadata=lambda at: {"kind": "xy"[at % 2]},
    )  # fmt: skip
    key = TrialKey("run0000001", "baseline", "sample-03", 0)
    calls = '  File "/home/me/evals.py", line 8, in find\n    return {}["x"]\n'
    failed: dict[str, Any] = {"outcome": "task_error", "error": "KeyError: 'x'", "metadata": {"traceback": calls}}
    store.commit("run0000001", [EvalResult(key=key, ordinal=3, snapshot=session.snapshot(), **failed)])
    text = read(report.refresh().to_html()).text
    assert "support@1, started 1970-01-01 00:16 UTC" in text
    assert re.search(r"Parameters of the experiments\s+experimentmodelk\s+baselinerag-large3", text)
    assert re.search(r"Slices\s+slicenpass rateinterval0 to 1\s+kind\s+x5100.0%", text)
    assert 'retrieve(query="refund") -> ["doc-1"]' in text
    assert "KeyError: 'x' (evals.py:8 in find)" in text
    assert 'return {}["x"]' in text


def test_a_page_is_bounded_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.reports.report.trials._PAGE_CHARACTERS", 20_000)
    report = made_report(lambda place, *_: Made(float(place > 3), output="x" * 3_900), samples=30)
    text = read(report.to_html()).text
    assert "25 more are not shown here. fairtrial export support@1 --format jsonl has all of them." in text


def test_a_page_has_the_plots_the_figures_and_the_trials_to_read() -> None:
    def trial(place: int, experiment: str, repeat: int) -> Made:
        return TASK_ERROR if place == 9 else PASS if place < 6 else FAIL

    page = made_report(trial).to_html()
    found = read(page)
    assert found.text.count("66.7%") == found.text.count("29.9% to 92.5%") == 1
    assert [attributes.get("role") for tag, attributes in found.tags if tag == "svg"].count("img") == 1
    assert "Trials: errors first" in found.text
    results = [attributes["data-result"] for tag, attributes in found.tags if "data-result" in attributes]
    assert results == ["task error", *["failed"] * 3, *["passed"] * 6]
    assert "ValueError: no" in found.text


def test_a_page_folds_the_details_and_no_warning() -> None:
    page = made_report(lambda *_: PASS, notes=write_notes(stopped="the budget was used up")).to_html()
    before, folded = page.split('<details class="more"><summary>Details</summary>')
    assert "ended early: the budget was used up" in before
    assert "task errors" not in before
    assert "task errors" in folded


def test_many_failures_are_capped_and_their_number_is_stated() -> None:
    page = made_report(lambda *_: FAIL, samples=2_050).to_html()
    assert page.count('<details class="trial"') == 2_000
    assert "50 more are not shown here." in page


def test_giant_outputs_are_cut() -> None:
    page = made_report(lambda *_: Made(0.0, output="x" * 10_000_000), samples=2).to_html()
    assert len(page) < 100_000


class TestPlots:
    ROW = plots.IntervalRow(HOSTILE, Bar(0.2, 0.5, 0.7), HOSTILE)

    def drawn(self) -> list[str]:
        wins = plots.WinsRow(HOSTILE, 3, 4, 5, HOSTILE)
        panel = plots.Distribution(HOSTILE, (1, 0, 2, 40), 0.6)
        return [
            plots.intervals([self.ROW, plots.IntervalRow("none", None, "-")], HOSTILE, alone=True),
            plots.wins_and_losses([wins, plots.WinsRow("empty", 0, 0, 0, "-")], HOSTILE, alone=True),
            plots.distributions([panel, plots.Distribution("empty", (0, 0), None)], HOSTILE, alone=True),
        ]

    def test_a_plot_alone_is_whole_xml_with_a_title_and_a_description(self) -> None:
        for svg in self.drawn():
            root = ElementTree.fromstring(svg)
            names = [child.tag.rpartition("}")[2] for child in root]
            assert names[:3] == ["title", "desc", "style"]
            assert root.get("role") == "img"
            assert not {element.tag.rpartition("}")[2] for element in root.iter()} & {
                "script",
                "image",
                "a",
                "foreignObject",
            }

    def test_every_bar_has_its_number_beside_it(self) -> None:
        _, wins, scores = self.drawn()
        assert re.search(">3</text>", wins)
        assert re.search(">4</text>", wins)
        assert re.search(">40</text>", scores)
        assert "mean 0.600" in scores

    def test_nothing_is_drawn_outside_the_picture(self) -> None:
        for svg in self.drawn():
            width, height = (
                float(part) for part in re.findall(r"[\d.]+", ElementTree.fromstring(svg).get("viewBox") or "")[2:]
            )
            for name, limit in (
                ("x", width),
                ("x1", width),
                ("x2", width),
                ("cx", width),
                ("y", height),
                ("y1", height),
            ):
                assert all(0 <= float(value) <= limit for value in re.findall(rf' {name}="([^"]+)"', svg)), name

    def test_rows_beyond_the_limit_of_a_plot_are_counted(self) -> None:
        svg = plots.intervals([self.ROW] * 70, "many")
        assert "and 10 more, not drawn" in svg

    def test_scales_have_round_numbers(self) -> None:
        row = plots.IntervalRow("a", Bar(-0.12, -0.05, 0.02, -0.12, 0.12, mark=0.0), "")
        svg = plots.intervals([row], "differences", percent=False)
        assert re.findall(r">(-?[\d.]+)</text>", svg) == ["-0.1", "-0.05", "0", "0.05", "0.1"]


# JUnit XML: a test case for every trial, that every parser of XML takes.


def mixed(place: int, experiment: str, repeat: int) -> Made | None:
    kinds = {
        0: TASK_ERROR,
        1: Made(None, "scorer_error", error="judge down"),
        2: Made(None, "timeout"),
        3: FAIL,
        4: Made(None, "not_run"),
        5: None,
    }
    return kinds.get(place, PASS)


def test_failures_errors_and_what_was_not_run_are_told_apart() -> None:
    root = ElementTree.fromstring(made_report(mixed).to_junit())
    assert (root.tag, root.get("name")) == ("testsuites", "support")
    (suite,) = root
    counts = {name: suite.get(name) for name in ("name", "tests", "failures", "errors", "skipped")}
    assert counts == {"name": "support.baseline", "tests": "9", "failures": "1", "errors": "3", "skipped": "1"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert len(cases) == 9
    found = {name: [child.tag for child in case if child.tag != "properties"] for name, case in cases.items()}
    assert found["sample-00"] == ["error"]
    assert found["sample-03"] == ["failure"]
    assert found["sample-04"] == ["skipped"]
    assert found["sample-06"] == []
    error = cases["sample-01"].find("error")
    assert error is not None
    assert (error.get("type"), error.get("message"), error.text) == ("scorer_error", "judge down", "judge down")
    failure = cases["sample-03"].find("failure")
    assert failure is not None
    assert (failure.get("message"), failure.text) == ("not the same", "not the same\n\noutput: an answer")
    assert cases["sample-06"].get("classname") == "support.baseline"
    assert cases["sample-06"].get("time") == "0.100"


def test_every_rate_has_its_interval_and_n_among_the_properties() -> None:
    root = ElementTree.fromstring(made_report(mixed).to_junit())
    facts = {found.get("name"): found.get("value") for found in root[0].findall("properties/property")}
    assert facts["pass_rate"] == "0.8"
    assert float(facts["pass_rate.low"] or 0) == pytest.approx(0.2836, abs=1e-4)
    assert (facts["pass_rate.n"], facts["not_run"], facts["planned"]) == ("5", "2", "10")
    empty = ElementTree.fromstring(made_report(lambda *_: TASK_ERROR, samples=2).to_junit())
    undefined = {found.get("name"): found.get("value") for found in empty[0].findall("properties/property")}
    assert undefined["pass_rate"] == undefined["pass_rate.low"] == ""


def test_repeats_and_experiments_have_names_of_their_own() -> None:
    root = ElementTree.fromstring(made_report(mixed, samples=7, repeats=2, experiments=("a", "b")).to_junit())
    assert [suite.get("name") for suite in root] == ["support.a", "support.b"]
    assert "sample-06 [repeat 1]" in [case.get("name") for case in root.iter("testcase")]
    alone = ElementTree.fromstring(made_report(mixed, samples=7, experiments=("a", "b"))["b"].to_junit())
    assert [suite.get("name") for suite in alone] == ["support.b"]


def test_characters_that_xml_cannot_hold_are_dropped_and_nothing_is_markup() -> None:
    text = hostile_report().to_junit()
    text.encode("utf-8")
    root = ElementTree.fromstring(text)
    known = {"testsuites", "testsuite", "testcase", "properties", "property", "failure", "error"}
    assert {element.tag for element in root.iter()} == known
    failure = next(root.iter("failure"))
    assert "<script>document.title='owned'</script>" in (failure.text or "")
    assert "]]>" in (failure.text or "")
    assert "\n# heading\n" in (failure.text or "")
    assert "\x1b" not in text
    assert "\x00" not in text


def test_a_failing_trial_without_a_reason_says_its_value() -> None:
    root = ElementTree.fromstring(made_report(lambda *_: Made(0.25, output={"a": 1}), samples=1).to_junit())
    failure = next(root.iter("failure"))
    assert (failure.get("message"), failure.text) == ("value 0.25", 'output: {"a":1}')


@pytest.mark.proves("R103")
def test_a_gate_has_a_case_for_every_rule() -> None:
    report = made_report(lambda place, *_: PASS if place % 4 else FAIL, samples=100)
    result = gate(report, {"min_pass_rate": 0.9, "floors": {"value": 0.5}})
    root = ElementTree.fromstring(result.to_junit())
    cases = {case.get("name"): [child.tag for child in case][1:] for case in root.iter("testcase")}
    assert cases == {"passed at least 90.0%": ["failure"], "value at least 0.500": []}
    assert (root[0].get("tests"), root[0].get("failures"), root[0].get("errors")) == ("2", "1", "0")
    close = ElementTree.fromstring(gate(report, {"min_pass_rate": 0.75}).to_junit())
    error = next(close.iter("error"))
    assert error.get("type") == "inconclusive"
    assert "the interval contains 75.0%" in (error.get("message") or "")


@pytest.mark.proves("R103")
def test_a_rule_left_open_by_missing_trials_is_an_error() -> None:
    report = made_report(lambda place, *_: None if place < 20 else PASS, samples=200)
    result = gate(report, {"min_pass_rate": 0.5})
    root = ElementTree.fromstring(result.to_junit())
    assert [case.get("name") for case in root.iter("testcase")] == ["passed at least 50.0%"]
    assert root[0].get("errors") == "1"
    assert "20 of 200 trials (10.0%) have no number for it" in (next(root.iter("error")).get("message") or "")


def test_files_are_written_by_their_suffix(tmp_path: Path) -> None:
    report = made_report(mixed, experiments=("a", "b"))
    compared, decided = compare(report["a"], report["b"]), gate(report["a"], {"min_pass_rate": 0.5})
    begins = {"html": "<!doctype html>", "md": "### ", "json": "{", "xml": "<?xml"}
    for what, suffixes in ((report, "html md json xml"), (report["a"], "html md json xml"), (compared, "html md json"),
                           (decided, "html md json xml")):  # fmt: skip
        for suffix in suffixes.split():
            path = tmp_path / f"{type(what).__name__}.{suffix}"
            what.export(path)
            assert path.read_text(encoding="utf-8").startswith(begins[suffix])
    report.export(tmp_path / "results.csv")
    report.export(tmp_path / "page", "html")
    assert (tmp_path / "page").read_text(encoding="utf-8") == report.to_html()
    with pytest.raises(ConfigurationError, match=r"html, md or json \(got 'xml'\)"):
        compared.export(tmp_path / "comparison.xml")
    with pytest.raises(ConfigurationError, match=r"csv, jsonl or parquet \(got 'docx'\)"):
        report.export(tmp_path / "report.docx")
    assert not (tmp_path / "report.docx").exists()


# Comparisons for papers: a table that is LaTeX whatever the names are, and a paragraph of what was done.


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


# The two JSON forms of a run contain the same data.


def trial(place: int, *_: Any) -> Made | None:
    return None if place == 9 else TASK_ERROR if place == 8 else Made(place % 2, metrics=(Metric("m", 0.5),))


def test_both_shapes_of_a_run_agree_and_differ_only_in_the_form_of_times_and_dataset() -> None:
    report = made_report(trial, tags={"team": "a"}, notes={"stopped": "early"}, created_at=1000.25)
    listed, head = listed_run(report.run, report.store.totals(report.run_id)), report_run(report.run, 1)
    other_form = {"dataset", "created_at", "finished_at"}
    for name in (listed.keys() & head.keys()) - other_form:
        assert listed[name] == head[name], name
    assert listed["dataset"] == {
        "name": head["dataset"],
        "version": head["dataset_version"],
        "fingerprint": head["dataset_fingerprint"],
        "samples": head["samples"],
    }
    for name in ("created_at", "finished_at"):
        assert datetime.fromisoformat(listed[name]) == datetime.fromtimestamp(head[name], UTC)
    assert report_run(report.run, 1) == report.to_json()["run"]


def test_the_figures_of_a_listed_run_are_those_of_its_report() -> None:
    report = made_report(trial)
    part = report.parts[0]
    listed = totals_record(part.totals)
    for name in ("pass_rate", "pass_rate_all", "mean_score", "mean_reward", "mean_latency_ms", "errors", "cost_usd"):
        assert listed[name] == getattr(part, name), name
    record: Any = report.to_json()
    told = record["experiments"][0]
    assert (listed["trials"], listed["scored"], listed["tokens"]) == (
        told["trials"]["finished"],
        told["trials"]["scored"],
        told["tokens"],
    )
