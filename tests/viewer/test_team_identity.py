"""Who gets a session of a team's server: sign-in at an issuer, each attack on it, and the end of sessions."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urljoin, urlsplit

import pytest
import sqlalchemy as sa

from fairtrial.viewer.team.database import SIGN_IN_SECONDS, TeamDatabase
from tests.viewer.conftest import Answer
from tests.viewer.issuer import (
    CLIENT,
    SIGNATURES,
    Claims,
    Issuer,
    encoded,
    new_key,
    signed,
    signed_with_public_key,
    unsigned,
)
from tests.viewer.teams import (
    COOKIE,
    LOGIN_COOKIE,
    PROJECTS,
    SECRET,
    Browser,
    Team,
    behave,
    oidc_team,
    person,
)

HOUR = 3600


def signed_by(issuer: Issuer, algorithm: str = "RS256", **header: Any) -> Callable[[Claims], str]:
    return lambda claims: signed(claims, issuer.keys["RS256"], algorithm, **header)


def with_other_claims(issuer: Issuer) -> Callable[[Claims], str]:
    def sign(claims: Claims) -> str:
        head, _, signature = signed_by(issuer)(claims).split(".")
        return ".".join((head, encoded({**claims, "groups": ["admins"]}), signature))

    return sign


def with_key_inside(issuer: Issuer, **where: str) -> Callable[[Claims], str]:
    key = new_key("mine")
    return lambda claims: signed(claims, key, "RS256", jwk=key.as_dict(private=False), **where)


ATTACKS: dict[str, Callable[[Issuer], dict[str, Any]]] = {
    "no algorithm": lambda _: {"sign": unsigned},
    "no algorithm in odd letters": lambda _: {"sign": lambda claims: unsigned(claims, "nOnE")},
    "the public key as a secret": lambda issuer: {"sign": lambda c: signed_with_public_key(c, issuer.keys["RS256"])},
    "the public key as a secret, unnamed": lambda issuer: {
        "sign": lambda c: signed_with_public_key(c, issuer.keys["RS256"], kid=False)
    },
    "no signature": lambda issuer: {"sign": lambda claims: signed_by(issuer)(claims).rpartition(".")[0] + "."},
    "other claims": lambda issuer: {"sign": with_other_claims(issuer)},
    "an unknown key": lambda _: {"sign": lambda claims: signed(claims, new_key("another"), "RS256")},
    "another key of the same name": lambda issuer: {
        "sign": lambda claims: signed(claims, new_key(str(issuer.keys["RS256"].kid)), "RS256")
    },
    "a key inside": lambda issuer: {"sign": with_key_inside(issuer)},
    "a key inside under a known name": lambda issuer: {
        "sign": with_key_inside(issuer, kid=str(issuer.keys["RS256"].kid))
    },
    "a key of another type": lambda issuer: {"sign": signed_by(issuer, kid=str(issuer.keys["ES256"].kid))},
    "the public key as a longer secret": lambda issuer: {
        "sign": lambda c: signed_with_public_key(c, issuer.keys["RS256"], algorithm="HS512")
    },
    "an extension that must be understood": lambda issuer: {"sign": signed_by(issuer, crit=["x"], x=1)},
    "no token": lambda _: {"sign": lambda _: "a.b.c"},
    "an encrypted token": lambda _: {"sign": lambda _: "a.b.c.d.e"},
    "claims that are a list": lambda issuer: {"sign": lambda _: signed_by(issuer)([])},  # type: ignore[arg-type]
    "another audience": lambda _: {"claims": {"aud": "another"}},
    "other audiences": lambda _: {"claims": {"aud": ["another", f"{CLIENT}s"]}},
    "no audience": lambda _: {"claims": {"aud": None}},
    "another issuer": lambda _: {"claims": {"iss": "http://127.0.0.1:9"}},
    "the issuer and a slash": lambda issuer: {"claims": {"iss": f"{issuer.url}/"}},
    "no issuer": lambda _: {"claims": {"iss": None}},
    "expired": lambda _: {"claims": {"iat": time.time() - 2 * HOUR, "exp": time.time() - HOUR}},
    "no expiry": lambda _: {"claims": {"exp": None}},
    "an expiry that is no number": lambda _: {"claims": {"exp": float("nan")}},
    "an expiry without an end": lambda _: {"claims": {"exp": float("inf")}},
    "an expiry that is a text": lambda _: {"claims": {"exp": "never"}},
    "from the future": lambda _: {"claims": {"iat": time.time() + HOUR, "exp": time.time() + 2 * HOUR}},
    "valid from the future on": lambda _: {"claims": {"nbf": time.time() + HOUR}},
    "no time of issue": lambda _: {"claims": {"iat": None}},
    "no subject": lambda _: {"claims": {"sub": None}},
    "an empty subject": lambda _: {"claims": {"sub": ""}},
    "a subject that is a number": lambda _: {"claims": {"sub": 7}},
}
"""Tokens that nobody may accept, by what is wrong with them."""
OF_SIGN_IN: dict[str, Callable[[Issuer], dict[str, Any]]] = {
    **ATTACKS,
    "another nonce": lambda _: {"claims": {"nonce": "x" * 43}},
    "no nonce": lambda _: {"claims": {"nonce": None}},
    "several audiences": lambda _: {"claims": {"aud": [CLIENT, "another"]}},
    "given to another client": lambda _: {"claims": {"aud": [CLIENT, "another"], "azp": "another"}},
    "another person in UserInfo": lambda _: {"told_later": frozenset({"groups"}), "userinfo": {"sub": "eve"}},
    "nobody in UserInfo": lambda _: {"told_later": frozenset({"groups"}), "userinfo": {"sub": None}},
    "no UserInfo": lambda _: {"told_later": frozenset({"groups"}), "status": {"/userinfo": 500}},
    "no tokens": lambda _: {"status": {"/token": 500}},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with oidc_team(tmp_path_factory.mktemp("team")) as team:
        yield team


@pytest.fixture
def team(served: Team) -> Team:
    behave(served.issuer)
    return served


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Team]:
    """A server that has asked its issuer nothing."""
    with oidc_team(tmp_path) as team:
        yield team


def may(team: Team, browser: Browser, path: str = "/p/support/") -> bool:
    """Whether a browser is shown a page."""
    answer = browser.ask(team.page(path))
    assert answer.status in (200, 303, 404), answer
    return answer.status == 200


def refused(team: Team, browser: Browser, answer: Answer) -> None:
    """Nobody has signed in, and the page says why without a secret."""
    assert answer.status in (400, 403), (answer.status, answer.text)
    assert browser.cookie(team.url) == ""
    assert not any(secret in answer.text for secret in team.issuer.given)
    assert "<script>alert" not in answer.text
    assert not may(team, browser, "/p/open/")


class TestSignIn:
    def test_a_page_leads_to_the_issuer_and_back_to_it(self, team: Team) -> None:
        behave(team.issuer, person=person("ann", "viewers"))
        browser, wanted = Browser(), "/p/support/support@2/trials?outcome=failed&q=a%20b"
        answer = browser.follow(team.page(wanted))
        assert (answer.status, browser.at) == (200, team.page(wanted)), answer.text

    @pytest.mark.parametrize("algorithm", SIGNATURES)
    def test_each_safe_signature_is_accepted(self, team: Team, algorithm: str) -> None:
        behave(team.issuer, algorithm=algorithm)
        assert may(team, team.sign_in("ann", "viewers"))
        assert "Warning" not in team.log

    def test_several_audiences_with_ours_as_the_client_are_accepted(self, team: Team) -> None:
        behave(team.issuer, claims={"aud": [CLIENT, "another"], "azp": CLIENT})
        assert may(team, team.sign_in("ann", "viewers"))

    def test_groups_may_be_in_user_info_only(self, team: Team) -> None:
        behave(team.issuer, told_later=frozenset({"groups", "name"}))
        browser = team.sign_in("bea", "viewers", name="Bea of UserInfo")
        assert may(team, browser)
        assert "Bea of UserInfo" in browser.ask(team.page("/")).text

    @pytest.mark.parametrize("attack", OF_SIGN_IN)
    def test_a_wrong_token_opens_no_session(self, team: Team, attack: str) -> None:
        behave(team.issuer, person=person("ann", "viewers"), **OF_SIGN_IN[attack](team.issuer))
        browser = Browser()
        refused(team, browser, browser.ask(team.begin(browser)))

    def test_every_request_to_the_issuer_has_secrets_of_its_own(self, team: Team) -> None:
        asked = [parse_qs(urlsplit(Browser().step(team.page("/login"))).query) for _ in range(3)]
        for name in ("state", "nonce", "code_challenge"):
            values = {one[name][0] for one in asked}
            assert len(values) == 3
            assert min(map(len, values)) >= 43

    def test_two_tabs_may_sign_in_at_once(self, team: Team) -> None:
        behave(team.issuer, person=person("ann", "viewers"))
        browser = Browser()
        first, second = team.begin(browser, "/p/support/"), team.begin(browser, "/p/open/history")
        assert browser.step(second) == team.page("/p/open/history")
        assert browser.step(first) == team.page("/p/support/")
        assert may(team, browser)

    def test_groups_that_are_taken_away_are_gone_with_the_next_sign_in(self, team: Team) -> None:
        browser = team.sign_in("cara", "viewers", "billing")
        assert (may(team, browser), may(team, browser, "/p/billing/")) == (True, True)
        team.sign_in("cara", "billing", browser=browser)
        assert (may(team, browser), may(team, browser, "/p/billing/")) == (False, True)

    @pytest.mark.parametrize(
        "groups",
        [None, [], "", ["*"], "xadmins", {"admins": True}, [["admins"]], [1, None], ["Admins"], ["admins "], [""], 7],
        ids=repr,
    )
    def test_what_is_no_list_of_our_groups_gives_no_role(self, team: Team, groups: Any) -> None:
        behave(team.issuer, person=person("dan"), claims={"groups": groups}, userinfo={"groups": groups})
        browser = Browser()
        if browser.ask(team.begin(browser)).status == 303:
            assert (may(team, browser, "/p/open/"), may(team, browser)) == (True, False)

    def test_a_text_from_the_issuer_is_text(self, team: Team) -> None:
        name = "<script>alert(1)</script>\"'><img src=x>\u202e"
        browser = team.sign_in("eve<b>", "viewers", name=name)
        for path in ("/", "/p/support/"):
            page = browser.ask(team.page(path))
            assert page.status == 200
            assert "<script>alert" not in page.text
            assert "<img src=x" not in page.text
            assert "eve<b>" not in page.text


class TestState:
    """What the browser brings back."""

    def test_a_callback_works_once(self, team: Team) -> None:
        browser = Browser()
        callback = team.begin(browser)
        assert browser.ask(callback).status == 303
        session = browser.cookie(team.url)
        assert browser.ask(callback).status in (400, 403)
        assert browser.cookie(team.url) in (session, "")
        other = Browser()
        refused(team, other, other.ask(callback))

    def test_of_many_equal_callbacks_at_once_one_opens_a_session(self, team: Team) -> None:
        browser = Browser()
        callback = team.begin(browser)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: browser.ask(callback).status, range(8)))
        assert sorted(answers)[:2] == [303, 403]

    def test_browsers_come_back_from_another_site(self, team: Team) -> None:
        behave(team.issuer, person=person("ann", "viewers"))
        browser = Browser()
        sent = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]
        assert browser.ask(team.begin(browser), headers=sent).status == 303
        framed = [*sent[:2], ("Sec-Fetch-Dest", "iframe")]
        assert browser.ask(team.begin(browser), headers=framed).status == 403

    def test_a_code_works_once(self, team: Team) -> None:
        browser = Browser()
        [code] = parse_qs(urlsplit(team.begin(browser)).query)["code"]
        again = changed(team.begin(browser), code=code)
        refused(team, browser, browser.ask(again))  # The challenge is of another request.
        used = Browser()
        first = team.begin(used)
        assert used.ask(first).status == 303
        used.jar[urlsplit(team.url).netloc].pop(COOKIE)
        refused(team, used, used.ask(changed(team.begin(used), code=parse_qs(urlsplit(first).query)["code"][0])))

    @pytest.mark.parametrize("state", ["", None, "x", "x" * 43, "\u00e9", "%00"])
    def test_a_changed_state_is_refused_before_the_code_is_used(self, team: Team, state: str | None) -> None:
        browser = Browser()
        callback = changed(team.begin(browser), state=state)
        before = team.issuer.asked["/token"]
        refused(team, browser, browser.ask(callback))
        assert team.issuer.asked["/token"] == before

    def test_nobody_is_signed_in_as_somebody_else_by_a_link(self, team: Team) -> None:
        behave(team.issuer, person=person("mallory", "viewers"))
        link = team.begin(Browser())
        before = team.issuer.asked["/token"]
        victim, busy = Browser(), Browser()
        refused(team, victim, victim.ask(link))
        team.begin(busy)  # Has the cookie of a sign-in of its own.
        refused(team, busy, busy.ask(link))
        assert team.issuer.asked["/token"] == before

    def test_a_session_is_not_replaced_by_the_link_of_somebody_else(self, team: Team) -> None:
        browser = team.sign_in("ann", "viewers")
        session = browser.cookie(team.url)
        behave(team.issuer, person=person("mallory"))
        assert browser.ask(team.begin(Browser())).status in (400, 403)
        assert browser.cookie(team.url) == session
        assert may(team, browser)

    @pytest.mark.parametrize(
        "sent",
        [
            {"iss": "http://127.0.0.1:9"}, {"iss": ""}, {"code": None}, {"code": ""},
            {"code": None, "error": "access_denied", "error_description": "<script>alert(1)</script>"},
        ],
    )  # fmt: skip
    def test_an_answer_of_another_issuer_or_without_a_code_is_refused(self, team: Team, sent: dict[str, Any]) -> None:
        behave(team.issuer, sent=sent)
        before = team.issuer.asked["/token"]
        browser = Browser()
        refused(team, browser, browser.ask(team.begin(browser)))
        if sent.get("code", "x"):
            assert team.issuer.asked["/token"] == before

    @pytest.mark.parametrize("name", ["state", "code", "iss"])
    def test_a_parameter_that_comes_twice_is_refused(self, team: Team, name: str) -> None:
        browser = Browser()
        refused(team, browser, browser.ask(f"{team.begin(browser)}&{name}=x"))

    @pytest.mark.parametrize(
        "to",
        [
            "//evil.example", "///evil.example", "https://evil.example", "http:evil.example", "\\\\evil.example",
            "/\\evil.example", "\\/evil.example", "/%2f%2fevil.example", "%2f%2fevil.example", "/%5cevil.example",
            "/../evil.example", "/p/../../x", "/p/support/..//evil.example", "/..//evil.example", "/.//evil.example",
            "/p/%2e%2e//evil.example", "javascript:alert(1)", "data:text/html,x", "@evil.example", ".evil.example",
            ":80@evil.example", "/\t/evil.example", "\t//evil.example", " //evil.example", "/\r\n/evil.example",
            "a\r\nSet-Cookie: x=1", "/p/support/\r\nSet-Cookie: x=1", "?x=//evil.example", "#//evil", "\u00e9", "\x00",
            "/callback?code=x&state=y", "/logout", "/" + "a" * 4_000,
        ],
    )  # fmt: skip
    def test_nobody_is_led_elsewhere(self, team: Team, to: str) -> None:
        browser = Browser()
        first = browser.ask(team.page(f"/login?{urlencode({'to': to})}"))
        if first.status in (400, 414):
            return
        callback = browser.step(first.headers["location"])
        answer = browser.ask(callback)
        assert answer.status == 303
        location = answer.headers["location"]
        assert location.isascii()
        assert not re.search(r"[\x00-\x20\\]", location)
        reached = urlsplit(urljoin(callback, location))
        assert f"{reached.scheme}://{reached.netloc}" == team.url
        assert not re.match(r"/*(//|%2f|%5c)", reached.path, re.IGNORECASE)
        assert "x=1" not in answer.headers.get("set-cookie", "")
        assert browser.cookie(team.url)


def changed(address: str, **values: str | None) -> str:
    """An address with other parameters; None takes one away."""
    place = urlsplit(address)
    query = {name: found[0] for name, found in parse_qs(place.query).items()} | values
    return place._replace(query=urlencode({name: v for name, v in query.items() if v is not None})).geturl()


class TestSessions:
    def test_a_session_that_was_there_before_is_not_the_one_after(self, team: Team) -> None:
        browser = Browser()
        browser.set(team.url, "fixed" * 10)
        team.sign_in("ann", "viewers", browser=browser)
        first = browser.cookie(team.url)
        team.sign_in("ann", "viewers", browser=browser)
        assert len({"fixed" * 10, first, browser.cookie(team.url)}) == 3
        assert len(first) >= 43
        fixed = Browser()
        fixed.set(team.url, "fixed" * 10)
        assert not may(team, fixed, "/p/open/")

    def test_only_a_few_cookies_of_the_name_are_looked_up(self, team: Team) -> None:
        valid = f"{COOKIE}={team.sign_in('ann', 'viewers').cookie(team.url)}"
        for before, status in ((1, 200), (2_000, 303)):
            cookies = "; ".join([*[f"{COOKIE}=x"] * before, valid])
            assert Browser().ask(team.page("/p/support/"), headers=[("Cookie", cookies)]).status == status

    def test_cookies_are_hidden_from_scripts_and_other_sites(self, team: Team) -> None:
        browser = team.sign_in("ann")
        kept = {header.partition("=")[0]: header for header in browser.given if "Max-Age=0" not in header}
        assert {COOKIE, LOGIN_COOKIE} <= set(kept)
        for header in kept.values():
            assert {"Path=/", "HttpOnly", "SameSite=Lax"} <= set(header.split("; "))
            assert "domain=" not in header.lower()

    def test_logging_out_ends_the_session_and_needs_its_form(self, team: Team) -> None:
        browser = team.sign_in("ann", "viewers")
        session = browser.cookie(team.url)
        assert browser.ask(team.page("/logout")).status in (404, 405)
        assert browser.ask(team.page("/logout"), {"form_secret": "x" * 32}).status == 403
        assert browser.ask(team.page("/logout"), {}).status == 403
        foreign = browser.ask(
            team.page("/logout"), {"form_secret": team.secret(browser)}, [("Origin", "http://evil.example")]
        )
        assert foreign.status == 403
        assert may(team, browser)
        assert team.form(browser, "/logout").status in (200, 303)
        browser.set(team.url, session)
        assert not may(team, browser, "/p/open/")

    def test_revoking_ends_all_sessions_of_one_person(self, team: Team) -> None:
        two = [team.sign_in("frank", "viewers") for _ in range(2)]
        other = team.sign_in("frankie", "viewers")
        assert all(may(team, browser) for browser in (*two, other))
        team.command("revoke", "frank")
        assert [may(team, browser) for browser in (*two, other)] == [False, False, True]
        assert may(team, team.sign_in("frank", "viewers"))

    def test_they_survive_a_restart_and_no_secret_is_kept(self, tmp_path: Path) -> None:
        from tests.viewer.teams import running

        with oidc_team(tmp_path) as team:
            browser = team.sign_in("ann", "viewers")
            team.process.terminate()
            team.process.wait(60)
            (tmp_path / "log").rename(tmp_path / "log.1")
            with running(tmp_path, team.url, team.issuer) as again:
                assert may(again, browser)
        for file in tmp_path.glob("team.db*"):
            assert browser.cookie(team.url).encode() not in file.read_bytes()
        assert (tmp_path / "team.db").stat().st_mode & 0o077 == 0

    def test_an_idle_session_ends(self, tmp_path: Path) -> None:
        with oidc_team(tmp_path, idle_minutes=0.1) as team:
            browser = team.sign_in("ann", "viewers")
            for _ in range(3):
                time.sleep(2.2)
                assert may(team, browser)
            time.sleep(6.3)
            assert not may(team, browser)

    def test_a_session_ends_after_its_whole_time_however_busy(self, tmp_path: Path) -> None:
        with oidc_team(tmp_path, absolute_hours=5 / HOUR) as team:
            browser = team.sign_in("ann", "viewers")
            began = time.monotonic()
            while time.monotonic() < began + 2:
                assert may(team, browser)
                time.sleep(0.2)
            while time.monotonic() < began + 5.5:
                browser.ask(team.page("/"))
                time.sleep(0.2)
            assert not may(team, browser)


class TestDatabase:
    """What the server keeps of its own, by a clock of the test."""

    @pytest.fixture(params=["sqlite", "postgresql"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        given: str = request.getfixturevalue("pg_url") if request.param == "postgresql" else ""
        return given or f"sqlite:///{tmp_path / 'team.db'}"

    def test_a_sign_in_ends_after_ten_minutes_and_is_of_one_browser(self, url: str) -> None:
        now = [1e9]
        database = TeamDatabase(url, clock=lambda: now[0])
        begun = [database.begin_sign_in("one browser", f"p/{number}") for number in range(3)]
        assert database.end_sign_in(begun[0].state, "another") is None
        now[0] += SIGN_IN_SECONDS
        assert database.end_sign_in(begun[0].state, "one browser") == begun[0]
        assert database.end_sign_in(begun[0].state, "one browser") is None
        now[0] += 1
        assert database.end_sign_in(begun[1].state, "one browser") is None
        odd = database.begin_sign_in("one browser", "p/\0")
        assert database.end_sign_in("\0", "one browser") is None
        assert database.end_sign_in(odd.state, "one browser") == odd
        database.close()

    def test_the_limits_of_a_session_are_exact(self, url: str) -> None:
        now = [1e9]
        database = TeamDatabase(url, clock=lambda: now[0])
        database.meet("u-1", "Ann")
        secret = database.open_session("u-1", ["viewers"])
        for step in (99, 99, 99):
            now[0] += step
            found = database.session(secret, idle=100, absolute=300)
            assert found is not None
            assert (found.id, found.name, found.groups) == ("u-1", "Ann", ("viewers",))
        now[0] += 3
        assert database.session(secret, idle=100, absolute=300) is None
        assert database.session(secret, idle=100, absolute=301) is not None
        now[0] += 100
        assert database.session(secret, idle=100, absolute=900) is None
        database.close()

    def test_the_audit_can_only_grow(self, url: str) -> None:
        database = TeamDatabase(url)
        database.record("signed in", "u-1", "Ann")
        database.close()
        engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        changes = ["update team_audit set person = 'x'", "delete from team_audit"]
        copied = "into team_audit select * from team_audit where id = 1"
        if engine.dialect.name == "sqlite":
            changes += [f"insert or replace {copied}", f"replace {copied}"]
        else:
            changes += ["truncate team_audit", f"insert {copied} on conflict (id) do update set person = 'x'"]
        for change in changes:
            with pytest.raises(sa.exc.DBAPIError, match="append-only"), engine.begin() as connection:
                connection.exec_driver_sql(change)
        engine.dispose()
        database = TeamDatabase(url)
        assert [(entry.person, entry.action) for entry in database.audit()] == [("u-1", "signed in")]
        database.close()


class TestKeys:
    def test_a_new_key_is_found_and_one_that_was_withdrawn_opens_nothing(self, fresh: Team) -> None:
        issuer = fresh.issuer
        assert may(fresh, fresh.sign_in("ann", "viewers"))
        old = issuer.rotate()
        assert may(fresh, fresh.sign_in("ann", "viewers"))
        behave(issuer, sign=lambda claims: signed(claims, old, "RS256"))
        browser = Browser()
        refused(fresh, browser, browser.ask(fresh.begin(browser)))

    def test_a_key_beside_the_new_one_is_accepted(self, fresh: Team) -> None:
        old = fresh.issuer.rotate(withdraw=False)
        assert may(fresh, fresh.sign_in("ann", "viewers"))
        behave(fresh.issuer, sign=lambda claims: signed(claims, old, "RS256"))
        assert may(fresh, fresh.sign_in("ann", "viewers"))

    def test_unknown_keys_do_not_make_us_ask_again_and_again(self, fresh: Team) -> None:
        key = new_key("x")
        fresh.sign_in("ann")
        began = time.monotonic()
        for number in range(20):
            behave(fresh.issuer, sign=lambda claims, number=number: signed(claims, key, "RS256", kid=f"k{number}"))
            browser = Browser()
            assert browser.ask(fresh.begin(browser)).status in (400, 403)
        assert fresh.issuer.asked["/jwks"] <= 2 + (time.monotonic() - began) // 10
        assert fresh.issuer.asked["/.well-known/openid-configuration"] == 1


@pytest.fixture(scope="module")
def unasked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """A server that never finds a document it can use."""
    with oidc_team(tmp_path_factory.mktemp("unasked")) as team:
        yield team


class TestIssuer:
    @pytest.mark.parametrize(
        "metadata",
        [
            {"issuer": "http://127.0.0.1:9"}, {"issuer": None}, {"token_endpoint": None}, {"jwks_uri": None},
            {"authorization_endpoint": "javascript:alert(1)"}, {"token_endpoint": "file:///etc/passwd"},
            {"token_endpoint": "http://192.0.2.1/token"}, {"userinfo_endpoint": "http://192.0.2.1/userinfo"},
        ],
    )  # fmt: skip
    def test_a_document_that_is_not_of_the_issuer_is_refused(
        self, unasked: Team, metadata: dict[str, str | None]
    ) -> None:
        behave(unasked.issuer, metadata=metadata)
        answer = Browser().ask(unasked.page("/login"))
        assert 400 <= answer.status < 600, answer
        assert "location" not in answer.headers

    def test_an_issuer_that_is_down_is_asked_again(self, fresh: Team) -> None:
        behave(fresh.issuer, status={"/.well-known/openid-configuration": 500})
        answer = Browser().ask(fresh.page("/login"))
        assert answer.status >= 400
        assert "Traceback" not in answer.text + fresh.log
        behave(fresh.issuer)
        assert may(fresh, fresh.sign_in("ann", "viewers"))


class TestConfidentialClient:
    def test_a_secret_is_sent_to_the_issuer_and_seen_nowhere(self, tmp_path: Path) -> None:
        with oidc_team(tmp_path, secret=SECRET) as team:
            assert may(team, team.sign_in("ann", "viewers"))
            team.issuer.client_secret = "another"
            browser = Browser()
            answer = browser.ask(team.begin(browser))
            refused(team, browser, answer)
            assert SECRET not in answer.text + team.log + str(team.audit())

    def test_without_its_variable_the_server_does_not_start(self, tmp_path: Path) -> None:
        started = oidc_team(tmp_path, client_secret_env="FAIRTRIAL_CLIENT_SECRET")
        with pytest.raises(AssertionError, match="FAIRTRIAL_CLIENT_SECRET"), started:
            pass


class TestWithoutSession:
    @pytest.mark.parametrize("path", ["/", "/p/support/", "/p/nothing/", "/p/support/support@2", "/p/", "/nothing"])
    def test_people_are_asked_to_sign_in_and_programs_are_told(self, team: Team, path: str) -> None:
        answer = Browser().ask(team.page(path))
        assert answer.status == 303
        location = urlsplit(urljoin(team.page(path), answer.headers["location"]))
        assert (location.path, parse_qs(location.query).get("to", ["/"])) == ("/login", [path])
        told = Browser().ask(team.page(path), headers=[("Accept", "application/json")])
        assert (told.status, "support" in told.text.lower()) == (401, False)

    def test_its_health_says_nothing_else(self, team: Team) -> None:
        answer = Browser().ask(team.page("/healthz"))
        assert answer.status == 200
        assert len(answer.text) < 40
        assert not any(name in answer.text.lower() for name in PROJECTS)

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "HOST, evil.example"])
    def test_another_host_is_not_answered(self, team: Team, host: str) -> None:
        named = host.replace("HOST", urlsplit(team.url).netloc)
        for path in ("/login", "/", "/callback?state=x&code=y"):
            answer = Browser().ask(team.page(path), headers=[("Host", named)])
            assert answer.status == 421
            assert "url in team.toml" in answer.text
            assert "--trusted-host" not in answer.text

    @pytest.mark.parametrize("name", ["x-forwarded-user", "x-goog-iap-jwt-assertion", "remote-user", "authorization"])
    def test_headers_of_a_proxy_identify_nobody(self, team: Team, name: str) -> None:
        token = team.issuer.token(person("ann", "admins"), nonce="x")
        for value in ("ann", token, f"Bearer {token}"):
            given = [(name, value), ("x-forwarded-groups", "admins"), ("Accept", "application/json")]
            assert Browser().ask(team.page("/p/support/"), headers=given).status == 401

    def test_forwarded_addresses_change_nothing(self, team: Team) -> None:
        given = [("x-forwarded-host", "evil.example"), ("x-forwarded-proto", "https"), ("forwarded", "host=evil")]
        location = Browser().ask(team.page("/login"), headers=given).headers["location"]
        assert parse_qs(urlsplit(location).query)["redirect_uri"] == [f"{team.url}/callback"]


def test_with_https_cookies_are_bound_to_the_host(tmp_path: Path) -> None:
    """A proxy ends TLS; the browser names its host."""
    from tests.servers import free_port
    from tests.viewer.teams import fill_projects, running, write_config

    issuer, port = Issuer(), free_port()
    issuer.redirect_uri = "https://team.example/callback"
    identity = {"kind": "oidc", "issuer": issuer.url, "client_id": CLIENT}
    write_config(tmp_path, "https://team.example", f"127.0.0.1:{port}", identity, PROJECTS)
    fill_projects(tmp_path)
    host = [("Host", "team.example")]
    with running(tmp_path, "https://team.example", issuer) as team:
        browser, here = Browser(), f"http://127.0.0.1:{port}"
        assert browser.ask(f"{here}/login").status == 421
        location = browser.ask(f"{here}/login?to=/p/open/", headers=host).headers["location"]
        callback = browser.step(location)
        assert callback.startswith("https://team.example/callback?")
        answer = browser.ask(callback.replace("https://team.example", here), headers=host)
        assert (answer.status, answer.headers["location"]) in ((303, "https://team.example/p/open/"), (303, "/p/open/"))
        assert browser.ask(f"{here}/p/open/", headers=host).status == 200
        for name in (f"__Host-{LOGIN_COOKIE}", f"__Host-{COOKIE}"):
            [header] = [one for one in browser.given if one.startswith(f"{name}=") and "Max-Age=0" not in one]
            assert {"Path=/", "HttpOnly", "SameSite=Lax", "Secure"} <= set(header.split("; "))
        plain = Browser()
        plain.set(here, browser.cookie(here, f"__Host-{COOKIE}"))
        assert plain.ask(f"{here}/p/open/", headers=host).status == 303
        assert "Traceback" not in team.log
    issuer.close()


def test_without_its_database_the_server_lets_nobody_in_and_does_not_quote_it(fresh: Team) -> None:
    browser = fresh.sign_in("ann", "viewers")
    for table in ("team_sign_ins", "team_sessions", "team_audit"):
        other = Browser()
        callback = fresh.begin(other)
        change_database(fresh, f"alter table {table} rename to hidden")
        assert (other.ask(callback).status, other.cookie(fresh.url)) == (503, "")
        asked = [Browser().ask(fresh.page("/login")), Browser().ask(fresh.page("/callback?state=x&code=y"))]
        asked += [browser.ask(fresh.page(path)) for path in ("/p/support/", "/p/support/support@2/t/baseline/q01")]
        assert not [answer.text for answer in asked if re.search(r"\[SQL|SELECT |INSERT |DELETE ", answer.text)]
        assert not [answer for answer in asked if answer.status == 500]
        change_database(fresh, f"alter table hidden rename to {table}")
    assert "Traceback" not in fresh.log
    assert may(fresh, browser)


def change_database(team: Team, statement: str) -> None:
    with sqlite3.connect(team.folder / "team.db") as database:
        database.execute(statement)
    database.close()


def test_anybody_who_begins_many_sign_ins_leaves_nothing_and_ends_those_of_nobody_else(fresh: Team) -> None:
    browser = Browser()
    callback = fresh.begin(browser, "/p/open/")
    before = every_row(fresh.folder / "team.db")
    for to in ("/", "/p/open/", "/p/open/?q=%00", "/p/open/?q=" + "x" * 5_000):
        assert all(Browser().ask(fresh.page(f"/login?to={quote(to)}")).status == 303 for _ in range(10))
    assert every_row(fresh.folder / "team.db") == before
    answer = browser.ask(callback)
    assert (answer.status, answer.headers["location"]) == (303, fresh.page("/p/open/"))
    for state in ("%00", "x", "a.b.c.d.e", "....", callback.partition("state=")[2].partition("&")[0][:-4]):
        assert browser.ask(fresh.page(f"/callback?code=x&state={state}")).status == 403
    assert "Traceback" not in fresh.log


def test_no_secret_is_in_the_log_the_audit_or_the_database(fresh: Team) -> None:
    secrets: set[str] = set()
    for attack in ("another nonce", "expired", "no algorithm", "no tokens", "another person in UserInfo"):
        behave(fresh.issuer, person=person("ann", "viewers"), **OF_SIGN_IN[attack](fresh.issuer))
        browser = Browser()
        callback = fresh.begin(browser)
        browser.ask(callback)
        secrets |= {browser.cookie(fresh.url, LOGIN_COOKIE), parse_qs(urlsplit(callback).query)["state"][0]}
    behave(fresh.issuer)
    browser = fresh.sign_in("ann", "viewers")
    browser.ask(fresh.page("/p/support/support@2/t/baseline/q01"))
    secrets |= {browser.cookie(fresh.url), fresh.secret(browser), *fresh.issuer.given} - {""}
    fresh.form(browser, "/logout")
    entries = fresh.audit()
    fresh.process.terminate()
    fresh.process.wait(60)
    assert [entry["action"] for entry in entries].count("sign-in refused") == 5
    told = fresh.log + str(entries) + "".join(str(row) for row in every_row(fresh.folder / "team.db"))
    assert not [secret for secret in secrets if secret in told]


def every_row(path: Path) -> list[Any]:
    """Everything that a database has."""
    with sqlite3.connect(path) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        rows = [row for name in tables for row in database.execute(f'select * from "{name}"')]
    database.close()
    return rows
