"""Watchdogs of stuck event loops and stalled interpreters."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from fairtrial.fleet.ops.group import LoopGroup
from fairtrial.fleet.ops.watchdog import Watchdog
from tests.fleet.build import until
from tests.fleet.grouping import Steady, ask, running

pytestmark = pytest.mark.proves("R83", "R84", "R109")


class TestWatchdog:
    async def test_a_blocked_event_loop_is_not_live_and_is_live_again(self, caplog: pytest.LogCaptureFixture) -> None:
        group = LoopGroup([Steady()], health_port=0, stall_seconds=0.6)
        answers: list[tuple[int, bytes]] = []

        def probe(address: tuple[str, int]) -> None:
            for path in (b"/live", b"/ready", b"/health", b"/metrics"):
                with socket.create_connection(address, 10) as link:
                    link.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
                    said = b"".join(iter(lambda: link.recv(65536), b""))
                answers.append((int(said.split(b" ")[1]), said))

        async with running(group):
            await until(lambda: group.loops[0].state == "running")
            assert (await ask(group, "/metrics"))[0] == 200
            assert group.health_address is not None
            prober = threading.Thread(target=probe, args=(group.health_address,))
            a_wrong_turn(1.5, prober.start)
            await asyncio.to_thread(prober.join)
            assert [status for status, _ in answers] == [503, 503, 503, 200]
            assert b"has been stuck for" in answers[0][1]
            assert b'"live": false, "ready": false, "why": "the event loop has been stuck for' in answers[2][1]
            assert b"fairtrial_event_loop_stalls_total 0" not in answers[3][1]
            assert b'fairtrial_trials_total{loop="steady"} 3' in answers[3][1]  # As it was before.
            await until(lambda: "responds again" in caplog.text)
            assert (await ask(group, "/live"))[0] == 200
            assert (await ask(group, "/health"))[0] == 200
        assert "in a_wrong_turn" in caplog.text

    async def test_a_loop_that_is_only_busy_is_live(self) -> None:
        dog = Watchdog(5.0)
        assert (dog.silence, dog.stalled) == (0.0, False)
        dog.start()
        try:
            time.sleep(0.05)  # noqa: ASYNC251 - busy, for less than it takes
            assert not dog.stalled
        finally:
            dog.stop()
        dog.stop()


def a_wrong_turn(seconds: float, then: Callable[[], None]) -> None:
    """Blocks the event loop, as user code does; `then` happens when that has been noticed."""
    time.sleep(seconds)
    then()
    time.sleep(seconds)


STALLING = """
import ctypes, re, sys, time
from fairtrial.fleet.ops.watchdog import InterpreterWatchdog

class Contained(InterpreterWatchdog):
    def __enter__(self):
        import os
        os.getpid = lambda: 1
        return super().__enter__()

with (Contained if "contained" in sys.argv else InterpreterWatchdog)(1.5):
    print("watched", flush=True)
    if "computing" in sys.argv:
        re.match("(a+)+$", 40 * "a" + "!")
    elif "stalled" in sys.argv:
        ctypes.PyDLL(None).sleep(100)
    time.sleep(4)
print("ended", flush=True)
"""


@pytest.mark.parametrize("how", ["watched", "computing", "contained"])
def test_a_process_whose_interpreter_is_stalled_is_killed_from_outside_and_shows_where(how: str) -> None:
    run = [sys.executable, "-c", STALLING, "stalled", how]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1 if how == "contained" else -signal.SIGABRT, "watched\n")
    assert f'File "<string>", line {14 if how == "computing" else 16} in <module>' in done.stderr
    assert how == "contained" or "its interpreter has been stalled for" in done.stderr


def test_a_process_that_waits_or_was_suspended_is_not_taken_for_stalled() -> None:
    with subprocess.Popen([sys.executable, "-c", STALLING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watched\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ended\n")


STARVED = {}
STARVED["interpreter"] = """
import time
from fairtrial.fleet.ops.watchdog import InterpreterWatchdog

with InterpreterWatchdog(1.0):
    print("watched", flush=True)
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass
print("ended", flush=True)
"""
STARVED["event loop"] = """
import asyncio, time
from fairtrial.fleet.ops.watchdog import Watchdog

async def main():
    watchdog = Watchdog(1.0, exit_on_stall=True)
    watchdog.start()
    print("watched", flush=True)
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        await asyncio.sleep(0)
    watchdog.stop()

asyncio.run(main())
print("ended", flush=True)
"""
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def schedule(pid: int, policy: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)
        os.sched_setscheduler(int(thread), policy, os.sched_param(0))


@pytest.mark.skipif(sys.platform != "linux", reason="the scheduler's figures are those of Linux")
@pytest.mark.parametrize("watched", STARVED)
def test_a_process_that_gets_no_processor_is_not_taken_for_stalled(watched: str) -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    rivals = [subprocess.Popen([sys.executable, "-c", BUSY, str(core)]) for _ in range(4)]
    try:
        with subprocess.Popen([sys.executable, "-c", STARVED[watched]], stdout=subprocess.PIPE, text=True) as starved:
            assert starved.stdout is not None
            assert starved.stdout.readline() == "watched\n"
            schedule(starved.pid, os.SCHED_IDLE, {core})
            time.sleep(3)
            schedule(starved.pid, os.SCHED_OTHER, cores)
            out, _ = starved.communicate(timeout=60)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert (starved.returncode, out) == (0, "ended\n")
