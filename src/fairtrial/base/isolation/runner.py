"""Run user code in child processes, and send functions and values there."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from hashlib import blake2b
from importlib.machinery import PathFinder
from types import FunctionType, MethodType, ModuleType
from typing import Any

import anyio

from fairtrial.base.codec import decode
from fairtrial.base.frozen import EMPTY
from fairtrial.base.isolation.child import DIRTY, HEADER, OK, PART, SECRETS, hear_secrets, keeper_module
from fairtrial.base.system import kill_group, require_posix
from fairtrial.errors import ConfigurationError, FairtrialError

_lock = threading.Lock()
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class NotSendableError(ConfigurationError):
    """A value cannot be sent to a child process."""


def pack(
    value: object,
    what: str,
    *,
    remedy: str = "remove isolate=True",
    by_name: Mapping[int, tuple[str, str] | None] = EMPTY,  # type: ignore[assignment]  # empty
) -> bytes:
    """Pickle a value for a child process: code that the child can import by name, other code by value.

    Args:
        value: The value.
        what: How errors call it.
        remedy: What errors advise in the end.
        by_name: Objects that the child takes from a module that it imports, by their ids; see `globals_of`.

    Raises:
        NotSendableError: the value refers to something that exists only in this process.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, found: Any) -> Any:
            if (named := by_name.get(id(found))) is not None:
                return _from_module, named
            if type(found) in _LOCKS:
                return _LOCKS[type(found)], ()  # The child gets a lock of its own.
            module = sys.modules.get(getattr(found, "__module__", None) or "")
            if module is not None and not _is_importable(module):
                cloudpickle.register_pickle_by_value(module)
            return super().reducer_override(found)

    with _lock, io.BytesIO() as file:
        try:
            Pickler(file).dump(value)
        except Exception as error:
            raise NotSendableError(
                f"{what} must be something that can be sent to a child process ({type(error).__name__}: {error})\n"
                "Open connections and files inside the function, define it in a module that can be imported, or "
                f"{remedy}"
            ) from None
        return file.getvalue()


def pack_plain(value: object) -> bytes:
    """Pickle a value that consists of plain JSON values and our own records, which takes less time."""
    return pickle.dumps(value)


def check_sendable(value: object, what: str) -> None:
    """Raise unless this system has such child processes and a value can be sent to them."""
    _require_children()
    pack(value, what)


def globals_of(file: str) -> dict[int, tuple[str, str]]:
    """Return the objects at the top level of the module in a file, by their ids, if a child process can import it."""
    modules = [module for module in list(sys.modules.values()) if file and getattr(module, "__file__", None) == file]
    return {
        id(value): (module.__name__, name)
        for module in modules
        if module.__name__ != "__main__" and _is_importable(module)
        for name, value in vars(module).items()
        if not isinstance(value, type | ModuleType | FunctionType) and not name.startswith("__")
    }


def _from_module(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _require_children() -> None:
    require_posix("isolate=True works", "remove it, or run this there")
    if not sys.executable:
        raise ConfigurationError("isolate=True needs a Python interpreter in sys.executable")


_importable: dict[str, bool] = {}


def _is_importable(module: ModuleType) -> bool:
    """Return whether a new interpreter with the same `sys.path` would import the same file under the same name."""
    name = module.__name__
    file = getattr(module, "__file__", None)
    if name == "__main__" or file is None:
        # cloudpickle always sends `__main__` by value. Without a file, a module is built in or the program made it.
        return name == "__main__" or module.__spec__ is not None
    found = _importable.get(name)
    if found is None:
        found = _importable[name] = _imported_from(name) == os.path.realpath(file)
    return found


def _imported_from(name: str) -> str | None:
    path = None
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        spec = PathFinder.find_spec(full, path)
        if spec is None:
            for finder in sys.meta_path:  # Editable installations add finders, in the child too.
                search = getattr(finder, "find_spec", None)
                spec = search(full, path) if search is not None else None
                if spec is not None:
                    break
            else:
                return None
        path = spec.submodule_search_locations
    return os.path.realpath(spec.origin) if spec is not None and spec.origin else None


START_SECONDS = 120.0
"""How long a child may take to start; generous, because many may start at once on a busy machine."""
_LOOK_SECONDS = 1.0
_EXIT_SECONDS = 5.0  # How long a child that has closed its connection, or was killed, is waited for.
_NO_KEYWORDS: Mapping[str, Any] = {}


class IsolatedError(FairtrialError):
    """User code failed in its child process; the message carries the original type and text.

    Attributes:
        retry_after: The error's own `retry_after`, if it had one.
        details: The error's own `isolated_details` as JSON: data to keep although the call failed.
        refusal: What a model said that declined to answer; None for any other error.
        traceback: The last calls before the error, in the child process.
        mistake: Whether it is a programming error.
        broken_user: Whether it is a `BrokenUserError`.
    """

    retry_after: float | None = None
    details: Any = None
    refusal: str | None = None
    traceback: str = ""
    mistake: bool = False
    broken_user: bool = False


class ChildDiedError(IsolatedError):
    """The child process ended without an answer."""


def read_answer[T](answer: bytes, kind: type[T]) -> T:
    """Return the result of a call; raises `IsolatedError` if it failed."""
    if answer[:1] == OK:
        return decode(kind, answer[1:].decode("utf-8"))
    reply: Any = decode(object, answer[1:].decode("utf-8"))
    error = IsolatedError(reply["error"])
    error.retry_after, error.details, error.refusal = reply["retry_after"], reply["details"], reply["refusal"]
    error.traceback, error.mistake, error.broken_user = reply["traceback"], reply["mistake"], reply["broken_user"]
    raise error


class Function:
    """A serialized callable, sent once to each child."""

    __slots__ = ("data", "digest")

    def __init__(self, fn: Callable[..., Any], what: str, wrapper: Callable[..., Any] | None = None) -> None:
        self.data = pack((wrapper, fn), what)
        self.digest = blake2b(self.data, digest_size=16).digest()


class IsolatedRunner:
    """Runs functions in child processes: one for each concurrent call, reused for later calls.

    It works with asyncio and trio, from any thread. A cancelled call kills its child and everything the child started;
    a child is also killed if a call leaves processes running. All children end when this process ends, even if it is
    killed.
    """

    def __init__(self) -> None:
        self._idle: list[IsolatedChild] = []
        self._lock = threading.Lock()
        self._functions: dict[tuple[Any, Any], tuple[Any, Function]] = {}
        self._process = os.getpid()
        weakref.finalize(self, _kill_idle, self._idle)  # For a runner that is never closed.

    def function(self, fn: Callable[..., Any], what: str, wrapper: Callable[..., Any] | None = None) -> Function:
        """Serialize a callable, once. The child calls `wrapper(fn, ...)` if there is a wrapper, else `fn(...)`."""
        # Each access to a method makes another object.
        identity = (id(fn.__self__), fn.__func__) if isinstance(fn, MethodType) else id(fn)
        key = (identity, wrapper)
        found = self._functions.get(key)
        if found is None:
            found = self._functions[key] = (
                fn,
                Function(fn, what, wrapper),
            )  # Keeps `fn`, so that its id is not reused.
        return found[1]

    async def run[T](
        self, fn: Callable[..., Any], *args: Any, kind: type[T], what: str = "the function", **kwargs: Any
    ) -> T:
        """Call a function in a child process and read its result as `kind`."""
        function = self.function(fn, what)
        async with self.child() as child:
            return await child.call(function, args, kwargs, kind=kind, what=f"the arguments of {what}")

    @contextlib.asynccontextmanager
    async def child(self) -> AsyncIterator[IsolatedChild]:
        """Provide a child process for the calls inside the block."""
        child = self._take() or await IsolatedChild.start()
        try:
            yield child
        finally:
            with self._lock:
                kept = child.is_reusable and self._process == os.getpid()
                if kept:
                    self._idle.append(child)
            if not kept:
                await child.end()

    def _take(self) -> IsolatedChild | None:
        with self._lock:
            if self._process != os.getpid():  # User code forked this process: the children belong to its parent.
                self._process = os.getpid()
                self._idle.clear()
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
                child.kill()
        return None

    def close(self) -> None:
        """End the idle children; busy ones end with their calls."""
        with self._lock:
            _kill_idle(self._idle)

    def __reduce__(self) -> Any:
        return (IsolatedRunner, ())  # Each process has its own pool of children.


class IsolatedChild:
    """One child process: `IsolatedRunner` calls functions in it, or one function is started and talks to its caller."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, lifeline: int) -> None:
        self._process = process
        self._connection = connection
        self._lifeline = lifeline
        self._owner = os.getpid()
        self._known: set[bytes] = set()
        self.is_reusable = False
        _children.add(self)

    @classmethod
    async def start(cls) -> IsolatedChild:
        """Start a process and wait until it is ready for calls."""
        _require_children()
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        code = "from fairtrial.base.isolation.child import main; main()"
        try:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own code; returns as soon as the process exists
                [
                    sys.executable,
                    "-P",
                    *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]  # as multiprocessing does
                    "-c",
                    code,
                    str(theirs.fileno()),
                    str(watched),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), watched),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
            )
        except BaseException:
            ours.close()
            os.close(lifeline)
            raise
        finally:
            theirs.close()
            os.close(watched)
        ours.setblocking(False)
        child = cls(process, ours, lifeline)
        try:
            await child._send(pickle.dumps((_search_path(), os.environ.get("PYTHONPATH"), keeper_module())))
            with anyio.move_on_after(START_SECONDS):
                await child._receive(len(OK))
                child.is_reusable = True
        except ChildDiedError as error:
            await child.end()
            raise IsolatedError(f"a child process could not start: {error}") from None
        except BaseException:
            await child.end()
            raise
        if not child.is_reusable:
            await child.end()
            raise IsolatedError(f"a child process was not ready within {START_SECONDS:g} s")
        return child

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    async def call[T](
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] = _NO_KEYWORDS,
        *,
        kind: type[T],
        what: str = "the arguments of an isolated function",
        on_part: Callable[[str], None] | None = None,
        silence_seconds: float | None = None,
    ) -> T:
        """Call a function. If the call is cancelled, the caller must kill the child.

        Args:
            function: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            kind: The type of its result.
            what: How errors call the arguments.
            on_part: Called with the JSON of every value that the function emits (`isolation.child.emit`).
            silence_seconds: The longest time between two values that the function emits.

        Raises:
            TimeoutError: the function emitted nothing for longer than `silence_seconds`.
        """
        arguments = pack((args, dict(kwargs)), what)
        await self.load(function)
        return await self._ask((function.digest, None, arguments), kind, on_part, silence_seconds)

    async def begin(self, function: Function, arguments: bytes) -> socket.socket:
        """Start a call that talks over the connection itself, which is returned; the caller must `end` the child.

        `arguments` are those of the function, positional ones and keywords, as `pack` returns them.
        """
        await self.load(function)
        self.is_reusable = False
        await self._send(pickle.dumps((function.digest, None, arguments)))
        return self._connection

    async def load(self, function: Function) -> None:
        """Load a function in the child, so that later calls do not spend time on it."""
        if function.digest not in self._known:
            await self._ask((function.digest, function.data, None), object)
            self._known.add(function.digest)

    async def _ask[T](
        self,
        message: tuple[bytes, bytes | None, bytes | None],
        kind: type[T],
        on_part: Callable[[str], None] | None = None,
        silence_seconds: float | None = None,
    ) -> T:
        self.is_reusable = False  # Until the answer has arrived.
        await self._send(pickle.dumps(message))
        silence = None if silence_seconds is None else silence_seconds + START_SECONDS
        while True:
            with anyio.fail_after(silence):
                head = await self._receive(1 + HEADER.size)
                answer = await self._receive(HEADER.unpack(head[1:])[0])
            if head[:1] == SECRETS:
                hear_secrets(answer)
                continue
            if head[:1] != PART:
                break
            silence = silence_seconds
            if on_part is not None:
                on_part(answer.decode("utf-8"))
        self.is_reusable = head[:1] != DIRTY
        return read_answer(answer, kind)

    async def _send(self, message: bytes) -> None:
        left = memoryview(HEADER.pack(len(message)) + message)
        while left:
            try:
                left = left[self._connection.send(left) :]
            except BlockingIOError:
                await self._ready(anyio.wait_writable)
            except (BrokenPipeError, ConnectionResetError):
                raise await self.died() from None

    async def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                piece = self._connection.recv(min(size - len(received), 1 << 20))
            except BlockingIOError:
                await self._ready(anyio.wait_readable)
                continue
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise await self.died()
            received += piece
        return bytes(received)

    async def _ready(self, wait: Callable[[socket.socket], Any]) -> None:
        """Wait for the socket. Also check the process: a descendant can keep the socket open after the child ended."""
        with anyio.move_on_after(_LOOK_SECONDS) as scope:
            await wait(self._connection)
        if scope.cancelled_caught and not self.is_alive:
            raise await self.died()

    async def died(self) -> ChildDiedError:
        """Return how the process ended, after its connection has."""
        code = await self._exit_code()
        if code is None:
            return ChildDiedError("the child process closed its connection without an answer")
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return ChildDiedError(f"the child process ended without an answer ({ended})")

    async def _exit_code(self) -> int | None:
        """Wait for the end of the process, without blocking the event loop; None if it goes on."""
        pause, end = 0.001, anyio.current_time() + _EXIT_SECONDS
        while (code := self._process.poll()) is None and anyio.current_time() < end:
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return code

    async def end(self) -> None:
        """End the process and everything it started, and wait for it, also if the caller is cancelled."""
        if self._signal():
            try:
                with anyio.CancelScope(shield=True):
                    await self._exit_code()
            except BaseException:  # A shield does not stop `Task.cancel`. The process is killed: it ends at once.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_EXIT_SECONDS)
                raise

    def kill(self) -> None:
        """`end` for callers that may block."""
        if self._signal():
            self._process.wait()

    def _signal(self) -> bool:
        """Kill the process and everything it started; False if that was done or is not ours to do."""
        _children.discard(self)
        if self._lifeline < 0 or self._owner != os.getpid():  # Killed before, or owned by the parent of this process.
            return False
        _kill_tree(self._process.pid, alive=self.is_alive)
        self._connection.close()
        os.close(self._lifeline)
        self._lifeline = -1
        return True


_children: set[IsolatedChild] = set()


@atexit.register
def _kill_all() -> None:
    for child in list(_children):
        child.kill()


def _kill_idle(idle: list[IsolatedChild]) -> None:
    while idle:
        idle.pop().kill()


def _search_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]


def _kill_tree(pid: int, *, alive: bool) -> None:
    """Kill a process, its group, and on Linux also descendants that left the group by starting a new session."""
    descendants = _descendants(pid) if alive else []
    kill_group(pid)
    for found in descendants:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(found, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            for child in map(int, file.read().split()):
                found += [child, *_descendants(child)]
    return found
