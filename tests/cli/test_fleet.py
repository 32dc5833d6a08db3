"""`worker`, `fleet` and `fleet dlq`, over a real Redis."""

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

from fairtrial import Sample, open_store
from fairtrial.fleet import EvalRequest, connect_broker
from fairtrial.fleet.client import dispatch
from fairtrial.fleet.client.dispatch import DispatchConfig
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


def set_aside(url: str, count: int, reply_to: str = "") -> list[str]:
    """Put dead letters into the mailbox of suite "doubles"; their ids, oldest first."""
    address = ("r", reply_to) if reply_to else ()

    async def work() -> list[str]:
        broker = connect_broker(url)
        try:
            mailbox: Any = await broker.requests("doubles")
            for number in range(count):
                await mailbox.connection.command("XADD", mailbox.keys.stream, "*", "b", f"nonsense {number}", *address)
            while (await mailbox.depth()).dead < count:
                await mailbox.receive(max_messages=10, wait_time_seconds=1)
            return [letter.id for letter in await mailbox.dead_letters.page()]
        finally:
            await broker.close()

    return asyncio.run(work())


def test_a_worker_executes_the_trials_of_a_run(cli: Cli, evals: Path, url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "fairtrial.cli", "worker", "evals.py", "--mailbox", url, "--name", "w1", "--json"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        try:
            done = cli("run", "evals.py", "--mailbox", url, "--quiet")
            assert (done.code, done.out) == (0, "doubles@1:baseline  pass rate 75.0%, 4 scored, 0 errors\n")
            done = cli("run", "evals.py", "--mailbox", "--quiet")  # By the queue of the environment.
            assert (done.code, done.out) == (0, "doubles@2:baseline  pass rate 75.0%, 4 scored, 0 errors\n")
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
    assert lines[3].split() == ["worker", "suite", "state", "in", "flight", "last", "heard", "of"]
    assert lines[4].split()[:4] == ["w1", "doubles", "alive", "0"]
    assert open_store().runs()[0].status == "finished"


def test_a_run_for_a_fleet_needs_a_queue(cli: Cli, evals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRTRIAL_MAILBOX", raising=False)
    done = cli("run", "evals.py", "--mailbox")
    assert done.code == 2
    assert "no queue is configured" in done.err
    assert "FAIRTRIAL_MAILBOX" in done.err


def test_a_worker_ends_when_there_is_nothing_to_do(cli: Cli, evals: Path, url: str) -> None:
    done = cli("worker", "evals.py", "--until-empty", "--empty-seconds", "0.5", "--quiet", "--name", "w2")
    assert (done.code, done.err) == (0, "worker w2 ended: 0 received, none executed\n")
    done = cli("worker", "evals.py", "--until-empty", "--empty-seconds", "0", "--quiet", "--json")
    assert done.json["format"] == "fairtrial.worker/1"


def test_the_fleet_is_shown_for_every_suite_that_is_known(cli: Cli, evals: Path, url: str) -> None:
    cli("run", "evals.py", "--quiet")
    set_aside(url, 1)
    head, row = cli("fleet").out.splitlines()[:2]
    assert head.split() == ["suite", "waiting", "delayed", "in", "flight", "oldest", "dead", "letters", "workers"]
    assert row.split()[:6] == ["doubles", "0", "0", "0", "-", "1"]
    assert cli("fleet", "evals.py").out.splitlines()[1].startswith("doubles")


def queue(url: str, *replies: str) -> None:
    """Queue a request for suite "doubles" for each name of a mailbox that wants the reply."""

    async def work() -> None:
        office = connect_broker(url)
        try:
            mailbox: Any = await office.requests("doubles")
            for number, reply in enumerate(replies):
                await mailbox.send(EvalRequest(sample=Sample(f"s{number}", number)), reply_to=reply)
        finally:
            await office.close()

    asyncio.run(work())


class TestPurge:
    @pytest.fixture
    def queued(self, cli: Cli, evals: Path, url: str) -> str:
        """Two requests of a finished run, one of an unknown one, and one of a run that can be resumed."""
        cli("run", "evals.py", "--quiet")
        cli("run", "evals.py", "--quiet", "--resume", "never")
        store = open_store()
        unfinished, finished = store.runs()
        store.update_run(unfinished.run_id, status="interrupted")
        queue(
            url,
            *[f"doubles.results.{finished.run_id}"] * 2,
            "doubles.results.lost",
            f"doubles.results.{unfinished.run_id}",
        )
        return url

    def test_requests_of_finished_and_unknown_runs_are_removed_and_others_stay(self, cli: Cli, queued: str) -> None:
        done = cli("fleet", "doubles", "--purge", "--dry-run")
        assert sorted(line.split() for line in done.out.splitlines()[1:]) == [
            ["doubles", "doubles@1", "finished", "2"],
            ["doubles", "lost", "unknown", "1"],
        ]
        assert done.err == "would remove 3 requests\n"
        assert cli("fleet", "doubles", "--json").json["suites"][0]["waiting"] == 4
        facts = cli("fleet", "doubles", "--purge", "--yes", "--json").json
        assert (facts["format"], facts["removed"]) == ("fairtrial.fleet_purge/1", 3)
        assert cli("fleet", "doubles", "--json").json["suites"][0]["waiting"] == 1
        assert cli("fleet", "doubles", "--purge").err == "no queued request of a finished or unknown run\n"

    def test_without_a_terminal_it_must_be_confirmed_by_an_option(self, cli: Cli, queued: str) -> None:
        done = cli("fleet", "doubles", "--purge")
        assert done.code == 2
        assert "confirm with --yes" in done.err
        assert cli("fleet", "doubles", "--json").json["suites"][0]["waiting"] == 4


def test_a_process_that_was_not_heard_of_for_long_is_shown_as_lost_while_it_holds_requests(
    cli: Cli, evals: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(url, "doubles.results.lost")
    script = f"""
import asyncio, os
from fairtrial.fleet.queues import connect_broker
async def work():
    mailbox = await connect_broker({url!r}).requests("doubles")
    await mailbox.receive(visibility_timeout=300)
    os._exit(9)
asyncio.run(work())
"""
    assert subprocess.run([sys.executable, "-c", script], env=environment(), check=False, timeout=60).returncode == 9
    (seen,) = cli("fleet", "doubles", "--json").json["suites"]
    assert [worker["state"] for worker in seen["workers"]] == ["alive"]
    monkeypatch.setattr("fairtrial.mailbox.server._UNANNOUNCED_SECONDS", 0.0)
    (seen,) = cli("fleet", "doubles", "--json").json["suites"]
    assert [(worker["state"], worker["in_flight"]) for worker in seen["workers"]] == [("lost", 1)]
    suite, worker = (cli("fleet", "doubles").out.splitlines()[line].split() for line in (1, 4))
    assert suite[-1] == "0"
    assert worker[1:4] == ["doubles", "lost", "1"]


@pytest.mark.long
def test_a_killed_worker_is_shown_as_lost_by_its_name(cli: Cli, evals: Path, url: str) -> None:
    script = """
import sys
from fairtrial.fleet.worker import eval_loop
eval_loop.ANNOUNCEMENT_SECONDS = 1.0
from fairtrial.cli.app import invoke
invoke(sys.argv[1:])
"""
    command = [sys.executable, "-c", script, "worker", "evals.py", "--mailbox", url, "--name", "w1", "--quiet"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as worker:
        try:
            wait_for_workers(url, 1)
        finally:
            worker.kill()
    wait_for_workers(url, 0)
    (seen,) = cli("fleet", "doubles", "--json").json["suites"]
    assert [(one["name"], one["state"]) for one in seen["workers"]] == [("w1", "lost")]


def test_a_fleet_of_an_unknown_suite_is_refused_with_the_known_suites(cli: Cli, evals: Path, url: str) -> None:
    queue(url, "doubles.results.lost")
    done = cli("fleet", "doublez")
    assert (done.code, done.out) == (2, "")
    assert "there is no queue of a suite 'doublez', and no run of it is stored here" in done.err
    assert "did you mean doubles?" in done.err
    assert "the known suites are doubles" in cli("fleet", "numz", "--json").err
    assert cli("fleet", "evals.py").code == 0


def test_a_user_with_the_documented_rights_sees_the_fleet_of_a_stored_suite(
    cli: Cli, evals: Path, server: RedisServer, url: str
) -> None:
    rights = (Path(__file__).resolve().parents[2] / "deploy" / "redis-user.acl").read_text().split()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">secret", *rights)
    try:
        limited = f"redis://worker:secret@127.0.0.1:{server.port}/0"
        cli("run", "evals.py", "--quiet")
        assert cli("fleet", "doubles", "--mailbox", limited).out.splitlines()[1].split()[0] == "doubles"
        done = cli("fleet", "doublez", "--mailbox", limited)
        assert done.code == 2
        assert "did you mean doubles?" in done.err
    finally:
        with server.client() as client:
            client.execute_command("ACL", "DELUSER", "worker")


def test_watching_refreshes_until_ctrl_c_and_ends_with_0(evals: Path, url: str) -> None:
    queue(url, "doubles.results.lost")
    with subprocess.Popen(
        [sys.executable, "-m", "fairtrial.cli", "fleet", "doubles", "--watch", "--mailbox", url],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        seen = [watching.stdout.readline() for _ in range(4)]  # A screen of two lines, an empty one, the next screen.
        watching.send_signal(signal.SIGINT)
        _, log = watching.communicate(timeout=60)
    assert (watching.returncode, log) == (0, "")
    assert seen[0] == seen[3]
    assert seen[0].startswith("suite")


class TestDeadLetters:
    def test_dead_letters_are_listed_and_shown(self, cli: Cli, evals: Path, url: str) -> None:
        assert cli("fleet", "dlq", "list", "evals.py").err == "no dead letters for doubles\n"
        cli("run", "evals.py", "--quiet")
        assert cli("fleet", "dlq", "list", "doubles").err == "no dead letters for doubles\n"
        first, _ = set_aside(url, 2)
        lines = cli("fleet", "dlq", "list", "doubles").out.splitlines()
        assert lines[0].split() == ["id", "when", "tries", "sample", "reason"]
        assert lines[1].startswith(first)
        assert len(lines) == 3
        shown = cli("fleet", "dlq", "show", "doubles", first).out
        assert "message   nonsense 0" in shown
        facts = cli("fleet", "dlq", "list", "doubles", "--json").json
        assert (facts["format"], len(facts["letters"])) == ("fairtrial.dead_letters/1", 2)
        assert cli("fleet", "dlq", "show", "doubles", first, "--json").json["text"] == "nonsense 0"
        assert cli("fleet", "dlq", "show", "doubles", "9-9").err == (
            "error: there is no dead letter '9-9' of doubles\n  see: fairtrial fleet dlq list doubles\n"
        )

    def test_dead_letters_are_dropped_or_retried(self, cli: Cli, url: str) -> None:
        first, *_ = set_aside(url, 3)
        assert cli("fleet", "dlq", "drop", "doubles", first).err == "1 dead letter of doubles dropped\n"
        done = cli("fleet", "dlq", "drop", "doubles", first)
        assert done.code == 2
        assert done.err.endswith("1 id not found; see: fairtrial fleet dlq list doubles\n")
        assert (
            cli("fleet", "dlq", "retry", "doubles", "--all").err
            == "2 dead letters of doubles went back into the queue\n"
        )
        assert cli("fleet", "dlq", "drop", "doubles", "--all", "--json").json["count"] == 0
        assert cli("fleet", "doubles", "--json").json["suites"][0]["waiting"] == 2

    @pytest.mark.parametrize(
        "words", [["list"], ["list", "--json"], ["show", "1-1"], ["retry", "--all"], ["drop", "1-1"]]
    )
    def test_an_unknown_suite_is_refused_with_the_names_that_are_near(
        self, cli: Cli, url: str, words: list[str]
    ) -> None:
        said = "error: there is no queue of a suite 'duobles', and no run of it is stored here\n"
        done = cli("fleet", "dlq", words[0], "duobles", *words[1:])
        assert (done.code, done.out) == (2, "")
        assert done.err == f"{said}  this server has no queues; check the address\n"
        set_aside(url, 1)
        done = cli("fleet", "dlq", words[0], "duobles", *words[1:])
        assert (done.code, done.err) == (2, f"{said}  did you mean doubles?\n")
        assert cli("fleet", "dlq", "list", "zzz").err.endswith("  the known suites are doubles\n")

    def test_retrying_those_of_a_finished_run_is_refused_with_the_command_to_use_instead(
        self, cli: Cli, evals: Path, url: str
    ) -> None:
        cli("run", "evals.py", "--quiet")
        (run,) = open_store().runs()
        (letter,) = set_aside(url, 1, f"doubles.results.{run.run_id}")
        for words in (["--all"], [letter]):
            done = cli("fleet", "dlq", "retry", "doubles", *words)
            assert (done.code, done.err) == (
                2,
                "error: run doubles@1 has ended: no client collects the results of its 1 dead letter\n"
                "  retry its failed trials with: fairtrial run evals.py --mailbox URL --resume errors\n",
            )
        assert len(cli("fleet", "dlq", "list", "doubles", "--json").json["letters"]) == 1
        open_store().update_run(run.run_id, status="interrupted")  # A client that resumes it will collect.
        assert cli("fleet", "dlq", "retry", "doubles", "--all").code == 0

    def test_retrying_those_whose_mailbox_is_gone_needs_force(self, cli: Cli, url: str) -> None:
        set_aside(url, 2, "doubles.results.gone")
        done = cli("fleet", "dlq", "retry", "doubles", "--all")
        assert (done.code, done.err) == (
            2,
            "error: no client collects the results of 2 dead letters: the mailbox doubles.results.gone does not exist\n"
            "  run the suite again with --resume errors, or use --force to execute them all the same\n",
        )
        done = cli("fleet", "dlq", "retry", "doubles", "--all", "--force")
        assert (done.code, done.err) == (0, "2 dead letters of doubles went back into the queue\n")

    @pytest.mark.parametrize("words", [[], ["1-1", "--all"]])
    def test_which_ones_must_be_said(self, cli: Cli, url: str, words: list[str]) -> None:
        assert cli("fleet", "dlq", "retry", "doubles", *words).err == (
            "error: give the ids of the dead letters to retry, or --all\n  see: fairtrial fleet dlq list doubles\n"
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
            assert (new.code, new.out) == (0, "doubles@1:baseline  pass rate 75.0%, 4 scored, 0 errors\n")
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
        assert (
            "start workers with this client's code, or with --allow-drift; run the same command to execute them" in said
        )
        assert "the outputs are stored" not in said
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
        broker = connect_broker(url)
        try:
            requests: Any = await broker.requests("doubles")
            async with asyncio.timeout(60):
                while len(await requests.announced()) != count:  # noqa: ASYNC110 - another process announces itself
                    await asyncio.sleep(0.05)
        finally:
            await broker.close()

    asyncio.run(work())
