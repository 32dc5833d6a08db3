"""Pictures of samples, messages and tool results: on the page of a trial, in reviews, and in what is exported."""

from __future__ import annotations

import base64
import html
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from fairtrial import Attachment
from fairtrial.reports import EvalReport
from fairtrial.store import open_store
from fairtrial.store.notes import ReviewNote, write_notes
from fairtrial.viewer.access import POLICY
from fairtrial.viewer.review import review_code
from fairtrial.viewer.site import write_site
from tests.viewer import pictures
from tests.viewer.conftest import Viewed, open_session, start_server

PAGE = "pictures@1/t/baseline/q0"
SHOWN = {"wide.png", "small.png", "tall.png", "two pixels.gif", "wrong type.jpg", "cut.png", "polyglot.gif"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Viewed, dict[str, Attachment]]]:
    path = tmp_path_factory.mktemp("pictures") / "runs.db"
    store = open_store(path)
    files = pictures.add_picture_run(store)
    review = ReviewNote("helpful", "Does it help?", "", ("baseline",), "ratings", "07", 1, 1, ())
    store.update_run("picture-run", notes=write_notes(reviews=(review,)))
    server, thread = start_server(path, reviewers=("ann",), user="me")
    yield Viewed(server, store, open_session(server)), files
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


def images(text: str) -> dict[str, str]:
    """Return the name and address of each picture of a page."""
    found = re.findall(r'<img src="([^"]+)" alt="([^"]*)"', text)
    return {html.unescape(name): html.unescape(address) for address, name in found}


def test_pictures_of_a_sample_of_messages_and_of_tools_are_on_the_page(shown: Any) -> None:
    viewed, _ = shown
    text = viewed.get(PAGE).text
    assert set(images(text)) == SHOWN
    before, transcript = text.split('id="transcript"')
    assert set(images(before)) == {"wide.png"}
    tool = transcript[transcript.index("screenshot") :]
    assert set(images(tool)) == {"wide.png", "small.png", "tall.png"}
    assert 'width="1600" height="500" loading="lazy"' in before


def test_a_picture_is_sent_as_what_its_bytes_are_and_everything_else_to_be_saved(shown: Any) -> None:
    viewed, files = shown
    types = {
        "wide.png": "image/png",
        "wrong type.jpg": "image/png",
        "polyglot.gif": "image/gif",
        "two pixels.gif": "image/gif",
    }
    for name, file in files.items():
        answer = viewed.get(f"pictures@1/blob/{file.sha256}?o=0")
        if name in ("missing.png", "huge.png"):
            assert answer.status == 404, name
            continue
        assert answer.headers["x-content-type-options"] == "nosniff"
        inline = name in SHOWN or name == "notes.txt"
        assert answer.headers["content-disposition"].startswith("inline" if inline else "attachment"), name
        if not inline:
            assert answer.headers["content-type"] == "application/octet-stream", name
        elif name in types:
            assert answer.headers["content-type"] == types[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.png", "not in the store"),
        ("huge.png", "too large to show here"),
        ("bomb.png", "60,000 x 60,000 pixels"),
        ("svg as png.png", "not a picture"),
        ("html as gif.gif", "not a picture"),
        ("cut in its head.png", "not a picture"),
        ("cut.png", "the end of the picture is missing"),
    ],
)
def test_the_page_says_what_is_wrong_with_a_picture(shown: Any, name: str, words: str) -> None:
    viewed, _ = shown
    lines = [line for line in viewed.get(PAGE).text.splitlines() if name in line and "<p" in line]
    assert lines
    assert all(words in line for line in lines)


def test_a_drawing_that_can_contain_scripts_stays_a_link(shown: Any) -> None:
    viewed, files = shown
    text = viewed.get(PAGE).text
    assert f'/blob/{files["drawing.svg"].sha256}?o=0">drawing.svg</a>' in text
    assert "drawing.svg" not in images(text)


def test_the_policy_of_pages_with_pictures_is_that_of_all_pages(shown: Any) -> None:
    viewed, _ = shown
    assert viewed.get(PAGE).headers["content-security-policy"] == POLICY
    assert "img-src 'self'; " in POLICY
    assert "script-src 'self'; " in POLICY


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_the_pictures_and_reports_no_problem(shown: Any, scheme: Any, tmp_path: Path) -> None:
    viewed, _ = shown
    exported = tmp_path / "report.html"
    exported.write_text(EvalReport(viewed.store, viewed.store.get_run("picture-run")).to_html(), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_context(color_scheme=scheme, viewport={"width": 500, "height": 900}).new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.goto(viewed.server.invitation())
        for address in (viewed.base + PAGE, exported.as_uri()):
            page.goto(address)
            page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true })")
            page.evaluate("() => document.querySelectorAll('img').forEach((one) => { one.loading = 'eager' })")
            page.wait_for_function("() => [...document.images].every((one) => one.complete)")
            drawn = page.evaluate("() => [...document.images].map((one) => [one.alt, one.naturalWidth, one.width])")
            assert {name for name, _, _ in drawn} == SHOWN
            assert all(natural > 0 and width <= 500 for _, natural, width in drawn), drawn
            assert page.evaluate("document.documentElement.scrollWidth") <= 500
            assert page.evaluate("window.hit") is None
        assert problems == []
        browser.close()


def test_a_reviewer_sees_the_pictures_of_the_drawn_trial(shown: Any) -> None:
    viewed, files = shown
    ann = Viewed(viewed.server, viewed.store, open_session(viewed.server, "ann"))
    [review] = viewed.store.get_run("picture-run").noted.reviews
    queue = f"review/{review_code('picture-run', review)}"
    assert set(images(ann.get(queue).text)) == {"wide.png"}
    found = images(ann.get(f"{queue}?transcript=1").text)
    assert set(found) == SHOWN
    answer = ann.get(found["small.png"].removeprefix("../"))
    assert (answer.status, answer.headers["content-type"]) == (200, "image/png")
    assert ann.get(f"pictures@1/blob/{files['small.png'].sha256}?o=0").status == 403


def test_a_site_has_its_pictures_as_files(shown: Any, tmp_path: Path) -> None:
    viewed, _ = shown
    write_site(viewed.store, viewed.store.get_run("picture-run"), tmp_path / "site.zip")
    with zipfile.ZipFile(tmp_path / "site.zip") as archive:
        page = archive.read("t/0001.html").decode()
        found = images(page)
        assert set(found) == SHOWN
        for name, address in found.items():
            assert archive.read(address.removeprefix("../")) == pictures.NAMES[name][0]
        held = [name for name in archive.namelist() if name.startswith("p/")]
    assert len(held) == len(set(held)) == len({pictures.NAMES[name][0] for name in SHOWN})
    assert not [name for name in held if name.endswith("svg")]
    assert "attachment: drawing.svg" in page


def test_the_exported_page_contains_its_pictures_and_no_other_bytes(shown: Any) -> None:
    viewed, _ = shown
    page = EvalReport(viewed.store, viewed.store.get_run("picture-run")).to_html()
    found = re.findall(r'<img alt="([^"]*)" src="data:([^;]+);base64,([^"]+)">', page)
    assert {name for name, _, _ in found} == SHOWN
    assert len(found) == page.count("<img") == page.count('src="')
    for name, media_type, data in found:
        assert base64.b64decode(data) == pictures.NAMES[name][0]
        assert media_type == ("image/gif" if name.endswith("gif") else "image/png")
    assert "img-src data:;" in page
    assert "not in the store" in page
