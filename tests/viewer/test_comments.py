"""Comments of people on trials and on runs: who may write and withdraw them, and what the pages show."""

from __future__ import annotations

import html
import re
import sqlite3
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from fairtrial import Label, TrialKey, open_store
from fairtrial.reports.run_names import find_run
from fairtrial.store import load_run, save_run
from fairtrial.store.notes import ReviewNote, write_notes
from fairtrial.store.redact import register_secret
from fairtrial.viewer.access import Access
from fairtrial.viewer.pages.comments import comments_of_trial, read_comments
from fairtrial.viewer.review import MAX_TEXT
from fairtrial.viewer.site import write_site
from tests.viewer.conftest import HOSTILE, Answer, Viewed, add_support_runs, open_session, record, start_server, trial
from tests.viewer.teams import Browser, Team, oidc_team

KEY = TrialKey("support-run-2", "baseline", "q01")
TRIAL = "support@2/t/baseline/q01"
FORM = "application/x-www-form-urlencoded"
REVIEW = ReviewNote("helpful", "Does it help?", "", ("baseline",), "pass_fail", "00112233445566aa", 4, 2)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Viewed]:
    yield from serve(str(tmp_path / "runs.db"))


def serve(address: str) -> Iterator[Viewed]:
    store = open_store(address)
    if not store.runs():
        add_support_runs(store)
    server, thread = start_server(address, user="me", reviewers=("rev",))
    yield Viewed(server, store, open_session(server))
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


def send(viewed: Viewed, path: str = "support@2/comment", **fields: str) -> Answer:
    secret = Access.form_secret(viewed.cookie.partition("=")[2])
    body = urlencode({"form_secret": secret, "run": "support-run-2", **fields})
    origin = f"http://127.0.0.1:{viewed.server.port}"
    return viewed.get(path, method="POST", body=body, Origin=origin, Content_Type=FORM)


def texts(page: str) -> list[str]:
    """The comments on a page, as a person reads them."""
    return [html.unescape(text) for text in re.findall(r'<p class="prose">(.*?)</p></li>', page, re.DOTALL)]


def last_id(page: str) -> str:
    return str(re.findall(r'<li id="c([0-9a-f]{16})"', page)[-1])


class TestOnePerson:
    def test_a_trial_and_its_run_have_their_own_comments(self, owner: Viewed) -> None:
        assert send(owner, o="2", text="two\r\nlines ").status == 303
        assert send(owner, text="of the run").status == 303
        assert texts(owner.get(TRIAL).text) == ["two\nlines"]
        assert texts(owner.get("support@2/t/careful/q01").text) == []
        report = owner.get("support@2").text
        assert texts(report) == ["of the run"]
        assert f'href="./{TRIAL}#c' in report
        assert texts(owner.get("support@1").text) == []

    def test_the_link_and_the_answer_lead_to_the_page_with_its_filter(self, owner: Viewed) -> None:
        query = urlencode([("o", "2"), ("q", "outcome=passed&m.kind=delivery")])
        page = owner.get(f"{TRIAL}?{query}").text
        [action] = set(re.findall(r'<form method="post" action="([^"]*/comment[^"]*)"', page))
        action = html.unescape(action).removeprefix("../../../")
        answer = send(owner, action, o="2", text="hm")
        assert answer.headers["location"] == f"../{TRIAL}?{query}#comments"
        page = owner.get(f"{TRIAL}?{query}").text
        assert f'href="../../../{TRIAL}?{html.escape(query)}#c{last_id(page)}"' in page
        assert 'rel="next"' in page

    @pytest.mark.parametrize("text", ["", " \r\n\t", "\u200b\u202e", "x" * (MAX_TEXT + 1)], ids=repr)
    def test_nothing_and_too_much_are_refused(self, owner: Viewed, text: str) -> None:
        answer = send(owner, o="2", text=text)
        assert (answer.status, "1 to 20,000 characters" in answer.text) == (422, True)
        assert list(owner.store.labels("support-run-2")) == []

    def test_the_longest_text_is_shown_whole(self, owner: Viewed) -> None:
        text = "\U0001f600\r\n" * (MAX_TEXT // 2 - 1) + "!"
        assert send(owner, o="2", text=text).status == 303
        assert texts(owner.get(TRIAL).text) == [text.replace("\r\n", "\n")]

    def test_text_that_is_markup_stays_text(self, owner: Viewed) -> None:
        for text in HOSTILE:
            assert send(owner, o="2", text=text).status == 303
            assert send(owner, text=text).status == 303
        for path in (TRIAL, "support@2"):
            page = owner.get(path).text
            assert len(texts(page)) == len(HOSTILE)
            assert "<script>window.hit" not in page
            assert "<img src=x" not in page
            assert "{{ 7*7 }}" in page

    def test_secrets_are_redacted(self, owner: Viewed) -> None:
        register_secret("a-registered-value")
        assert (
            send(owner, o="2", text="it is a-registered-value and ghp_abcdefghijklmnopqrstuvwxyz0123456789").status
            == 303
        )
        [text] = texts(owner.get(TRIAL).text)
        assert text.startswith("it is ")
        assert "a-registered-value" not in text
        assert "ghp_abc" not in text

    def test_a_withdrawn_comment_is_shown_no_more_and_the_others_stay(self, owner: Viewed) -> None:
        for text in ("one", "two"):
            send(owner, o="2", text=text)
        id = last_id(owner.get(TRIAL).text)
        assert send(owner, o="0", withdraw=id).status == 422  # Another trial.
        assert send(owner, withdraw=id).status == 422  # The run.
        assert send(owner, o="2", withdraw=id).status == 303
        assert texts(owner.get(TRIAL).text) == ["one"]
        assert send(owner, o="2", withdraw=id).status == 422

    @pytest.mark.parametrize("fields", [{"o": "9999"}, {"o": "x"}, {"o": "-1"}, {"run": "other"}, {"run": ""}], ids=str)
    def test_a_comment_on_something_else_is_refused(self, owner: Viewed, fields: dict[str, str]) -> None:
        assert send(owner, **{"o": "2", "text": "hm", **fields}).status in (404, 422)
        assert list(owner.store.labels("support-run-2")) == []

    def test_a_form_without_a_secret_or_of_a_reviewer_changes_nothing(self, owner: Viewed) -> None:
        assert send(owner, o="2", text="hm", form_secret="").status == 403
        reviewer = Viewed(owner.server, owner.store, open_session(owner.server, "rev"))
        assert send(reviewer, o="2", text="hm").text == "this session is for reviews only\n"
        assert list(owner.store.labels("support-run-2")) == []

    def test_a_run_that_takes_the_name_of_a_deleted_one_gets_no_comment(self, owner: Viewed) -> None:
        owner.store.delete_run("support-run-2")
        assert send(owner, o="2", text="hm").status == 404
        run = owner.store.create_run(record("third", "support", 4))
        assert run.name == "support@2"
        owner.store.commit("third", [trial(run, 2)])
        answer = send(owner, o="2", text="hm")
        assert (answer.status, "deleted meanwhile" in answer.text) == (404, True)
        assert list(owner.store.labels("third")) == []

    def test_comments_of_reviews_are_among_the_others_in_the_order_of_time(self, owner: Viewed) -> None:
        store = owner.store
        store.update_run("support-run-2", notes=write_notes(reviews=(REVIEW,)))
        store.label(Label(KEY, "~comment", {"id": "a" * 16, "text": "first"}, "ann", 10.0))
        store.label(Label(KEY, "~comment:helpful", "second", "ben", 20.0))
        store.label(Label(KEY, "~comment", {"id": "b" * 16, "text": "third"}, "", 30.0))
        store.label(Label(KEY, "~comment:helpful", "withdrawn", "cy", 40.0))
        store.label(Label(KEY, "~comment:helpful", None, "cy", 50.0))
        page = owner.get(TRIAL).text
        assert texts(page) == ["first", "second", "third"]
        assert "1970-01-01 00:00 UTC" in page
        assert 'href="../../../support@2/review/helpful">in the review helpful' in page
        assert "(no name)" in page

    def test_damaged_comments_are_left_out_and_the_last_200_are_shown(self, owner: Viewed) -> None:
        store = owner.store
        for value in (None, "text", 7, [1], {}, {"id": 1, "text": 2}, {"text": None}):
            store.label(Label(KEY, "~comment", value, "ann"))
        for at in range(201):
            store.label(Label(KEY, "~comment", {"id": f"{at:016}", "text": f"number {at}"}, "ann", 1e300 + at))
        page = owner.get(TRIAL).text
        assert texts(page)[0] == "number 1"
        assert "The last 200 of 201" in page

    def test_a_copy_of_the_run_has_its_comments_and_its_static_pages_have_none(
        self, owner: Viewed, tmp_path: Path
    ) -> None:
        send(owner, o="2", text="on a trial")
        send(owner, text="on the run")
        save_run(owner.store, "support-run-2", tmp_path / "copy.db")
        copy, run_id = load_run(tmp_path / "copy.db")
        run = copy.get_run(run_id)
        assert [comment.text for comment in comments_of_trial(copy, run, KEY)] == ["on a trial"]
        assert [comment.text for comment in read_comments(copy, run, ["~run-comment"])] == ["on the run"]
        copy.close()
        write_site(owner.store, owner.store.get_run("support-run-2"), tmp_path / "site.zip")
        with zipfile.ZipFile(tmp_path / "site.zip") as pages:
            assert [name for name in pages.namelist() if b"on a trial" in pages.read(name)] == []


def test_two_servers_that_write_at_the_same_moment_lose_nothing(database: str) -> None:
    servers = [serve(database), serve(database)]
    viewers = [next(server) for server in servers]
    start = threading.Barrier(4)
    statuses: list[int] = []

    def write(viewed: Viewed, who: int, fields: dict[str, str]) -> None:
        start.wait(60)
        statuses.extend(send(viewed, text=f"{who} {number}", **fields).status for number in range(10))

    plans = [(viewed, who, fields) for who, viewed in enumerate(viewers) for fields in ({}, {"o": "2"})]
    threads = [threading.Thread(target=write, args=plan) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    expected = {f"{who} {number}" for who in (0, 1) for number in range(10)}
    for path in (TRIAL, "support@2"):
        assert sorted(texts(viewers[0].get(path).text)) == sorted(expected), path
    assert statuses == [303] * 40
    for server in servers:
        assert next(server, None) is None


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with oidc_team(tmp_path_factory.mktemp("team")) as team:
        yield team


def say(team: Team, browser: Browser, **fields: str) -> Answer:
    return team.form(browser, "/p/support/support@2/comment", **{"run": "support-run-2", "o": "2", **fields})


def test_two_people_write_and_each_withdraws_only_their_own(team: Team) -> None:
    ann = team.sign_in("u-17", "editors", name="Same Name")
    ben = team.sign_in("u-18", "viewers", "reviewers", name="Same Name")
    for browser, text in ((ann, "of Ann"), (ben, "of Ben")):
        assert say(team, browser, text=text).status == 303
    address = team.page(f"/p/support/{TRIAL}")
    page = ann.ask(address).text
    assert texts(page) == ["of Ann", "of Ben"]
    assert page.count('name="withdraw"') == 1
    assert page.count("<strong>Same Name</strong>") == 2
    answer = say(team, ann, withdraw=last_id(page))
    assert (answer.status, "only by who wrote it" in answer.text) == (422, True)
    assert say(team, ben, withdraw=last_id(page)).status == 303
    assert texts(ann.ask(address).text) == ["of Ann"]
    entries = [(entry["person"], entry["action"], entry["object"]) for entry in team.audit()]
    about = "support@2 (support-run-2) baseline/q01/0"
    assert [entry for entry in entries if "comment" in entry[1]] == [
        ("u-17", "commented", about), ("u-18", "commented", about), ("u-18", "withdrew a comment", about),
    ]  # fmt: skip


def test_who_may_not_is_refused_and_sees_no_form(team: Team) -> None:
    before = list(labels(team))
    viewer, blind, other = (team.sign_in(name, name) for name in ("viewers", "reviewers", "billing"))
    assert say(team, viewer, text="hm").text == "this session may not review\n"
    assert say(team, blind, text="hm").status == 403
    assert say(team, other, text="hm").status == 404
    editor = team.sign_in("u-20", "editors")
    fields = {"run": "support-run-2", "o": "2", "text": "hm"}
    for secret in ({}, {"form_secret": team.secret(viewer)}):
        assert editor.ask(team.page("/p/support/support@2/comment"), {**fields, **secret}).status == 403
    editor.ask(team.page("/p/support/support@2"), headers=[("Accept", "application/json")])  # Until it is computed.
    for path in (TRIAL, "support@2"):
        assert "/comment" not in viewer.ask(team.page(f"/p/support/{path}")).text
        assert "/comment" in editor.ask(team.page(f"/p/support/{path}")).text
    assert list(labels(team)) == before


def labels(team: Team) -> list[Label]:
    store = open_store(team.folder / "support.db")
    found = list(store.labels(find_run(store, "support@2").run.run_id))
    store.close()
    return found


def test_the_audit_has_a_comment_before_it_is_stored(team: Team) -> None:
    editor = team.sign_in("u-21", "editors")
    secret = team.secret(editor)
    with sqlite3.connect(team.folder / "team.db") as database:
        database.execute("CREATE TRIGGER away BEFORE INSERT ON team_audit BEGIN SELECT RAISE(ABORT, 'away'); END")
    database.close()
    before = labels(team)
    fields = {"form_secret": secret, "run": "support-run-2", "o": "2", "text": "hm"}
    try:
        assert editor.ask(team.page("/p/support/support@2/comment"), fields).status == 503
    finally:
        with sqlite3.connect(team.folder / "team.db") as database:
            database.execute("DROP TRIGGER away")
        database.close()
    assert labels(team) == before
