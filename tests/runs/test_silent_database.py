"""A database host that stops responding, as behind a firewall. Run by scripts/attacks --soak."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = textwrap.dedent(
    """
    import os, signal, subprocess, threading, time
    import anyio
    from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match
    from tests.servers import PostgresServer

    def link(state):
        subprocess.run(["ip", "link", "set", "lo", state], check=True)

    def cut_off():
        pids = server.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # Statements are sent and not answered.
        time.sleep(2)
        link("down")  # Nothing that the server's kernel says on its behalf arrives.
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
        server.forget()
        time.sleep(3)
        link("up")
        server.start()

    executed = []

    async def slow(number):
        executed.append(number)
        if number == 50:
            threading.Thread(target=cut_off).start()
        await anyio.sleep(0.1)
        return number

    link("up")
    server = PostgresServer()
    server.start()
    try:
        data = Dataset.of({number: number for number in range(600)}, name="numbers")
        suite = EvalSuite("silent", data, slow, exact_match, version="1", config=EvalConfig(max_concurrent=10))
        began = time.monotonic()
        report = suite.run_sync(store=server.new_database())
        print(report.status, report.successful, len(executed), time.monotonic() - began < 120)
    finally:
        server.close()
    """
)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_database_that_is_cut_off_silently_is_found_again_within_two_minutes() -> None:
    assert os.getuid() == 0, "a network namespace with PostgreSQL in it needs root"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["finished", "600", "600", "True"], done.stderr
