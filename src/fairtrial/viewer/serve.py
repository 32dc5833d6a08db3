"""Serve the viewer: sockets, limits of connections, the start and the end."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from sqlalchemy import make_url
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairtrial.base.foreign import HEAD_SECONDS
from fairtrial.base.system import keep_port, require_posix
from fairtrial.data.index import cache_folder
from fairtrial.errors import ConfigurationError
from fairtrial.store.open import find_database
from fairtrial.store.protocol import RunStore
from fairtrial.viewer.access import Access, check_reviewers, kept_secrets
from fairtrial.viewer.app import make_app
from fairtrial.viewer.pages.context import Viewer
from fairtrial.viewer.question import segment
from fairtrial.viewer.work import open_viewed
from fairtrial.viewer.working import Workbench

MAX_ANONYMOUS = 64
_numbers = count()


class ViewConnection(H11Protocol):
    """A connection that must send the head of its request in time.

    At more than `MAX_ANONYMOUS` connections without a session, the oldest of them is closed: a browser, which sends its
    request at once, is answered beside any number of idle clients. Connections with a session are not counted.
    """

    _number = -1
    _had_session = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head; close the oldest anonymous connections if there are too many."""
        super().connection_made(transport)
        self._number = next(_numbers)
        self._wait()
        anonymous = [one for one in self.connections if isinstance(one, ViewConnection) and one._is_anonymous()]
        for one in sorted(anonymous, key=lambda one: one._number)[:-MAX_ANONYMOUS]:
            one.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass data on; the time of a head begins with its first byte."""
        if self._timer is None and self._is_waiting:
            self._wait()
        self._note_session()  # Before the next request takes the place of this one.
        super().data_received(data)
        if not self._is_waiting:
            self._stop_waiting()

    def _note_session(self) -> None:
        scope: Any = self.scope
        if scope is not None and scope.get("fairtrial.session") is not None:
            self._had_session = True

    def _is_anonymous(self) -> bool:
        """Return whether no request of this connection had a session, and it is open."""
        self._note_session()
        return not self._had_session and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_waiting(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_waiting)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_waiting(self) -> None:
        self._timer = None
        if self._is_waiting:
            self.transport.abort()


DEFAULT_PORT = 7878
_BACKLOG = 256
_NEXT_PORTS = 20


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where and how to serve.

    Attributes:
        store: The address of the store.
        host: The interface to listen on.
        port: The port; None for the default, or the next that is free; 0 for any.
        socket_path: A Unix socket to listen on instead.
        trusted_hosts: Further host names under which browsers may reach the server, such as that of a proxy.
        secure: Whether a proxy ends TLS in front of it.
        read_only: Open the store for reading only.
        reviewers: The names of people who get an address of their own, with reviews and nothing else.
        user: The name under which labels of the person who started the server are stored; by default, the login name.
        token: What people sign in with; by default one that is kept beside the store.
    """

    store: str
    host: str = "127.0.0.1"
    port: int | None = None
    socket_path: Path | None = None
    trusted_hosts: tuple[str, ...] = ()
    secure: bool = False
    read_only: bool = False
    reviewers: tuple[str, ...] = ()
    user: str = ""
    token: str = ""


class ViewServer:
    """A server of one store; `run` blocks until it is stopped."""

    def __init__(self, options: ServeOptions) -> None:
        database = find_database(options.store)
        if database is None:
            raise ConfigurationError("a store in memory cannot be viewed: other processes cannot read it")
        user = options.user or _login_name()
        reviewers = check_reviewers(options.reviewers, user)
        self._options = options
        self._listening = listen_on(options)
        port = None if options.socket_path else int(self._listening.getsockname()[1])
        self.port = port
        folder = database.absolute().parent if isinstance(database, Path) else _private_folder(database)
        hosts = [*options.trusted_hosts]
        if port is not None and options.host not in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::"):  # noqa: S104
            hosts.append(f"{options.host}:{port}")
        kept = kept_secrets(folder, reviewers)
        self.folder = folder  # Where view.json is.
        self.access = Access.create(
            port=port,
            trusted_hosts=hosts,
            prefix=kept.prefix,
            secure=options.secure,
            user=user,
            reviewers=kept.reviewers,
            token=options.token or kept.token,
            folder=folder,
        )
        name = database.name if isinstance(database, Path) else "PostgreSQL"
        self.store: RunStore = open_viewed(options.store, read_only=options.read_only)
        self._store_name = name
        self._server: ViewHttpServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def address(self, run: str = "") -> str:
        """Return the address to open first; it asks for the token."""
        return self._link(segment(run) if run else "")

    def invitation(self, run: str = "") -> str:
        """Return an address that opens a session once, within a minute."""
        return self._login(self.access.invite(), **({"run": run} if run else {}))

    def reviewer_addresses(self) -> dict[str, str]:
        """Return the address of each reviewer, which stays valid when the server is started again."""
        return {name: self._login(token) for name, token in self.access.reviewers.items()}

    def _login(self, token: str, **more: str) -> str:
        return self._link(f"login?{urlencode({'token': token, **more})}")

    def _link(self, path: str) -> str:
        host = "127.0.0.1" if self._options.host in ("0.0.0.0", "::") else self._options.host  # noqa: S104
        base = f"http://{host}:{self.port}" if self.port is not None else "http://localhost:PORT"
        return f"{base}/{self.access.prefix}/{path}"

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C, SIGTERM or `stop`."""
        try:
            asyncio.run(self._serve(started))
        finally:
            self._listening.close()
            if self._options.socket_path is not None:
                self._options.socket_path.unlink(missing_ok=True)
            self.store.close()

    async def _serve(self, started: Callable[[], None]) -> None:
        workbench = Workbench(self._options.store, read_only=self._options.read_only)
        viewer = Viewer(
            self.store, workbench, self.access, store_name=self._store_name, read_only=self._options.read_only
        )
        self._server = make_server(make_app(viewer), viewer.streams.close)
        self._loop = asyncio.get_running_loop()
        workbench.start({"job": "start"}, None)
        self._loop.call_soon(started)
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            await to_its_end(workbench.close())

    def stop(self) -> None:
        """End the server; may be called from another thread."""
        if self._server is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._server.end)


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that must be completed, also when another Ctrl-C cancels this task."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue


class ViewHttpServer(uvicorn.Server):
    """Ends open streams before it waits for connections to end."""

    def __init__(self, config: uvicorn.Config, close_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._close_streams = close_streams

    def end(self) -> None:
        """End the streams, then the server."""
        self._close_streams()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: object) -> None:
        """End on a signal, at once on another Ctrl-C. uvicorn would raise it again, and SIGTERM would close nothing."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.end()


def make_server(app: Any, close_streams: Callable[[], None]) -> ViewHttpServer:
    """Return the server of an application, with our limits of connections."""
    config = uvicorn.Config(
        app, http=ViewConnection, loop="asyncio", ws="none", lifespan="off", access_log=False,
        log_level="warning", server_header=False, date_header=False, proxy_headers=False,
        h11_max_incomplete_event_size=32_768, timeout_keep_alive=30, timeout_graceful_shutdown=2,
    )  # fmt: skip
    return ViewHttpServer(config, close_streams)


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "me"  # No login name, as in some containers.


def listen_on(options: ServeOptions, remedy: str = "") -> socket.socket:
    """Return the socket to listen on; `remedy` is what to do if that fails, by default with options of `view`."""
    if options.socket_path is not None:
        return _listen_on_path(options.socket_path, remedy)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    wanted = [options.port] if options.port is not None else range(DEFAULT_PORT, DEFAULT_PORT + _NEXT_PORTS)
    problem: OSError | None = None
    for port in wanted:
        # asyncio sends small pages at once (TCP_NODELAY) only on sockets that name their protocol.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        keep_port(made)
        try:
            made.bind((options.host, port))
        except OSError as error:
            made.close()
            problem = error
            continue
        made.listen(_BACKLOG)
        return made
    where = f"{options.host}:{options.port or DEFAULT_PORT}"
    remedy = remedy or "choose another port with --port, or 0 for any"
    raise ConfigurationError(f"cannot listen on {where}: {problem}\n{remedy}")


def _listen_on_path(path: Path, remedy: str = "") -> socket.socket:
    """Listen on a Unix socket that only its owner can open."""
    remedy = remedy or "name another file with --socket"
    require_posix("--socket works", "listen on a port, with --port")
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ConfigurationError(f"another server listens on {path}\n{remedy}")
        path.unlink()  # Of a server that ended without removing it.
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError as error:
        made.close()
        raise ConfigurationError(f"cannot listen on {path}: {error}\n{remedy}") from None
    finally:
        os.umask(mask)
    made.listen(_BACKLOG)
    return made


def _private_folder(url: str) -> Path | None:
    """Return the folder of this user for what the viewer of a database on a server keeps; None if there is none."""
    address = make_url(url).set(password=None).render_as_string()
    folder = cache_folder() / "view" / hashlib.sha256(address.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return folder
