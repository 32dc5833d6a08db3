"""Workers and clients as processes, for tests and benchmarks of whole fleets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fairtrial

SUITE = Path(__file__).with_name("fleet_suite.py")
ROOT = SUITE.parents[2]


def environment(*, traced: bool = False, **settings: object) -> dict[str, str]:
    """What the suite is told; a process that is killed reports no coverage, so none is traced unless asked for."""
    kept = {name: value for name, value in os.environ.items() if traced or not name.startswith("COVERAGE")}
    source = Path(fairtrial.__file__).parents[1]  # The caller's: benchmarks measure other commits.
    kept["PYTHONPATH"] = os.pathsep.join([str(source), str(ROOT)])
    kept.update({f"FLEET_{name.upper()}": str(value) for name, value in settings.items()})
    return kept


class Processes:
    """Starts workers and clients of one fleet, and leaves none behind."""

    def __init__(self, folder: Path, mailbox: str, *, traced: bool = False, **settings: object) -> None:
        self.folder = folder
        self.mailbox = mailbox
        self.settings = settings
        self._traced = traced
        self._all: list[subprocess.Popen[str]] = []
        self._started = 0

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._all:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, name: str, *command: str, **settings: object) -> subprocess.Popen[str]:
        self._started += 1
        with open(self.folder / f"{name}-{self._started}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment(traced=self._traced, **{**self.settings, **settings}),
            )
        self._all.append(process)
        return process

    def worker(self, *options: str, **settings: object) -> subprocess.Popen[str]:
        """Start a worker."""
        command = ("-m", "fairtrial.cli", "worker", str(SUITE), "--mailbox", self.mailbox, *options)
        return self._start("worker", *command, **settings)

    def client(self, store: str, **settings: object) -> subprocess.Popen[str]:
        """Start a client."""
        return self._start("client", str(SUITE), store, self.mailbox, **settings)

    def command(self, *words: str, **settings: object) -> subprocess.Popen[str]:
        """Start the `fairtrial` command."""
        return self._start("command", "-m", "fairtrial.cli", *words, **settings)

    def logs(self) -> str:
        """What workers and clients wrote, for the message of a failed test."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def said(client: subprocess.Popen[str], timeout: float = 120) -> dict[str, Any]:
    """What a client printed at its end."""
    out, _ = client.communicate(timeout=timeout)
    assert client.returncode == 0, client.returncode
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def end(process: subprocess.Popen[str], *, number: signal.Signals = signal.SIGTERM, timeout: float = 60) -> int:
    """Ask a process to end and wait for it; returns its exit code."""
    process.send_signal(number)
    process.communicate(timeout=timeout)
    return process.returncode


def wait_for_lines(path: Path, count: int, *, timeout: float = 60) -> int:
    """Wait until a log has `count` lines; returns how many it has."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if path.exists() and (lines := path.read_bytes().count(b"\n")) >= count:
            return lines
        time.sleep(0.01)
    raise AssertionError(f"{path.name} did not get {count} lines in {timeout} s")
