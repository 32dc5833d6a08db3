"""The child process: receives functions and arguments, calls them and returns the results as JSON.

`IsolatedRunner` starts it with the descriptors of its socket and of its lifeline, a pipe that the operating system
closes when the parent process ends, even if it is killed.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fairtrial.base.codec import dumps
from fairtrial.errors import BrokenUserError, CodecError, ModelRefusedError, is_programming_error

HEADER = struct.Struct("!Q")
OK, ERROR = b"o", b"e"
CLEAN, DIRTY, PART, SECRETS = b"c", b"d", b"p", b"s"
_PR_SET_CHILD_SUBREAPER = 36


_parent: socket.socket | None = None


def emit(value: Any) -> None:
    """Send the parent a part of the result of the call that is being executed."""
    if _parent is None:
        raise RuntimeError("emit() must be called in a child process of IsolatedRunner")
    part = dumps(value).encode("utf-8", "replace")
    _parent.sendall(_new_secrets() + PART + HEADER.pack(len(part)) + part)


class SecretKeeper(NamedTuple):
    """What keeps the secrets of a process.

    Attributes:
        module: The module that sets the keeper when it is imported.
        known: Returns the secrets that are registered or in an environment, with their descriptions.
        register: Registers those of a child process.
    """

    module: str
    known: Callable[[Mapping[str, str]], dict[str, str]]
    register: Callable[[Mapping[str, str]], None]


_keeper: SecretKeeper | None = None
_keeper_module = ""
_inherited: dict[str, str] = {}  # The environment that the parent knows.
_told: set[str] = set()


def keep_secrets(keeper: SecretKeeper) -> None:
    """Set what keeps the secrets of this process: a child process tells its parent those that are new."""
    global _keeper
    _keeper = keeper
    _told.update(keeper.known(_inherited))


def keeper_module() -> str:
    """Return the module that keeps the secrets of this process; "" if none does."""
    return "" if _keeper is None else _keeper.module


def hear_secrets(content: bytes) -> None:
    """Register the secrets in the content of a `SECRETS` message."""
    if _keeper is not None:
        _keeper.register(json.loads(content))


def _new_secrets() -> bytes:
    """Return a message with the secrets that the parent does not know; empty if there are none."""
    if _keeper is None and _keeper_module and dict(os.environ) != _inherited:
        importlib.import_module(_keeper_module)  # Only now: it takes as long to import as most tasks.
    if _keeper is None:
        return b""
    fresh = {value: what for value, what in _keeper.known(os.environ).items() if value not in _told}
    if not fresh:
        return b""
    _told.update(fresh)
    content = json.dumps(fresh).encode()
    return SECRETS + HEADER.pack(len(content)) + content


def parent_connection() -> socket.socket:
    """Return the connection to the parent, for a function that `IsolatedChild.begin` has started."""
    if _parent is None:
        raise RuntimeError("parent_connection() must be called in a child process of IsolatedRunner")
    return _parent


def unpack(data: bytes) -> Any:
    """Return what the parent has packed; only for a child process."""
    return pickle.loads(data)  # noqa: S301 - from the process that started this one


def main() -> None:
    """Serve calls until the parent closes the socket or ends."""
    descriptor, lifeline = (int(argument) for argument in sys.argv[1:3])
    sys.argv[1:] = []
    kept = (descriptor, lifeline)
    for number in kept:
        os.set_inheritable(number, False)
    # Processes that user code forks must not keep these open or write to them.
    os.register_at_fork(after_in_child=lambda: _close(*kept))
    _end_with_parent(lifeline)
    _adopt_descendants()
    global _parent, _keeper_module
    connection = _parent = socket.socket(fileno=descriptor)
    setup = _receive(connection)
    if setup is None:
        return
    sys.path[:], search_path, _keeper_module = pickle.loads(setup)  # noqa: S301 - from the process that started this one
    if search_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = search_path
    _inherited.update(os.environ)
    connection.sendall(OK)
    functions: dict[bytes, Any] = {}
    while (message := _receive(connection)) is not None:
        answer = _answer(message, functions)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # noqa: S110 - closed or replaced by user code, and the answer is worth more
                pass
        state = DIRTY if _has_children() else CLEAN
        connection.sendall(_new_secrets() + state + HEADER.pack(len(answer)) + answer)


def _close(*descriptors: int) -> None:
    for number in descriptors:
        os.close(number)


def _answer(message: bytes, functions: dict[bytes, Any]) -> bytes:
    try:
        digest, function, arguments = pickle.loads(message)  # noqa: S301
        if function is not None:
            functions[digest] = pickle.loads(function)  # noqa: S301
            return OK + b"null"
        wrapper, fn = functions[digest]
        args, kwargs = pickle.loads(arguments)  # noqa: S301
        result = fn(*args, **kwargs) if wrapper is None else wrapper(fn, *args, **kwargs)
        return OK + dumps(result).encode("utf-8", "replace")
    except CodecError as error:
        return _failure(f"the result cannot be sent as JSON: {error}", error)
    except BaseException as error:
        return _failure(_describe(error), error)


def _failure(text: str, error: BaseException) -> bytes:
    reply: dict[str, Any] = {
        "error": text,
        "retry_after": None,
        "details": None,
        "refusal": None,
        "traceback": "",
        "mistake": False,
        "broken_user": isinstance(error, BrokenUserError),
    }
    try:
        wanted = getattr(error, "retry_after", None)
        reply["retry_after"] = float(wanted) if isinstance(wanted, int | float) else None
        reply["details"] = getattr(error, "isolated_details", None)
        reply["refusal"] = error.refusal if isinstance(error, ModelRefusedError) else None
        reply["traceback"] = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-8:]))
        reply["mistake"] = is_programming_error(error)
        return ERROR + dumps(reply).encode("utf-8", "replace")
    except Exception:
        return ERROR + dumps({**reply, "retry_after": None, "details": None}).encode("utf-8", "replace")


def _describe(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        return type(error).__name__


def _receive(connection: socket.socket) -> bytes | None:
    """Receive a message; None at the end."""
    head = _exactly(connection, HEADER.size)
    return None if head is None else _exactly(connection, HEADER.unpack(head)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            return None
        received += piece
    return bytes(received)


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process and its group when the parent ends.

    A thread could not do so while user code holds the interpreter lock.
    """
    import fcntl

    signal.signal(signal.SIGIO, signal.SIG_DFL)  # The default action ends the process.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # The parent ended before the signal was set up.
        os.killpg(0, signal.SIGKILL)


def _adopt_descendants() -> None:
    """On Linux, become the parent of orphaned descendants, so that they are found even after a double fork."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _has_children() -> bool:
    """True if the call left processes running."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # A child that has ended.
    except ChildProcessError:
        return False
    return True
