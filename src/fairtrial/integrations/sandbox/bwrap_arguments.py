"""How bubblewrap is called: system calls, folders, limits."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import platform
import pwd
import re
import secrets
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fairtrial.errors import ConfigurationError, SandboxUnavailableError
from fairtrial.integrations.sandbox.settings import MIB, SandboxSettings, explain_refusal

# Numbers of x86-64 and of the generic table, which aarch64 uses.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
# Unix, IPv4, IPv6, netlink. Others, such as vsock, are not part of the network namespace.
_FAMILIES = (1, 2, 10, 16)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter as the kernel reads it; None for a processor whose numbers are not known here."""
    known = _ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, column = known
    refuse = _step(_RETURN, _ERROR | errno.EPERM)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, 0x40000000, 0, 1),  # The x32 numbers, which would bypass the list.
        refuse,
    ]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            steps += [_step(_EQUAL, number, 0, 1), refuse]
    # The flags of clone3 are in memory, where a filter cannot read them: libraries then use clone.
    steps += [_step(_EQUAL, _CLONE3[column], 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    steps += [
        _step(_EQUAL, _CLONE[column], 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    steps += [_step(_EQUAL, _SOCKET[column], 0, len(_FAMILIES) + 2), _step(_LOAD, _FIRST_ARGUMENT)]
    steps += [_step(_EQUAL, family, len(_FAMILIES) - place) for place, family in enumerate(_FAMILIES)]
    steps += [_step(_RETURN, _ERROR | errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)]
    return b"".join(steps)


_PLACES = ("/mnt", "/media", "/srv")
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_MNT_DETACH = 2

_names = itertools.count()
_starters: dict[str, Starter] = {}
_lock = threading.Lock()


def _forget_starters() -> None:
    global _lock
    _starters.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_starters)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


@contextlib.contextmanager
def _refusal() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"started as root with files that only root can read, and mounts are not allowed ({error})"
        raise SandboxUnavailableError(explain_refusal(problem)) from None


class Starter:
    """A thread that starts bwrap: --die-with-parent means the death of the thread that started it.

    With a place, the thread has a mount namespace of its own, in which that place is an empty file system.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fairtrial-sandbox")
        self._entered = not place

    def _call[T](self, function: Callable[[], T]) -> T:
        if not self._entered:
            with _refusal():
                os.unshare(os.CLONE_NEWNS)
                _mount("none", "/", None, _MS_REC | _MS_SLAVE)
                _mount("fairtrial", self._place, "tmpfs", 0, "mode=0755")
            self._entered = True
        return function()

    def call[T](self, function: Callable[[], T]) -> T:
        """Call a function in the thread and return what it returns."""
        return self._thread.submit(self._call, function).result()

    def call_later(self, function: Callable[[], object]) -> None:
        """Call a function in the thread without waiting for it."""
        self._thread.submit(self._call, function)


class Staging:
    """Paths that only root can walk to, such as a Python in /root/.pyenv, mounted where any user id finds them."""

    def __init__(self, paths: Sequence[str] = ()) -> None:
        hidden = [path for path in paths if not _is_public(path)]
        free = [place for place in _PLACES if os.path.isdir(place) and not _is_used(place, paths)]
        if hidden and not free:
            raise SandboxUnavailableError(explain_refusal("started as root without a free mount point (/mnt)"))
        self._place = free[0] if hidden else ""
        self._found = {path: f"{self._place}/{next(_names)}" for path in hidden}

    def source(self, path: str) -> str:
        """Return where a path is found."""
        return self._found.get(path, path)

    def start[T](self, function: Callable[[], T]) -> T:
        """Call a function that starts bwrap in a thread that lasts, with the paths mounted."""
        with _lock:
            starter = _starters.get(self._place) or _starters.setdefault(self._place, Starter(self._place))

        def mount_and_start() -> T:
            self._mount()
            return function()

        return starter.call(mount_and_start)

    def _mount(self) -> None:
        with _refusal():
            for path, found in self._found.items():
                os.mkdir(found) if os.path.isdir(path) else Path(found).touch()
                _mount(path, found, None, _MS_BIND)

    def end(self) -> None:
        """Remove the mounts, once bwrap has made its own."""
        if self._found:
            _starters[self._place].call_later(self._unmount)

    def _unmount(self) -> None:
        libc = ctypes.CDLL(None)
        for found in self._found.values():
            libc.umount2(os.fsencode(found), _MNT_DETACH)
            with contextlib.suppress(OSError):
                os.rmdir(found) if os.path.isdir(found) else os.unlink(found)


def _is_used(place: str, paths: Sequence[str]) -> bool:
    return any(f"{path}/".startswith(f"{place}/") for path in paths)


def _is_public(path: str) -> bool:
    """Whether every user can read a file or directory and walk to it."""
    mode = os.stat(path).st_mode
    needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
    return mode & needed == needed and all(above.stat().st_mode & stat.S_IXOTH for above in Path(path).parents)


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
