"""Real servers for tests, each in a folder of its own on a free port, stopped by process id."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

import psycopg

_START_SECONDS = 60


def free_port() -> int:
    """A TCP port on the loopback interface that no one uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresServer:
    """A PostgreSQL server on 127.0.0.1; `stop` and `start` again at will, the data stays.

    Args:
        folder: A folder that is kept at the end; if it has the data of an earlier server, they are used.
        options: Settings of the server, as in `fsync=on`, over those for tests.
    """

    def __init__(
        self, password: str = "store-test-password", *, folder: Path | None = None, options: Sequence[str] = ()
    ) -> None:
        self.password = password
        self.port = free_port()
        # Not under pytest's own folders: the server's user must be able to walk there.
        self._folder = Path(tempfile.mkdtemp(prefix="fairtrial-pg-")) if folder is None else folder
        self._kept = folder is not None
        self._options = [word for option in options for word in ("-c", option)]
        self._user = "postgres" if os.getuid() == 0 else None
        self._bin = _binaries()
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        if not (self._folder / "data").exists():
            self._folder.mkdir(exist_ok=True)
            self._initialise()

    def _initialise(self) -> None:
        if self._user is not None:
            import pwd

            owner = pwd.getpwnam(self._user)
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
        template = self._template()
        if not template.exists():
            self._make_cluster()
            # Whoever is first leaves a copy for the others; a rename is all or nothing.
            self._copy("data", "copy")
            with contextlib.suppress(OSError):
                (self._folder / "copy").rename(template)
        elif template.stat().st_uid != self._folder.stat().st_uid:
            raise RuntimeError(f"{template} belongs to somebody else: remove it")
        else:
            self._copy(template, "data")

    def _template(self) -> Path:
        """Where the first server with this version and password leaves its empty cluster: `initdb` takes seconds."""
        made_with = f"{self._bin} {self.password} {self._folder.stat().st_uid}"
        name = f"fairtrial-pg-template-{hashlib.sha256(made_with.encode()).hexdigest()[:16]}"
        return Path(tempfile.gettempdir()) / name

    def _make_cluster(self) -> None:
        secret = self._folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)
        subprocess.run(
            [
                self._bin / "initdb",
                *("--pgdata", self._folder / "data", "--username", "tester", "--auth", "scram-sha-256"),
                *("--pwfile", secret, "--encoding", "UTF8", "--no-locale", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            cwd=self._folder,
            user=self._user,
            timeout=_START_SECONDS,
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        # A log file, not a pipe: nobody would empty the pipe.
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    self._bin / "postgres",
                    *("-D", self._folder / "data", "-p", str(self.port), "-h", "127.0.0.1"),
                    *("-k", self._folder, "-c", "fsync=off", "-c", "shared_buffers=32MB", "-c", "max_connections=60"),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                user=self._user,
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.05)  # Polling for readiness; how long it takes does not matter.

    def stop(self, *, crash: bool = False) -> None:
        """Stop the server: its clients are disconnected at once; with `crash`, it does not even say goodbye."""
        if self._process is not None:
            # SIGINT is PostgreSQL's fast shutdown, SIGQUIT its immediate one, which recovers at the next start.
            self._process.send_signal(signal.SIGQUIT if crash else signal.SIGINT)
            self._process.wait(timeout=_START_SECONDS)
            self._process = None

    def restart(self, *, crash: bool = False) -> None:
        """Stop and start."""
        self.stop(crash=crash)
        self.start()

    def back_up(self) -> None:
        """Copy the data as it is now; the server is restarted for that."""
        self.stop()
        self._copy("data", "backup")
        self.start()

    def fail_over(self) -> None:
        """Go on with the copy, as with a standby that was behind: what was committed since is gone."""
        self.stop(crash=True)
        self._copy("backup", "data")
        self.start()

    def _copy(self, source: str | Path, target: str) -> None:
        shutil.rmtree(self._folder / target, ignore_errors=True)
        subprocess.run(["cp", "-a", self._folder / source, self._folder / target], check=True)

    def pids(self) -> list[int]:
        """The process ids of the server and of its connections."""
        assert self._process is not None
        server = self._process.pid
        children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii")
        return [server, *map(int, children.split())]

    def kill(self) -> None:
        """Kill the server and all its children at once, as a power switch would."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.forget()

    def forget(self) -> None:
        """Take note that the server was killed by a test; it can be started again."""
        assert self._process is not None
        self._process.wait(timeout=_START_SECONDS)
        self._process = None
        (self._folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and remove its folder, unless it is to be kept."""
        self.stop(crash=True)
        if not self._kept:
            shutil.rmtree(self._folder, ignore_errors=True)

    def url(self, database: str) -> str:
        """The address of a database."""
        return f"postgresql://tester:{quote(self.password)}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The address of a fresh, empty database."""
        self._databases += 1
        name = f"test_{self._databases}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Remove a database made by `new_database` even if clients are still connected to it."""
        name = psycopg.sql.Identifier(url.rpartition("/")[2])
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


class PgBouncer:
    """A PgBouncer in transaction mode before a PostgreSQL server: what a session sets is lost between transactions."""

    def __init__(self, server: PostgresServer) -> None:
        self.port = free_port()
        self._server = server
        self._folder = Path(tempfile.mkdtemp(prefix="fairtrial-pgbouncer-"))
        self._user = "postgres" if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        settings = f"""
            [databases]
            * = host=127.0.0.1 port={self._server.port} user=tester password={self._server.password}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = any
            pool_mode = transaction
            default_pool_size = 3
        """
        file = self._folder / "pgbouncer.ini"
        file.write_text("\n".join(line.strip() for line in settings.splitlines()))
        if self._user is not None:
            import pwd

            owner = pwd.getpwnam(self._user)
            for path in (self._folder, file):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        binary = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen([binary, file], stdout=log, stderr=log, user=self._user)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)  # Polling for readiness; how long it takes does not matter.

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=_START_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def url(self, url: str) -> str:
        """The address of a database of the server, by this PgBouncer."""
        return f"postgresql://tester@127.0.0.1:{self.port}/{url.rpartition('/')[2]}"


def _binaries() -> Path:
    """The folder of an `initdb` on the PATH, which somebody chose; else Debian's newest, which are not on the PATH."""
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3].partition(".")[0])
    )
    if not found:
        raise RuntimeError("these tests need PostgreSQL: run scripts/setup")
    return found[-1].parent
