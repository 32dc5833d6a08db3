"""kill -9 at any moment loses nothing that was stored and executes nothing stored again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalReport, open_store
from tests.servers import PostgresServer

SCRIPT = Path(__file__).with_name("suite_to_kill.py")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process that is killed reports no coverage; tracing it would only make the test slower.
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
    )


def wait_for_call(log: Path, seen: int, process: subprocess.Popen[str]) -> None:
    """Wait until the suite has called its task after the first `seen` lines of its log."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.exists() and len(log.read_text().splitlines()) > seen:
            return
        if process.poll() is not None:
            raise AssertionError(process.stderr.read() if process.stderr else "")
        time.sleep(0.005)
    raise AssertionError("the suite did not start")


def stored(store_url: str) -> tuple[EvalReport, dict[str, tuple[str, Any, Any]]]:
    store = open_store(store_url)
    (run,) = store.runs(suite="to-kill")
    report = EvalReport(store, run)
    found = {
        result.sample_id: (str(result.outcome), result.output, result.passed if result.success else None)
        for result in report.results
    }
    store.close()
    return report, found


def expected(samples: int) -> dict[str, tuple[str, Any, Any]]:
    def one(i: int) -> tuple[str, Any, Any]:
        if i % 50 == 7:
            return "task_error", None, None
        output = 2 * i if i % 10 else 0
        return "scored", output, output == 2 * i

    return {f"s{i}": one(i) for i in range(samples)}


def kill_and_resume(store_url: str, folder: Path, *, samples: int, kills: int, server: PostgresServer | None) -> None:
    chance = random.Random(20261115)
    log = folder / "calls.log"
    committed: set[str] = set()
    for kill in range(kills):
        seen = len(log.read_text().splitlines()) if log.exists() else 0
        process = start(store_url, log, samples)
        wait_for_call(log, seen, process)
        time.sleep(chance.uniform(0.0, 0.6))
        if server is not None and kill == kills // 2:
            server.restart()
            time.sleep(0.5)
        assert process.poll() is None, "the suite ended before it could be killed: give it more samples"
        process.kill()
        process.communicate()
        called = {line.split()[1] for line in log.read_text().splitlines()[seen:] if line.startswith("call ")}
        assert not called & committed, "a stored trial was executed again"
        _, found = stored(store_url)
        assert committed <= set(found), "a stored result was lost"
        committed = set(found)
    seen = len(log.read_text().splitlines())
    process = start(store_url, log, samples)
    if server is not None:
        wait_for_call(log, seen, process)
        server.restart()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.split() == ["finished", str(samples)]
    called = {line.split()[1] for line in log.read_text().splitlines()[seen:] if line.startswith("call ")}
    assert not called & committed
    report, found = stored(store_url)
    assert report.status == "finished"
    assert found == expected(samples)


@pytest.mark.long
@pytest.mark.proves("R108")
def test_a_suite_killed_twenty_times_ends_with_the_results_of_an_uninterrupted_run_on_sqlite(tmp_path: Path) -> None:
    kill_and_resume(f"sqlite:///{tmp_path}/runs.db", tmp_path, samples=6000, kills=20, server=None)


@pytest.mark.long
@pytest.mark.proves("R108")
def test_the_same_on_postgresql_with_the_server_restarted_in_the_middle(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    kill_and_resume(own_postgres.new_database(), tmp_path, samples=3000, kills=8, server=own_postgres)


@pytest.mark.parametrize("request_to_end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_drains_closes_everything_and_the_last_line_says_how_to_go_on(
    tmp_path: Path, request_to_end: signal.Signals
) -> None:
    url, log = f"sqlite:///{tmp_path}/runs.db", tmp_path / "calls.log"
    process = start(url, log, 60, "slow")
    wait_for_call(log, 12, process)
    started = time.monotonic()
    process.send_signal(request_to_end)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert process.returncode == -signal.SIGINT, err
    assert err.splitlines()[-1].endswith(f"Resume it with: python {SCRIPT} {url} {log} 60 slow")
    lines = log.read_text().splitlines()
    opened = [line.split()[1] for line in lines if line.startswith("open ")]
    closed = [line.split()[1] for line in lines if line.startswith("close ")]
    assert opened
    assert sorted(opened) == sorted(closed)
    report, found = stored(url)
    assert report.status == "interrupted"
    assert found
    assert all(outcome in ("scored", "task_error") for outcome, _, _ in found.values())


def test_a_second_interrupt_cancels_what_is_in_flight_at_once(tmp_path: Path) -> None:
    url, log = f"sqlite:///{tmp_path}/runs.db", tmp_path / "calls.log"
    process = start(url, log, 60, "slow")
    wait_for_call(log, 12, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, err
    lines = log.read_text().splitlines()
    assert sum(line.startswith("open ") for line in lines) == sum(line.startswith("close ") for line in lines)
    assert stored(url)[0].status == "interrupted"
