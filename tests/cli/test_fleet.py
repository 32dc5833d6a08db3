"""`worker`, `fleet` and `dlq`, over a real Redis."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from fairtrial.fleet import dispatch
from fairtrial.fleet.dispatcher import DispatchConfig
from fairtrial.fleet.post import open_post_office
from tests.cli.conftest import EVALS, Cli
from tests.cli.test_screens import environment
from tests.redis_server import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def url(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("FAIRTRIAL_MAILBOX", server.url)
    yield server.url
    with server.client() as client:
        client.flushall()


def set_aside(url: str, count: int) -> list[str]:
    """Put dead letters into the mailbox of suite "doubles"; their ids, oldest first."""

    async def work() -> list[str]:
        office = open_post_office(url)
        try:
            mailbox: Any = await office.requests("doubles")
            for number in range(count):
                await mailbox.connection.command("XADD", mailbox.keys.stream, "*", "b", f"nonsense {number}")
            while (await mailbox.depth()).dead < count:
                await mailbox.receive(max_messages=10, wait_time_seconds=1)
            return [letter.id for letter in await mailbox.dead_letters.page()]
        finally:
            await office.close()

    return asyncio.run(work())


def test_a_worker_does_what_a_run_asks_for(cli: Cli, evals: Path, url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "fairtrial.cli", "worker", "evals.py", "--mailbox", url, "--name", "w1", "--json"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        try:
            done = cli("run", "evals.py", "--mailbox", url, "--quiet")
            assert (done.code, done.out) == (0, "doubles@1:baseline  75.0% of 4 scored passed, 0 errors\n")
            done = cli("run", "evals.py", "--fleet", "--quiet")  # By the queue of the environment.
            assert (done.code, done.out) == (0, "doubles@2:baseline  75.0% of 4 scored passed, 0 errors\n")
            facts = cli("fleet", "doubles", "--json").json
            lines = cli("fleet", "doubles").out.splitlines()
        finally:
            worker.terminate()
            said, log = worker.communicate(timeout=60)
    assert worker.returncode == 0, log
    assert '"received": 8' in said
    assert facts["format"] == "fairtrial.fleet/1"
    (suite,) = facts["suites"]
    assert set(suite) == {
        *("suite", "waiting", "delayed", "in_flight", "dead_letters", "oldest_in_flight_seconds", "workers"),
        "versions",
    }
    assert (suite["waiting"], len(suite["workers"])) == (0, 1)
    assert lines[3].split() == ["worker", "suite", "in", "flight", "last", "heard", "of"]
    assert lines[4].split()[1:3] == ["doubles", "0"]
    assert open_store().runs()[0].status == "finished"


def test_a_run_for_a_fleet_needs_a_queue(cli: Cli, evals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRTRIAL_MAILBOX", raising=False)
    done = cli("run", "evals.py", "--fleet")
    assert done.code == 2
    assert "no queue is named" in done.err
    assert "FAIRTRIAL_MAILBOX" in done.err


def test_a_worker_ends_when_there_is_nothing_to_do(cli: Cli, evals: Path, url: str) -> None:
    done = cli("worker", "evals.py", "--until-empty", "--quiet", "--name", "w2")
    assert (done.code, done.err) == (0, "worker w2 ended: 0 received, none executed\n")
    assert cli("worker", "evals.py", "--until-empty", "--quiet", "--json").json["format"] == "fairtrial.worker/1"


def test_the_fleet_is_shown_for_every_suite_that_is_known(cli: Cli, evals: Path, url: str) -> None:
    assert cli("fleet").err == (
        "error: which suite? None is named, and none is known here\n  as in: fairtrial fleet support\n"
    )
    cli("run", "evals.py", "--quiet")
    set_aside(url, 1)
    head, row = cli("fleet").out.splitlines()[:2]
    assert head.split() == ["suite", "waiting", "delayed", "in", "flight", "oldest", "dead", "letters", "workers"]
    assert row.split()[:6] == ["doubles", "0", "0", "0", "-", "1"]
    assert cli("fleet", "evals.py").out.splitlines()[1].startswith("doubles")


class TestDeadLetters:
    def test_they_are_listed_and_shown(self, cli: Cli, url: str) -> None:
        assert cli("dlq", "list", "doubles").err == "no dead letters of doubles\n"
        first, _ = set_aside(url, 2)
        lines = cli("dlq", "list", "doubles").out.splitlines()
        assert lines[0].split() == ["id", "when", "tries", "sample", "reason"]
        assert lines[1].startswith(first)
        assert len(lines) == 3
        shown = cli("dlq", "show", "doubles", first).out
        assert "message   nonsense 0" in shown
        facts = cli("dlq", "list", "doubles", "--json").json
        assert (facts["format"], len(facts["letters"])) == ("fairtrial.dead_letters/1", 2)
        assert cli("dlq", "show", "doubles", first, "--json").json["text"] == "nonsense 0"
        assert cli("dlq", "show", "doubles", "9-9").err == (
            "error: there is no dead letter '9-9' of doubles\n  see: fairtrial dlq list doubles\n"
        )

    def test_they_are_dropped_or_tried_again(self, cli: Cli, url: str) -> None:
        first, *_ = set_aside(url, 3)
        assert cli("dlq", "drop", "doubles", first).err == "1 dead letter of doubles dropped\n"
        done = cli("dlq", "drop", "doubles", first)
        assert done.code == 2
        assert done.err.endswith("1 id of those are not there; see: fairtrial dlq list doubles\n")
        assert cli("dlq", "retry", "doubles", "--all").err == "2 dead letters of doubles went back into the queue\n"
        assert cli("dlq", "drop", "doubles", "--all", "--json").json["count"] == 0
        assert cli("fleet", "doubles", "--json").json["suites"][0]["waiting"] == 2

    @pytest.mark.parametrize("words", [[], ["1-1", "--all"]])
    def test_which_ones_must_be_said(self, cli: Cli, url: str, words: list[str]) -> None:
        assert cli("dlq", "retry", "doubles", *words).err == (
            "error: say which dead letters to retry: their ids, or --all\n  see: fairtrial dlq list doubles\n"
        )


class TestVersions:
    """A rolling deploy: workers and clients of two versions of the code on one queue."""

    @pytest.fixture
    def files(self, place: Path) -> dict[str, str]:
        for version in "12":
            text = EVALS.replace("double, exact_match)", f'double, exact_match, version="{version}")')
            (place / f"v{version}.py").write_text(text)
        return {version: f"v{version}.py" for version in "12"}

    @pytest.fixture
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client that looks for workers after a moment, and waits for them for another."""
        monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0.5")
        monkeypatch.setattr(dispatch, "DispatchConfig", partial(DispatchConfig, hint_seconds=0.1))

    @pytest.mark.long
    def test_workers_of_two_versions_on_one_queue_finish_the_runs_of_two_clients(
        self, cli: Cli, files: dict[str, str], url: str
    ) -> None:
        with started("worker", files["1"], url), started("worker", files["2"], url) as second:
            with started("run", files["1"], url, "--store", "old.db") as client:
                new = cli("run", files["2"], "--mailbox", url, "--quiet", "--store", "new.db")
                assert client.wait(60) == 0
            assert (new.code, new.out) == (0, "doubles@1:baseline  75.0% of 4 scored passed, 0 errors\n")
            (suite,) = cli("fleet", "doubles", "--json").json["suites"]
            assert sorted(version["workers"] for version in suite["versions"]) == [1, 1]
            assert len({version["code"] for version in suite["versions"]}) == 2
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 0
            (suite,) = cli("fleet", "doubles", "--json").json["suites"]
            assert [version["workers"] for version in suite["versions"]] == [1]

    @pytest.mark.long
    def test_a_run_ends_as_incomplete_when_all_workers_have_other_code(
        self, cli: Cli, files: dict[str, str], url: str, soon: None
    ) -> None:
        with started("worker", files["2"], url):
            wait_for_workers(url, 1)
            done = cli("run", files["1"], "--mailbox", url, "--quiet")
        assert done.code == 4
        said = " ".join(done.err.split())
        assert "4 of 4 trials have no stored result: no worker has had this run's code for 0.5 s. 1 worker" in said
        assert "1 worker of suite 'doubles' is connected, but with code" in said
        assert "start workers with this client's code, or with --allow-drift; the same command executes them" in said
        run = open_store().runs()[0]
        assert run.status == "incomplete"
        with started("worker", files["1"], url):
            wait_for_workers(url, 1)
            assert cli("run", files["1"], "--mailbox", url, "--quiet").code == 0
        assert [run.status for run in open_store().runs()] == ["finished"]

    def test_a_run_ends_as_incomplete_when_there_is_no_worker(
        self, cli: Cli, files: dict[str, str], url: str, soon: None
    ) -> None:
        done = cli("run", files["1"], "--mailbox", url, "--quiet")
        assert done.code == 4
        assert "No worker of suite 'doubles' is connected: start one" in " ".join(done.err.split())


@contextmanager
def started(command: str, suite: str, url: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, which is told to end at the end."""
    words = (command, suite, "--mailbox", url, "--quiet", *words)
    process = subprocess.Popen([sys.executable, "-m", "fairtrial.cli", *words], env=environment())
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def wait_for_workers(url: str, count: int) -> None:
    async def work() -> None:
        office = open_post_office(url)
        try:
            requests: Any = await office.requests("doubles")
            async with asyncio.timeout(60):
                while len(await requests.announced()) != count:  # noqa: ASYNC110 - another process announces itself
                    await asyncio.sleep(0.05)
        finally:
            await office.close()

    asyncio.run(work())
