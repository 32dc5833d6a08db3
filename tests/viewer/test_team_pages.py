"""The pages of a team in a real browser: rules of axe-core, and names that are markup."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Dialog, sync_playwright

from tests.viewer.teams import PROJECTS, oidc_team

pytestmark = pytest.mark.long
MARKUP = "<img src=x onerror=alert(1)>{{7*7}}\u202e"
PAGES = (
    "/",
    "/p/support/",
    "/p/support/support@2",
    "/p/support/support@2/review",
    "/p/support/review",
    "/callback?state=x",
)


@pytest.mark.timeout(300)
def test_no_page_of_a_team_violates_a_rule_of_axe_or_runs_a_name(tmp_path: Path) -> None:
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    projects: dict[str, Any] = {**PROJECTS, "support": {**PROJECTS["support"], "title": MARKUP}}
    violations: dict[str, Any] = {}
    alerts: list[str] = []

    def said(dialog: Dialog) -> None:
        alerts.append(dialog.message)
        dialog.dismiss()

    with oidc_team(tmp_path, projects=projects) as team, sync_playwright() as playwright:
        signed_in = team.sign_in("u1", "admins", name=MARKUP)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for width, scheme in ((1400, "light"), (320, "dark")):
            context = browser.new_context(
                viewport={"width": width, "height": 900},
                color_scheme=scheme,  # type: ignore[arg-type]  # one of its words
                bypass_csp=True,
            )
            context.add_cookies([{"name": "fairtrial", "value": signed_in.cookie(team.url), "url": team.url}])
            page = context.new_page()
            page.on("dialog", said)
            page.set_default_timeout(120_000)
            for path in PAGES:
                page.goto(team.page(path))
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
                assert page.locator("main img").count() == 0, path
                page.evaluate(axe)
                found = page.evaluate("async () => (await axe.run(document)).violations")
                if found:
                    violations[f"{path} at {width}"] = [
                        (one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found
                    ]
            page.goto(team.page("/"))
            assert "<img src=x onerror=alert(1)>{{7*7}}" in page.inner_text("main")
            assert "<img src=x" in page.inner_text("header")
            context.close()
        browser.close()
    assert violations == {}
    assert alerts == []
