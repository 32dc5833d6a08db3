"""Reports as web pages: nothing is fetched, no foreign code runs, and all text can be read."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fairtrial import EvalResult, Session, ToolInvoked, TrialKey, open_store
from fairtrial.reports.render import plots
from fairtrial.reports.render.document import Bar
from fairtrial.reports.render.html import POLICY, SCRIPT
from tests.reports.browser import Browser
from tests.reports.made import FAIL, HOSTILE, PASS, TASK_ERROR, Made, hostile_report, made_report

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
    assert found.text.count("66.7%") >= 2
    assert "29.9% to 92.5%" in found.text
    assert [attributes.get("role") for tag, attributes in found.tags if tag == "svg"].count("img") == 2
    assert "Trials: errors first" in found.text
    results = [attributes["data-result"] for tag, attributes in found.tags if "data-result" in attributes]
    assert results == ["task error", *["failed"] * 3, *["passed"] * 6]
    assert "ValueError: no" in found.text


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
