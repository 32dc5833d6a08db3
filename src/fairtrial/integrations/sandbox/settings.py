"""Settings of sandboxes, and what stands in their way on a machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.errors import ConfigurationError

# Settings of the kernel, the value that is an obstacle, and the remedy.
_OBSTACLES = (
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor forbids user namespaces (kernel.apparmor_restrict_unprivileged_userns=1): load an AppArmor "
        "profile for bwrap that has `userns`, or `sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
    ),
    (
        "user/max_user_namespaces",
        "0",
        "the number of user namespaces is limited to 0 (user.max_user_namespaces=0): "
        "`sysctl user.max_user_namespaces=10000`",
    ),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "unprivileged user namespaces are switched off (kernel.unprivileged_userns_clone=0): "
        "`sysctl kernel.unprivileged_userns_clone=1`",
    ),
)


def find_obstacles(proc: Path = Path("/proc")) -> list[str]:
    """Return the settings of this machine that keep bwrap from making namespaces, each with its remedy."""
    found = [remedy for name, wrong, remedy in _OBSTACLES if _read(proc / "sys" / name).strip() == wrong]
    if any(line.split() == ["Seccomp:", "2"] for line in _read(proc / "self/status").splitlines()):
        found.append(
            "this process runs under a seccomp filter, as in a container with Docker's default profile: start the "
            "container with `--security-opt seccomp=PROFILE` that allows unshare, clone, mount and pivot_root"
        )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def explain_refusal(problem: str, proc: Path = Path("/proc")) -> str:
    """Return the message for a sandbox that cannot be made: what failed, why, and what to change."""
    lines = [f"cannot make a bwrap sandbox: {problem}"]
    if sys.platform != "linux":
        lines.append("  bwrap works on Linux only")
    else:
        lines += [f"  {obstacle}" for obstacle in find_obstacles(proc)]
    lines.append('  or name another kind: "docker", "podman", "inspect:NAME"; "unsafe-local" isolates nothing')
    return "\n".join(lines)


MIB = 1024 * 1024
type ExceededLimit = Literal["time", "memory", "processes", "files"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one command in a sandbox may use; more is refused by the kernel, or ends the command.

    Attributes:
        seconds: Time until the command and everything it started are killed.
        memory: Bytes of memory of all processes together.
        processes: Processes and threads at the same time.
        output: Bytes of stdout, and of stderr, that are kept; the rest is read and discarded.
        disk: Bytes in the working directory, and as many in /tmp; they are kept in memory.
        files: Files and directories in both.
    """

    seconds: float = 60.0
    memory: int = 1024 * MIB
    processes: int = 128
    output: int = 10 * MIB
    disk: int = 256 * MIB
    files: int = 20_000

    def __post_init__(self) -> None:
        """Refuse limits that allow nothing or everything."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigurationError(
                    f"limit {field.name!r} of a sandbox must be positive and finite (got {value!r})"
                )


@first_is(str)
@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The kind of a sandbox and what it allows.

    Attributes:
        kind: "bwrap", "docker", "podman", "inspect:NAME" or "unsafe-local".
        network: Whether commands may use the network of this machine.
        readable: Files and directories of this machine that commands may read, at the same path.
        env: Environment variables of every command; nothing else is taken from this process.
        limits: What one command may use.
        image: The image of a container; for docker and podman.
    """

    kind: str = "bwrap"
    network: bool = False
    readable: tuple[str, ...] = ()
    env: Mapping[str, str] = EMPTY
    limits: SandboxLimits = SandboxLimits()
    image: str = "python:3.12-slim"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command returned.

    Attributes:
        returncode: Its exit status; negative if a signal ended it; 126 or 127 if it could not be started.
        stdout: What it wrote, up to the limit; bytes that are not UTF-8 are replaced.
        stderr: Likewise.
        limit: The limit for which it was killed, if any.
        truncated: Whether it wrote more than was kept.
    """

    returncode: int
    stdout: str = ""
    stderr: str = ""
    limit: ExceededLimit | None = None
    truncated: bool = False

    @property
    def success(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.returncode == 0 and self.limit is None


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """A command with all that a backend needs to run it."""

    argv: tuple[str, ...]
    input: bytes
    cwd: str
    env: Mapping[str, str]
    limits: SandboxLimits
    user: str | None = None


@dataclass(frozen=True, slots=True)
class RawResult:
    """The result of a command, with its output as bytes."""

    returncode: int
    stdout: bytes
    stderr: bytes
    limit: ExceededLimit | None = None
    truncated: bool = False

    def as_text(self) -> ExecResult:
        """Return the result with its output as text."""
        return ExecResult(
            self.returncode,
            self.stdout.decode("utf-8", "replace"),
            self.stderr.decode("utf-8", "replace"),
            self.limit,
            self.truncated,
        )
