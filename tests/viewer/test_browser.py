"""The viewer in a real browser: looks, keys, long transcripts, and attacks."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from fairtrial.cli.command_view import _open_browser
from tests.viewer.conftest import HOSTILE, Viewed, segment

PAGES = {
    "runs": "",
    "report": "support@2",
    "trials": "support@2/trials?m.kind=refund",
    "trial": "support@2/t/baseline/q15",
    "compare": "compare?a=support@2:baseline&b=support@2:careful",
    "pair": "compare/sample?a=support@2:baseline&b=support@2:careful&id=q03",
    "matrix": "matrix?c=support@2&c=support@1&show=differ",
    "history": "history?suite=support",
    "history by run": "history?suite=support&by=run&alarm=1",
    "running": "endless@1",
    "missing": "nothing@1",
}
pytestmark = pytest.mark.long
RULES = "MAP evil.example 127.0.0.1, MAP rebind.example 127.0.0.1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser, closed after this module: while Playwright is open, its event loop is the only one of the thread."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", f"--host-resolver-rules={RULES}"]
        made = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        yield made
        made.close()


class Watched:
    """A page, and everything that should not happen on it."""

    def __init__(self, viewed: Viewed, browser: Browser, **options: Any) -> None:
        self.viewed = viewed
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.problems: list[str] = []
        self.foreign: list[str] = []
        self.page.on("dialog", self._dialog)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", self._console)
        self.page.on("request", self._request)
        self.page.goto(viewed.server.invitation())

    def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "404" not in message.text:
            self.problems.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(f"http://127.0.0.1:{self.viewed.server.port}/"):
            self.foreign.append(request.url)

    def open(self, path: str) -> Page:
        self.page.goto(self.viewed.base + path)
        # A report loads itself again until its figures are there.
        self.page.locator("meta[http-equiv=refresh]").wait_for(state="detached")
        return self.page


@pytest.fixture
def watched(viewed: Viewed, browser: Browser) -> Iterator[Watched]:
    made = Watched(viewed, browser)
    yield made
    made.context.close()


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (320, "light")])
def test_every_page_fits_its_window_and_reports_nothing(
    viewed: Viewed, browser: Browser, width: int, scheme: Any
) -> None:
    made = Watched(viewed, browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name, path in PAGES.items():
        page = made.open(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.locator("h1").count() == 1, name
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light"), name
    assert made.problems == []
    assert made.foreign == []
    made.context.close()


def test_a_link_leads_through_the_page_to_sign_in_and_the_opened_browser_needs_none(
    viewed: Viewed, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    _open_browser(tmp_path, viewed.server.invitation("support@2"))
    context = browser.new_context()
    page = context.new_page()
    page.goto(viewed.base + "support@2/trials?m.kind=refund")
    page.get_by_label("Token").fill("not the token")
    page.keyboard.press("Enter")
    assert page.get_by_role("alert").inner_text() == "That is not the token."
    page.get_by_label("Token").fill(viewed.server.access.token)
    page.get_by_role("button").click()
    page.wait_for_url("**/support@2/trials?m.kind=refund")
    context.close()
    context = browser.new_context()
    page = context.new_page()
    page.goto(opened[0])
    page.wait_for_url(viewed.base + "support@2")
    assert page.goto(viewed.base).status == 200  # type: ignore[union-attr]
    context.close()


def test_keys_move_open_and_go_back_with_the_filter_kept(watched: Watched) -> None:
    page = watched.open("support@2/trials?e=baseline&outcome=failed")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert "q03" in page.locator(".here").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/t/baseline/q03?**")
    page.keyboard.press("]")
    page.wait_for_url("**/t/baseline/q06?**")
    page.go_back()
    page.go_back()
    page.wait_for_url("**/trials?e=baseline&outcome=failed")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "q"
    page.keyboard.type("j?")
    assert page.locator("#help").is_hidden()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    assert watched.problems == []


def test_a_facet_filters_when_it_is_chosen(watched: Watched) -> None:
    page = watched.open("support@2/trials")
    page.get_by_label("refund").check()
    page.wait_for_url("**/trials?m.kind=refund")
    assert page.locator("tbody tr").count() == 28
    page.get_by_role("link", name="kind = refund").click()
    page.wait_for_url("**/trials")
    assert watched.problems == []


def test_events_collapse_and_a_link_opens_one(watched: Watched) -> None:
    page = watched.open("support@2/t/baseline/q15")
    page.keyboard.press("c")
    assert page.locator(".transcript > details[open]").count() == 0
    page.locator(".outline a").nth(3).click()
    assert page.locator(".transcript > details[open]").count() == 1
    page.keyboard.press("m")
    page.wait_for_url("**form=markdown**")
    assert page.locator(".md").count() > 0
    assert watched.problems == []


def test_everything_but_keys_works_without_scripts(viewed: Viewed, browser: Browser) -> None:
    made = Watched(viewed, browser, java_script_enabled=False)
    page = made.open("support@2/trials")
    page.get_by_label("failed").check()
    page.locator("input[name='latency_ms.min']").fill("300")
    page.get_by_role("button", name="Filter").click()
    assert page.locator("tbody tr").count() == 5
    page.locator("tbody a.main").first.click()
    assert page.locator("h1").inner_text() == "q30"
    made.context.close()


@pytest.mark.long
@pytest.mark.proves("R119")
def test_find_and_anchors_work_in_a_transcript_of_thousands_of_messages(watched: Watched) -> None:
    page = watched.open("long@1/t/baseline/q00")
    assert page.locator(".transcript > details").count() == 5_000
    assert page.evaluate("window.find('message 4987:')")
    seen = page.evaluate(
        "(() => { const box = getSelection().getRangeAt(0).getBoundingClientRect();"
        " return box.top >= 0 && box.bottom <= innerHeight; })()"
    )
    assert seen
    watched.open("long@1/t/baseline/q00#e4321")
    page.wait_for_function(
        "(() => { const box = document.getElementById('e4321').getBoundingClientRect();"
        " return box.top > -5 && box.top < innerHeight; })()"
    )
    page.locator("a[rel=next]").last.click()
    page.wait_for_url("**from=5000**")
    assert "the very last needle" in page.locator(".transcript").inner_text()
    assert watched.problems == []


@pytest.mark.long
@pytest.mark.proves("R122", "R123")
def test_attacks_in_every_text_execute_nothing_and_fetch_nothing(watched: Watched) -> None:
    run = watched.viewed.store.get_run("hostile-run")
    name, (first, second) = segment(run.name), run.experiments
    pages = ["", name, f"matrix?c={name}", f"{name}/trials", f"{name}/trials?q=script&sort=-score"]
    for place, text in enumerate(HOSTILE):
        pages += [
            f"{name}/t/{segment(second)}/{segment(f'{place}/{text}')}?form={form}&invisible=1"
            for form in ("text", "markdown", "raw")
        ]
    pages.append(f"{name}/t/{segment(first)}/{segment(f'1/{HOSTILE[1]}')}")
    for path in pages:
        page = watched.open(path)
        assert page.evaluate("window.hit") is None, path
        assert page.locator("main iframe, main img, main form[action^=javascript], main base, main style").count() == 0
        targets = page.evaluate("[...document.querySelectorAll('a')].map((link) => link.protocol)")
        assert set(targets) <= {"http:", "https:"}, path
    assert watched.problems == []
    assert watched.foreign == []


EVIL = """<!doctype html><title>wait</title><body><script>
const target = "http://127.0.0.1:%d/%s/";
async function attempt(name, action) { try { found[name] = await action(); } catch { found[name] = "refused"; } }
const found = {};
(async () => {
  await attempt("read", async () => (await fetch(target, { credentials: "include" })).status);
  await attempt("post", async () => (await fetch(target + "logout", { method: "POST", credentials: "include", body: "x",
    mode: "no-cors" })).type);
  await attempt("script", () => new Promise((done) => { const it = document.createElement("script"); it.src = target;
    it.onload = () => done("loaded"); it.onerror = () => done("refused"); document.body.append(it); }));
  await attempt("frame", () => new Promise((done) => { const it = document.createElement("iframe"); it.src = target;
    it.onload = () => { let text = "opaque"; try { text = it.contentDocument.body.textContent } catch {} done(text) };
    document.body.append(it); }));
  document.title = JSON.stringify(found);
})();
</script>"""


@pytest.fixture
def evil(viewed: Viewed) -> Iterator[tuple[int, list[str | None]]]:
    """Another site: its port, and the cookies it was sent."""
    page = EVIL % (viewed.server.port, viewed.prefix)
    cookies: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cookies.append(self.headers.get("Cookie"))
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1], cookies
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.mark.proves("R122")
@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
def test_another_site_reads_changes_and_frames_nothing(
    watched: Watched, evil: tuple[int, list[str | None]], host: str
) -> None:
    port, cookies = evil
    statuses: dict[str, int] = {}

    def note(answer: Any) -> None:
        statuses[answer.request.method + answer.url] = answer.status

    watched.page.on("response", note)
    watched.open("support@2")
    statuses.clear()
    watched.page.goto(f"http://{host}:{port}/")
    watched.page.wait_for_function("document.title.startsWith('{')")
    found = json.loads(watched.page.title())
    assert found["read"] == "refused"
    assert found["script"] == "refused"
    assert "support" not in found["frame"]
    base = watched.viewed.base
    reached = {url: status for url, status in statuses.items() if base in url and "icon.svg" not in url}  # Of our page.
    assert {url: status for url, status in reached.items() if status != 403} == {}
    assert cookies[0] is None
    assert watched.open("support@2").locator("h1").inner_text() == "support@2"  # The session is still there.


@pytest.mark.proves("R122")
def test_a_rebound_name_is_not_answered_and_a_link_from_elsewhere_is(
    watched: Watched, evil: tuple[int, list[str | None]]
) -> None:
    viewed = watched.viewed
    answer = watched.page.goto(f"http://rebind.example:{viewed.server.port}/{viewed.prefix}/")
    assert answer is not None
    assert answer.status == 421
    watched.page.goto(f"http://evil.example:{evil[0]}/")
    watched.page.evaluate("address => { location.href = address }", viewed.base + "support@2")
    watched.page.wait_for_url("**/support@2")
    assert watched.page.locator("h1").inner_text() == "support@2"


def test_keys_move_through_the_matrix_and_a_choice_shows_its_rows(watched: Watched) -> None:
    page = watched.open("matrix?c=support@2")
    page.get_by_label("show").select_option("worse")
    page.wait_for_url("**show=worse**")
    assert page.locator("tbody tr").count() == 5
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert "q10" in page.locator(".here").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/t/baseline/q10?**")
    page.go_back()
    page.get_by_text("Columns (2)").click()
    page.get_by_label("support@1:careful", exact=True).check()
    page.wait_for_url("**c=support%401%3Acareful**")
    assert page.locator("thead th").count() == 4
    page.get_by_label("compare support@1:careful with the first column").click()
    page.wait_for_url("**/compare?a=support%402%3Abaseline&b=support%401%3Acareful")
    page.get_by_role("link", name="all samples side by side").click()
    page.wait_for_url("**/matrix?c=support%402%3Abaseline&c=support%401%3Acareful")
    watched.open("matrix?c=support@2")
    page.keyboard.press("]")
    page.wait_for_url("**from=25**")
    assert watched.problems == []


def test_the_matrix_is_read_filtered_and_reached_without_scripts(viewed: Viewed, browser: Browser) -> None:
    made = Watched(viewed, browser, java_script_enabled=False)
    page = made.open("?suite=support")
    page.locator("select[name=a]").select_option("support@1:careful")
    page.locator("select[name=b]").select_option("support@2:baseline")
    page.get_by_role("button", name="Side by side").click()
    assert page.locator("thead .who").all_inner_texts() == ["careful", "baseline"]
    page.get_by_label("show").select_option("better")
    page.get_by_label("search").fill("Order 10")
    page.get_by_role("button", name="Show").click()
    assert page.locator("tbody a.main").all_inner_texts() == ["q10"]
    made.context.close()


@pytest.mark.parametrize("width", [390, 899])
def test_a_phone_shows_the_filter_line_first_then_input_and_output(
    viewed: Viewed, browser: Browser, width: int
) -> None:
    made = Watched(viewed, browser, viewport={"width": width, "height": 844})
    page = made.open("support@2/trials?outcome=failed")
    summary, first = page.get_by_text("Filter and search"), page.locator("tbody tr").first
    assert summary.bounding_box()["y"] < first.bounding_box()["y"] < 500  # type: ignore[index]
    assert page.get_by_label("search all texts").is_hidden()
    for text in ("Where is order 0?", "Order 0 was never seen"):
        box = first.get_by_text(text).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    summary.click()
    page.locator("input[name=e][value=careful]").click()
    page.wait_for_url("**e=careful**")
    assert page.locator("tbody tr").count() == 8
    page = made.open("matrix?c=support@2")
    assert page.locator("tbody td .who").first.is_visible()
    made.context.close()


def test_a_wide_window_has_its_filters_unfolded(watched: Watched) -> None:
    page = watched.open("support@2/trials")
    assert page.get_by_label("search all texts").is_visible()
    assert page.get_by_text("Filter and search").is_hidden()


def test_the_history_changes_with_what_is_chosen_and_leads_to_trials(watched: Watched) -> None:
    page = watched.open("history?suite=support")
    with page.expect_navigation():
        page.get_by_label("one point for each").select_option("run")
    page.locator("meta[http-equiv=refresh]").wait_for(state="detached")
    assert page.url.endswith("history?suite=support&experiment=baseline&by=run")
    assert page.locator("tr.row").count() == 2
    assert page.locator("section svg.ft-plot").count() == 2
    with page.expect_navigation():
        page.get_by_label("experiment").select_option("careful")
    page.locator("meta[http-equiv=refresh]").wait_for(state="detached")
    assert "Pass rate of careful" in page.locator("h2").first.inner_text()
    page.keyboard.press("j")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.url.endswith("/support@2")
    page.go_back()
    page.get_by_role("link", name="failed").first.click()
    page.wait_for_url("**/support@2/trials?e=careful&outcome=failed")
    assert watched.problems == []
