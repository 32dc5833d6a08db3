"""Attempts to escape: contained, and the sandbox works afterwards; as root and as another user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from fairtrial.integrations.sandbox import ExecResult, Sandbox, SandboxLimits
from tests.integrations.sandbox.another_user import NOBODY, ROOT, as_another_user
from tests.integrations.sandbox.attacks import ATTACKS, LIMITS, pid_of, processes_of, run_attack

SLOW = {"a_gigabyte_of_output"}


@pytest.mark.proves("R145")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in SLOW else []) for n in ATTACKS])
def test_an_attack_is_contained_and_the_sandbox_works_afterwards(name: str) -> None:
    anyio.run(run_attack, ATTACKS[name])


@pytest.mark.long
def test_all_attacks_are_contained_if_the_host_process_is_unprivileged() -> None:
    argv, environment = as_another_user([sys.executable, "-m", "tests.integrations.sandbox.attacks"])
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["uid"] == (NOBODY if os.getuid() == 0 else os.getuid())
    assert report["results"] == dict.fromkeys(ATTACKS, "contained")


def test_each_sandbox_of_root_has_an_unprivileged_user_id_of_its_own_and_others_keep_theirs() -> None:
    async def user_ids() -> list[int]:
        async with Sandbox() as one, Sandbox() as other:
            return [_user_id(pid_of(box)) for box in (one, other)]

    first, second = anyio.run(user_ids)
    if os.getuid() == 0:
        assert first != second
        assert min(first, second) >= 1000
    else:
        assert {first, second} == {os.getuid()}


def _user_id(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:"))


async def _disturb(box: Sandbox, number: int, results: dict[int, ExecResult]) -> None:
    hostile = {
        0: ["bash", "-c", ":(){ :|:& };: ; sleep 60"],
        1: ["python3", "-c", "import os\nfor _ in range(6): os.fork()\nx = b'x' * (200 << 20)\ninput()"],
        2: ["sh", "-c", "yes"],
        3: ["python3", "-c", "n = 0\nwhile True: open(f'/tmp/{n}', 'w').close(); n += 1"],
    }
    async with box:
        if number in hostile:
            results[number] = await box.exec(hostile[number], timeout=3)
            return
        await box.write_file("number", str(number))
        for _ in range(10):
            code = "import os; print(sum(range(10**5)), open('number').read(), len(os.listdir('/box')))"
            results[number] = await box.exec(["python3", "-c", code])
            if not results[number].success:
                return


@pytest.mark.long
async def test_eight_parallel_sandboxes_do_not_affect_each_other() -> None:
    results: dict[int, ExecResult] = {}
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(_disturb, Sandbox(limits=LIMITS), number, results)
    assert [results[number].success for number in range(8)] == [False] * 4 + [True] * 4
    assert [results[number].stdout for number in range(4, 8)] == [f"4999950000 {number} 1\n" for number in range(4, 8)]


HOST = """
import sys
import anyio
from fairtrial.integrations.sandbox import Sandbox
from tests.integrations.sandbox.attacks import pid_of

async def main():
    async with Sandbox() as box:
        print(pid_of(box), flush=True)
        await box.exec(["sh", "-c", "setsid sleep 1000 & trap '' TERM HUP; sleep 1000"])

anyio.run(main)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_host_process_that_is_killed_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True, env=environment) as host:
        assert host.stdout is not None
        first = int(host.stdout.readline())
        assert _wait(lambda: len(processes_of(first)) >= 3)
        everything = [*processes_of(host.pid), first, *processes_of(first)]
        host.send_signal(signal.SIGKILL)
    assert _wait(lambda: not any(map(_is_running, everything))), everything
    assert list(tmp_path.iterdir()) == []


async def test_a_cancelled_command_ends_and_the_sandbox_works_on() -> None:
    async with Sandbox() as box:
        with anyio.move_on_after(0.5) as scope:
            await box.exec(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
        assert scope.cancelled_caught
        assert processes_of(pid_of(box)) == []
        assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_a_command_that_closes_its_output_and_leaves_a_daemon_does_not_block() -> None:
    async with Sandbox(limits=SandboxLimits(seconds=20)) as box:
        started = time.monotonic()
        result = await box.exec(["sh", "-c", "setsid sleep 1000 & echo started"])
        assert (result.stdout, result.success) == ("started\n", True)
        assert time.monotonic() - started < 10
        assert processes_of(pid_of(box)) == []
