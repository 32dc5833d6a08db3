"""Tasks that disturb their process: every trial of the local run is still stored."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from fairtrial import open_store

HEAD = """
import asyncio, gc, json, logging, os, resource, signal, socket, sys, threading, time
from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match

kept = []

def run(task, count=60, **settings):
    data = Dataset.of({number: 2 * number for number in range(count)}, name="numbers")
    config = EvalConfig(**{"max_concurrent": 10, "timeout_seconds": 20, "grace_seconds": 1, **settings})
    suite = EvalSuite("mess", data, task, exact_match, config=config, version="1")
    print(suite.run_sync(store=sys.argv[1]).status, file=sys.stderr)
"""

PROGRAMS = {
    "threads, descriptors and output left behind": """
def task(number):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    kept.append([open(os.devnull) for _ in range(10)])
    sys.stdout.write("\\x1b]0;title\\x07" + "A" * 200_000 + "\\n")
    return 2 * number
""",
    "the world changed": """
async def task(number):
    os.chdir("/")
    os.umask(0o777)
    os.environ.clear()
    os.environ["TZ"] = "Asia/Kathmandu"
    os.environ["FAIRTRIAL_STORE"] = "/nowhere/runs.db"
    time.tzset()
    logging.disable(logging.CRITICAL)
    logging.getLogger().handlers.clear()
    asyncio.set_event_loop_policy(None)
    sys.setrecursionlimit(300)
    gc.disable()
    socket.setdefaulttimeout(0.001)
    return 2 * number
""",
    "the clock changed": """
async def task(number):
    time.time = lambda: float("nan")
    time.monotonic = lambda: -1e18
    return 2 * number
""",
    "the json module replaced": """
async def task(number):
    json.dumps = lambda *args, **options: "replaced"
    json.loads = lambda *args, **options: {}
    return 2 * number
""",
    "processes forked": """
import warnings
warnings.simplefilter("ignore")
def task(number):
    if number % 5 == 0 and os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    if number == 31:
        os.fork()
    return 2 * number
""",
    "a deep value shown": """
def task(number):
    if number == 20:
        value = []
        for _ in range(1_000_000):
            value = [value]
        try:
            repr(value)
        except RecursionError:
            pass
        while value:
            value = value.pop()
    return 2 * number
""",
}


def start(folder: Path, program: str, after: str = "run(task)") -> subprocess.Popen[str]:
    (folder / "program.py").write_text(HEAD + program + "\n" + after + "\n")
    return subprocess.Popen(
        ["env", "--default-signal=INT,QUIT,TERM", sys.executable, "program.py", f"sqlite:///{folder}/runs.db"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> str:
    """Wait for a program, end whatever it left behind, and return what it wrote."""
    try:
        process.wait(timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # It left nothing behind.
            os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1]


def outcomes(folder: Path) -> tuple[str, Counter[str]]:
    store = open_store(f"sqlite:///{folder}/runs.db")
    try:
        (run,) = store.runs()
        return run.status, Counter(str(result.outcome) for result in store.results(run.run_id))
    finally:
        store.close()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_trial_is_stored_although_tasks_leave_a_mess(tmp_path: Path, name: str) -> None:
    said = finish(start(tmp_path, PROGRAMS[name]))
    assert said.splitlines()[-1:] == ["finished"], said
    assert outcomes(tmp_path) == ("finished", {"scored": 60})


@pytest.mark.long
def test_a_task_that_terminates_its_process_drains_the_run_and_leaves_it_resumable(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        textwrap.dedent(
            """
            async def task(number):
                if number == 20 and not os.path.exists("terminated"):
                    open("terminated", "w").close()
                    os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.02)
                return 2 * number
            """
        ),
    )
    said = finish(process)
    status, results = outcomes(tmp_path)
    assert status == "interrupted", said
    assert 20 < results["scored"] < 60
    again = (tmp_path / "program.py").read_text()
    assert finish(start(tmp_path, again.removeprefix(HEAD).removesuffix("\nrun(task)\n"))).endswith("finished\n")
    assert outcomes(tmp_path) == ("finished", {"scored": 60})


def test_running_out_of_descriptors_is_an_error_of_the_trials_that_needed_one(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        textwrap.dedent(
            """
            async def task(number):
                with open(os.devnull):
                    await asyncio.sleep(0.5)
                return 2 * number
            """
        ),
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\nrun(task, 1000, max_concurrent=1000)",
    )
    said = finish(process)
    assert said.splitlines()[-1:] == ["finished"], said
    status, results = outcomes(tmp_path)
    assert status == "finished"
    assert sum(results.values()) == 1000
    assert results["task_error"] > 500
    assert results["scored"] > 100


@pytest.mark.long
def test_a_task_that_closes_all_descriptors_is_isolated_once_its_process_was_killed_twice(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        def task(number):
            if number == 30:
                open(f"closed-{os.getpid()}", "w").close()
                os.closerange(3, 64)
            return 2 * number
        """
    )
    for deaths in (1, 2):
        process = start(tmp_path, program)
        while len(list(tmp_path.glob("closed-*"))) < deaths:
            assert process.poll() is None, finish(process)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
    said = finish(start(tmp_path, program))
    assert said.splitlines()[-1:] == ["finished"], said
    assert outcomes(tmp_path) == ("finished", {"scored": 59, "task_error": 1})
