"""The command line of bwrap: what a sandbox sees of this machine."""

from __future__ import annotations

import functools
import os
import pwd
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairtrial.errors import ConfigurationError, SandboxUnavailableError
from fairtrial.integrations.sandbox.obstacles import explain_refusal
from fairtrial.integrations.sandbox.seccomp import seccomp_filter
from fairtrial.integrations.sandbox.settings import MIB, SandboxSettings
from fairtrial.integrations.sandbox.staging import Staging

WORK = "/box"
SHARED_MEMORY = 64 * MIB
_USER = 1000
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "ssl/certs", "ssl/openssl.cnf")
_ETC_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "gai.conf")
_PASSWD = f"sandbox:x:{_USER}:{_USER}::{WORK}:/bin/sh\n"
_GROUP = f"sandbox:x:{_USER}:\n"


@dataclass(slots=True)
class BwrapStart:
    """A command line and the descriptors that it names; `close` them once bwrap has started."""

    argv: list[str]
    uid: int | None = None
    staging: Staging = field(default_factory=Staging)
    descriptors: list[int] = field(default_factory=list)

    def add_data(self, data: bytes) -> str:
        """Return the number of a descriptor from which bwrap reads `data`, which must fit into a pipe."""
        descriptor, write = os.pipe()
        self.descriptors.append(descriptor)
        os.write(write, data)
        os.close(write)
        return str(descriptor)

    def close(self) -> None:
        """Close the descriptors of this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


@functools.cache
def bwrap_features(program: str) -> frozenset[str]:
    """Return the options that this bwrap knows."""
    try:
        text = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(explain_refusal(f"{program} cannot be started ({error})")) from None
    known = frozenset(re.findall(r"--[a-z0-9-]+", text.stdout + text.stderr))
    if "--size" not in known:
        raise SandboxUnavailableError(explain_refusal(f"{program} must be version 0.6 or newer (no option --size)"))
    return known


def start_of(program: str, settings: SandboxSettings, control: int, info: int) -> BwrapStart:
    """Return the command line that starts the first process of a sandbox.

    `control` is its end of the socket; to `info` bwrap writes the process id that it has on this machine.
    """
    features = bwrap_features(program)
    start = BwrapStart([program])
    argv = start.argv
    if os.geteuid() == 0:
        start.uid = unused_uid(Path("/proc/self/uid_map").read_text())
    argv += ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    argv += ["--uid", str(_USER), "--gid", str(_USER), "--hostname", "sandbox", "--cap-drop", "ALL"]
    argv += ["--info-fd", str(info)]
    if "--disable-userns" in features:
        argv.append("--disable-userns")
    if settings.network:
        argv.append("--share-net")
    extra = {path: os.path.realpath(path) for path in (*_python_files(), *checked_readable(settings.readable))}
    if start.uid is not None:
        start.staging = Staging(list(extra.values()))
    _add_files(start, settings, {path: start.staging.source(source) for path, source in extra.items()})
    code = seccomp_filter()
    if code is not None:
        argv += ["--seccomp", start.add_data(code)]
    source = Path(__file__).with_name("first_process.py").read_text()
    argv += ["--chdir", WORK, "--", interpreter(), "-I", "-S", "-c", source, str(control)]
    if start.uid is not None:
        argv[:0] = ["setpriv", "--reuid", str(start.uid), "--regid", str(start.uid), "--clear-groups", "--"]
    return start


def _add_files(start: BwrapStart, settings: SandboxSettings, extra: Mapping[str, str]) -> None:
    argv = start.argv
    argv += ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    for name in (*_ETC, *(_ETC_NETWORK if settings.network else ())):
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    argv += ["--ro-bind-data", start.add_data(_PASSWD.encode()), "/etc/passwd"]
    argv += ["--ro-bind-data", start.add_data(_GROUP.encode()), "/etc/group"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for path, size in (("/dev/shm", SHARED_MEMORY), (WORK, settings.limits.disk), ("/tmp", settings.limits.disk)):  # noqa: S108
        argv += ["--perms", "0755" if path == WORK else "1777", "--size", str(size), "--tmpfs", path]
    for path, source in extra.items():
        argv += ["--ro-bind", source, path]
    argv += ["--remount-ro", "/dev", "--remount-ro", "/"]


def interpreter() -> str:
    """Return the Python of this process, without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def checked_readable(paths: Sequence[str]) -> Sequence[str]:
    """Return paths that are absolute and exist; raises for others."""
    for path in paths:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ConfigurationError(f"readable: paths must be absolute and exist (got {path!r})")
    return paths


def _python_files() -> list[str]:
    prefix = os.path.realpath(sys.base_prefix)
    return [] if prefix == "/usr" or prefix.startswith("/usr/") else [prefix]


def search_path() -> str:
    """Return the PATH of commands: the Python of this process first."""
    own = os.path.dirname(interpreter())
    usual = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    return usual if own in usual.split(":") else f"{own}:{usual}"


def unused_uid(uid_map: str, attempts: int = 100) -> int:
    """Return an unprivileged user id that no account has, from those that exist in this namespace."""
    ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in uid_map.splitlines())]
    first, count = max(ranges, key=lambda given: given[1])
    high = min(first + count - 2, 2**31 - 2)  # The last one may mean "no user".
    low = max(first + (high - first) // 2, 1000)
    for _ in range(attempts if high > low else 0):
        uid = low + secrets.randbelow(high - low)
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
    raise SandboxUnavailableError(
        explain_refusal("started as root, and there is no unprivileged user id to drop to (/proc/self/uid_map)")
    )
