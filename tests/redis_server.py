"""A real redis-server on a free port of the loopback, for tests."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One redis-server with its own folder. `kill` and `start` again keep the folder, and so what was written."""

    def __init__(
        self, folder: Path, *options: str, tls: tuple[Path, Path] | None = None, binary: str = "redis-server"
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.tls = tls
        self._binary = binary
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> RedisServer:
        binary = shutil.which(self._binary)
        assert binary is not None, "the tests of mailboxes need redis-server: run scripts/setup"
        command = [binary, "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
        command += ["--dir", str(self.folder), "--logfile", str(self.folder / "redis.log")]
        if self.tls is None:
            command += ["--port", str(self.port)]
        else:
            certificate, key = map(str, self.tls)
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
        self._process = subprocess.Popen([*command, *self._options])
        self._await_port()
        return self

    def _await_port(self) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            assert self._process is not None
            assert self._process.poll() is None, (self.folder / "redis.log").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.01)
        while self.tls is None and "requirepass" not in " ".join(self._options) and time.monotonic() < end:
            try:  # It answers while it still loads what it had written.
                with self.client() as client:
                    client.ping()
                return
            except redis.exceptions.BusyLoadingError:
                time.sleep(0.01)

    def stop(self) -> None:
        """Stop it as an administrator would."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop it as a power switch would."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=20)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()
