"""`fairtrial run --view`: the viewer beside a run, in a real terminal and without one."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from email.message import Message
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_interrupt import SLOW, Terminal

ADDRESS = re.compile(r"watch it at (http://127\.0\.0\.1:\d+/\w+/slow@1)\b")
ENDS = "stop it with Enter or Ctrl-C"


class Page(NamedTuple):
    status: int
    text: str
    headers: Message


def get(address: str, cookie: str = "") -> Page:
    parts = urlsplit(address)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
        connection.request("GET", address.partition(parts.netloc)[2], headers={"Cookie": cookie})
        answer = connection.getresponse()
        return Page(answer.status, answer.read().decode(), answer.headers)


def is_served(address: str) -> bool:
    parts = urlsplit(address)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname or "", parts.port or 0)) == 0


def children_of(session: int) -> list[str]:
    """The processes of a session, by what they execute."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            facts = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(facts[3]) == session and facts[0] != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A browser that notes what it was asked to open: a copy of the page."""
    program, seen = place / "browser", place / "opened.html"
    program.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {seen}\n')
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(program))
    return seen


@pytest.mark.long
def test_a_run_is_watched_from_its_start_until_somebody_stops_it(place: Path, opened: Path) -> None:
    (place / "slow.py").write_text(SLOW.replace("range(60)", "range(200)"))
    terminal = Terminal("run", "slow.py", "--view", "--fail-under", "0.9", BROWSER=os.environ["BROWSER"])
    terminal.read_until("sign in with the token ")
    found = ADDRESS.search(terminal.text)
    assert found is not None, terminal.text
    address = found[1]
    assert get(address).status == 401
    terminal.read_until("passed ")
    invitation = re.search(r'url=([^"]+)"', opened.read_text())
    assert invitation is not None
    signed_in = get(invitation[1].replace("&amp;", "&"))
    assert (signed_in.status, signed_in.headers["location"]) == (303, "./slow@1")
    cookie = signed_in.headers["set-cookie"].partition(";")[0]
    page = get(address, cookie).text
    assert "data-status>running<" in page
    terminal.read_until(ENDS)
    assert "exit 1: " in terminal.text  # The report comes first.
    assert get(address, cookie).status == 200
    session = terminal.process.pid
    assert any("fairtrial.viewer.work" in words for words in children_of(session))
    os.write(terminal._ours, b"\n")
    assert terminal.end() == 1
    assert not is_served(address)
    assert children_of(session) == []


@pytest.mark.long
@pytest.mark.parametrize("moment", ["during the run", "after it"])
def test_ctrl_c_stops_the_run_and_the_viewer(place: Path, moment: str) -> None:
    (place / "slow.py").write_text(SLOW if moment == "after it" else SLOW.replace("range(60)", "range(2000)"))
    terminal = Terminal("run", "slow.py", "--view")
    terminal.read_until("passed " if moment == "during the run" else ENDS)
    found = ADDRESS.search(terminal.text)
    assert found is not None, terminal.text
    os.killpg(terminal.process.pid, signal.SIGINT)  # What a terminal does.
    code = terminal.end()
    assert "Traceback" not in terminal.text
    assert not is_served(found[1])
    assert children_of(terminal.process.pid) == []
    if moment == "after it":
        assert code == 0
    else:
        assert code == 130
        assert terminal.text.rstrip().endswith("resume it with: fairtrial run slow.py --view")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_viewer_that_is_stopped_ends_with_0_and_leaves_nothing_behind(
    cli: Cli, place: Path, number: signal.Signals
) -> None:
    (place / "slow.py").write_text(SLOW.replace("range(60)", "range(2)"))
    cli("run", "slow.py")
    temporary = place / "temporary"
    temporary.mkdir()
    terminal = Terminal("view", "--socket", "view.sock", "--no-browser", TMPDIR=str(temporary))
    terminal.read_until("stop with Ctrl-C")
    assert (place / "view.sock").is_socket(), terminal.text
    assert list(temporary.iterdir()) != []
    terminal.process.send_signal(number)
    assert terminal.end() == 0, terminal.text
    assert not (place / "view.sock").exists()
    assert list(temporary.iterdir()) == []
    assert children_of(terminal.process.pid) == []


def test_without_a_terminal_the_viewer_ends_with_the_run_and_opens_nothing(place: Path, opened: Path) -> None:
    (place / "slow.py").write_text(SLOW.replace("range(60)", "range(6)"))
    command = [sys.executable, "-m", "fairtrial.cli", "run", "slow.py", "--view", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = ADDRESS.search(done.stderr)
    assert found is not None, done.stderr
    assert (done.returncode, json.loads(done.stdout)["runs"][0]["name"]) == (0, "slow@1")
    assert not is_served(found[1])
    assert not opened.exists()


@pytest.mark.parametrize("given", [False, True])
def test_without_a_terminal_the_token_is_named_and_not_printed(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    (place / "slow.py").write_text(SLOW.replace("range(60)", "range(2)"))
    token = "a-token-of-the-user" if given else ""
    monkeypatch.setenv("FAIRTRIAL_VIEW_TOKEN", token)
    done = cli("run", "slow.py", "--view", "--store", "runs.db")
    token = token or json.loads((place / "view.json").read_text())["token"]
    assert token
    assert token not in done.out + done.err
    where = "in FAIRTRIAL_VIEW_TOKEN" if given else f"in {place}/view.json, or of your own in FAIRTRIAL_VIEW_TOKEN"
    assert f"sign in with the token {where}\n" in done.err


def test_a_store_that_cannot_be_viewed_is_refused_before_the_first_trial(cli: Cli, place: Path) -> None:
    (place / "slow.py").write_text(SLOW)
    done = cli("run", "slow.py", "--view", "--store", "memory:")
    assert done.code == 2
    assert "a store in memory cannot be viewed" in done.err


@pytest.mark.long
def test_a_run_that_had_ended_before_is_shown_all_the_same(cli: Cli, place: Path) -> None:
    (place / "slow.py").write_text(SLOW.replace("range(60)", "range(6)"))
    assert cli("run", "slow.py", "--once", "k", "--quiet").code == 0
    terminal = Terminal("run", "slow.py", "--once", "k", "--view")
    terminal.read_until(ENDS)
    found = re.search(r"watch it at (http://[\w.:/]+)", terminal.text)
    assert found is not None, terminal.text
    assert get(found[1]).status == 401
    os.write(terminal._ours, b"\n")
    assert terminal.end() == 0
