"""What differs between Linux, macOS and Windows, and one sentence for what does not work on Windows.

Decided by what Python offers, not by the name of the system, so that tests can take it away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fairtrial.errors import ConfigurationError

if TYPE_CHECKING:
    import asyncio
    import socket
    from concurrent.futures import Future

IS_POSIX: Final = hasattr(os, "fork")
_LOOK_SECONDS: Final = None if IS_POSIX else 0.1
_REPLACE_SECONDS: Final = 0.0 if IS_POSIX else 2.0


def require_posix(what: str, remedy: str) -> None:
    """Refuse what needs process groups, and descriptors that a child process inherits.

    Raises:
        ConfigurationError: this is Windows.
    """
    if not IS_POSIX:
        raise ConfigurationError(f"{what} on Linux and macOS, not on Windows: {remedy}")


def own_group() -> dict[str, Any]:
    """The options of a child process that Ctrl-C in the terminal is not meant for."""
    if IS_POSIX:
        return {"process_group": 0}
    return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}


def kill_group(leader: int) -> None:
    """Kill the processes of a group; nothing happens if none is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def handle_signal(loop: asyncio.AbstractEventLoop, number: int, call: Callable[[], object]) -> None:
    """Call something in the event loop at a signal. The loop of Windows cannot do that itself."""
    try:
        loop.add_signal_handler(number, call)
    except NotImplementedError:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))


def release_signal(loop: asyncio.AbstractEventLoop, number: int, handler: Any) -> None:
    """Give a signal back to the handler that `signal.getsignal` returned before `handle_signal`."""
    with contextlib.suppress(NotImplementedError):
        loop.remove_signal_handler(number)
    signal.signal(number, handler)


def keep_port(listening: socket.socket) -> None:
    """Let a port be used again soon, by one server at a time: SO_REUSEADDR of Windows would let two share it."""
    import socket

    option = socket.SO_REUSEADDR if IS_POSIX else getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
    if option is not None:
        listening.setsockopt(socket.SOL_SOCKET, option, 1)


def result_of[T](future: Future[T]) -> T:
    """Wait for a result so that signals are handled meanwhile: on Windows they do not interrupt a waiting thread."""
    while True:
        try:
            return future.result(_LOOK_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()


def replace_file(aside: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file the name of another. Windows refuses that for as long as anybody, such as a scanner, reads it."""
    deadline = time.monotonic() + _REPLACE_SECONDS
    while True:
        try:
            os.replace(aside, target)
            return
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
