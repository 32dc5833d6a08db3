"""`fairtrial doctor`: each check, over real servers, and the screen as it was designed."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fairtrial.cli import command_doctor as checks
from fairtrial.store import schema
from fairtrial.store.open import migrate_store
from tests.cli.conftest import Cli, Done
from tests.cli.test_import import assert_golden
from tests.cli.test_screens import in_terminal
from tests.redis_server import RedisServer
from tests.servers import PostgresServer

ROOT = Path(__file__).resolve().parent.parent.parent
PASSWORD = "k7-Hs2mQ9vLw4"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*checks._PROVIDER_KEYS, "FAIRTRIAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), "--maxmemory", "100mb") as started:
        yield started


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer(PASSWORD)
    try:
        server.start()
        yield server
    finally:
        server.close()


def found(done: Done) -> dict[str, tuple[str, str, str]]:
    return {one["name"]: (one["status"], one["detail"], one["remedy"] or "") for one in done.json["checks"]}


def test_the_screen_is_as_designed(
    cli: Cli, place: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-proj-1234567890abcdefghijkl")
    monkeypatch.setenv("FAIRTRIAL_STOER", "x")
    migrate_store("runs.db")
    Path("runs.db").chmod(0o644)
    with monkeypatch.context() as patch:
        patch.delenv("FAIRTRIAL_GOLDEN", raising=False)
        screens = [cli("doctor", "--store", "runs.db", "--mailbox", redis_server.url).out]
    screens.append(in_terminal(["doctor", "--store", "runs.db"], columns=80, NO_COLOR="1", FAIRTRIAL_CACHES="x"))
    text = "\n".join(screens).replace(str(redis_server.port), "<port>").replace("\r", "")
    for pattern, instead in (
        (r"python( +)\S+ on .*", r"python\1<version>"),
        (r"fairtrial( +)\S+ with \d+ lib", r"fairtrial\1<version>, with <n> lib"),
        (r"(?:ok|warning)( +)redis-py( +)(?:.|\n {10,})*\n", "<redis-py>\n"),
        (r"[\d.]+ GB free", "<n> GB free"),
        (r"Redis [\d.]+", "Redis <version>"),
        (r"(?m)^\d warnings", "<n> warnings"),
    ):
        text = re.sub(pattern, instead, text)
    assert_golden("doctor", text)
    assert "sk-proj" not in text


def test_a_sound_installation_has_no_problems(
    cli: Cli, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_redis_library", lambda: iter(()))
    done = cli("doctor", "--mailbox", redis_server.url, "--json")
    assert (done.code, done.json["format"], done.json["ok"]) == (0, "fairtrial.doctor/1", True)
    assert {status for status, _, _ in found(done).values()} == {"ok"}, done.out
    assert not Path(".fairtrial").exists()  # Looking at it created nothing.
    with redis_server.client() as client:
        assert client.keys() == []
    assert cli("doctor").out.endswith(" checks, no problems\n")


def test_a_file_that_is_no_store_and_an_old_or_readonly_one_are_told_apart(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("text.db").write_text("not a database, but longer than a header of one would be " * 20)
    done = cli("doctor", "--store", "text.db", "--json")
    assert (done.code, found(done)["store"][0]) == (1, "failed")
    done = cli("doctor", "--store", "nowhere://x", "--json")
    assert (done.code, found(done)["store"][0]) == (1, "failed")
    assert found(cli("doctor", "--store", "memory:", "--json"))["store"][0] == "warning"
    migrate_store("old.db")
    import sqlite3

    def checked(version: int) -> tuple[str, str, str]:
        with closing(sqlite3.connect("old.db")) as connection, connection:
            connection.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (str(version),))
        return found(cli("doctor", "--store", "old.db", "--json"))["store"]

    oldest = min(schema.ADDED) - 1
    assert checked(oldest - 1)[0] == "failed"
    status, detail, remedy = checked(oldest)
    assert (status, f"schema {oldest}" in detail, "fairtrial store migrate" in remedy) == ("warning", True, True)


@pytest.mark.parametrize(("free", "status"), [(5e8, "warning"), (5e7, "failed")])
def test_a_full_disk_is_noticed(cli: Cli, monkeypatch: pytest.MonkeyPatch, free: float, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": int(free)}))
    done = cli("doctor", "--json")
    assert (done.code, found(done)["disk"][0]) == (int(status == "failed"), status)


def test_postgresql_is_checked_for_schema_rights_and_clock(cli: Cli, postgres: PostgresServer) -> None:
    url = postgres.new_database()
    seen = found(cli("doctor", "--store", url, "--json"))
    assert "empty; the first run creates the tables" in seen["store"][1]
    assert seen["permissions"] == ("ok", "the user of the store has CREATE on the schema", "")
    assert seen["store clock"][0] == "ok"
    migrate_store(url)
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    done = cli("doctor", "--store", url.replace("tester", "reader"), "--json")
    seen = found(done)
    assert (done.code, seen["store"][0]) == (1, "ok")
    assert seen["permissions"][:2] == ("failed", "the user of the store lacks INSERT and UPDATE on the tables")
    assert PASSWORD not in done.out + done.err


def test_it_tells_who_stores_the_results_of_a_fleet_on_postgresql(cli: Cli, postgres: PostgresServer) -> None:
    url, other = postgres.new_database(), postgres.new_database()
    one = found(cli("doctor", "--store", url, "--mailbox", url, "--json"))
    assert one["results"] == (
        "ok",
        "stored by workers, as they acknowledge the requests: one database for both",
        "",
    )
    two = found(cli("doctor", "--store", url, "--mailbox", other, "--json"))
    assert two["results"][:2] == ("ok", "sent to the client, which stores them: queue and store are separate")
    assert "results" not in found(cli("doctor", "--mailbox", url, "--json"))  # The store is a file.
    migrate_store(url)
    assert found(cli("doctor", "--store", url, "--mailbox", url, "--json"))["results"] == one["results"]


def test_servers_that_do_not_answer_fail_with_a_remedy_and_without_the_password(cli: Cli) -> None:
    done = cli(
        "doctor", "--store", f"postgresql://me:{PASSWORD}@127.0.0.1:1/db", "--mailbox", f"redis://:{PASSWORD}@127.0.0.1:1"
    )  # fmt: skip
    assert done.code == 1
    assert "failed   store" in done.out
    assert "failed   queue" in done.out
    assert "FAIRTRIAL_MAILBOX" in done.out
    assert "2 checks failed" in done.out
    assert PASSWORD not in done.out + done.err


def test_a_redis_that_may_lose_messages_or_refuses_the_user_is_reported(cli: Cli, tmp_path: Path) -> None:
    rights = (ROOT / "deploy" / "redis-user.acl").read_text().strip()
    with RedisServer(tmp_path / "r", "--appendonly", "no") as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", f">{PASSWORD}", *rights.split())
        client.execute_command("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "+ping", "+time", "+info")
        url = server.url.replace("redis://", f"redis://worker:{PASSWORD}@")
        seen = found(cli("doctor", "--mailbox", url, "--json"))
        assert (seen["queue"][0], seen["queue rights"][0]) == ("ok", "ok"), seen
        assert seen["queue data"][0] == "warning"
        assert "appendonly yes" in seen["queue data"][2]
        seen = found(cli("doctor", "--mailbox", url.replace("worker", "reader"), "--json"))
        assert seen["queue rights"][0] == "warning", seen
        assert "deploy/redis-user.acl" in seen["queue rights"][2]
        client.config_set("maxmemory", "10mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        done = cli("doctor", "--mailbox", url, "--json")
        assert (done.code, found(done)["queue"][0]) == (1, "failed")
        assert "maxmemory-policy" in found(done)["queue"][1]


@pytest.mark.parametrize("ahead", [-7.0, 7.0])
def test_clocks_that_differ_are_reported(ahead: float) -> None:
    assert checks._clock("queue clock", 0.5).status == "ok"
    check = checks._clock("queue clock", ahead)
    assert check.status == "warning"
    assert ("7.0 s ahead of" if ahead > 0 else "7.0 s behind") in check.detail


def test_settings_and_credentials_that_cannot_work_are_reported(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-ant-0123456789abcdefghij"
    monkeypatch.setenv("ANTHROPIC_API_KEY", f'"{key}"')
    done = cli("doctor", "--json")
    assert found(done)["credentials"][0] == "warning"
    assert key not in done.out
    monkeypatch.setenv("FAIRTRIAL_CONCURRENCY", "many")
    done = cli("doctor", "--json")
    assert (done.code, found(done)["settings"][0]) == (1, "failed")
    monkeypatch.setenv("FAIRTRIAL_CONCURRENCY", "3")
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "long")
    assert found(cli("doctor", "--json"))["settings"][0] == "failed"
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "5")
    monkeypatch.setenv("FAIRTRIAL_VIEW_TOKEN", "a token that somebody chose")
    monkeypatch.setenv("FAIRTRIAL_FILE_LIMITS", "2")
    assert found(cli("doctor", "--json"))["settings"][0] == "ok"
    monkeypatch.setenv("FAIRTRIAL_FILE_LIMITS", "nan")
    assert found(cli("doctor", "--json"))["settings"][0] == "failed"


def test_libraries_that_are_missing_or_too_old_are_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {"anyio": "4.6.9", "cloudpickle": None, "rapidfuzz": None}

    def version(name: str) -> str:
        if name in versions:
            if (known := versions[name]) is None:
                raise metadata.PackageNotFoundError(name)
            return known
        return "99.0"

    declared = ["anyio>=4.7", "cloudpickle>=3.1", 'rapidfuzz>=3.9; extra == "fuzzy"', "rich>=13.7"]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    monkeypatch.setattr(metadata, "version", version)
    done = cli("doctor", "--json")
    status, detail, remedy = found(done)["fairtrial"]
    assert (done.code, status, remedy) == (1, "failed", "pip install --upgrade fairtrial")
    assert "not installed: cloudpickle; too old: anyio 4.6.9 (needs 4.7)" in detail
    assert "rapidfuzz" not in detail  # An extra that nobody asked for.


@pytest.mark.parametrize(("python", "status"), [((3, 13, 9), "failed"), ((3, 14, 0), "ok"), ((3, 15, 2), "ok")])
def test_a_library_that_this_python_does_not_need_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, python: Any, status: str
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", lambda name: ["backports-zstd>=1.0; python_version < '3.14'"])
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(sys, "version_info", python)
    assert checks._libraries().status == status


@pytest.mark.parametrize(
    ("python", "redis", "status"),
    [((3, 12, 1), "8.1.0", "warning"), ((3, 13, 9), "7.0.0", "warning"), ((3, 13, 10), "8.1.0", "ok"),
     ((3, 14, 0), "8.1.0", "warning"), ((3, 14, 1), "8.1.0", "ok"), ((3, 12, 1), "8.1.1", "ok")],
)  # fmt: skip
def test_a_redis_py_with_a_known_defect_is_reported(
    monkeypatch: pytest.MonkeyPatch, python: Any, redis: str, status: str
) -> None:
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(metadata, "version", lambda name: redis)
    (check,) = checks._redis_library()
    assert check.status == status
