"""Takes from a Python on Linux what Windows lacks; active with this folder on PYTHONPATH.

`sys.platform` and `os.name` stay: they decide what the standard library imports. The rules of paths, and open files
that cannot be replaced, are left to the workflows on the real systems.
"""

# ruff: noqa: E402  # What is imported after a removal finds it removed; what is imported before it is not concerned.

import sys

for _name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "multiprocessing.popen_fork"):
    sys.modules[_name] = None  # type: ignore[assignment]  # importing it fails

import _socket

for _name in ("AF_UNIX", "socketpair"):  # `socket` has a socketpair of its own, for Windows.
    delattr(_socket, _name)

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from typing import Any

import platformdirs.unix  # noqa: F401  # Has another module for Windows.

_OF_OS = (
    "fork", "forkpty", "register_at_fork", "killpg", "getpgid", "getpgrp", "setpgid", "setsid", "getsid", "getuid",
    "geteuid", "getgid", "getegid", "getgroups", "getresuid", "setuid", "setgid", "chown", "fchown", "fchmod", "pread",
    "preadv", "pwrite", "pwritev", "statvfs", "fstatvfs", "sysconf", "getloadavg", "pidfd_open", "mkfifo", "nice",
    "sched_getaffinity", "WNOHANG", "O_ASYNC", "O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY",
)  # fmt: skip
_OF_SIGNAL = (
    "SIGKILL", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGIO", "SIGPIPE", "alarm",
    "setitimer", "pthread_sigmask", "pthread_kill",
)  # fmt: skip
_OF_LOOPS = (
    "add_signal_handler",
    "remove_signal_handler",
    "add_reader",
    "remove_reader",
    "add_writer",
    "remove_writer",
)


def _refuse(*_: object) -> None:
    raise NotImplementedError  # As a ProactorEventLoop does.


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
    if event == "os.symlink":
        raise OSError(1314, "A required privilege is not held by the client")
    if event == "os.kill" and not arguments[1]:
        raise SystemExit(f"on Windows, os.kill({arguments[0]}, 0) would end the process")


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("pass_fds") or options.get("preexec_fn"):
            raise ValueError("pass_fds and preexec_fn are not supported on Windows platforms")
        super().__init__(*arguments, **options)

    def kill(self) -> None:
        self.send_signal(9)


for _name in _OF_OS:
    delattr(os, _name)
for _name in _OF_SIGNAL:
    delattr(signal, _name)
for _name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC", "CLOCK_REALTIME", "clock_gettime", "clock_gettime_ns", "tzset"):
    delattr(time, _name)
for _name in _OF_LOOPS:
    setattr(asyncio.SelectorEventLoop, _name, _refuse)
shutil.disk_usage = lambda path: namedtuple("usage", "total used free")(1 << 40, 1 << 39, 1 << 39)  # type: ignore[arg-type, assignment, call-arg, return-value]
subprocess.Popen = _Popen  # type: ignore[misc]
sys.addaudithook(_audit)
