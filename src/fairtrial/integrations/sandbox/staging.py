"""The threads that start bwrap, and how user ids without privileges get at files that only root can walk to."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fairtrial.errors import SandboxUnavailableError
from fairtrial.integrations.sandbox.obstacles import explain_refusal

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
