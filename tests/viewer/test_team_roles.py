"""What people of a team may do: every route for every role, and no way from one project into another."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import Sample
from fairtrial.store import open_store
from fairtrial.viewer.app import CHANGES, PAGES, TEAM_CHANGES, ruled_routes
from tests.viewer.conftest import Answer, record, trial
from tests.viewer.teams import (
    REVIEW,
    Browser,
    Team,
    behave,
    code_of,
    file_of,
    oidc_team,
    trial_to_answer,
)

ROLES: Mapping[str, frozenset[str]] = {
    "viewers": frozenset({"read"}),
    "reviewers": frozenset({"review"}),
    "editors": frozenset({"read", "review", "edit"}),
    "admins": frozenset({"read", "review", "edit", "delete"}),
}
ROUTES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("GET", "/"): ("read", ""),
    ("GET", "/history"): ("read", "history?suite=PROJECT"),
    ("GET", "/compare"): ("read", "compare?a=PROJECT@1:careful&b=PROJECT@2:careful"),
    ("GET", "/compare/sample"): ("read", "compare/sample?a=PROJECT@1:careful&b=PROJECT@2:careful&id=q01"),
    ("GET", "/matrix"): ("read", "matrix?c=PROJECT@2"),
    ("GET", "/search"): ("read", "search?name=better+PROJECT"),
    ("GET", "/review"): ("review", "review"),
    ("GET", "/review/{code}"): ("review", "review/CODE"),
    ("GET", "/review/{code}/blob/{sha256}"): ("review", "review/CODE/blob/FILE?id=MEMBER"),
    ("GET", "/{run}"): ("read", "PROJECT@2"),
    ("GET", "/{run}/live"): ("read", "PROJECT@2/live"),
    ("GET", "/{run}/trials"): ("read", "PROJECT@2/trials"),
    ("GET", "/{run}/rates"): ("read", "PROJECT@2/rates"),
    ("GET", "/{run}/trials.{form}"): ("read", "PROJECT@2/trials.csv"),
    ("GET", "/{run}/review"): ("read", "PROJECT@2/review"),
    ("GET", "/{run}/review/{name}"): ("read", "PROJECT@2/review/helpful"),
    ("GET", "/{run}/review/{name}/labels.{form}"): ("read", "PROJECT@2/review/helpful/labels.csv"),
    ("GET", "/{run}/calibration"): ("read", "PROJECT@2/calibration"),
    ("GET", "/{run}/t/{experiment}/{sample}"): ("read", "PROJECT@2/t/baseline/q01"),
    ("GET", "/{run}/t/{experiment}/{sample}/{repeat:int}"): ("read", "PROJECT@2/t/baseline/q01/0"),
    ("GET", "/{run}/blob/{sha256}"): ("read", "PROJECT@2/blob/FILE?o=0"),
    ("POST", "/review/{code}"): ("review", "review/CODE"),
    ("POST", "/{run}/review"): ("edit", "PROJECT@2/review"),
    ("POST", "/{run}/review/{name}"): ("edit", "PROJECT@2/review/helpful"),
    ("POST", "/{run}/picked"): ("edit", "PROJECT@2/picked"),
    ("POST", "/{run}/comment"): ("review read", "PROJECT@2/comment"),
    ("POST", "/{run}/keep"): ("delete", "PROJECT@1/keep"),
    ("POST", "/{run}/delete"): ("delete", "PROJECT@1/delete"),
}
"""Every route of a project: what it needs, and an address of it that works."""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with oidc_team(tmp_path_factory.mktemp("team")) as team:
        yield team


@pytest.fixture(scope="module")
def people(team: Team) -> dict[str, Browser]:
    """A browser for each role in the project `support`, for other projects and for nobody at all."""
    found = {role: team.sign_in(f"one of {role}", role) for role in (*ROLES, "billing", "billing-admins")}
    return found | {"nothing": team.sign_in("nobody"), "everything": team.sign_in("boss", "admins", "billing-admins")}


@pytest.fixture(autouse=True)
def well_behaved(team: Team) -> None:
    behave(team.issuer)


@pytest.fixture(scope="module")
def members(team: Team, people: dict[str, Browser]) -> dict[str, str]:
    """A drawn trial of the review of each project."""
    pages = {name: f"/p/{name}/review/{code_of(name)}" for name in ("support", "billing")}
    return {name: trial_to_answer(people["everything"].ask(team.page(path)).text) for name, path in pages.items()}


def address(route: tuple[str, str], members: Mapping[str, str], project: str = "support") -> str:
    values = {"PROJECT": project, "CODE": code_of(project), "FILE": file_of(project), "MEMBER": members[project]}
    return re.sub("|".join(values), lambda match: values[match[0]], f"/p/{project}/{ROUTES[route][1]}")


def ask(team: Team, browser: Browser, method: str, path: str, member: str) -> Answer:
    """The answer to a request; a form asks for nothing that could be done, so that it changes nothing."""
    fields = {"id": member, "name": "helpful", "o": "0", "more": "0", "run": f"{path.split('/')[2]}-run-2"}
    return browser.ask(team.page(path)) if method == "GET" else team.form(browser, path, **fields)


def test_every_route_of_a_project_needs_what_is_said_here() -> None:
    rules = [*(("GET", rule) for rule in PAGES), *(("POST", rule) for rule in (*CHANGES, *TEAM_CHANGES))]
    assert {(method, rule.path): " ".join(filter(None, (rule.needs, rule.needs_too))) for method, rule in rules} == {
        route: needs for route, (needs, _) in ROUTES.items()
    }
    routes: Any = ruled_routes(None, (*CHANGES, *TEAM_CHANGES))  # type: ignore[arg-type]
    served = {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}
    assert served - {("GET", "/static/{hash}/{name}")} == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_every_role_may_do_what_it_may_and_nothing_else(
    team: Team, people: dict[str, Browser], members: dict[str, str], route: tuple[str, str]
) -> None:
    method, path = route[0], address(route, members)
    for role, allowed in ROLES.items():
        answer = ask(team, people[role], method, path, members["support"])
        if allowed.issuperset(ROUTES[route][0].split()):
            expected = {"GET": (200,), "POST": (303, 422)}[method]
            assert answer.status in expected, (role, answer)
        elif path == "/p/support/":
            assert (answer.status, answer.headers["location"]) == (303, team.page("/p/support/review")), role
        else:
            assert (answer.status, len(answer.text) < 80) == (403, True), (role, answer)
    unknown = ask(team, people["nothing"], method, path.replace("/p/support/", "/p/unknown/"), "x")
    for other in ("billing", "nothing"):
        answer = ask(team, people[other], method, path, members["support"])
        assert (answer.status, answer.text) == (unknown.status, unknown.text) == (404, answer.text), other
    signed_out = Browser().ask(team.page(path), None if method == "GET" else {"form_secret": "x"})
    assert signed_out.status == (303 if method == "GET" else 401)
    assert signed_out.headers.get("location", f"{team.url}/login?").startswith(f"{team.url}/login?")


@pytest.mark.parametrize("route", [route for route in ROUTES if "run" in route[1] or "code" in route[1]], ids=" ".join)
def test_what_is_of_one_project_is_not_in_another(
    team: Team, people: dict[str, Browser], members: dict[str, str], route: tuple[str, str]
) -> None:
    path = address(route, members, "billing")
    assert "billing" in path
    for browser in (people["admins"], people["everything"]):  # The second may see both, each in its place.
        answer = ask(team, browser, route[0], path.replace("/p/billing/", "/p/support/"), members["billing"])
        assert answer.status in (404, 422), answer
        assert "Order 1 " not in answer.text


SAME = ("same@1", "same@1/trials", "same@1/trials?q=output", "same@1/t/baseline/q01", "same@1/trials.csv",
        "matrix?c=same@1&show=outputs", "history?suite=same", "compare?a=same@1:baseline&b=same@1:careful")  # fmt: skip


def test_runs_of_the_same_id_in_two_projects_stay_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("same")
    with oidc_team(folder) as team:
        for name in ("support", "billing"):
            store = open_store(folder / f"{name}.db")
            run = store.create_run(record("same", "same", 4, dataset_fingerprint="ab" * 16))
            samples = {at: Sample(f"q{at:02}", f"input of {name}", "x", {"kind": name}) for at in range(4)}
            results = [replace(trial(run, at), output=f"output of {name}") for at in range(run.planned)]
            store.commit(run.run_id, results, samples)
            store.update_run(run.run_id, status="finished", finished_at=2000.0)
            store.close()
        boss = team.sign_in("boss", "admins", "billing-admins")
        for path in SAME:
            pages = {name: boss.ask(team.page(f"/p/{name}/{path}")) for name in ("support", "billing")}
            assert {page.status for page in pages.values()} == {200}, path
            for name, other in (("support", "billing"), ("billing", "support")):
                assert f"of {other}" not in pages[name].text, path
        assert "output of billing" in boss.ask(team.page("/p/billing/same@1/t/baseline/q01")).text


@pytest.mark.parametrize(
    "path",
    [
        "/p/open/../support/", "/p/open/%2e%2e/support/", "/p/open/..%2fsupport/", "/p/open//p/support/",
        "/p/open/%2fp%2fsupport%2f", "/p/%73upport/", "/p/Support/", "//p/support/", "/p/support%2f", "/p/support;/",
        "/p/open%2f..%2fsupport/", "/p//support/", "/./p/support/", "/static/../p/support/", "/p/support%00/",
        "/login/../p/support/", "/healthz/../p/support/", "/p/support\\", "/P/support/",
    ],
)  # fmt: skip
def test_an_odd_address_leads_into_no_project(team: Team, people: dict[str, Browser], path: str) -> None:
    for browser in (people["nothing"], Browser()):
        answer = browser.ask(team.url + path)
        assert answer.status in (303, 400, 404, 421), answer
        assert "support@2" not in answer.text
        assert "Support bot" not in answer.text


def test_the_first_page_has_the_projects_of_this_person_and_open_reviews(
    team: Team, people: dict[str, Browser]
) -> None:
    seen = {who: people[who].ask(team.page("/")).text for who in people}
    titles = {"Support bot": {*ROLES, "everything"}, "billing": {"billing", "billing-admins", "everything"}}
    for title, mine in titles.items():
        assert {who for who, text in seen.items() if re.search(rf">\s*{title}\s*<", text)} == mine
    assert f"/review/{code_of('support')}" in seen["reviewers"]
    assert f"/review/{code_of('support')}" not in seen["viewers"]


def test_several_groups_add_up(team: Team) -> None:
    browser = team.sign_in("both", "viewers", "reviewers")
    paths = ("/p/support/", "/p/support/review", f"/p/support/review/{code_of('support')}")
    assert [browser.ask(team.page(path)).status for path in paths] == [200] * 3
    assert team.form(browser, "/p/support/support@2/review", name="x").status == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(team: Team, people: dict[str, Browser], method: str) -> None:
    import http.client
    from urllib.parse import urlsplit

    connection = http.client.HTTPConnection(urlsplit(team.url).netloc, timeout=60)
    cookie = f"fairtrial={people['admins'].cookie(team.url)}"
    connection.request(method, "/p/support/support@2/delete", headers={"Cookie": cookie})
    assert connection.getresponse().status == 405
    connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "http://evil.example")], [("Origin", "null")], [("Origin", "")],
        [("Sec-Fetch-Site", "cross-site")], [("Sec-Fetch-Site", "same-site")],
    ],
    ids=str,
)  # fmt: skip
def test_a_form_of_another_site_changes_nothing(
    team: Team, people: dict[str, Browser], headers: list[tuple[str, str]]
) -> None:
    browser = people["admins"]
    form = {"form_secret": team.secret(browser), "confirm": "support-run-1"}
    assert browser.ask(team.page("/p/support/support@1/delete"), form, headers).status == 403
    assert browser.ask(team.page("/p/support/support@1")).status == 200


def test_a_form_of_another_session_or_project_changes_nothing(team: Team, people: dict[str, Browser]) -> None:
    path, fields = "/p/support/support@1/delete", {"confirm": "support-run-1"}
    for secret in ("", "x" * 32, team.secret(people["editors"])):
        answer = people["admins"].ask(team.page(path), {"form_secret": secret, **fields})
        assert answer.status == 403
    assert people["admins"].ask(team.page(path), fields).status == 403
    assert people["admins"].ask(team.page("/p/support/support@1")).status == 200


def test_a_run_is_deleted_by_an_admin_who_types_its_id(tmp_path_factory: pytest.TempPathFactory) -> None:
    with oidc_team(tmp_path_factory.mktemp("delete")) as team:
        admin = team.sign_in("ann", "admins")
        for wrong in ("", "support@1", "support-run-2"):
            assert team.form(admin, "/p/support/support@1/delete", confirm=wrong).status == 422
        assert team.form(admin, "/p/support/support@1/keep", kept="1").status == 303
        assert team.form(admin, "/p/support/support@1/delete", confirm="support-run-1").status == 303
        assert admin.ask(team.page("/p/support/support@1")).status == 404
        done = [(entry["action"], entry["object"]) for entry in team.audit() if entry["project"]]
        assert [action for action, _ in done if action in ("kept", "deleted")] == ["kept", "deleted"]
        assert all("support" in what for _, what in done)


def answer_review(team: Team, browser: Browser, say: str, project: str = "support", **headers: Any) -> str:
    """Answer the next trial of the review; returns which it was."""
    page = f"/p/{project}/review/{code_of(project)}"
    member = trial_to_answer(browser.ask(team.page(page), **headers).text)
    fields = {"form_secret": team.secret(browser, page, **headers), "id": member, "say": say}
    answer = browser.ask(team.page(page), fields, **headers)
    assert answer.status == 303, answer
    return member


def test_labels_are_of_the_subject_and_names_are_shown(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("labels")
    with oidc_team(folder) as team:
        two = [team.sign_in(sub, "editors", name="Same Name") for sub in ("u-17", "u-18")]
        for _ in range(2 * REVIEW.size):
            for browser, say in zip(two, ("pass", "fail"), strict=True):
                answer_review(team, browser, say)
        team.form(two[0], "/p/support/support@2/picked", o="0", name="helpful", say="pass")
        page = two[0].ask(team.page("/p/support/support@2/review/helpful"))
        facts = json.loads(
            two[0].ask(team.page("/p/support/support@2/review/helpful"), headers=[("Accept", "application/json")]).text
        )
    store = open_store(folder / "support.db")
    labels = list(store.labels("support-run-2"))
    store.close()
    assert {label.annotator for label in labels} == {"u-17", "u-18"}
    assert [label.name for label in labels].count("~picked:helpful") == 1
    assert sorted(facts["annotators"]) == ["u-17", "u-18"]
    assert "Same Name" in page.text
    assert "Krippendorff" in page.text


ACTIONS = {"signed in", "sign-in refused", "signed out", "read transcript", "exported", "labelled", "reviewed",
           "commented", "deleted", "kept", "session revoked"}  # fmt: skip


def test_the_audit_has_every_action_and_cannot_be_changed(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("audit")
    with oidc_team(folder) as team:
        browser = team.sign_in("u-17", "admins", name="Ann")
        assert browser.ask(team.page("/callback?state=x&code=y")).status in (400, 403)
        for path in ("t/baseline/q01", "trials.csv", "review/helpful/labels.csv"):
            assert browser.ask(team.page(f"/p/support/support@2/{path}")).status == 200
        answer_review(team, browser, "pass")
        labelled = team.form(browser, "/p/support/support@2/picked", o="0", name="helpful", say="pass")
        assert labelled.status == 303
        said = team.form(browser, "/p/support/support@2/comment", run="support-run-2", text="Look at q01.")
        assert said.status == 303
        assert team.form(browser, "/p/support/support@1/keep", kept="1").status == 303
        assert team.form(browser, "/p/support/support@1/delete", confirm="support-run-1").status == 303
        assert people_may_not(team)
        team.form(browser, "/logout")
        team.sign_in("u-17", "admins", name="Ann")
        team.command("revoke", "u-17")
        entries = team.audit()
        assert {entry["action"] for entry in entries} >= ACTIONS
        assert [entry for entry in entries if entry["person"] == "u-99" and entry["project"] == "support"] == []
        by_action = {entry["action"]: entry for entry in entries}
        for action in ACTIONS - {"sign-in refused", "session revoked", "signed in", "signed out"}:
            entry = by_action[action]
            assert (entry["person"], entry["name"], entry["project"]) == ("u-17", "Ann", "support"), entry
            assert "support" in entry["object"] or code_of("support") in entry["object"], entry
            assert entry["address"] == "127.0.0.1"
        assert "t/baseline/q01" in next(e["object"] for e in entries if e["action"] == "read transcript")
        assert team.audit("--since", "2100-01-01") == []
        assert len(team.audit("--since", "2020-01-01")) == len(entries)
        assert "u-17" in team.command("audit")
        before = len(entries)
        with sqlite3.connect(folder / "team.db") as database:
            tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
            [table] = [name for name in tables if "audit" in name]
            for statement in (
                f"update {table} set person = 'x'", f"delete from {table}", f"insert or replace into {table} "
                f"select * from {table} where id = 1", f"delete from {table} where id = 1",
            ):  # fmt: skip
                with pytest.raises(sqlite3.DatabaseError, match="append-only"):
                    database.execute(statement)
        database.close()
        assert len(team.audit()) == before


def people_may_not(team: Team) -> bool:
    """Refused requests leave no entry of a page that was read."""
    other = team.sign_in("u-99", "reviewers")
    return other.ask(team.page("/p/support/support@2/t/baseline/q01")).status == 403
