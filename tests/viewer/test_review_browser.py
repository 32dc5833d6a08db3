"""A review in a real browser: by keyboard alone, over a crash of the server, and without scripts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from fairtrial.store import RunStore, open_store
from fairtrial.store.notes import ReviewNote, write_notes
from fairtrial.viewer.review import review_code
from tests.viewer.conftest import add_support_runs

pytestmark = [pytest.mark.long, pytest.mark.proves("R115")]
REVIEW = ReviewNote("helpful", "Does it help?", "Be *strict*.", ("baseline",), "pass_fail", "0011223344556677", 20)
RATED = ReviewNote("rated", "How good is it?", "", ("baseline",), "ratings", "77", 3)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    made = open_store(tmp_path / "runs.db")
    add_support_runs(made)
    made.update_run("support-run-2", notes=write_notes(reviews=(REVIEW, RATED)))
    yield made
    made.close()


class Server:
    """`fairtrial view` as a process of its own, which can be killed."""

    def __init__(self, path: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._path = path
        self.address = ""
        self.start()

    def start(self) -> None:
        words = ["view", "--store", str(self._path), "--port", str(self.port), "--no-browser", "--json"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fairtrial.cli", *words, "--reviewers", "ann"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        facts = ""
        while not facts.rstrip().endswith("}\n}") and not facts.endswith("}\n}\n"):
            line = self._process.stdout.readline()
            assert line, "the server ended"
            facts += line
        self.address = json.loads(facts)["reviewers"]["ann"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def server(store: RunStore, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "runs.db")
    yield made
    made.kill()


def shown_id(page: Page) -> str:
    return str(page.locator("input[name=id]").input_value())


def wait_for_another(page: Page, before: str) -> None:
    """Wait until another trial, or the end, is shown."""
    page.wait_for_function(
        "before => { const id = document.querySelector('input[name=id]');"
        " return id ? id.value !== before : document.title.startsWith('Review') }",
        arg=before,
    )


def test_twenty_trials_by_keyboard_alone_with_the_server_killed_in_between(
    browser: Browser, server: Server, store: RunStore
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(server.address)
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url(f"**/review/{review_code('support-run-2', REVIEW)}")
    wanted: dict[str, object] = {}
    seen = []
    for number in range(20):
        before = shown_id(page)
        seen.append(before)
        place = page.locator("pre").first.inner_text().removeprefix("Where is order ").removesuffix("?")
        sample = f"q{int(place):02}"
        if number == 4:
            page.keyboard.press("c")
            page.keyboard.type("pf1s?")  # Keys in a comment are text.
            page.keyboard.press("Escape")
        if number == 6:
            page.keyboard.press("e")
            page.wait_for_url("**expected=1**")
        if number == 8:
            server.kill()
        if number == 5:
            page.keyboard.press("s")
            page.keyboard.press("1")
            wanted[sample] = None
        else:
            page.keyboard.press("p" if number % 3 else "f")
            wanted[sample] = bool(number % 3)
        if number == 8:
            page.get_by_text("Not saved yet").wait_for()
            assert shown_id(page) == before
            server.start()
        wait_for_another(page, before)
        if number == 10:  # Back to the last answer, and another one.
            page.keyboard.press("u")
            page.wait_for_url("**id=**")
            assert shown_id(page) == before
            page.keyboard.press("f")
            wanted[sample] = False
            wait_for_another(page, before)
    page.get_by_text("Nothing is left for you").wait_for()
    context.close()
    assert len(set(seen)) == 20
    said: dict[str, object] = dict.fromkeys(wanted)
    for label in store.labels("support-run-2", name="helpful"):
        assert label.annotator == "ann"
        said[label.key.sample_id] = label.value
    assert said == wanted
    kept = {label.name: label.value for label in store.labels("support-run-2") if label.name.startswith("~")}
    assert kept == {
        "~comment:helpful": "pf1s?",
        "~skip:helpful": "cannot tell",
        "~looked:helpful": "expected",
    }


def test_a_review_works_without_scripts(browser: Browser, server: Server, store: RunStore) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(server.address)
    page.get_by_role("link", name="rated").click()
    page.get_by_role("textbox").fill("hm")
    page.get_by_role("button", name="4 good").click()
    page.get_by_role("button", name="1 wrong").click()
    page.get_by_role("button", name="2 broken or cut off").click()
    page.get_by_text("Nothing is left for you").wait_for()
    context.close()
    assert [label.value for label in store.labels("support-run-2", name="rated")] == ["good", "wrong"]
    assert [label.value for label in store.labels("support-run-2", name="~skip:rated")] == ["broken or cut off"]
    assert [label.value for label in store.labels("support-run-2", name="~comment:rated")] == ["hm"]


def test_keys_of_ratings_are_stored_as_the_words_of_a_judge(browser: Browser, server: Server, store: RunStore) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(server.address)
    page.get_by_role("link", name="rated").click()
    for key in "531":
        before = shown_id(page)
        page.keyboard.press(key)
        wait_for_another(page, before)
    context.close()
    found = [label.value for label in store.labels("support-run-2", name="rated")]
    assert found == ["excellent", "fair", "wrong"]
