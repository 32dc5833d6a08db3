"""A real terminal for tests: tmux with a separate socket."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROMPT = "ready>"


@dataclass(frozen=True, slots=True)
class Pane:
    """A shell in a pane: what is typed into it, and what stands on it."""

    socket: str
    log: Path

    def tmux(self, *words: str) -> str:
        """A command to the server of this pane."""
        done = subprocess.run(
            ["tmux", "-S", self.socket, "-f", os.devnull, *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.stdout

    def type(self, line: str) -> None:
        """Type a line."""
        self.tmux("send-keys", "-l", line)
        self.press("Enter")

    def press(self, key: str) -> None:
        """Press a key, such as C-c."""
        self.tmux("send-keys", key)

    def lines(self) -> list[str]:
        """The lines on the screen, up to the last that is not empty."""
        return [line.rstrip() for line in self.tmux("capture-pane", "-p").rstrip().splitlines()]

    def drawn(self) -> str:
        """Everything that was ever written to the pane, with its control codes."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, for_what: str, holds: Callable[[list[str]], bool], seconds: float = 90.0) -> list[str]:
        """Look at the screen until something holds; the screen on which it does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lines = self.lines()
            if holds(lines):
                return lines
            time.sleep(0.05)
        shown = "\n".join(self.lines())
        raise AssertionError(f"waited {seconds:.0f} s for {for_what}; the screen shows:\n{shown}")

    def wait_for_prompt(self) -> list[str]:
        """Wait until the shell is ready for the next command."""
        return self.wait("the prompt", lambda lines: bool(lines) and lines[-1] == PROMPT)


@contextmanager
def terminal(folder: Path, *, columns: int = 80, rows: int = 40) -> Iterator[Pane]:
    """A shell in a folder, where `fairtrial` is the one under test."""
    assert shutil.which("tmux"), "tmux is missing: scripts/setup installs it"
    programs = folder / ".programs"
    programs.mkdir()
    program = programs / "fairtrial"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fairtrial.cli "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": path, "HOME": str(folder), "LANG": "C.UTF-8",
        "PS1": f"{PROMPT} ", "TERM": "screen-256color",
    }  # fmt: skip
    shell = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in variables.items()), "sh", "-i"])
    # The name of a socket is short or not at all, and folders of tests have long ones.
    with tempfile.TemporaryDirectory(prefix="tmux-") as own:
        pane = Pane(f"{own}/socket", folder / ".pane.log")
        pane.log.touch()
        try:
            pane.tmux("-u", "new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(folder), shell)
            pane.tmux("pipe-pane", f"cat >> {shlex.quote(str(pane.log))}")
            pane.wait_for_prompt()
            yield pane
        finally:
            subprocess.run(["tmux", "-S", pane.socket, "kill-server"], check=False, capture_output=True, timeout=30)
