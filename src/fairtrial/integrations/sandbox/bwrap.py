"""Sandboxes of bubblewrap."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import uuid
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from fairtrial.errors import ConfigurationError, SandboxError, SandboxUnavailableError
from fairtrial.integrations.sandbox.bwrap_arguments import WORK, search_path, start_of
from fairtrial.integrations.sandbox.settings import (
    MIB,
    ExceededLimit,
    RawResult,
    SandboxCommand,
    SandboxLimits,
    SandboxSettings,
    explain_refusal,
)

_PREFIX = "fairtrial-sandbox-"
_OWN = "fairtrial-host"
_EXTRA_MEMORY = 128 * MIB  # Shared memory and the first process.
_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def _allow_groups(parent: Path) -> None:
    """Allow groups with limits below ours. Processes may only be in groups without any: ours alone moves aside."""
    control, members = parent / "cgroup.subtree_control", parent / "cgroup.procs"
    try:
        control.write_text("+memory +pids")
    except OSError as error:
        if error.errno != errno.EBUSY or members.read_text().split() != [str(os.getpid())]:
            raise
        (parent / _OWN).mkdir(exist_ok=True)
        (parent / _OWN / "cgroup.procs").write_text(str(os.getpid()))
        control.write_text("+memory +pids")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control group of one sandbox: the kernel refuses more memory and more processes, without a gap."""

    path: Path

    @classmethod
    def create(cls, limits: SandboxLimits, *, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Self | None:
        """Return a group with these limits; None if cgroup v2 is not there or not writable."""
        try:
            own = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
            parent = root / own.strip("/").removesuffix(_OWN)
            if not {"memory", "pids"} <= set((parent / "cgroup.controllers").read_text().split()):
                return None
            _allow_groups(parent)
            for left in parent.glob(f"{_PREFIX}*"):
                with contextlib.suppress(OSError):
                    left.rmdir()  # Of a process that was killed; a group in use is not empty and stays.
            group = cls(parent / f"{_PREFIX}{uuid.uuid4().hex}")
            group.path.mkdir()
        except (OSError, StopIteration):
            return None
        try:
            # Files of the sandbox are kept in memory and count.
            group._set("memory.max", limits.memory + 2 * limits.disk + _EXTRA_MEMORY)
            group._set("pids.max", limits.processes + 2)
            with contextlib.suppress(OSError):
                group._set("memory.swap.max", 0)  # Missing without swap accounting.
        except OSError:
            group.remove()
            return None
        return group

    def _set(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def add(self, pid: int) -> None:
        """Put a process into the group; what it starts later is in it too."""
        self._set("cgroup.procs", pid)

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


_CHUNK = 256 * 1024


@dataclass(slots=True)
class CappedOutput:
    """What a command writes: the first bytes are kept, the rest is read and discarded."""

    limit: int
    data: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def add(self, chunk: bytes) -> None:
        """Keep a chunk as far as the limit allows."""
        room = self.limit - len(self.data)
        self.data += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room

    async def read_all(self, descriptor: int) -> None:
        """Read from a pipe until all its writers have ended."""
        os.set_blocking(descriptor, False)
        while True:
            try:
                chunk = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                await anyio.wait_readable(descriptor)
                continue
            if not chunk:
                return
            self.add(chunk)
            # A command that never stops writing must not keep other tasks from running.
            await anyio.lowlevel.checkpoint()


async def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe and close it; a reader that went away is ignored."""
    os.set_blocking(descriptor, False)
    view = memoryview(data)
    try:
        while view:
            try:
                view = view[os.write(descriptor, view[:_CHUNK]) :]
            except BlockingIOError:
                await anyio.wait_writable(descriptor)
            except BrokenPipeError:
                return
    finally:
        os.close(descriptor)


_START_SECONDS = 20.0
_GRACE_SECONDS = 5.0
_KERNEL_COUNTS_PER_NAMESPACE = (5, 14)
_LONGEST_REPLY = 4096
_LIMITS: dict[str, ExceededLimit] = {"time": "time", "memory": "memory", "processes": "processes", "files": "files"}
_ENDED = "the sandbox has ended: its first process was killed (is there enough memory?); open another one"


class BwrapBackend:
    """One sandbox: its first process, and the socket over which that gets commands."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self.uid: int | None = None  # On the host, if the sandbox has one of its own.
        self.pid = 0  # Of the first process, on the host.
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroup: Cgroup | None = None
        self._owner = os.getpid()
        self._received = bytearray()
        self._finalizer: Any = None

    work = WORK

    @property
    def path(self) -> str:
        """The PATH of commands."""
        return search_path()

    @property
    def enforcement(self) -> str:
        """What enforces the limits of memory and processes: "cgroup" (the kernel) or "supervisor" (by polling)."""
        return "supervisor" if self._cgroup is None else "cgroup"

    async def start(self) -> None:
        """Start the first process; raises SandboxUnavailableError if this machine does not allow isolation."""
        try:
            await anyio.to_thread.run_sync(self._start)
        except BaseException:
            await self.close()
            raise

    def _start(self) -> None:
        program = shutil.which("bwrap") if sys.platform == "linux" else None
        if program is None:
            raise SandboxUnavailableError(explain_refusal("bwrap is not installed (`apt install bubblewrap`)"))
        self._cgroup = Cgroup.create(self.settings.limits)  # While no process of the sandbox is in our own group.
        self._control, theirs = socket.socketpair()
        errors, errors_write = os.pipe()
        info, info_write = os.pipe()
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, errors)
            ours.callback(os.close, info)
            with contextlib.ExitStack() as passed:
                passed.callback(theirs.close)
                passed.callback(os.close, errors_write)
                passed.callback(os.close, info_write)
                start = start_of(program, self.settings, theirs.fileno(), info_write)
                passed.callback(start.close)
                self.uid = start.uid
                descriptors = [theirs.fileno(), info_write, *start.descriptors]
                ours.callback(start.staging.end)
                self._process = start.staging.start(lambda: self._popen(start.argv, descriptors, errors_write))
            self._finalizer = weakref.finalize(self, _abandon, self._control, self._process)
            self._await_first_process(self._control, self._process, errors)
            self.pid = json.loads(os.read(info, 4096))["child-pid"]
        if self._cgroup is not None:
            for pid in (self._process.pid, self.pid):
                self._cgroup.add(pid)

    def _popen(self, argv: list[str], descriptors: list[int], errors: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=descriptors,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            cwd="/",
        )

    @staticmethod
    def _await_first_process(control: socket.socket, process: subprocess.Popen[bytes], errors: int) -> None:
        """Wait until the first process says that it is there."""
        control.settimeout(_START_SECONDS)
        try:
            answer = control.recv(4096)
        except TimeoutError:
            raise SandboxUnavailableError(explain_refusal(f"no answer within {_START_SECONDS:.0f} s")) from None
        if b"ready" not in answer:
            process.wait(_GRACE_SECONDS)
            lines = os.read(errors, 4096).decode(errors="replace").strip().splitlines()
            problem = lines[-1] if lines else f"bwrap ended with status {process.returncode}"
            raise SandboxUnavailableError(explain_refusal(problem))
        control.setblocking(False)

    async def run(self, command: SandboxCommand) -> RawResult:
        """Run a command to its end, or to one of its limits."""
        if command.user not in (None, "sandbox"):
            raise ConfigurationError(f"a bwrap sandbox has one user, 'sandbox' (got user={command.user!r})")
        control = self._open_control()
        limits = command.limits
        stdout, stderr = CappedOutput(limits.output), CappedOutput(limits.output)
        failure: SandboxError | None = None
        reply: tuple[int, ExceededLimit | None] | None = None
        with contextlib.ExitStack() as pipes:
            input_write, output, errors = await self._send_command(control, command, pipes)
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(write_all, input_write, command.input)
                    group.start_soon(stdout.read_all, output)
                    group.start_soon(stderr.read_all, errors)
                    try:
                        with anyio.move_on_after(limits.seconds + _GRACE_SECONDS):
                            reply = await self._receive(control)
                    except SandboxError as error:
                        failure = error
                    if reply is None:
                        self._kill()  # Its pipes end with it.
            except BaseException:
                if reply is None and failure is None:
                    await self._cancel(control)
                raise
        if failure is not None:
            raise failure
        status, limit = reply or (-9, "time")
        truncated = stdout.truncated or stderr.truncated
        return RawResult(status, bytes(stdout.data), bytes(stderr.data), limit, truncated)

    def _open_control(self) -> socket.socket:
        if os.getpid() != self._owner:
            raise SandboxError("a sandbox belongs to the process that started it: open another one in this process")
        if self._control is None:
            raise SandboxError("the sandbox has ended")
        return self._control

    async def _send_command(
        self, control: socket.socket, command: SandboxCommand, pipes: contextlib.ExitStack
    ) -> tuple[int, int, int]:
        """Send a command with its ends of three pipes; returns ours."""
        limits = command.limits
        request = {
            "argv": command.argv,
            "cwd": command.cwd,
            "env": dict(command.env),
            "limits": {
                **{name: getattr(limits, name) for name in ("seconds", "memory", "processes", "disk", "files")},
                "tasks": limits.processes + 1 if _kernel_counts_tasks(self.uid) else None,
            },
        }
        with contextlib.ExitStack() as passed:
            theirs: list[int] = []
            ours: list[int] = []
            for number in range(3):
                read, write = os.pipe()
                theirs.append(read if number == 0 else write)
                ours.append(write if number == 0 else read)
                passed.callback(os.close, theirs[-1])
                if number > 0:  # `write_all` closes the first one: the command reads to its end.
                    pipes.callback(os.close, ours[-1])
            try:
                await self._send(control, request, theirs)
            except BaseException:
                os.close(ours[0])
                raise
        return ours[0], ours[1], ours[2]

    async def _send(self, control: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
        body = json.dumps(message).encode()
        try:
            with anyio.fail_after(_GRACE_SECONDS, shield=True):  # Half a message would be the end of the sandbox.
                socket.send_fds(control, [struct.pack("!I", len(body))], descriptors)
                view = memoryview(body)
                while view:
                    try:
                        view = view[control.send(view) :]
                    except BlockingIOError:
                        await anyio.wait_writable(control)
        except (OSError, TimeoutError):
            self._kill()
            raise SandboxError(_ENDED) from None

    async def _receive(self, control: socket.socket) -> tuple[int, ExceededLimit | None]:
        """Return the exit status of a command and the limit for which it was killed."""
        while b"\n" not in self._received:
            try:
                data = control.recv(_LONGEST_REPLY)
            except BlockingIOError:
                await anyio.wait_readable(control)
                continue
            except OSError:
                data = b""
            self._received += data
            if not data or len(self._received) > _LONGEST_REPLY:
                raise SandboxError(_ENDED)
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        try:
            status, _, limit = line.decode().partition(" ")
            return int(status), _LIMITS.get(limit)
        except ValueError:
            raise SandboxError(_ENDED) from None

    async def _cancel(self, control: socket.socket) -> None:
        """End the command that is running, and keep the sandbox; if it does not answer, end the sandbox."""
        with anyio.move_on_after(_GRACE_SECONDS, shield=True):
            try:
                await self._send(control, {"cancel": True}, [])
                await self._receive(control)
            except SandboxError:
                return
            return
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        if self._control is not None:
            self._control.close()
            self._control = None

    async def close(self) -> None:
        """End everything in the sandbox; its files are gone."""
        if self._control is not None and os.getpid() == self._owner:
            self._control.close()
            self._control = None
        process, self._process = self._process, None
        if os.getpid() != self._owner:
            return
        if process is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_wait_for_end, process)
        if self._cgroup is not None:
            self._cgroup.remove()


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _abandon(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a sandbox that nobody closed."""
    control.close()
    if process.returncode is None:
        process.kill()
        process.wait()


def _kernel_counts_tasks(uid: int | None) -> bool:
    """Whether RLIMIT_NPROC counts the tasks of this sandbox alone: by its own user id, or in a new kernel."""
    version = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    return uid is not None or version >= _KERNEL_COUNTS_PER_NAMESPACE
