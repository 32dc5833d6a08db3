"""Odd requests to a running server, as bytes: every answer is a sentence, and nothing is read that has no page."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fairtrial.errors import ConfigurationError
from fairtrial.viewer.serve import _listen_on_path
from tests.viewer.conftest import Viewed

BLOB = "support@2/blob/" + "a" * 64
PATHS = [
    "../../etc/passwd", "static/%2e%2e/%2e%2e/etc/passwd", "static/x//etc/passwd", "support@2/blob/..%2F..%2Fx.db?o=0",
    "support@2%00", "%252e%252e%252fx.db", "%ff%fe", "support@2/trials.exe", f"{BLOB}?o=-1", f"{BLOB}?o=%D9%A1",
    "support@2/t/f/x/99999999999999999999999",
    "support@2/trials?after=99999999999999999999999999&value=nan..inf&sort=%00",
    "a" * 9_000,
]  # fmt: skip


def ask(viewed: Viewed, request: str, *, body: str = "") -> bytes:
    """The whole answer to a request, `HOST` and `PREFIX` filled in; empty if the connection is closed without one."""
    here = f"127.0.0.1:{viewed.server.port}"
    text = request.replace("HOST", here).replace("PREFIX", viewed.prefix).replace("COOKIE", viewed.cookie)
    with socket.create_connection(("127.0.0.1", viewed.server.port), timeout=30) as connection:
        connection.sendall(f"{text}\r\nConnection: close\r\n\r\n{body.replace('HOST', here)}".encode("latin-1"))
        return b"".join(iter(lambda: connection.recv(65_536), b""))


@pytest.mark.parametrize("path", PATHS, ids=[path[:30] for path in PATHS])
def test_an_odd_path_leads_to_no_file_and_no_error_of_ours(viewed: Viewed, path: str) -> None:
    answer = ask(viewed, f"GET /PREFIX/{path} HTTP/1.1\r\nHost: HOST\r\nCookie: COOKIE")
    assert answer[9:12] in (b"200", b"400", b"404", b"414", b"422")
    assert b"root:" not in answer


HOSTS = ["evil.example", "localhost.:PORT", "127.0.0.1.nip.io:PORT", "0.0.0.0:PORT", "[::ffff:127.0.0.1]:PORT", " ",
         "127.0.0.1:PORT@evil", "2130706433:PORT", "HOST\r\nHost: evil.example"]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_of_elsewhere_is_not_answered_whatever_it_looks_like(viewed: Viewed, host: str) -> None:
    named = host.replace("PORT", str(viewed.server.port))
    answer = ask(viewed, f"GET /PREFIX/ HTTP/1.1\r\nHost: {named}\r\nCookie: COOKIE")
    assert answer[9:12] in (b"400", b"421")


def test_an_absolute_address_of_elsewhere_is_no_page(viewed: Viewed) -> None:
    answer = ask(viewed, "GET http://evil.example/PREFIX/ HTTP/1.1\r\nHost: HOST\r\nCookie: COOKIE")
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
    answer = ask(viewed, start + headers, body=body + SMUGGLED)
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
