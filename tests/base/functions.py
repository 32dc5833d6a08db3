"""Functions for child processes to import."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LOCK = threading.Lock()


def add(one: int, other: int = 1) -> int:
    return one + other


def process(*_: Any) -> int:
    return os.getpid()


def process_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def close_descriptors_and_sleep() -> None:
    os.closerange(3, 256)
    time.sleep(60)


def set_variable(name: str, value: str) -> str:
    os.environ[name] = value
    return value


def under_the_lock() -> bool:
    with LOCK:
        return True


def hold_the_interpreter(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)  # PyDLL: without letting go of the lock.


def fork_and_answer(how: str) -> int:
    """Leave a process behind that holds on to everything, and answer."""
    if how == "exec":
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False).pid
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if how == "daemon":
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(writer, str(os.getpid()).encode())
        time.sleep(600)
    if how == "daemon":
        os.waitpid(child, 0)
    return int(os.read(reader, 20))


def fork_and_hang(file: str) -> None:
    child = fork_and_answer("daemon")
    Path(file).write_text(f"{os.getpid()} {child}")
    time.sleep(600)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
