"""A running server of a team, and browsers of its people."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

from fairtrial import Attachment, Sample
from fairtrial.store import open_store
from fairtrial.store.notes import ReviewNote, write_notes
from fairtrial.viewer.review import review_code
from tests.cli.test_screens import environment
from tests.servers import free_port
from tests.viewer.conftest import Answer, record, trial
from tests.viewer.issuer import Behaviour, Issuer
from tests.viewer.searches import add_search

FORM = "application/x-www-form-urlencoded"
PAGE = "text/html,application/xhtml+xml"
COOKIE, LOGIN_COOKIE = "fairtrial", "fairtrial-login"
SECRET_VARIABLE = "FAIRTRIAL_CLIENT_SECRET"
SECRET = "a secret: of the/client+%"
REVIEW = ReviewNote("helpful", "Does it help?", "", ("baseline", "careful"), "pass_fail", "00112233445566aa", 4, 2)
PROJECTS: Mapping[str, Mapping[str, Any]] = {
    "support": {
        "title": "Support bot", "viewer": ["viewers"], "reviewer": ["reviewers"], "editor": ["editors"],
        "admin": ["admins"],
    },
    "billing": {"viewer": ["billing"], "admin": ["billing-admins"]},
    "open": {"viewer": ["*"]},
}  # fmt: skip


class Browser:
    """Sends requests, and keeps cookies of each port apart, which is stricter than browsers are."""

    def __init__(self) -> None:
        self.jar: dict[str, dict[str, str]] = {}
        self.given: list[str] = []
        self.at = ""

    def ask(
        self,
        address: str,
        form: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        headers: Sequence[tuple[str, str]] = (),
        *,
        socket_path: Path | None = None,
    ) -> Answer:
        """The answer to one request, which a form makes a POST; redirections are not followed."""
        place = urlsplit(address)
        connection = http.client.HTTPConnection(place.netloc, timeout=60)
        if socket_path is not None:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.connect(str(socket_path))
        body = b"" if form is None else urlencode(form).encode()
        given = {"Host": place.netloc, "Accept": PAGE, "Cookie": self._cookies(place.netloc)}
        if form is not None:
            given |= {"Origin": f"{place.scheme}://{place.netloc}", "Content-Type": FORM}
            given["Content-Length"] = str(len(body))
        named = {name.lower() for name, _ in headers}
        path = (place.path or "/") + (f"?{place.query}" if place.query else "")
        connection.putrequest("GET" if form is None else "POST", path, skip_host=True, skip_accept_encoding=True)
        for name, value in [*((n, v) for n, v in given.items() if v and n.lower() not in named), *headers]:
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        connection.close()
        for name, value in answer.getheaders():
            if name.lower() == "set-cookie":
                self._keep(place.netloc, value)
        self.at = address
        return Answer(answer.status, text, {name.lower(): value for name, value in answer.getheaders()})

    def follow(self, address: str, form: Mapping[str, str] | None = None) -> Answer:
        """The answer at the end of all redirections; `at` is its address."""
        answer = self.ask(address, form)
        for _ in range(12):
            if answer.status not in (302, 303):
                return answer
            answer = self.ask(urljoin(self.at, answer.headers["location"]))
        raise AssertionError(f"too many redirections, the last to {self.at}")

    def step(self, address: str) -> str:
        """Where one request leads."""
        answer = self.ask(address)
        assert answer.status in (302, 303), (answer.status, answer.text)
        return urljoin(address, answer.headers["location"])

    def cookie(self, address: str, name: str = COOKIE) -> str:
        """The value of a cookie of a server; empty if there is none."""
        return self.jar.get(urlsplit(address).netloc, {}).get(name, "")

    def set(self, address: str, value: str, name: str = COOKIE) -> None:
        """Put a cookie into the jar."""
        self.jar.setdefault(urlsplit(address).netloc, {})[name] = value

    def _cookies(self, netloc: str) -> str:
        return "; ".join(f"{name}={value}" for name, value in self.jar.get(netloc, {}).items())

    def _keep(self, netloc: str, header: str) -> None:
        self.given.append(header)
        for name, morsel in SimpleCookie(header).items():
            if not morsel.value or morsel["max-age"] == "0":
                self.jar.get(netloc, {}).pop(name, None)
            else:
                self.jar.setdefault(netloc, {})[name] = morsel.value


@dataclass
class Team:
    """A server in a process of its own."""

    folder: Path
    url: str
    issuer: Issuer
    process: subprocess.Popen[bytes]
    variables: Mapping[str, str] = field(default_factory=dict)
    health_port: int = 0

    @property
    def log(self) -> str:
        """All that the process has printed."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def page(self, path: str = "/") -> str:
        """The address of a page."""
        return self.url + path

    def probe(self, path: str) -> tuple[int, str]:
        """The answer of the port for operations."""
        answer = Browser().ask(f"http://127.0.0.1:{self.health_port}{path}")
        return answer.status, answer.text

    def begin(self, browser: Browser, to: str = "/") -> str:
        """Where the issuer sends a browser after the page to sign in: the callback with its code."""
        return browser.step(browser.step(self.page(f"/login?{urlencode({'to': to})}")))

    def sign_in(self, sub: str, *groups: str, browser: Browser | None = None, to: str = "/", **more: Any) -> Browser:
        """A browser in which somebody has signed in."""
        browser = browser or Browser()
        self.issuer.does = replace(self.issuer.does, person=person(sub, *groups, **more))
        answer = browser.ask(self.begin(browser, to))
        assert answer.status == 303, (answer.status, answer.text, self.log)
        return browser

    def secret(self, browser: Browser, path: str = "/", **more: Any) -> str:
        """What the forms of a browser's session carry."""
        found = re.findall(r'name="form_secret" value="([^"]+)"', browser.ask(self.page(path), **more).text)
        assert len(set(found)) == 1, (path, found)
        return str(found[0])

    def form(self, browser: Browser, path: str, page: str = "/", **fields: str) -> Answer:
        """The answer to a form of this browser's session, with the secret of a page."""
        return browser.ask(self.page(path), {"form_secret": self.secret(browser, page), **fields})

    def form_as(self, headers: Sequence[tuple[str, str]], path: str, **fields: str) -> Answer:
        """The answer to a form of the person whom a proxy names."""
        secret = self.secret(Browser(), headers=headers)
        return Browser().ask(self.page(path), {"form_secret": secret, **fields}, headers)

    def command(self, *words: str) -> str:
        """What a command about this team prints."""
        line = [sys.executable, "-m", "fairtrial.cli", "serve", *words, "--config", "team.toml"]
        done = subprocess.run(
            line,
            cwd=self.folder,
            env=environment(FAIRTRIAL_CACHE_DIR=str(self.folder / "cache"), **self.variables),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def audit(self, *words: str) -> list[dict[str, Any]]:
        """The entries of the audit."""
        entries: list[dict[str, Any]] = json.loads(self.command("audit", "--json", *words))["entries"]
        return entries


def person(sub: str, *groups: str, name: str = "", **more: Any) -> dict[str, Any]:
    """What an issuer says of somebody."""
    return {"sub": sub, "name": name or sub.title(), "groups": list(groups), **more}


def write_config(
    folder: Path,
    url: str,
    listen: str,
    identity: Mapping[str, Any],
    projects: Mapping[str, Mapping[str, Any]],
    stores: Mapping[str, str] = {},
) -> None:
    """Write the file that says who may do what."""
    lines = [f"url = {json.dumps(url)}", f"listen = {json.dumps(listen)}", 'database = "sqlite:///team.db"']
    lines += ["[identity]", *(f"{name} = {json.dumps(value)}" for name, value in identity.items())]
    for name, values in projects.items():
        lines += [f"[projects.{name}]", f"store = {json.dumps(stores.get(name, f'sqlite:///{name}.db'))}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    (folder / "team.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def fill_projects(folder: Path, names: Sequence[str] = tuple(PROJECTS)) -> None:
    """Make the stores: in each, a search and two runs of ten samples with a file, the second with a review."""
    for name in names:
        store = open_store(folder / f"{name}.db")
        file = Attachment(store.put_blob(name.encode()), "text/plain", len(name))
        samples = {at: Sample(f"q{at:02}", {"file": file}, "Friday") for at in range(10)}
        for number in (1, 2):
            run = store.create_run(record(f"{name}-run-{number}", name, 10))
            store.commit(run.run_id, [trial(run, at) for at in range(run.planned)], samples)
            store.update_run(run.run_id, status="finished", finished_at=1000.0 + number)
        add_search(store, f"better {name}", ["Answer.", "Guess."], [0, 0], suite=f"{name}-prompts")
        store.update_run(f"{name}-run-2", notes=write_notes(reviews=(REVIEW,)))
        store.close()


def code_of(project: str) -> str:
    """The code of the review of a project."""
    return review_code(f"{project}-run-2", REVIEW)


def trial_to_answer(page: str) -> str:
    """The trial that the page of a review asks about."""
    [code] = set(re.findall(r'name="id" value="([0-9a-f]{16})"', page))
    return str(code)


def environment_in(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a server with a cache of its own."""
    return environment(FAIRTRIAL_CACHE_DIR=str(folder / "cache"), **variables)


@contextmanager
def running(folder: Path, url: str, issuer: Issuer, health_port: int = 0, **variables: str) -> Iterator[Team]:
    """A server of the `team.toml` in a folder."""
    command = [sys.executable, "-m", "fairtrial.cli", "serve", "--config", "team.toml"]
    command += ["--health-port", str(health_port)] if health_port else []
    with open(folder / "log", "ab") as log:
        known = environment_in(folder, **variables)
        process = subprocess.Popen(command, cwd=folder, env=known, stdout=log, stderr=log)
    team = Team(folder, url, issuer, process, variables, health_port)
    try:
        wait_for(team)
        yield team
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait(60)


def wait_for(team: Team) -> None:
    """Wait until a server listens."""
    end = time.monotonic() + 90
    ready = f"at {team.url} (listening on"
    while ready not in team.log and team.process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert team.process.poll() is None, team.log
    assert ready in team.log


@contextmanager
def oidc_team(
    folder: Path,
    *,
    secret: str = "",
    projects: Mapping[str, Mapping[str, Any]] = PROJECTS,
    issuer_url: str = "",
    port: int = 0,
    health: bool = False,
    stores: Mapping[str, str] = {},
    **identity: Any,
) -> Iterator[Team]:
    """A team whose people sign in at an issuer of their own."""
    port, issuer = port or free_port(), Issuer(secret)
    url = f"http://127.0.0.1:{port}"
    issuer.redirect_uri = f"{url}/callback"
    named = {"client_secret_env": SECRET_VARIABLE} if secret else {}
    about = {"kind": "oidc", "issuer": issuer_url or issuer.url, "client_id": "fairtrial", **named, **identity}
    write_config(folder, url, f"127.0.0.1:{port}", about, projects, stores)
    fill_projects(folder, [name for name in projects if name not in stores])
    try:
        with running(
            folder, url, issuer, free_port() if health else 0, **({SECRET_VARIABLE: secret} if secret else {})
        ) as team:
            yield team
    finally:
        issuer.close()


def behave(issuer: Issuer, **changes: Any) -> None:
    """Let an issuer behave well, but for these changes."""
    issuer.does = replace(Behaviour(), **changes)


def file_of(project: str) -> str:
    """The digest of the file of a project."""
    return hashlib.sha256(project.encode()).hexdigest()
