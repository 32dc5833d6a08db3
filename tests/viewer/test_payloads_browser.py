"""More than a hundred attacks in every text field, in a real browser: nothing executes and nothing leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, sync_playwright

from fairtrial.reports.render.pictures import attachments_of
from fairtrial.viewer.review import review_code
from tests.viewer.conftest import Viewed, open_session, segment, start_server
from tests.viewer.payloads import PAYLOADS, RUN, add_payloads
from tests.viewer.test_browser import Watched

pytestmark = [pytest.mark.long, pytest.mark.proves("R122", "R123")]
FOREIGN = (
    "main :is(iframe, img:not(.picture img), base, style, script, object, embed, video, audio, link, template, math, "
    "noscript)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    path = tmp_path_factory.mktemp("payloads") / "runs.db"
    store = add_payloads(path)
    server, thread = start_server(path, reviewers=("ann",), user="me")
    yield Viewed(server, store, open_session(server))
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


def check(watched: Watched, path: str) -> str:
    """Open a page, look for anything that a payload could have made, and return its HTML."""
    page = watched.open(path)
    assert page.evaluate("window.hit") is None, path
    assert page.locator(FOREIGN).count() == 0, path
    found: dict[str, Any] = page.evaluate(
        """() => ({
          protocols: [...new Set([...document.querySelectorAll("a")].map((link) => link.protocol))],
          handlers: [...document.querySelectorAll("*")].filter((one) =>
            [...one.attributes].some((name) => /^on|^srcdoc|^style/i.test(name.name)) ||
            (one.hasAttribute("formaction") && !one.formAction.startsWith(location.origin))).length,
          scripts: [...document.scripts].filter((one) => !one.src.startsWith(location.origin) || one.text).length,
          forms: [...document.forms].filter((one) => !one.action.startsWith(location.origin)).length,
          autofocus: document.querySelectorAll("[autofocus]").length,
        })"""
    )
    assert set(found.pop("protocols")) <= {"http:", "https:"}, path
    assert found == {"handlers": 0, "scripts": 0, "forms": 0, "autofocus": 0}, path
    assert watched.problems == [], path
    assert watched.foreign == [], path
    return str(page.content())


def test_every_text_field_holds_every_payload_and_none_has_an_effect(attacked: Viewed, browser: Browser) -> None:
    assert len(PAYLOADS) >= 100
    run = attacked.store.get_run(RUN)
    name, (first, second) = segment(run.name), [segment(one) for one in run.experiments]
    [review] = run.noted.reviews
    code = review_code(run.run_id, review)
    sample = segment(f"0/{PAYLOADS[0]}")
    watched = Watched(attacked, browser)
    pages = [
        "", name, f"{name}/trials", f"{name}/trials?sort=-score", f"{name}/trials?outcome=task_error",
        f"{name}/review", f"{name}/review/{segment(review.name)}", f"review/{code}?transcript=1",
        f"{name}/calibration?early=1", "review",
        f"compare?a={segment(segment(run.name))}%3A{first}&b={segment(segment(run.name))}%3A{second}",
        f"matrix?c={segment(segment(run.name))}", f"history?suite={quote(run.suite, safe='')}&by=run",
        f"history?suite={quote(run.suite, safe='')}&alarm=1&by=code",
    ]  # fmt: skip
    search = f"search?name={quote(PAYLOADS[6], safe='')}"
    assert len(attacked.json(search)["candidates"]) == len(PAYLOADS)
    pages += [search, f"{search}&from=100&against=baseline"]
    pages += [f"{name}/t/{second}/{sample}?form={form}&invisible=1&whole=1" for form in ("text", "markdown", "raw")]
    assert watched.open(pages[-1].partition("?")[0]).locator(".picture img").count() > len(PAYLOADS)
    [attacked_trial] = attacked.store.results(run.run_id, ordinals=[1])
    for sha256 in {file.sha256 for file in attachments_of(attacked_trial)}:
        answer = attacked.get(f"{name}/blob/{sha256}?o=1")
        assert (answer.status, answer.headers["x-content-type-options"]) == (200, "nosniff")
        assert answer.headers["content-type"] in ("image/png", "image/gif", "application/octet-stream")
    pages += [f"{name}/t/{first}/{sample}?lane={lane}" for lane in ("judge", "other")]
    pages += [f"history?suite={quote(one.suite, safe='')}&by=run" for one in attacked.store.runs()[:12]]
    for path in pages:
        check(watched, path)
    following = watched.open(f"{name}/trials").locator("a[rel=next]")
    while following.count():  # The pages of the table: each payload is an id, an input, an output and a reason.
        following.first.click()
        check(watched, re.sub(r"^.*?/[a-z0-9]{10}/", "", watched.page.url))
        following = watched.page.locator("a[rel=next]")
    older = watched.open("").locator("a[rel=next]")
    while older.count():  # The list of runs: each payload is the name of a suite, an experiment and a dataset.
        older.first.click()
        check(watched, re.sub(r"^.*?/[a-z0-9]{10}/", "", watched.page.url))
        older = watched.page.locator("a[rel=next]")
    watched.context.close()


def test_what_is_typed_into_forms_and_addresses_has_no_effect(attacked: Viewed, browser: Browser) -> None:
    run = attacked.store.get_run(RUN)
    name = segment(run.name)
    watched = Watched(attacked, browser)
    history = f"history?suite={quote(run.suite, safe='')}"
    everything = "\n".join(PAYLOADS)
    for text in (everything, PAYLOADS[0], PAYLOADS[9], PAYLOADS[17]):
        page = watched.open(f"{name}/review")
        page.locator("#name").evaluate("(field, text) => { field.value = text }", text[:60])
        page.locator("#question").evaluate("(field, text) => { field.value = text }", "")
        page.locator("#guidelines").fill(text[:15_000])
        page.evaluate("() => { for (const field of document.querySelectorAll('[required]')) field.required = false }")
        with page.expect_navigation():
            page.get_by_role("button", name="Make the review").click()
        assert page.evaluate("window.hit") is None
        assert page.locator(FOREIGN).count() == 0
        assert "must have" in page.locator(".verdict").inner_text()
    watched.problems.clear()  # The browser reports the status 422 of a refused form.
    for text in PAYLOADS[::9]:
        address = segment(segment(text))
        for path in (
            f"{name}/trials?q={address}&e={address}&m.{address}={address}&sort={address}&score={address}",
            f"?suite={address}&status={address}",
            f"{history}&experiment={address}&dataset={address}&by={address}&end={address}",
            f"{history}&alarm=1&since={address}&reference={address}",
            f"{name}/trials?outcome={address}&after={address}",
        ):
            check(watched, path)
    watched.context.close()
