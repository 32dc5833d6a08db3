"""An emulator of SQS and S3 on a free port of the loopback interface, for tests."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.servers import free_port

PYTHON = Path(sys.prefix).parent / ".venv-ministack/bin/python"  # Beside the environment of the tests.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-key-id", "AWS_SECRET_ACCESS_KEY": "test-secret-of-the-emulator"}
REGION = "eu-central-1"
_START_SECONDS = 60


class SqsServer:
    """One emulator. Its clock can be moved and stopped; `pause` and `resume` stop the whole process."""

    def __init__(self) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="fairtrial-sqs-"))
        clock = self._folder / "clock"
        clock.write_bytes(bytes(16))
        with open(clock, "r+b") as file:
            self._clock = mmap.mmap(file.fileno(), 16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "test", **options: object) -> str:
        """Return the address of queues with this prefix."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"sqs://{REGION}/{prefix}?endpoint={self.endpoint}{more}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> Self:
        assert PYTHON.exists(), "the tests of SQS need its emulator: run scripts/setup"
        kept = {"PATH": os.environ["PATH"], "HOME": str(self._folder), "TMPDIR": str(self._folder), **CREDENTIALS}
        settings = {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self.port),
            "LOG_LEVEL": "ERROR",
            "SERVICES": "sqs,s3",
        }
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [PYTHON, Path(__file__).with_name("sqs_emulator.py"), self._folder / "clock"],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**kept, **settings},
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/_ministack/health", timeout=5):
                    return self
            except urllib.error.HTTPError:
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.02)  # Polling for readiness; how long it takes does not matter.

    def stop(self) -> None:
        """Stop it and remove its folder."""
        if self._process is not None:
            self._process.kill()  # It stores nothing.
            self._process.wait(timeout=20)
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """Stop the process: connections stay open, and nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process continue."""
        os.kill(self.pid, signal.SIGCONT)

    def pass_time(self, seconds: float) -> None:
        """Move the clock of SQS."""
        ahead, frozen = struct.unpack("<dd", self._clock[:16])
        self._clock[:16] = struct.pack("<dd", ahead + seconds, frozen)

    def freeze(self) -> None:
        """Let the clock of SQS stand still, except for `pass_time`. Long polls do not end then."""
        ahead, _ = struct.unpack("<dd", self._clock[:16])
        self._clock[:16] = struct.pack("<dd", ahead, time.time())

    def client(self, service: str = "sqs") -> Any:
        """Return a blocking client."""
        from botocore.session import get_session

        return get_session().create_client(
            service,
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
