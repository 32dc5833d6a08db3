"""Every page of the viewer, checked with axe-core in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from fairtrial import Label, TrialKey, open_store
from fairtrial.store.notes import ReviewNote, write_notes
from fairtrial.viewer.review import review_code
from tests.viewer.conftest import Viewed, add_running_run, add_support_runs, open_session, start_server
from tests.viewer.days import add_days
from tests.viewer.pictures import add_picture_run
from tests.viewer.searches import add_search

pytestmark = pytest.mark.long
REVIEW = ReviewNote("helpful", "Does it help?", "Be *strict*.", ("baseline",), "ratings", "07", 36, 2, ("m.kind",))
CODE = review_code("support-run-2", REVIEW)
PAGES = {
    "sign in": "login?token=used",
    "runs": "",
    "report": "support@2",
    "trials": "support@2/trials?m.kind=refund",
    "trial": "support@2/t/baseline/q15",
    "trial in Markdown": "support@2/t/baseline/q15?form=markdown",
    "trial with pictures": "pictures@1/t/baseline/q0",
    "error": "support@2/t/baseline/q09",
    "compare": "compare?a=support@2:baseline&b=support@2:careful",
    "pair": "compare/sample?a=support@2:baseline&b=support@2:careful&id=q03",
    "matrix": "matrix?c=support@2&c=support@1&show=differ",
    "history": "history?suite=support",
    "history by day": "history?suite=daily",
    "history with the alarm": "history?suite=daily&alarm=1&reference=800&span=30",
    "search": "search?name=many",
    "running": "endless@1",
    "missing": "nothing@1",
    "review list": "review",
    "queue": f"review/{CODE}",
    "queue with all": f"review/{CODE}?transcript=1&expected=1",
    "reviews": "support@2/review",
    "review": "support@2/review/helpful",
    "calibration": "support@2/calibration?early=1",
    "calibration to come": "support@2/calibration",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    path: Path = tmp_path_factory.mktemp("axe") / "runs.db"
    store = open_store(path)
    add_support_runs(store)
    add_running_run(store)
    add_picture_run(store)
    add_days(store)
    add_search(
        store, "many", [f"Answer in {at} words." for at in range(12)], [at // 2 for at in range(12)], error="dead"
    )
    store.update_run("support-run-2", notes=write_notes(reviews=(REVIEW,)))
    for place in (1, 2, 3, 4, 5, 6):
        key = TrialKey("support-run-2", "baseline", f"q{place:02}")
        store.label(Label(key, "helpful", "good", "ann"))
        store.label(Label(key, "helpful", "good" if place % 2 else "poor", "ben"))
        store.label(Label(key, "~comment:helpful", "m" * 400, "ann"))
        for name in ("~comment", "~run-comment"):
            store.label(
                Label(
                    key._replace(sample_id="q15"), name, {"id": f"{place:016}", "text": "hm " * 200 + "m" * 400}, "me"
                )
            )
    store.label(Label(TrialKey("support-run-2", "baseline", "q07"), "~skip:helpful", "cannot tell", "ann"))
    server, thread = start_server(path, user="me")
    yield Viewed(server, store, open_session(server))
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (320, "light"), (390, "dark")])
def test_no_page_violates_a_rule_of_axe(reviewed: Viewed, browser: Browser, width: int, scheme: Any) -> None:
    # The policy of the pages would refuse axe itself.
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(reviewed.server.invitation())
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    violations: dict[str, list[str]] = {}
    for name, path in PAGES.items():
        page.goto(reviewed.base + path)
        page.locator("meta[http-equiv=refresh]").wait_for(state="detached")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        page.evaluate(axe)
        found = page.evaluate("async () => (await axe.run(document)).violations")
        if found:
            violations[name] = [
                f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}" for one in found
            ]
    context.close()
    assert violations == {}
