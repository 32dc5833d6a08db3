"""The first process of a bwrap sandbox (PID 1): starts commands, enforces limits, ends everything a command left.

It runs inside the sandbox, by the Python of the host process, with the standard library alone. Commands have the same
user id, but they can neither signal it (the kernel protects PID 1 from its own namespace) nor read its memory (it is
not dumpable). If the socket to the host process closes, it exits, and the kernel ends the whole namespace.

A request is four bytes with the length, then JSON; it comes with three descriptors: the command's
stdin, stdout and stderr. A reply is a line: the exit status and the limit that was exceeded, if any.

It imports the modules that are written in C, not `socket`, `signal`, `ctypes` and `typing`: much of the time
that a sandbox takes to start would be theirs.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found, unused-ignore]
import _socket as socket
import errno
import json
import os
import resource
import select
import sys
import time
from _ctypes import call_function, dlopen, dlsym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PRCTL = dlsym(dlopen(None, 0), "prctl")  # type: ignore[arg-type]
PR_SET_DUMPABLE = 4
POLL_SECONDS = 0.05
FILE_SYSTEMS = ("/box", "/tmp", "/dev/shm")  # noqa: S108


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its descriptors; None if the host process is gone."""
    descriptors: list[int] = []
    head = b""
    while len(head) < 4:
        data, extra, _, _ = control.recvmsg(4 - len(head), socket.CMSG_SPACE(3 * 4))
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors += memoryview(content[: len(content) // 4 * 4]).cast("i")
        if not data:
            return None, []
        head += data
    size = int.from_bytes(head, "big")
    body = bytearray()
    while len(body) < size:
        data = control.recv(min(size - len(body), 65536))
        if not data:
            return None, []
        body += data
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # Commands get their copies as 0, 1 and 2 only.
    return json.loads(body), descriptors


def set_dumpable(value: int) -> None:
    """Allow or forbid other processes of this user to read this one's memory and descriptors."""
    if call_function(PRCTL, (PR_SET_DUMPABLE, value, 0, 0, 0)) != 0:
        raise OSError(errno.EINVAL, "prctl")


def limit_resources(limits: dict[str, Any]) -> None:
    """Set the limits that the kernel keeps for each process."""
    memory, files = limits["memory"], limits["disk"]
    for kind, value in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_NPROC, limits["tasks"]),
    ):
        if value is not None:
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Replace this process, a new child, by the command."""
    status = 126
    try:
        os.setsid()
        # Memory runs out: the kernel ends the command, not PID 1.
        set_dumpable(1)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        limit_resources(request["limits"])
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])  # noqa: S606
    except OSError as error:
        status = 127 if error.errno == errno.ENOENT else 126
        place = error.filename if error.filename == request["cwd"] else request["argv"][0]
        os.write(2, f"{place}: {error.strerror}\n".encode("utf-8", "replace"))
    except ValueError as error:  # A null byte, or text that is not Unicode.
        os.write(2, f"{error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(status)


def reap(statuses: dict[int, int], flags: int) -> bool:
    """Collect ended processes; returns whether there are any left."""
    while True:
        try:
            pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        statuses[pid] = os.waitstatus_to_exitcode(status)


def end_all(statuses: dict[int, int]) -> None:
    """Kill and collect every process but this one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    reap(statuses, 0)


def fields(path: str, names: tuple[str, ...]) -> tuple[int, int]:
    """Return the sum of some fields of a file of /proc, in bytes or as they are, and the number of threads."""
    total = threads = 0
    with open(path) as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in names:
                total += int(value.split()[0]) * 1024
            elif name == "Threads":
                threads = int(value)
    return total, threads


def use_of(limits: dict[str, Any]) -> tuple[int, int]:
    """Return the memory and the number of threads of all commands.

    Pages that processes share are counted once, which is slow: it is done if the limit seems to be exceeded.
    """
    memory = tasks = 0
    processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    for name in processes:
        try:
            used, threads = fields(f"/proc/{name}/status", ("RssAnon", "RssShmem", "VmSwap"))
        except (OSError, ValueError):
            continue  # It has just ended.
        memory += used
        tasks += threads
    if memory > limits["memory"]:
        exact = 0
        for name in processes:
            try:
                exact += fields(f"/proc/{name}/smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss"))[0]
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                return memory, tasks  # A process that hides its pages: the larger figure counts.
        memory = exact
    return memory, tasks


def files_used() -> int:
    """Return the number of files in the writable file systems."""
    used = 0
    for path in FILE_SYSTEMS:
        try:
            state = os.statvfs(path)
        except OSError:
            continue
        used += state.f_files - state.f_ffree
    return used


def exceeded(limits: dict[str, Any], deadline: float, files_before: int) -> str | None:
    """Return the name of the limit that is exceeded, if any."""
    if time.monotonic() >= deadline:
        return "time"
    memory, tasks = use_of(limits)
    if memory > limits["memory"]:
        return "memory"
    if tasks > limits["processes"]:
        return "processes"
    files = files_used()
    if files > limits["files"] and files > files_before:  # Commands that delete files must be able to run.
        return "files"
    return None


def run(control: socket.socket, request: dict[str, Any], descriptors: list[int]) -> str:
    """Run one command to its end; returns the reply to the host process."""
    deadline = time.monotonic() + request["limits"]["seconds"]
    files_before = files_used()
    statuses: dict[int, int] = {}
    main = os.fork()
    if main == 0:
        become(request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    process = os.pidfd_open(main)
    watched = select.poll()
    watched.register(process, select.POLLIN)
    watched.register(control, select.POLLIN)
    reason = None
    while main not in statuses and reason is None:
        wait = max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
        ready = [descriptor for descriptor, _ in watched.poll(wait * 1000)]
        if control.fileno() in ready:
            if receive(control)[0] is None:
                os._exit(0)
            reason = "cancelled"
        reap(statuses, os.WNOHANG)
        if main not in statuses and reason is None and process not in ready:
            reason = exceeded(request["limits"], deadline, files_before)
    os.close(process)
    end_all(statuses)
    return f"{statuses[main]} {reason or ''}\n"


def main() -> None:
    """Serve requests until the host process closes the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.setblocking(True)
    os.set_inheritable(control.fileno(), False)
    os.umask(0o022)
    set_dumpable(0)
    control.sendall(b"ready\n")
    while True:
        request, descriptors = receive(control)
        if request is None:
            os._exit(0)
        if "argv" in request:  # A request to cancel a command that has just ended has none.
            control.sendall(run(control, request, descriptors).encode())


if __name__ == "__main__":
    main()
