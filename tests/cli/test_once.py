"""The first and the last seconds of a run, and runs that are executed once: nothing stored is paid for again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from fairtrial import open_store
from fairtrial.errors import StoreUnavailableError
from fairtrial.runs.events import EvalRunCompleted, observe_every_run
from fairtrial.store.sql import SqlStore
from tests.cli.conftest import EVALS, Cli
from tests.cli.test_screens import environment
from tests.proxy import Proxy
from tests.servers import PostgresServer

COUNTED = EVALS.replace(
    "    if number ==", '    with open("executed", "a") as file:\n        file.write("x")\n    if number =='
).replace("double, exact_match)", 'double, exact_match, version="1")')
SLOW = (
    COUNTED.replace("    if number ==", "    time.sleep(0.4)\n    if number ==")
    .replace("@task(inline=True)\n", "")
    .replace("exact_match, version", "exact_match, config=EvalConfig(max_concurrent=1), version")
    .replace("samples = [", "import time\n\nfrom fairtrial import EvalConfig\n\nsamples = [")
)


class AtTheEnd:
    """Calls a function when a run has ended, before its report is read."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def publish(self, event: object) -> None:
        if isinstance(event, EvalRunCompleted):
            self._call()


@pytest.fixture
def at_the_end() -> Iterator[Callable[[Callable[[], Any]], None]]:
    yield lambda call: observe_every_run(AtTheEnd(call))
    observe_every_run(None)


@pytest.fixture
def counted(place: Path) -> Callable[[], int]:
    """A suite that counts its executions."""
    (place / "evals.py").write_text(COUNTED)
    return lambda: _executions(place)


def _executions(place: Path) -> int:
    file = place / "executed"
    return file.stat().st_size if file.exists() else 0


@pytest.fixture
def behind(pg_server: PostgresServer, pg_url: str) -> Iterator[tuple[Proxy, str]]:
    """A store in PostgreSQL behind a network that can fail."""
    with Proxy(pg_server.port) as proxy:
        url = make_url(pg_url).set(port=proxy.port, host="127.0.0.1")
        yield proxy, url.render_as_string(hide_password=False)


class TestTheLastSeconds:
    def test_a_store_that_is_away_while_the_report_is_read_is_waited_for(
        self,
        cli: Cli,
        counted: Callable[[], int],
        behind: tuple[Proxy, str],
        at_the_end: Callable[[Callable[[], Any]], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        proxy, url = behind

        def away() -> None:
            proxy.refused = True
            proxy.cut()
            threading.Timer(0.5, proxy.calm).start()

        at_the_end(away)
        done = cli("run", "evals.py", "--store", url)
        assert done.code == 0, done.err
        assert done.out.count("doubles  run") == 1
        assert "reading the report: the store is unavailable" in caplog.text
        assert counted() == 4

    def test_when_it_stays_away_exit_5_says_that_the_run_is_finished_and_how_to_show_it(
        self,
        cli: Cli,
        counted: Callable[[], int],
        behind: tuple[Proxy, str],
        at_the_end: Callable[[Callable[[], Any]], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0.3")
        monkeypatch.setenv("FAIRTRIAL_STORE", behind[1])
        proxy = behind[0]

        def away() -> None:
            proxy.refused = True
            proxy.cut()

        at_the_end(away)
        for json in ((), ("--json",)):
            done = cli("run", "evals.py", *json)
            assert (done.code, done.out) == (5, "")
            what, remedy = done.err.splitlines()[-2:]
            assert what.startswith("error: the report cannot be read: the store is unavailable")
            assert remedy.startswith(
                "  the run is finished and stored, do not repeat it; show it with: fairtrial show "
            )
            proxy.calm()
            shown = cli(*remedy.partition(": fairtrial ")[2].split())
            assert shown.code == 0
            assert "75.0%" in shown.out
        assert counted() == 8

    def test_ctrl_c_while_the_report_is_read_says_that_the_run_is_finished(
        self, cli: Cli, counted: Callable[[], int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_arguments: object, **_more: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("fairtrial.cli.options.show_report", interrupted)
        done = cli("run", "evals.py", "--store", "x.db")
        (run,) = open_store("x.db").runs()
        assert done.code == 130
        assert done.err.splitlines()[-1] == (
            "interrupted: the run is finished and stored, do not repeat it; "
            f"show it with: fairtrial show {run.run_id} --store x.db"
        )

    def test_any_other_error_in_the_report_says_it_too(
        self, cli: Cli, counted: Callable[[], int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_arguments: object, **_more: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("fairtrial.cli.options.show_report", broken)
        done = cli("run", "evals.py", "--store=x.db")
        (run,) = open_store("x.db").runs()
        assert done.code not in (0, 3)
        assert done.err.rstrip().endswith(f"show it with: fairtrial show {run.run_id} --store=x.db")

    def test_a_signal_after_the_last_trial_does_not_advise_to_repeat_a_finished_run(
        self, cli: Cli, counted: Callable[[], int], at_the_end: Callable[[Callable[[], Any]], None]
    ) -> None:
        def interrupt() -> None:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.2)  # The main thread handles it.

        at_the_end(interrupt)
        done = cli("run", "evals.py", "--store", "x.db")
        (run,) = open_store("x.db").runs()
        assert (done.code, run.status) == (130, "finished")
        assert done.err.splitlines()[-1] == f"it had ended; show it with: fairtrial show {run.run_id} --store x.db"


class TestTheFirstSeconds:
    def test_a_store_that_is_away_is_waited_for(
        self, cli: Cli, counted: Callable[[], int], behind: tuple[Proxy, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        proxy, url = behind
        open_store(url).close()
        proxy.refused = True
        threading.Timer(0.5, proxy.calm).start()
        done = cli("run", "evals.py", "--store", url, "--quiet")
        assert done.code == 0, done.err
        assert "opening the store: the store is unavailable" in caplog.text

    @pytest.mark.parametrize("wrong", ["password", "database"])
    def test_a_wrong_address_is_not_waited_for(
        self, cli: Cli, counted: Callable[[], int], pg_url: str, wrong: str
    ) -> None:
        changed: Any = {wrong: "other"}
        url = make_url(pg_url).set(**changed).render_as_string(hide_password=False)
        began = time.monotonic()
        assert cli("run", "evals.py", "--store", url).code == 2
        assert time.monotonic() - began < 60

    def test_when_it_stays_away_nothing_was_executed_and_the_same_command_may_be_repeated(
        self, cli: Cli, counted: Callable[[], int], behind: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0.2")
        behind[0].refused = True
        done = cli("run", "evals.py", "--store", behind[1])
        assert (done.code, counted()) == (3, 0)
        assert done.err.splitlines()[-1].startswith("  nothing was executed")

    @pytest.mark.parametrize(
        ("method", "words"),
        [
            *((method, ()) for method in ("runs", "create_run", "run_owner", "acquire_run", "done", "totals")),
            ("create_run", ("--resume", "never")),
            ("create_run", ("--once", "k")),
        ],
    )
    def test_every_answer_may_be_lost_before_the_first_trial(
        self,
        cli: Cli,
        counted: Callable[[], int],
        monkeypatch: pytest.MonkeyPatch,
        method: str,
        words: tuple[str, ...],
    ) -> None:
        """The store does what it was asked, and the connection ends before it can say so."""
        original = getattr(SqlStore, method)
        lost: list[str] = []

        def answer_lost(self: SqlStore, *arguments: Any, **more: Any) -> Any:
            found = original(self, *arguments, **more)
            if not lost:
                lost.append(method)
                raise StoreUnavailableError("the connection was lost")
            return found

        monkeypatch.setattr(SqlStore, method, answer_lost)
        done = cli("run", "evals.py", "--store", "x.db", "--quiet", *words)
        assert (done.code, done.out) == (0, "doubles@1:baseline  pass rate 75.0%, 4 scored, 0 errors\n"), done.err
        assert [run.status for run in open_store("x.db").runs()] == ["finished"]
        assert counted() == 4


class TestOnce:
    def test_the_same_key_executes_nothing_again_and_ends_as_the_run_did(
        self, cli: Cli, counted: Callable[[], int]
    ) -> None:
        command = ("run", "evals.py", "--once", "night-1", "--fail-under", "0.9")
        first, second = cli(*command), cli(*command)
        assert (first.code, second.code) == (1, 1)
        assert first.out == second.out
        assert counted() == 4
        assert "doubles@1" in second.err
        assert "has this key and has ended: nothing was executed" in " ".join(second.err.split())
        assert cli(*command, "--json").json["runs"][0]["resumed"] is True
        assert counted() == 4

    def test_another_key_or_none_starts_a_new_run(self, cli: Cli, counted: Callable[[], int]) -> None:
        for words in (("--once", "a"), ("--once", "b"), (), ("--once", "a"), ("--once", "b")):
            assert cli("run", "evals.py", "--quiet", *words).code == 0
        assert len(open_store().runs()) == 3
        assert counted() == 12

    def test_an_unfinished_run_is_resumed_though_a_later_run_has_finished(
        self, cli: Cli, counted: Callable[[], int]
    ) -> None:
        assert cli("run", "evals.py", "--quiet", "--once", "a", "--max-samples", "2").code == 0
        (run,) = open_store().runs()
        open_store().update_run(run.run_id, status="interrupted")
        assert cli("run", "evals.py", "--quiet", "--once", "b", "--max-samples", "2").code == 0
        assert cli("run", "evals.py", "--quiet", "--once", "a", "--max-samples", "2").code == 0
        assert [run.status for run in open_store().runs()] == ["finished", "finished"]
        assert counted() == 4

    @pytest.mark.parametrize("status", ["finished", "interrupted"])
    def test_a_key_that_was_used_for_something_else_is_refused(
        self, cli: Cli, counted: Callable[[], int], status: Any, place: Path
    ) -> None:
        assert cli("run", "evals.py", "--quiet", "--once", "a").code == 0
        (run,) = open_store().runs()
        open_store().update_run(run.run_id, status=status)
        (place / "evals.py").write_text(COUNTED.replace('version="1"', 'version="2"'))
        done = cli("run", "evals.py", "--quiet", "--once", "a")
        assert (done.code, counted()) == (2, 4)
        said = " ".join(done.err.split())
        assert f"run {run.run_id} of suite 'doubles' has this key and cannot be resumed: its code has changed" in said
        assert "give another key to start a new run" in said
        assert cli("run", "evals.py", "--quiet", "--once", "a", "--allow-changed-code").code == 0
        assert counted() == 4

    @pytest.mark.parametrize("how", ["never", "errors", "x"])
    def test_options_that_execute_again_are_refused(self, cli: Cli, evals: Path, how: str) -> None:
        done = cli("run", "evals.py", "--once", "a", "--resume", how)
        assert done.code == 2
        assert "--once needs a key, and cannot be combined with" in done.err

    def test_every_suite_of_a_command_has_its_own_run_of_the_key(self, cli: Cli, place: Path) -> None:
        (place / "evals.py").write_text(COUNTED)
        (place / "more.py").write_text(COUNTED.replace('"doubles"', '"more"'))
        for _ in range(2):
            assert cli("run", "evals.py", "more.py", "--quiet", "--once", "a").code == 0
        assert (len(open_store().runs()), _executions(place)) == (2, 8)

    def test_a_key_may_look_like_a_credential(self, cli: Cli, counted: Callable[[], int]) -> None:
        key = "sk-proj-" + "aB3" * 16
        for _ in range(2):
            assert cli("run", "evals.py", "--quiet", "--once", key).code == 0
        assert counted() == 4
        assert key not in Path(".fairtrial/runs.db").read_bytes().decode("latin-1")

    @pytest.mark.long
    @pytest.mark.parametrize("killed", [False, True])
    def test_two_commands_with_one_key_at_once_execute_the_run_once(self, place: Path, killed: bool) -> None:
        (place / "evals.py").write_text(SLOW)
        open_store("x.db").close()
        command = [
            sys.executable,
            "-m",
            "fairtrial.cli",
            "run",
            "evals.py",
            "--once",
            "a",
            "--quiet",
            "--store",
            "x.db",
        ]
        started = [
            subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        again = 0  # Trials that were executed and are not stored when their process dies.
        if killed:  # The one that executes the run; the other takes it over.
            while not _executions(place):
                time.sleep(0.05)
            for process in started:  # On a busy machine, more trials would begin while the owner is looked up.
                process.send_signal(signal.SIGSTOP)
            store = open_store("x.db")
            (run,) = store.runs()
            again = _executions(place) - sum(byte.bit_count() for byte in store.done(run.run_id))
            owner = store.run_owner(run.run_id).owner or ""
            (victim,) = (process for process in started if f'"pid": {process.pid},' in owner)
            victim.kill()
            victim.communicate()
            started.remove(victim)
            started[0].send_signal(signal.SIGCONT)
        ended = [(process.communicate(timeout=60), process.returncode) for process in started]
        figures = "doubles@1:baseline  pass rate 75.0%, 4 scored, 0 errors\n"
        assert [(out, code) for (out, _), code in ended] == [(figures, 0)] * len(started), ended
        assert _executions(place) == 4 + again
        assert [run.status for run in open_store("x.db").runs()] == ["finished"]
