"""The page of a report, exported and in the viewer: the answer on the first screen, details folded below."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from fairtrial import open_store
from fairtrial.cli.app import invoke
from fairtrial.store.notes import write_notes
from fairtrial.viewer.serve import ViewServer
from tests.viewer.conftest import start_server

pytestmark = pytest.mark.long
WIDE, HIGH = 1280, 900
INTERVAL = re.compile(r"[-+]?[\d.,]+%? to [-+]?[\d.,]+%?")
UNFOLDED = """() => {
  const copy = document.querySelector("main").cloneNode(true);
  copy.querySelectorAll("details, script").forEach((part) => part.remove());
  return copy.textContent;
}"""


class Demo(NamedTuple):
    """The demo's run: its exported page and a viewer."""

    export: str
    server: ViewServer

    def open(self, page: Page, kind: str) -> None:
        if kind == "export":
            page.goto(self.export)
            return
        page.goto(self.server.invitation())
        page.goto(f"http://127.0.0.1:{self.server.port}/{self.server.access.prefix}/support@1")
        page.locator("meta[http-equiv=refresh]").wait_for(state="detached")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("report")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert invoke(["init", "demo"]) == 0
        os.chdir("demo")
        assert invoke(["run"]) == 0
        # A warning, which no page may fold away.
        store = open_store(".fairtrial/runs.db")
        store.update_run(store.runs()[0].run_id, notes=write_notes(stopped="the budget was used up"))
        store.close()
        assert invoke(["export", "support", "--format", "html", "--output", "report.html"]) == 0
    finally:
        os.chdir(before)
    server, thread = start_server(folder / "demo" / ".fairtrial" / "runs.db")
    yield Demo((folder / "demo" / "report.html").as_uri(), server)
    server.stop()
    thread.join(60)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield made
        made.close()


def bottom(page: Page, place: str) -> float:
    box = page.locator(place).first.bounding_box()
    assert box is not None, place
    return box["y"] + box["height"]


@pytest.mark.parametrize("kind", ["export", "viewer"])
def test_the_first_screen_has_the_answer_and_every_interval_once(demo: Demo, browser: Browser, kind: str) -> None:
    page = browser.new_page(viewport={"width": WIDE, "height": HIGH})
    demo.open(page, kind)
    row, sentence, worst = ".scroll table", "p.verdict", "table.worst"
    assert bottom(page, row) < bottom(page, sentence) < bottom(page, worst) <= HIGH
    assert page.locator(row).first.locator("tbody tr").count() == 2
    assert page.locator(sentence).inner_text().startswith("passed: no detectable difference between careful and basel")
    assert page.locator(f"{worst} tr:not(.why) td").count() == 2 * 5
    reasons = page.locator(f"{worst} .why").all_inner_texts()
    assert len(reasons) == len(set(reasons)) == 5
    assert page.locator(worst).bounding_box()["width"] > 0.9 * WIDE  # type: ignore[index]  # it was found above
    text = page.evaluate(UNFOLDED)
    assert "ended early: the budget was used up" in text
    intervals = Counter(INTERVAL.findall(text))
    assert {"60.7% to 88.9%", "75.8% to 97.1%", "-5.8 to +29.6"} <= set(intervals)
    assert [found for found, times in intervals.items() if times > 1] == []
    if kind == "viewer":
        page.locator(f"{worst} a").first.click()
        page.get_by_text("Order 1020 never came").first.wait_for()
    page.close()


@pytest.mark.parametrize("kind", ["export", "viewer"])
def test_details_open_with_the_keyboard_and_for_print(demo: Demo, browser: Browser, kind: str) -> None:
    page = browser.new_page(viewport={"width": WIDE, "height": HIGH})
    demo.open(page, kind)
    inside = page.get_by_text("mean score, errors as 0")
    assert not inside.is_visible()
    page.emulate_media(media="print")
    assert inside.bounding_box()["height"] > 0  # type: ignore[index]
    page.emulate_media(media="screen")
    page.locator("details.more > summary").focus()
    page.keyboard.press("Enter")
    inside.wait_for()
    columns = {round(box["x"]) for table in page.locator(".part > .scroll").all() if (box := table.bounding_box())}
    assert len(columns) == 2
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (390, "light")])
def test_both_pages_fit_a_phone_and_violate_no_rule_of_axe(
    demo: Demo, browser: Browser, width: int, scheme: Any
) -> None:
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    # The policy of the pages would refuse axe itself.
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True)
    violations: dict[str, list[str]] = {}
    for kind in ("export", "viewer"):
        demo.open(page, kind)
        page.locator("details.more > summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, kind
        page.evaluate(axe)
        found = page.evaluate("async () => (await axe.run(document)).violations")
        if found:
            violations[kind] = [f"{one['id']}: {one['nodes'][0]['html'][:160]}" for one in found]
    page.close()
    assert violations == {}
