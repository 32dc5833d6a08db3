"""What every test can count on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import PostgresServer

# Shared machines stall for seconds at a time: a slow example is no finding.
settings.register_profile("here", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the caches and stores of the person who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRTRIAL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("FAIRTRIAL_STORE", raising=False)
        yield


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Async tests marked `anyio` run on both event loops."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def pg_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server of our own, one per process of the tests."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def pg_url(pg_server: PostgresServer) -> Iterator[str]:
    """The address of an empty database."""
    url = pg_server.new_database()
    yield url
    pg_server.drop_database(url)


type Child = Callable[..., str]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Runs Python code in a fresh interpreter, away from the sources, and returns what it printed."""

    def run(code: str, *args: str, cwd: Path = tmp_path, **variables: str) -> str:
        path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path, **variables},
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
