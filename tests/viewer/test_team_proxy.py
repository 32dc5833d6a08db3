"""A proxy that signs people in: what is believed of it, and from whom."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalReport, calibrate, open_store
from tests.servers import free_port
from tests.viewer.conftest import Answer
from tests.viewer.issuer import Issuer, new_key, signed
from tests.viewer.teams import (
    PROJECTS,
    REVIEW,
    Browser,
    Team,
    behave,
    code_of,
    fill_projects,
    person,
    running,
    trial_to_answer,
    write_config,
)
from tests.viewer.test_team_identity import ATTACKS

HEADER, AUDIENCE = "x-goog-iap-jwt-assertion", "/projects/1/apps/evals"
type Headers = list[tuple[str, str]]


@contextmanager
def token_team(folder: Path) -> Iterator[Team]:
    """A server behind a proxy that adds a signed token."""
    issuer, port = Issuer(), free_port()
    url = f"http://127.0.0.1:{port}"
    identity = {"kind": "proxy-jwt", "header": HEADER, "issuer": issuer.url, "audience": AUDIENCE,
                "jwks_url": f"{issuer.url}/jwks"}  # fmt: skip
    write_config(folder, url, f"127.0.0.1:{port}", identity, PROJECTS)
    fill_projects(folder)
    try:
        with running(folder, url, issuer) as team:
            yield team
    finally:
        issuer.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with token_team(tmp_path_factory.mktemp("proxy")) as team:
        yield team


@pytest.fixture
def team(served: Team) -> Team:
    behave(served.issuer)
    return served


def as_person(team: Team, sub: str, *groups: str) -> Headers:
    return [(HEADER, team.issuer.token(person(sub, *groups), audience=AUDIENCE))]


def look(team: Team, headers: Headers, path: str = "/p/support/") -> Answer:
    return Browser().ask(team.page(path), headers=headers)


class TestSignedToken:
    def test_it_says_who_asks_and_what_they_may_do(self, team: Team) -> None:
        assert look(team, as_person(team, "ann", "viewers")).status == 200
        assert look(team, as_person(team, "ben")).status == 404
        assert look(team, as_person(team, "ann")).status == 404  # The groups are those of this very request.
        page = look(team, as_person(team, "ann", "viewers"), "/")
        assert "Ann" in page.text
        assert "set-cookie" not in page.headers

    @pytest.mark.parametrize("attack", ATTACKS)
    def test_a_wrong_one_is_refused(self, team: Team, attack: str) -> None:
        behave(team.issuer, **ATTACKS[attack](team.issuer))
        headers = as_person(team, "ann", "viewers", "admins")
        answer = look(team, headers)
        assert answer.status in (400, 401, 403), answer
        assert headers[0][1] not in answer.text + team.log
        assert "Support bot" not in answer.text

    def test_one_for_a_person_of_another_service_is_refused(self, team: Team) -> None:
        token = team.issuer.token(person("ann", "viewers"))  # For the client, not for this address.
        assert look(team, [(HEADER, token)]).status in (401, 403)

    def test_nobody_is_known_without_it(self, team: Team) -> None:
        for headers in ([], [(HEADER, "")], [("authorization", f"Bearer {as_person(team, 'ann', 'viewers')[0][1]}")]):
            assert look(team, headers).status == 401
        for name in ("x-forwarded-user", "x-forwarded-groups", "remote-user", HEADER.replace("-", "_")):
            assert look(team, [(name, "admins")]).status in (400, 401)
        assert look(team, [("cookie", f"{HEADER}=x; fairtrial=x")]).status == 401

    def test_two_of_them_are_refused_even_if_both_are_valid(self, team: Team) -> None:
        ann, eve = as_person(team, "ann", "viewers"), as_person(team, "eve", "admins")
        for headers in (ann + eve, eve + ann, ann + ann, [*ann, (HEADER, "")], [*ann, (HEADER.upper(), eve[0][1])]):
            assert look(team, headers).status in (400, 403), headers
        assert look(team, [(HEADER, f"{ann[0][1]},{eve[0][1]}")]).status in (400, 401, 403)

    def test_there_is_no_page_to_sign_in(self, team: Team) -> None:
        for path in ("/login", "/callback?state=x&code=y"):
            assert Browser().ask(team.page(path)).status == 401
        assert team.form_as(as_person(team, "ann", "viewers"), "/logout").status == 404

    def test_a_form_is_of_its_person(self, team: Team) -> None:
        ann, ben = as_person(team, "ann", "admins"), as_person(team, "ben", "admins")
        secret = team.secret(Browser(), headers=ben)
        form = {"form_secret": secret, "confirm": "support-run-1"}
        assert Browser().ask(team.page("/p/support/support@1/delete"), form, ann).status == 403
        foreign = [*ben, ("Origin", "http://evil.example")]
        assert Browser().ask(team.page("/p/support/support@1/delete"), form, foreign).status == 403
        assert look(team, ann, "/p/support/support@1").status == 200

    def test_an_expired_one_that_was_valid_is_refused(self, team: Team) -> None:
        behave(team.issuer, claims={"exp": time.time() - 26})  # Four seconds are left of the 30 for wrong clocks.
        headers = as_person(team, "ann", "viewers")
        assert look(team, headers).status == 200
        time.sleep(5)
        assert look(team, headers).status in (401, 403)


class TestKeys:
    def test_a_new_key_is_found_by_all_requests_of_a_page(self, tmp_path: Path) -> None:
        with token_team(tmp_path) as team:
            assert look(team, as_person(team, "ann", "viewers")).status == 200
            old = team.issuer.rotate()
            headers = [as_person(team, "ann", "viewers", f"other {number}") for number in range(8)]
            behave(team.issuer, seconds={"/jwks": 1.5})  # All of them arrive meanwhile.
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda one: look(team, one), headers))
            assert [answer.status for answer in answers] == [200] * 8
            assert team.issuer.asked["/jwks"] == 2
            behave(team.issuer, sign=lambda claims: signed(claims, old, "RS256"))
            assert look(team, as_person(team, "ann", "viewers")).status in (401, 403)
            forged = new_key("forged")
            behave(team.issuer, sign=lambda claims: signed(claims, forged, "RS256"))
            assert look(team, as_person(team, "ann", "viewers")).status in (401, 403)
            assert team.issuer.asked["/jwks"] == 2

    def test_an_issuer_that_cannot_be_asked_lets_nobody_in(self, tmp_path: Path) -> None:
        with token_team(tmp_path) as team:
            behave(team.issuer, status={"/jwks": 500})
            assert look(team, as_person(team, "ann", "viewers")).status in (401, 403, 503)
            behave(team.issuer)
            assert look(team, as_person(team, "ann", "viewers")).status == 200


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Team, Path]]:
    """A server on a socket, and its path."""
    folder, issuer = tmp_path_factory.mktemp("socket"), Issuer()
    write_config(folder, "https://team.example", "unix:serve.sock", {"kind": "proxy-header"}, PROJECTS)
    fill_projects(folder)
    with running(folder, "https://team.example", issuer) as team:
        yield team, folder / "serve.sock"
    issuer.close()


class TestHeader:
    """A header that is not signed: only who can open the socket can set it."""

    def ask(self, place: tuple[Team, Path], headers: Headers, path: str = "/p/support/") -> Answer:
        team, socket_path = place
        return Browser().ask(team.page(path), headers=headers, socket_path=socket_path)

    def test_the_socket_is_its_owners_alone(self, place: tuple[Team, Path]) -> None:
        assert stat.S_IMODE(place[1].stat().st_mode) & 0o077 == 0

    def test_it_names_a_person_and_groups(self, place: tuple[Team, Path]) -> None:
        known = [("X-Forwarded-User", "ann"), ("X-Forwarded-Groups", "other, viewers ,x")]
        assert self.ask(place, known).status == 200
        assert self.ask(place, [("X-Forwarded-User", "ann")]).status == 404
        assert self.ask(place, [("X-Forwarded-User", "ann")], "/p/open/").status == 200

    @pytest.mark.parametrize(
        "headers",
        [
            [], [("x-forwarded-user", "")], [("x-forwarded-user", "  ")], [("x-forwarded-groups", "viewers")],
            [("x-forwarded-user", "ann"), ("x-forwarded-user", "eve"), ("x-forwarded-groups", "viewers")],
            [("x-forwarded-user", "ann"), ("X-FORWARDED-USER", "ann"), ("x-forwarded-groups", "viewers")],
            [("x-forwarded-user", "ann"), ("x-forwarded-groups", ""), ("x-forwarded-groups", "viewers")],
            [("x_forwarded_user", "ann"), ("x-forwarded-groups", "viewers")],
            [("x-forwarded-user", "a" * 300), ("x-forwarded-groups", "viewers")],
            [("x-forwarded-user", "ann\x01"), ("x-forwarded-groups", "viewers")],
        ],
        ids=repr,
    )  # fmt: skip
    def test_what_is_not_one_person_is_refused(self, place: tuple[Team, Path], headers: Headers) -> None:
        assert self.ask(place, headers).status in (400, 401, 403)

    @pytest.mark.parametrize("groups", ["*", "viewers;admins", "admins x", "Admins", '"admins"'])
    def test_only_whole_names_are_groups(self, place: tuple[Team, Path], groups: str) -> None:
        assert self.ask(place, [("x-forwarded-user", "ann"), ("x-forwarded-groups", groups)]).status == 404

    def test_it_is_not_believed_over_tcp(self, tmp_path: Path) -> None:
        port = free_port()
        identity = {"kind": "proxy-header"}
        write_config(tmp_path, f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", identity, PROJECTS)
        fill_projects(tmp_path)
        issuer = Issuer()
        started = running(tmp_path, f"http://127.0.0.1:{port}", issuer)
        with pytest.raises(AssertionError, match="unix:"), started:
            pass
        issuer.close()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0

    def test_two_reviewers_behind_it_are_two_annotators(self, place: tuple[Team, Path]) -> None:
        """Their agreement is measured: each is known by the name that the proxy has established."""
        team, socket_path = place
        page = team.page(f"/p/support/review/{code_of('support')}")
        for place_in_order in range(2 * REVIEW.size):
            for who, say in (("ann", "pass"), ("ben", "pass" if place_in_order else "fail")):
                headers = [("x-forwarded-user", who), ("x-forwarded-groups", "reviewers")]
                given: dict[str, Any] = {"headers": headers, "socket_path": socket_path}
                shown = Browser().ask(page, **given)
                fields = {"id": trial_to_answer(shown.text), "say": say,
                          "form_secret": team.secret(Browser(), socket_path=socket_path, headers=headers)}  # fmt: skip
                assert Browser().ask(page, fields, **given).status == 303
        store = open_store(team.folder / "support.db")
        run = store.get_run("support-run-2")
        assert {label.annotator for label in store.labels(run.run_id)} == {"ann", "ben"}
        report: EvalReport = EvalReport(store, run)
        agreement = calibrate(report["baseline"], name=REVIEW.name).to_json()
        store.close()
        assert agreement["annotators"] == ["ann", "ben"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "http://team.example"}, "url"),
        ({"identity": {"kind": "oidc", "issuer": "http://id.example", "client_id": "x"}}, "issuer"),
        ({"identity": {"kind": "oidc", "issuer": "https://user@id.example", "client_id": "x"}}, "issuer"),
        ({"identity": {"kind": "oidc", "issuer": "ftp://127.0.0.1", "client_id": "x"}}, "issuer"),
        ({"identity": {"kind": "proxy-jwt", "header": "x", "issuer": "i", "audience": "a",
                       "jwks_url": "http://id.example/jwks"}}, "jwks_url"),
        ({"identity": {"kind": "proxy-jwt", "header": "x", "issuer": "i", "jwks_url": "https://x/"}}, "audience"),
        ({"identity": {"kind": "password"}}, "kind"),
        ({"projects": {}}, "projects"),
        ({"projects": {"../x": {"viewer": ["*"]}}}, "TOML"),
        ({"projects": {"x": {"veiwer": ["*"]}}}, "veiwer"),
        ({"projects": {"x": {"viewer": ["*"], "keep_days": -1}}}, "keep_days"),
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_is_not_safe_or_not_understood_starts_nothing(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    issuer, port = Issuer(), free_port()
    values: dict[str, Any] = {
        "url": f"http://127.0.0.1:{port}",
        "listen": f"127.0.0.1:{port}",
        "identity": {"kind": "oidc", "issuer": issuer.url, "client_id": "x"},
        "projects": PROJECTS,
    } | changes
    write_config(tmp_path, **values)
    fill_projects(tmp_path)
    started = running(tmp_path, values["url"], issuer)
    with pytest.raises(AssertionError, match=words), started:
        pass
    assert "Traceback" not in (tmp_path / "log").read_text()
    issuer.close()
