"""Fixtures for all tests."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpcore2
import pytest
from hypothesis import HealthCheck, settings

from tests.figures import figure, pytest_addoption
from tests.redis_server import RedisServer
from tests.servers import PostgresServer
from tests.sqs_server import CREDENTIALS, SqsServer
from tests.streams import pytest_runtest_call, pytest_runtest_setup, pytest_runtest_teardown, pytest_unconfigure

__all__ = [
    "figure", "pytest_addoption", "pytest_runtest_call", "pytest_runtest_setup", "pytest_runtest_teardown",
    "pytest_unconfigure",
]  # fmt: skip

# Shared machines stall for seconds at a time: a slow example is no finding.
settings.register_profile("here", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("reproducible", settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("here")


# What a test uses, directly or by a fixture, that is not Python: installed by `scripts/setup`, and named by a marker.
PROGRAMS = {
    "redis": {"RedisServer", "redis_server", "redis_url", "RedisCluster", "cluster_url"},
    "sqs": {"SqsServer", "sqs_server", "sqs_url"},
    "postgres": {"PostgresServer", "pg_server", "pg_url", "own_postgres", "mailbox_database"},
    "browser": {"browser", "screenshot", "Browser"},
    "tmux": {"terminal"},
    "node": {"node"},
    "slurm": {"Slurm"},
    "bwrap": {"Sandbox"},
}


_prefixes = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the programs they need, so that a person with only Python can leave them out."""
    for item in items:
        used = {*getattr(item, "fixturenames", ()), *vars(getattr(item, "module", None) or object)}
        used |= {"pg_url"} if "postgresql" in item.name else set()
        used |= {"node"} if "any-language" in item.name else set()
        for program, names in PROGRAMS.items():
            if used & names:
                item.add_marker(program)
        for stage in ("long", "measured"):
            if item.get_closest_marker(stage) is not None and f"mark.{stage}" not in _source(item.path):
                raise pytest.UsageError(
                    f"{item.nodeid}: write pytest.mark.{stage} in its file: scripts/check looks for it"
                )


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def pytest_collection_finish() -> None:
    """Exempt what is loaded from garbage collection, and cache no bytecode of the files that tests write.

    Modules and tests are half a million objects, which took 0.4 s to traverse each time. A file that is written twice
    within a second, with the same length, would be read as it was at first.
    """
    gc.collect()
    gc.freeze()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the caches and stores of the person who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRTRIAL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("FAIRTRIAL_STORE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Read the certificates of the system once for all clients of models: it takes most of the time of a client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(autouse=True)
def search_path_of_its_own() -> Iterator[None]:
    """What a suite that a test loads adds to the search path is not seen by later tests, or by processes they start."""
    path = list(sys.path)
    yield
    sys.path[:] = path


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


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """A server that only the tests of one file stop and break."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def pg_url(pg_server: PostgresServer) -> Iterator[str]:
    """The address of an empty database."""
    url = pg_server.new_database()
    yield url
    pg_server.drop_database(url)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server of our own, one per process of the tests."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> Iterator[str]:
    """The address of an empty Redis."""
    yield redis_server.url
    with redis_server.client() as client:
        client.flushall()


@pytest.fixture(scope="session")
def sqs_server() -> Iterator[SqsServer]:
    """An emulator of SQS and S3, one per process of the tests."""
    with SqsServer() as server:
        yield server


@pytest.fixture
def sqs_url(sqs_server: SqsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of queues that no other test uses; the environment has credentials for it."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return sqs_server.url(f"t{next(_prefixes)}", poll=1, linger=0, lag=2)


@pytest.fixture(scope="session")
def mailbox_database(pg_server: PostgresServer) -> str:
    """The address of a database for mailboxes of different names."""
    return pg_server.new_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store that several processes can open."""
    return str(tmp_path / "runs.db") if request.param == "sqlite" else str(request.getfixturevalue("pg_url"))


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
