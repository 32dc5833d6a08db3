"""Limits of memory and processes by a control group (cgroup v2), where this process may make one."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import Self

from fairtrial.integrations.sandbox.settings import MIB, SandboxLimits

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


class Cgroup:
    """The control group of one sandbox: the kernel refuses more memory and more processes, without a gap."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
