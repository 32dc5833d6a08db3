"""Who gets a session, how long it lasts, and who cannot keep its owner out."""

from __future__ import annotations

import http.client
import json
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urljoin, urlsplit

import pytest

from fairtrial import ConfigurationError, open_store
from fairtrial.viewer import access as guard
from fairtrial.viewer import serve as connections
from fairtrial.viewer.access import SESSION_SECONDS, Access, Sessions, check_token, same_secret
from tests.cli.test_screens import environment
from tests.viewer.conftest import Answer, Viewed, add_support_runs, open_session, start_server

TOKEN = "a token that somebody chose"
FORM = "application/x-www-form-urlencoded"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "runs.db")
    add_support_runs(store)
    store.close()
    return tmp_path


@pytest.fixture
def alone(folder: Path) -> Iterator[Viewed]:
    """A server of its own, without a session."""
    server, thread = start_server(folder / "runs.db", token=TOKEN, reviewers=("ann",), user="me")
    store = open_store(folder / "runs.db")
    yield Viewed(server, store, "")
    server.stop()
    thread.join(60)
    store.close()


def sign_in(viewed: Viewed, token: str, to: str = "", **headers: str) -> Answer:
    given = {"Origin": f"http://127.0.0.1:{viewed.server.port}", "Content-Type": FORM, "Cookie": "", **headers}
    return viewed.get("login", method="POST", body=urlencode({"token": token, "to": to}), **given)


def cookie_of(answer: Answer) -> str:
    return answer.headers.get("set-cookie", "").partition(";")[0]


class TestInvitations:
    def test_one_is_used_up_by_its_first_use(self) -> None:
        access = Access.create(port=1, user="me")
        made, other = access.invite(), access.invite()
        assert access.sign_in(made) is None  # On the page where people sign in it is no token.
        assert access.sign_in(made, by_link=True) is not None
        assert access.sign_in(made, by_link=True) is None
        assert access.sign_in(other, by_link=True) is not None

    def test_one_ends_after_a_minute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        access = Access.create(port=1, user="me")
        now = time.monotonic()
        made = access.invite()
        monkeypatch.setattr("fairtrial.viewer.access.time.monotonic", lambda: now + 61)
        assert access.sign_in(made, by_link=True) is None

    def test_the_token_opens_nothing_in_an_address(self, alone: Viewed) -> None:
        answer = alone.get(f"login?{urlencode({'token': TOKEN})}", Cookie="")
        assert (answer.status, "set-cookie" in answer.headers) == (401, False)

    def test_a_link_that_was_used_says_so_and_asks_for_the_token(self, alone: Viewed) -> None:
        path = alone.server.invitation("support@2").partition(alone.prefix + "/")[2]
        assert alone.get(path, Cookie="").status == 303
        again = alone.get(path, Cookie="")
        assert (again.status, "set-cookie" in again.headers) == (401, False)
        assert "has been used already" in again.text
        assert 'value="support@2"' in again.text


class TestThePage:
    def test_every_page_asks_to_sign_in_and_then_shows_what_was_asked_for(self, alone: Viewed) -> None:
        wanted = "support@2/trials?outcome=failed&q=a%20b"
        page = alone.get(wanted, Cookie="", Accept="text/html")
        assert (page.status, page.headers["cache-control"]) == (401, "no-store")
        assert 'action="../login"' in page.text
        assert "runs.db" not in page.text
        (to,) = re.findall(r'name="to" value="([^"]*)"', page.text)
        answer = sign_in(alone, TOKEN, to.replace("&amp;", "&"))
        assert (answer.status, answer.headers["location"]) == (303, f"./{wanted}")
        assert alone.get(wanted, Cookie=cookie_of(answer)).status == 200

    def test_programs_get_no_page(self, alone: Viewed) -> None:
        assert alone.get("", Cookie="").text.startswith("no session")
        assert alone.get("", Cookie="", Accept="application/json").text.startswith("no session")

    def test_its_style_is_there_without_a_session(self, alone: Viewed) -> None:
        page = alone.get("", Cookie="", Accept="text/html")
        (style,) = re.findall(r'href="\./(static/[^"]*\.css)"', page.text)
        assert alone.get(style, Cookie="").status == 200

    @pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "é😀", "\x00", "ann"])
    def test_a_wrong_token_opens_nothing(self, alone: Viewed, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fairtrial.viewer.app._WRONG_TOKEN_SECONDS", 0.0)
        answer = sign_in(alone, token, "support@2")
        assert (answer.status, "set-cookie" in answer.headers) == (401, False)
        assert "That is not the token." in answer.text

    @pytest.mark.parametrize(
        "to",
        [
            "//evil.example/", "https://evil.example/", "\\\\evil.example", "a\r\nSet-Cookie: x=1", "é\ud800",
            "../../x", "support@2/../../x", "%2e%2e/x", "..", "a\\..\\..\\x", ".%2E?q=1", "..#x",
        ],
    )  # fmt: skip
    def test_it_leads_nowhere_else(self, alone: Viewed, to: str) -> None:
        body = urlencode({"token": TOKEN, "to": to.encode("utf-8", "replace")})
        origin = f"http://127.0.0.1:{alone.server.port}"
        answer = alone.get("login", method="POST", body=body, Origin=origin, Content_Type=FORM)
        assert answer.status == 303
        location = answer.headers["location"]
        assert location.startswith("./")
        assert location.isascii()
        path = unquote(location.partition("?")[0]).replace("\\", "/")
        assert urlsplit(urljoin(f"{alone.base}login", path)).path.startswith(f"/{alone.prefix}/")
        assert answer.headers["set-cookie"].startswith("fairtrial=")

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", ""])
    def test_other_sites_cannot_sign_a_browser_in(self, alone: Viewed, origin: str) -> None:
        assert sign_in(alone, TOKEN, Origin=origin).status == 403

    def test_a_body_that_is_too_long_is_refused(self, alone: Viewed) -> None:
        assert sign_in(alone, "x" * guard.MAX_SIGN_IN).status == 413

    def test_a_body_in_chunks_is_refused_whatever_length_it_states(self, alone: Viewed) -> None:
        origin = f"http://127.0.0.1:{alone.server.port}"
        chunks = {"Origin": origin, "Content-Type": FORM, "Transfer-Encoding": "chunked"}
        assert alone.get("login", method="POST", body="8\r\ntoken=xx\r\n0\r\n\r\n", **chunks).status == 413

    def test_a_client_that_disconnects_in_the_middle_of_a_body_leaves_no_trace(
        self, alone: Viewed, caplog: pytest.LogCaptureFixture
    ) -> None:
        head = f"POST /{alone.prefix}/login HTTP/1.1\r\nHost: 127.0.0.1:{alone.server.port}\r\nContent-Type: {FORM}\r\n"
        with socket.create_connection(("127.0.0.1", alone.server.port)) as connection:
            origin = f"Origin: http://127.0.0.1:{alone.server.port}"
            connection.sendall(f"{head}{origin}\r\nContent-Length: 100\r\n\r\ntoken=".encode())
            assert alone.get("login", Cookie="").status == 401  # It has been read by now.
        assert alone.get("login", Cookie="").status == 401
        assert [record.exc_info for record in caplog.records if record.exc_info] == []

    def test_what_is_not_there_says_nothing_without_a_session(self, alone: Viewed) -> None:
        for path in ("static//etc/passwd", "static/x/../../support@2", "static/x/y/z"):
            answer = alone.get(path, Cookie="", Accept="text/html")
            assert (answer.status, answer.text) == (404, "not found\n")

    def test_a_second_cookie_of_the_name_changes_nothing(self, alone: Viewed) -> None:
        cookie = cookie_of(sign_in(alone, TOKEN))
        for both in (f"fairtrial=other; {cookie}", f"{cookie}; fairtrial=other"):
            assert alone.get(Cookie=both).status == 200
        origin = f"http://127.0.0.1:{alone.server.port}"
        ended = alone.get("logout", method="POST", body="x", Origin=origin, Cookie=f"{cookie}; fairtrial=other")
        assert (ended.status, alone.get(Cookie=cookie).status) == (200, 401)

    def test_reviewers_sign_in_there_too_and_see_reviews(self, alone: Viewed) -> None:
        answer = sign_in(alone, alone.server.access.reviewers["ann"], "support@2/trials")
        assert (answer.status, answer.headers["location"]) == (303, "./review")
        assert alone.get("support@2/trials", Cookie=cookie_of(answer)).status == 403

    def test_a_form_secret_of_any_characters_is_refused(self, alone: Viewed) -> None:
        cookie = cookie_of(sign_in(alone, TOKEN))
        origin = f"http://127.0.0.1:{alone.server.port}"
        for secret in ("%C3%A9%F0%9F%98%80", "%ff", "x", "x" + "&a=1" * 2_000):
            body = f"form_secret={secret}"
            answer = alone.get(
                "support@2/review", method="POST", body=body, Cookie=cookie, Origin=origin, Content_Type=FORM
            )
            assert answer.status == 403


class TestSessions:
    def test_they_survive_a_restart_and_links_stay_valid(self, folder: Path) -> None:
        server, thread = start_server(folder / "runs.db")
        first = Viewed(server, open_store(folder / "runs.db"), open_session(server))
        address, cookie = urlsplit(server.address("support@2")).path, first.cookie
        token = server.access.token
        server.stop()
        thread.join(60)
        server, thread = start_server(folder / "runs.db")
        second = Viewed(server, first.store, cookie)
        assert urlsplit(server.address("support@2")).path == address
        assert (second.get("support@2").status, server.access.token) == (200, token)
        assert token not in server.address()
        ended = second.get("logout", method="POST", body="x", Origin=f"http://127.0.0.1:{server.port}")
        assert (ended.status, second.get().status) == (200, 401)
        server.stop()
        thread.join(60)
        assert not Sessions(token, folder).has(cookie.partition("=")[2])
        first.store.close()

    def test_they_end_when_the_token_changes(self, tmp_path: Path) -> None:
        secret = Sessions("one", tmp_path).open()
        assert Sessions("one", tmp_path).has(secret)
        assert not Sessions("two", tmp_path).has(secret)
        assert not Sessions("one", tmp_path).has(secret)  # Nor do they come back with the token.
        access = [Access.create(port=1, token=token, reviewers={"ann": "r" * 32}) for token in ("one", "one", "two")]
        found = access[0].sign_in("r" * 32, by_link=True)
        assert found is not None
        assert [one.visitor(found[1]) is not None for one in access] == [True, True, False]

    def test_they_end_after_a_month(self, tmp_path: Path) -> None:
        now = [1e9]
        sessions = Sessions("t", tmp_path, clock=lambda: now[0])
        secret = sessions.open()
        now[0] += SESSION_SECONDS - 1
        assert sessions.has(secret)
        now[0] += 1
        assert not sessions.has(secret)

    def test_their_file_is_private_and_has_no_secret(self, tmp_path: Path) -> None:
        secret = Sessions(TOKEN, tmp_path).open()
        file = tmp_path / "view-sessions.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert secret not in file.read_text()
        assert TOKEN not in file.read_text()
        assert [path.name for path in tmp_path.iterdir()] == [file.name]

    @pytest.mark.parametrize("content", ["", "[]", '{"token": 1}', '{"sessions": [1]}', "\x00", "[" * 99_999])
    def test_a_damaged_file_has_no_session(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "view-sessions.json").write_text(content)
        sessions = Sessions("t", tmp_path)
        assert sessions.has(sessions.open())

    def test_two_servers_of_a_store_keep_each_others_sessions(self, tmp_path: Path) -> None:
        first, second = Sessions("t", tmp_path), Sessions("t", tmp_path)
        opened = [first.open(), second.open(), first.open()]
        first.end(opened[0])
        for server in (first, second, Sessions("t", tmp_path)):
            assert [server.has(secret) for secret in opened] == [False, True, True]
        Sessions("another", tmp_path).open()
        assert first.has(opened[1])  # While it runs, a server keeps what was opened with its token.

    def test_without_a_folder_that_can_be_written_they_last_as_long_as_the_server(self, tmp_path: Path) -> None:
        sessions = Sessions("t", tmp_path / "nowhere")
        secret = sessions.open()
        sessions.open()
        assert sessions.has(secret)
        assert not Sessions("t", tmp_path / "nowhere").has(secret)


@pytest.mark.parametrize("text", ["", "too short", "x" * 15, "a line and\nanother of them"])
def test_a_token_that_is_short_or_has_several_lines_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be one line of at least 16 characters"):
        check_token(text, "FAIRTRIAL_VIEW_TOKEN")
    assert check_token(f" {TOKEN}\n", "file") == TOKEN


def test_secrets_are_compared_as_bytes() -> None:
    assert same_secret("é", "é")
    assert not any(same_secret(text, "secret") for text in ("é", "\ud800", "", "secret\0", "😀"))


class TestCrowds:
    """Connections of other users of the machine, who know no secret."""

    def test_idle_connections_cannot_keep_the_owner_out(self, alone: Viewed) -> None:
        alone.cookie = open_session(alone.server)
        crowd = []
        for _ in range(4 * connections.MAX_ANONYMOUS):
            idle = socket.create_connection(("127.0.0.1", alone.server.port or 0), 10)
            idle.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            crowd.append(idle)
        assert [alone.get().status for _ in range(3)] == [200] * 3
        page = alone.get("", Cookie="", Accept="text/html")
        assert page.status == 401
        for idle in crowd:
            idle.close()

    def test_a_connection_with_a_session_is_not_closed_by_a_crowd(self, alone: Viewed) -> None:
        cookie = open_session(alone.server)
        own = http.client.HTTPConnection("127.0.0.1", alone.server.port or 0, timeout=60)

        def status() -> int:
            own.request("GET", f"/{alone.prefix}/", headers={"Cookie": cookie})
            answer = own.getresponse()
            answer.read()
            return answer.status

        assert status() == 200
        kept = own.sock
        crowd = [socket.create_connection(("127.0.0.1", alone.server.port or 0), 10) for _ in range(200)]
        assert (status(), own.sock is kept) == (200, True)
        for idle in crowd:
            idle.close()
        own.close()

    @pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n"])
    def test_a_head_must_arrive_in_time_however_slowly_it_drips(
        self, alone: Viewed, sent: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.4)
        with socket.create_connection(("127.0.0.1", alone.server.port or 0), 10) as slow:
            slow.settimeout(0.1)
            slow.sendall(sent)
            end = time.monotonic() + 20
            while time.monotonic() < end:
                try:
                    if not slow.recv(100):
                        return
                    slow.sendall(b"X")
                except TimeoutError:
                    continue
                except OSError:
                    return
        pytest.fail("the connection stayed open")

    def test_a_body_must_arrive_in_time(self, alone: Viewed, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
        place = f"127.0.0.1:{alone.server.port}"
        head = f"POST /{alone.prefix}/login HTTP/1.1\r\nHost: {place}\r\nOrigin: http://{place}\r\n"
        with socket.create_connection(("127.0.0.1", alone.server.port or 0), 20) as slow:
            slow.sendall(f"{head}Content-Type: {FORM}\r\nContent-Length: 100\r\n\r\ntoken=".encode())
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


class TestTheCommand:
    """`fairtrial view` itself."""

    def start(self, folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fairtrial.cli", "view", "--port", "0", "--store", "runs.db", *words]
        return subprocess.Popen(
            command, cwd=folder, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
    def test_the_browser_is_given_no_secret_that_other_users_can_read(self, folder: Path) -> None:
        seen = folder / "seen"
        browser = folder / "browser"
        browser.write_text(f'#!/bin/sh\ntr "\\0" "\\n" < /proc/$$/cmdline > {seen}.new\nmv {seen}.new {seen}\n')
        browser.chmod(0o755)
        process = self.start(folder, BROWSER=f"{browser} %s", TMPDIR=str(folder))
        try:
            end = time.monotonic() + 60
            while not seen.exists() and time.monotonic() < end:
                time.sleep(0.05)
            (address,) = (line for line in seen.read_text().splitlines() if "://" in line)
            assert address.startswith("file://")
            assert "token" not in seen.read_text()
            page = Path(urlsplit(address).path)
            assert stat.S_IMODE(page.stat().st_mode) == 0o600
            assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700
            (link,) = set(re.findall(r'http://[^"]*', page.read_text()))
            place = urlsplit(link)
            connection = http.client.HTTPConnection(place.netloc, timeout=60)
            statuses = []
            for _ in range(2):
                connection.request("GET", f"{place.path}?{place.query}")
                answer = connection.getresponse()
                answer.read()
                statuses.append(answer.status)
            connection.close()
            assert statuses == [303, 401]
        finally:
            process.terminate()
            _, said = process.communicate(timeout=60)
        assert re.search(r"open http://127.0.0.1:\d+/\w{10}/\n", said)

    @pytest.mark.parametrize("by_file", [True, False])
    def test_a_token_of_a_file_or_the_environment_is_not_printed(self, folder: Path, by_file: bool) -> None:
        (folder / "token").write_text(f"{TOKEN}\n")
        words = ("--token-file", "token") if by_file else ()
        variables: dict[str, str] = {} if by_file else {"FAIRTRIAL_VIEW_TOKEN": TOKEN}
        process = self.start(folder, "--no-browser", "--json", *words, **variables)
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        facts: dict[str, Any] = json.loads(text)
        place = urlsplit(facts["address"])
        connection = http.client.HTTPConnection(place.netloc, timeout=60)
        headers = {"Content-Type": FORM, "Origin": f"http://{place.netloc}"}
        connection.request("POST", f"{place.path}login", urlencode({"token": TOKEN}), headers)
        status = connection.getresponse().status
        connection.close()
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert (facts["token"], status) == (None, 303)
        assert TOKEN not in text + said
