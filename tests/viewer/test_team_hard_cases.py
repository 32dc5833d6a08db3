"""What goes wrong around a team's server: roles of its database, stores that fail, several servers at once."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg import conninfo

from fairtrial.store import open_store
from fairtrial.viewer.pages.context import LiveStreams
from fairtrial.viewer.team.config import read_settings
from fairtrial.viewer.team.database import TeamDatabase
from fairtrial.viewer.team.identity import IssuerKeys, SignInRefusedError
from fairtrial.viewer.team.serve import TeamServer
from tests.servers import PostgresServer
from tests.viewer.issuer import Issuer, new_key, signed
from tests.viewer.teams import (
    COOKIE,
    FORM,
    Browser,
    behave,
    code_of,
    fill_projects,
    oidc_team,
    running,
    trial_to_answer,
    write_config,
)

PICKED = {"o": "0", "name": "helpful", "say": "pass"}
MADE = {
    "name": "kind", "question": "Is it kind?", "experiment": "baseline", "scale": "pass_fail", "size": "4",
    "votes": "1",
}  # fmt: skip


@pytest.mark.timeout(120)
def test_the_server_needs_a_role_that_owns_nothing_once_the_tables_are_there(
    pg_url: str, pg_server: PostgresServer
) -> None:
    TeamDatabase(pg_url).close()
    facts: dict[str, Any] = conninfo.conninfo_to_dict(pg_url)
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE team_server LOGIN PASSWORD 'PASSWORD'")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO team_server")
        connection.execute("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO team_server")
        try:
            database = TeamDatabase(f"postgresql://team_server:PASSWORD@127.0.0.1:{facts['port']}/{facts['dbname']}")
            database.record("signed in", "u-1", "Ann")
            assert [entry.person for entry in database.audit()] == ["u-1"]
            database.close()
        finally:
            connection.execute("DROP OWNED BY team_server")
            connection.execute("DROP ROLE team_server")


@pytest.mark.timeout(120)
def test_servers_of_one_database_start_at_once_and_meet_the_same_person(pg_server: PostgresServer) -> None:
    for _ in range(3):
        url = pg_server.new_database()
        try:
            with ThreadPoolExecutor(8) as threads:
                databases = list(threads.map(lambda _, url=url: TeamDatabase(url), range(8)))
                keys = list(threads.map(lambda one: one.meet("u-1", "Ann"), databases))
            assert len(set(keys)) == 1
            for one in databases:
                one.close()
        finally:
            pg_server.drop_database(url)


def test_the_audit_says_what_was_read_and_which_run_was_changed(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        admin = team.sign_in("ann", "admins")
        pair = "/p/support/compare/sample?a=support@1:baseline&b=support@2:baseline&id=q03"
        assert admin.ask(team.page(pair)).status == 200
        for kept in ("1", ""):
            assert team.form(admin, "/p/support/support@2/keep", kept=kept).status == 303
        assert team.form(admin, "/p/support/support/delete", confirm="support-run-2").status == 303
        entries = [(entry["action"], entry["object"]) for entry in team.audit() if entry["project"]]
    assert entries == [
        ("read transcript", pair.removeprefix("/p/support/")),
        ("kept", "support@2 (support-run-2)"),
        ("no longer kept", "support@2 (support-run-2)"),
        ("deleted", "support@2 (support-run-2)"),
    ]


def test_no_change_is_stored_that_the_audit_does_not_have(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        admin = team.sign_in("ann", "admins")
        queue = f"/p/support/review/{code_of('support')}"
        member = trial_to_answer(admin.ask(team.page(queue)).text)
        secret = {"form_secret": team.secret(admin)}
        store = open_store(tmp_path / "support.db")
        before = store.get_run("support-run-2"), list(store.labels("support-run-2"))
        with sqlite3.connect(tmp_path / "team.db") as database:
            database.execute(
                "create trigger broken before insert on team_audit begin select raise(abort, 'no space'); end"
            )
        database.close()
        changes: dict[str, dict[str, str]] = {
            "/p/support/support@1/delete": {"confirm": "support-run-1"},
            "/p/support/support@2/keep": {"kept": "1"},
            "/p/support/support@2/picked": PICKED,
            queue: {"id": member, "say": "pass"},
            "/p/support/support@2/review": MADE,
            "/p/support/support@2/review/helpful": {"more": "3"},
        }
        for path, fields in changes.items():
            assert admin.ask(team.page(path), secret | fields).status == 503, path
        assert (store.get_run("support-run-2"), list(store.labels("support-run-2"))) == before
        store.close()
        assert admin.ask(team.page("/p/support/support@1")).status == 200


def test_the_audit_says_which_changes_failed_and_which_forms_were_of_no_run(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        admin = team.sign_in("ann", "admins")
        forms = (("support@2", PICKED, 303), ("support@2", PICKED | {"say": "?"}, 422), ("a secret", PICKED, 404))
        for run, fields, status in forms:
            assert team.form(admin, f"/p/support/{quote(run)}/picked", **fields).status == status, run
        entries = [(entry["action"], entry["object"]) for entry in team.audit() if entry["project"]]
    assert entries == [
        (action, "support@2/picked") for action in ("labelled", "labelled", "labelled (failed)")
    ]  # fmt: skip


def test_the_audit_has_no_name_that_names_no_run(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        admin = team.sign_in("ann", "admins")
        for path in (
            "matrix?c=typed-secret", "matrix?c=support@2&c=typed-secret", "matrix?c=support@typed-secret",
            "typed-secret/trials", "typed-secret/t/baseline/q01", "support@2/t/typed-secret/q01",
            "support@2/t/baseline/typed-secret", "review/typed-secret", "support@2/trials.typed-secret",
            "compare/sample?a=typed-secret&b=support@2:baseline&id=q03", "support@2/review/typed-secret/labels.csv",
        ):  # fmt: skip
            assert admin.ask(team.page(f"/p/support/{path}")).status in (200, 404, 422), path
        for path in ("review/typed-secret", "typed-secret/picked", "typed-secret/review", "typed-secret/review/x"):
            assert team.form(admin, f"/p/support/{path}", **PICKED, id="x").status == 404, path
        told = [entry["object"] for entry in team.audit() if "typed-secret" in entry["object"]]
    assert told == []


def test_a_store_that_fails_does_not_keep_the_runs_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(
        tmp_path, "http://127.0.0.1:1", "127.0.0.1:0",
        {"kind": "oidc", "issuer": "http://127.0.0.1:1", "client_id": "x"},
        {name: {"keep_days": 30} for name in ("support", "billing")},
    )  # fmt: skip
    fill_projects(tmp_path, ("support", "billing"))
    server = TeamServer(read_settings(tmp_path / "team.toml"))
    with sqlite3.connect(tmp_path / "support.db") as database:
        database.execute("alter table runs rename to gone")
    database.close()
    assert server.delete_old() > 0
    assert [run.suite for run in server.viewers["billing"].store.runs()] == []
    assert "old runs of support could not be deleted" in caplog.text
    for viewer in server.viewers.values():
        viewer.store.close()


def test_a_stream_ends_so_that_a_session_that_has_ended_follows_no_run() -> None:
    async def read() -> dict[str, Any]:
        return {"status": "running"}

    async def follow() -> list[bytes]:
        async with asyncio.timeout(30):
            return [event async for event in LiveStreams(longest=0.5).follow(read)]

    events = asyncio.run(follow())
    assert events[0].startswith(b"retry:")
    assert not any(event.startswith((b"event: ended", b"event: gone")) for event in events)


def test_names_that_no_database_takes_sign_in(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        browser = team.sign_in("ann", "viewers", name="An\ud800n\0a")
        assert browser.ask(team.page("/p/support/")).status == 200
        assert "An?na" in browser.ask(team.page("/")).text
        assert "Traceback" not in team.log


def test_a_browser_that_leaves_while_it_signs_out_is_no_error(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        browser = team.sign_in("ann", "viewers")
        place = urlsplit(team.url)
        head = (
            f"POST /logout HTTP/1.1\r\nHost: {place.netloc}\r\nOrigin: {team.url}\r\nContent-Type: {FORM}\r\n"
            f"Content-Length: 99\r\nCookie: {COOKIE}={browser.cookie(team.url)}\r\n\r\nform_secret="
        )
        with socket.create_connection((place.hostname, place.port), 60) as connection:
            connection.sendall(head.encode())
            time.sleep(1)
        time.sleep(1)
        assert browser.ask(team.page("/p/support/")).status == 200
        assert "Traceback" not in team.log


def test_names_and_groups_in_headers_are_utf8(tmp_path: Path) -> None:
    write_config(
        tmp_path, "https://team.example", "unix:serve.sock", {"kind": "proxy-header"},
        {"support": {"viewer": ["Größe"]}},
    )  # fmt: skip
    fill_projects(tmp_path, ("support",))
    issuer = Issuer()
    with running(tmp_path, "https://team.example", issuer) as team:
        given: dict[str, Any] = {"socket_path": tmp_path / "serve.sock"}
        sent: list[tuple[str, bytes]] = []
        for name, groups, status in (("Özil", "x, Größe", 200), ("Özil", "x", 404)):
            sent = [("x-forwarded-user", name.encode()), ("x-forwarded-groups", groups.encode())]
            answer = Browser().ask(team.page("/p/support/"), headers=sent, **given)  # type: ignore[arg-type]
            assert answer.status == status
        assert "Özil" in Browser().ask(team.page("/"), headers=sent, **given).text  # type: ignore[arg-type]
        broken = [("x-forwarded-user", b"\xd6zil"), ("x-forwarded-groups", b"x")]
        assert Browser().ask(team.page("/"), headers=broken, **given).status == 403  # type: ignore[arg-type]
    issuer.close()


def test_requests_that_wait_for_keys_are_refused_together() -> None:
    """An issuer that does not answer holds up each request once, not one after another."""

    async def ask(server: socket.socket) -> float:
        keys = IssuerKeys(url_of(server))
        began = time.monotonic()
        found = await asyncio.gather(*(keys.verify(f"e30.e30.{number}") for number in range(4)), return_exceptions=True)
        assert all(isinstance(one, SignInRefusedError) for one in found), found
        return time.monotonic() - began

    def url_of(server: socket.socket) -> Callable[[], Any]:
        async def url() -> str:
            return f"http://127.0.0.1:{server.getsockname()[1]}/jwks"

        return url

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert asyncio.run(ask(silent)) < 25


ODD_KEYS = (
    {"kty": "AKP", "kid": "of the future", "alg": "ML-DSA-44", "pub": "AA"},
    {"kty": "RSA", "kid": "no exponent", "n": "AQAB"},
    {"kty": "RSA", "kid": "no base64", "n": "!", "e": 3},
    {"kty": "EC", "kid": "no curve", "crv": "P-0", "x": "AA", "y": "AA"},
    {"kty": "EC", "kid": "no point", "crv": "P-256", "x": "AA", "y": "AA"},
    {"kty": "OKP", "kid": [1], "crv": "Ed25519", "x": "AA"},
    {"kid": "no type"},
    None,
)


def test_keys_that_cannot_be_read_are_ignored_beside_others(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer()
    behave(issuer, odd_keys=ODD_KEYS)
    try:
        keys = IssuerKeys(jwks_of(issuer))
        assert asyncio.run(keys.verify(signed({"sub": "ann"}, issuer.keys["RS256"], "RS256"))) == {"sub": "ann"}
        for odd in ("of the future", "no point"):
            with pytest.raises(SignInRefusedError, match="no valid signature"):
                asyncio.run(keys.verify(signed({"sub": "ann"}, issuer.keys["RS256"], "RS256", kid=odd)))
    finally:
        issuer.close()
    assert caplog.text.count("a key of the issuer is ignored") >= len(ODD_KEYS)
    assert "'no exponent'" in caplog.text


def test_keys_stay_usable_for_a_day_while_their_address_is_away(caplog: pytest.LogCaptureFixture) -> None:
    issuer, now = Issuer(), [0.0]
    old = issuer.keys["RS256"]
    token = signed({"sub": "ann"}, old, "RS256")
    hour = 3_600.0

    async def verify_through_a_day() -> None:
        keys = IssuerKeys(jwks_of(issuer), clock=lambda: now[0])
        assert await keys.verify(token)
        for away in ({"status": {"/jwks": 500}}, {"odd_keys": {"x": 1}}):
            behave(issuer, **away)
            now[0] += 2 * hour
            asked = issuer.asked["/jwks"]
            assert [await keys.verify(token) for _ in range(3)] == [{"sub": "ann"}] * 3
            assert issuer.asked["/jwks"] == asked + 1
            with pytest.raises(SignInRefusedError, match="no valid signature"):
                await keys.verify(signed({"sub": "ann"}, new_key("forged"), "RS256"))
        now[0] = 24 * hour
        assert await keys.verify(token)
        now[0] += 61
        with pytest.raises(SignInRefusedError, match="cannot be read"):
            await keys.verify(token)
        behave(issuer)
        assert await keys.verify(token)
        issuer.rotate()
        now[0] += 2 * hour
        with pytest.raises(SignInRefusedError, match="no valid signature"):
            await keys.verify(token)
        behave(issuer, status={"/jwks": 500})  # What was seen to be withdrawn does not come back.
        now[0] += 2 * hour
        with pytest.raises(SignInRefusedError, match="no valid signature"):
            await keys.verify(token)

    try:
        asyncio.run(verify_through_a_day())
    finally:
        issuer.close()
    assert "those that were read 120 minutes ago are used" in caplog.text


def jwks_of(issuer: Issuer) -> Callable[[], Any]:
    async def url() -> str:
        return f"{issuer.url}/jwks"

    return url


def test_refusals_that_anybody_can_cause_fill_no_audit(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        stranger = Browser()
        assert {stranger.ask(team.page(f"/callback?state={number}")).status for number in range(130)} == {403}
        team.sign_in("ann", "admins")
        actions = [entry["action"] for entry in team.audit()]
        assert actions == ["sign-in refused"] * 100 + ["signed in"]
        assert team.log.count("is not in the audit as one of many") == 30


def test_a_head_begins_no_sign_in_and_ends_none(tmp_path: Path) -> None:
    with oidc_team(tmp_path) as team:
        address = urlsplit(team.url)
        for path in ("/login", "/callback?state=x&code=y"):
            with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
                connection.sendall(
                    f"HEAD {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode()
                )
                answer = connection.makefile("rb").read().decode()
            assert answer.startswith("HTTP/1.1 401"), answer
            assert "set-cookie" not in answer.lower()
        assert team.audit() == []


def test_an_issuer_that_announces_its_name_must_say_it(tmp_path: Path) -> None:
    announced = {"authorization_response_iss_parameter_supported": True}
    with oidc_team(tmp_path) as team:
        behave(team.issuer, metadata=announced, sent={"iss": None})
        browser = Browser()
        answer = browser.ask(team.begin(browser))
        assert (answer.status, browser.cookie(team.url)) == (403, "")
        assert "of another issuer" in answer.text
        behave(team.issuer, metadata=announced, sent={"iss": team.issuer.url})
        assert browser.ask(team.begin(browser)).status == 303


def test_a_port_that_the_scheme_means_is_no_part_of_the_host(tmp_path: Path) -> None:
    identity = {"kind": "oidc", "issuer": "https://login.example", "client_id": "fairtrial"}
    for given, host in (
        ("https://team.example:443", "team.example"),
        ("https://Team.example/", "team.example"),
        ("https://team.example:8443", "team.example:8443"),
    ):
        write_config(tmp_path, given, "127.0.0.1:0", identity, {"support": {}})
        found = read_settings(tmp_path / "team.toml")
        assert (found.host, found.origin) == (host, f"https://{host}")


def test_a_project_whose_store_is_away_keeps_no_other_from_its_people(tmp_path: Path) -> None:
    server = PostgresServer("a-password-of-nobody-else")
    projects = {"support": {"viewer": ["*"]}, "open": {"viewer": ["*"]}}
    try:
        with oidc_team(tmp_path, projects=projects, health=True, stores={"support": server.url("postgres")}) as team:
            browser = team.sign_in("ann")
            away = browser.ask(team.page("/p/support/"))
            assert (away.status, away.headers["retry-after"]) == (503, "10")
            assert away.text == "the store of project support cannot be opened; it is tried again every 10 seconds\n"
            assert browser.ask(team.page("/p/open/")).status == 200
            home = browser.ask(team.page("/"))
            assert (home.status, home.text.count("could not be read in time")) == (200, 1)
            assert Browser().ask(team.page("/p/support/")).status == 303  # Not signed in.
            assert Browser().ask(team.page("/healthz")).text == "ok\n1 of 2 projects is away\n"
            assert team.probe("/ready")[0] == team.probe("/live")[0] == 200
            assert json.loads(team.probe("/health")[1])["projects_away"] == ["support"]
            assert 'fairtrial_serve_project_away{project="support"} 1.0' in team.probe("/metrics")[1]
            server.start()
            end = time.monotonic() + 60
            while browser.ask(team.page("/p/support/")).status != 200 and time.monotonic() < end:
                time.sleep(0.5)
            assert browser.ask(team.page("/p/support/")).status == 200
            assert Browser().ask(team.page("/healthz")).text == "ok\n"
            assert 'fairtrial_serve_project_away{project="support"} 0.0' in team.probe("/metrics")[1]
            assert team.log.count("project support is away") == 1
            assert team.log.count("project support is back") == 1
            assert server.password not in team.log
            assert "Traceback" not in team.log
    finally:
        server.close()


def test_metrics_count_requests_and_sign_ins_at_a_port_of_their_own(tmp_path: Path) -> None:
    with oidc_team(tmp_path, projects={"open": {"viewer": ["*"]}}, health=True) as team:
        browser = team.sign_in("u-17")
        assert browser.ask(team.page("/p/open/")).status == 200
        assert browser.ask(team.page("/p/none/")).status == 404
        assert browser.ask(team.page("/callback?state=x&code=y")).status == 403
        text = team.probe("/metrics")[1]
        assert browser.ask(team.page("/metrics")).status == 404
        assert Browser().ask(team.page("/metrics")).status == 303
        with sqlite3.connect(tmp_path / "team.db") as database:
            for table in ("team_sessions", "team_people"):
                database.execute(f"alter table {table} rename to {table}_away")
        database.close()
        status, without = team.probe("/metrics")
        assert (status, "fairtrial_serve_sessions" in without) == (200, False)
        end = time.monotonic() + 60
        while (ready := team.probe("/ready"))[0] == 200 and time.monotonic() < end:
            time.sleep(0.5)
        assert (ready[0], "audit is away" in ready[1]) == (503, True)
        assert team.probe("/live")[0] == 200
    for line in (
        'fairtrial_serve_request_duration_seconds_count{status="2xx"} 1.0',
        'fairtrial_serve_request_duration_seconds_count{status="3xx"} 2.0',
        'fairtrial_serve_request_duration_seconds_count{status="4xx"} 2.0',
        'fairtrial_serve_sign_ins_total{result="signed in"} 1.0',
        'fairtrial_serve_sign_ins_total{result="refused"} 1.0',
        'fairtrial_serve_project_away{project="open"} 0.0',
        "fairtrial_serve_sessions 1.0",
    ):
        assert f"{line}\n" in text, line
    assert "u-17" not in text


def test_people_whom_a_proxy_signs_in_are_offered_no_way_out_that_does_not_exist(tmp_path: Path) -> None:
    issuer = Issuer()
    try:
        place = tmp_path / "serve.sock"
        write_config(
            tmp_path, "https://team.example", f"unix:{place}", {"kind": "proxy-header"}, {"open": {"viewer": ["*"]}}
        )
        fill_projects(tmp_path, ("open",))
        with running(tmp_path, "https://team.example", issuer):
            page = Browser().ask("https://team.example/", headers=[("X-Forwarded-User", "ann")], socket_path=place)
    finally:
        issuer.close()
    assert page.status == 200
    assert "ann" in page.text
    assert "Sign out" not in page.text
