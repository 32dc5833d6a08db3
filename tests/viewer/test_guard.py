"""The guard: a table of requests, and a walk through all routes."""

from __future__ import annotations

import html
import posixpath
import re
import socket
import stat
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fairtrial.errors import ConfigurationError
from fairtrial.viewer.access import HEADERS, MAX_ADDRESS, Access, kept_secrets, refusal
from fairtrial.viewer.serve import _listen_on_path
from fairtrial.viewer.site import write_site
from tests.viewer.conftest import Viewed

PORT = 7878
HOST = f"127.0.0.1:{PORT}"


@pytest.fixture
def access() -> Access:
    return Access.create(port=PORT, prefix="abcdefghij")


def ask(access: Access, method: str = "GET", path: str = "/abcdefghij/", query: str = "", **headers: str | None) -> int:
    """The status that the guard answers with; 0 if it lets the request pass."""
    given: dict[str, str | None] = {"host": HOST, "cookie": f"fairtrial={access.sessions.open()}"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = [(name, value) for name, value in given.items() if value is not None]
    found = refusal(method, path, query, pairs, access)
    return 0 if found is None else found.status


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        (HOST, True), (f"localhost:{PORT}", True), (f"LOCALHOST:{PORT}", True), (f"[::1]:{PORT}", True),
        ("127.0.0.1", False), ("127.0.0.1:7879", False), ("evil.example:7878", False),
        (f"127.0.0.1:{PORT}.evil.example", False),
        ("", False), (f"{HOST},{HOST}", False), (f"user@{HOST}", False), (f"{HOST}/", False), (None, False),
    ],
)  # fmt: skip
def test_only_known_hosts_with_their_port_are_answered(access: Access, host: str | None, passes: bool) -> None:
    assert ask(access, host=host) == (0 if passes else 421)


def test_two_host_headers_are_refused(access: Access) -> None:
    found = refusal("GET", "/abcdefghij/", "", [("host", HOST), ("host", HOST)], access)
    assert found is not None
    assert found.status == 421


def test_a_trusted_host_without_a_port_is_answered_on_every_port() -> None:
    access = Access.create(port=PORT, prefix="abcdefghij", trusted_hosts=["Evals.Example"])
    assert [ask(access, host=host) for host in ("evals.example", "evals.example:8443", "other.example")] == [0, 0, 421]


def test_a_socket_is_answered_on_every_forwarded_port() -> None:
    access = Access.create(port=None, prefix="abcdefghij")
    assert [ask(access, host=host) for host in ("localhost:1234", "127.0.0.1:9", "evil.example:9")] == [0, 0, 421]


@pytest.mark.parametrize(
    ("site", "mode", "dest"),
    list(
        product(
            ("none", "same-origin", "same-site", "cross-site", "nonsense"),
            ("navigate", "cors", "no-cors", "websocket"),
            ("document", "iframe", "image", "script", "empty"),
        )
    ),
)
def test_other_sites_may_only_link_to_pages(access: Access, site: str, mode: str, dest: str) -> None:
    ours = site in ("none", "same-origin")
    passes = ours or (mode, dest) == ("navigate", "document")
    found = ask(access, sec_fetch_site=site, sec_fetch_mode=mode, sec_fetch_dest=dest)
    assert found == (0 if passes else 403)


@pytest.mark.parametrize(
    ("origin", "site", "length", "status"),
    [
        (f"http://{HOST}", "same-origin", "3", 0),
        (f"http://{HOST}", None, "3", 0),
        (None, "same-origin", "3", 403),
        ("null", "same-origin", "3", 403),
        (f"https://{HOST}", "same-origin", "3", 403),
        ("http://127.0.0.1:7902", "same-site", "3", 403),
        (f"http://localhost:{PORT}", "same-site", "3", 403),
        (f"http://{HOST}", "same-site", "3", 403),
        (f"http://{HOST}", "cross-site", "3", 403),
        (f"http://{HOST}", "same-origin", None, 413),
        (f"http://{HOST}", "same-origin", "2000000", 413),
    ],
)
def test_changes_come_from_our_own_pages_only(
    access: Access, origin: str | None, site: str | None, length: str | None, status: int
) -> None:
    headers: dict[str, Any] = {"origin": origin, "sec_fetch_site": site, "content_length": length}
    assert ask(access, "POST", "/abcdefghij/logout", **headers) == status


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused(access: Access, method: str) -> None:
    assert ask(access, method) == 405


@pytest.mark.parametrize(
    ("path", "cookie", "status"),
    [
        ("/abcdefghij/", None, 401),
        ("/abcdefghij/", "fairtrial=", 401),
        ("/abcdefghij/", "fairtrial=wrong", 401),
        ("/abcdefghij/", "other=1; fairtrial=wr\u00f6ng", 401),
        ("/abcdefghij/login", None, 0),
        ("/abcdefghij/login/", None, 401),
        ("/abcdefghij/%6cogin", None, 401),
        ("/", None, 404),
        ("/zzzzzzzzzz/", None, 404),
        ("/abcdefghij", None, 404),
        ("/static/x/view.css", None, 404),
        ("/abcdefghij/static/x/view.css", None, 0),
        ("/abcdefghij/statics", None, 401),
    ],
)
def test_without_a_session_only_the_page_to_sign_in_is_answered(
    access: Access, path: str, cookie: str | None, status: int
) -> None:
    assert ask(access, path=path, cookie=cookie) == status


def test_an_address_that_is_too_long_is_refused(access: Access) -> None:
    assert ask(access, query="q=" + "x" * MAX_ADDRESS) == 414


def test_a_session_ends_when_it_is_taken_away(access: Access) -> None:
    session = access.sessions.open()
    assert ask(access, cookie=f"fairtrial={session}") == 0
    access.sessions.end(session)
    assert ask(access, cookie=f"fairtrial={session}") == 401


def test_the_cookie_is_bound_to_the_prefix_and_hidden_from_scripts(access: Access) -> None:
    assert access.set_cookie("s") == "fairtrial=s; Path=/abcdefghij/; HttpOnly; SameSite=Lax; Max-Age=2592000"
    secure = Access.create(port=PORT, prefix="abcdefghij", secure=True)
    assert secure.set_cookie("s").endswith("; HttpOnly; SameSite=Lax; Secure; Max-Age=2592000")


def test_the_token_is_compared_whole(access: Access) -> None:
    assert access.is_token(access.token)
    assert not any(access.is_token(text) for text in ("", access.token[:-1], access.token + "x", "\u00e9", "\ud800"))


def test_the_prefix_is_kept_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    first = kept_secrets(tmp_path)
    assert (len(first.prefix), len(first.token)) == (10, 32)
    assert kept_secrets(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "view.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "[]", '{"prefix": "../../etc"}', '{"prefix": 7}', "\x00"])
def test_a_damaged_prefix_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "view.json").write_text(content)
    assert kept_secrets(tmp_path).prefix.isalnum()


def test_the_policy_has_no_exception() -> None:
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "http" not in policy


# Odd requests to a running server, as bytes: every answer is a sentence, and nothing is read that has no page.


BLOB = "support@2/blob/" + "a" * 64
PATHS = [
    "../../etc/passwd", "static/%2e%2e/%2e%2e/etc/passwd", "static/x//etc/passwd", "support@2/blob/..%2F..%2Fx.db?o=0",
    "support@2%00", "%252e%252e%252fx.db", "%ff%fe", "support@2/trials.exe", f"{BLOB}?o=-1", f"{BLOB}?o=%D9%A1",
    "support@2/t/f/x/99999999999999999999999",
    "support@2/trials?after=99999999999999999999999999&value=nan..inf&sort=%00",
    "a" * 9_000,
]  # fmt: skip


def answer_to(viewed: Viewed, request: str, *, body: str = "") -> bytes:
    """The whole answer to a request, `HOST` and `PREFIX` filled in; empty if the connection is closed without one."""
    here = f"127.0.0.1:{viewed.server.port}"
    text = request.replace("HOST", here).replace("PREFIX", viewed.prefix).replace("COOKIE", viewed.cookie)
    with socket.create_connection(("127.0.0.1", viewed.server.port), timeout=30) as connection:
        connection.sendall(f"{text}\r\nConnection: close\r\n\r\n{body.replace('HOST', here)}".encode("latin-1"))
        return b"".join(iter(lambda: connection.recv(65_536), b""))


@pytest.mark.parametrize("path", PATHS, ids=[path[:30] for path in PATHS])
def test_an_odd_path_leads_to_no_file_and_no_error_of_ours(viewed: Viewed, path: str) -> None:
    answer = answer_to(viewed, f"GET /PREFIX/{path} HTTP/1.1\r\nHost: HOST\r\nCookie: COOKIE")
    assert answer[9:12] in (b"200", b"400", b"404", b"414", b"422")
    assert b"root:" not in answer


HOSTS = ["evil.example", "localhost.:PORT", "127.0.0.1.nip.io:PORT", "0.0.0.0:PORT", "[::ffff:127.0.0.1]:PORT", " ",
         "127.0.0.1:PORT@evil", "2130706433:PORT", "HOST\r\nHost: evil.example"]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_of_elsewhere_is_not_answered_whatever_it_looks_like(viewed: Viewed, host: str) -> None:
    named = host.replace("PORT", str(viewed.server.port))
    answer = answer_to(viewed, f"GET /PREFIX/ HTTP/1.1\r\nHost: {named}\r\nCookie: COOKIE")
    assert answer[9:12] in (b"400", b"421")


def test_an_absolute_address_of_elsewhere_is_no_page(viewed: Viewed) -> None:
    answer = answer_to(viewed, "GET http://evil.example/PREFIX/ HTTP/1.1\r\nHost: HOST\r\nCookie: COOKIE")
    assert answer[9:12] == b"404"


SMUGGLED = "GET /PREFIX/support@2 HTTP/1.1\r\nHost: HOST\r\nCookie: COOKIE\r\n\r\n"
AMBIGUOUS = {
    "length and chunks": ("Content-Length: 5\r\nTransfer-Encoding: chunked", "0\r\n\r\n"),
    "two codings": ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", "0\r\n\r\n"),
    "an unknown coding": ("Transfer-Encoding: xchunked\r\nContent-Length: 3", "a=b"),
    "two lengths": ("Content-Length: 3\r\nContent-Length: 8", "a=b"),
    "a signed length": ("Content-Length: +3", "a=b"),
    "a space before the colon": ("Content-Length : 3", "a=b"),
    "a negative length": ("Content-Length: -1", "a=b"),
    "a header of 70 KB": ("X: " + "a" * 70_000, ""),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_request_carries_no_second_one(viewed: Viewed, name: str) -> None:
    headers, body = AMBIGUOUS[name]
    start = "POST /PREFIX/login HTTP/1.1\r\nHost: HOST\r\nOrigin: http://HOST\r\n"
    answer = answer_to(viewed, start + headers, body=body + SMUGGLED)
    assert b"HTTP/1.1 200" not in answer
    assert answer[9:12] in (b"400", b"413", b"")


def test_a_socket_is_not_taken_from_a_server_that_listens_on_it(tmp_path: Path) -> None:
    path = tmp_path / "view.sock"
    with _listen_on_path(path) as first:
        first.listen()
        with pytest.raises(ConfigurationError, match="another server listens on"):
            _listen_on_path(path)
        assert path.is_socket()
    _listen_on_path(path).close()  # Of a server that ended without removing it.
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        _listen_on_path(path)
    assert path.read_text() == "mine"


# Runs as static pages.


def test_a_site_has_the_report_and_every_trial_and_its_links_lead_to_its_files(viewed: Viewed, tmp_path: Path) -> None:
    write_site(viewed.store, viewed.store.get_run("support-run-2"), tmp_path / "site.zip")
    with zipfile.ZipFile(tmp_path / "site.zip") as archive:
        pages = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"index.html", "trials.html", "view.css", "icon.svg", "t/0001.html", "t/0080.html"} <= set(pages)
    assert "95% interval" in pages["index.html"]
    for name, text in pages.items():
        if not name.endswith(".html"):
            continue
        assert "<script" not in text
        assert "Content-Security-Policy" in text
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            target, _, anchor = html.unescape(link).partition("#")
            found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) if target else name
            assert found in pages, f"{name} links to {link}"
            if anchor:
                assert f'id="{anchor}"' in pages[found], f"{name} links to {link}"


def test_the_same_run_makes_the_same_file(viewed: Viewed, tmp_path: Path) -> None:
    for name in ("one.zip", "two.zip"):
        write_site(viewed.store, viewed.store.get_run("support-run-1"), tmp_path / name)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_hostile_texts_are_text_in_a_site(viewed: Viewed, tmp_path: Path) -> None:
    write_site(viewed.store, viewed.store.get_run("hostile-run"), tmp_path / "site.zip")
    with zipfile.ZipFile(tmp_path / "site.zip") as archive:
        for name in archive.namelist():
            assert re.fullmatch(r"(t/\d{4}|index|trials)\.html|view\.css|icon\.svg", name)
            text = archive.read(name).decode()
            for attack in ("<script", "<img", "<iframe", "<base", 'onerror="', "<style>"):
                assert attack not in text, name
