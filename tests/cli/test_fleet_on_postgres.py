"""Every command that takes the address of a queue, on PostgreSQL."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairtrial import Sample
from fairtrial.fleet import EvalRequest, connect_broker
from tests.cli.conftest import Cli
from tests.cli.test_screens import environment

SECRET = "store-test-password"


def send(url: str, *bodies: Any, reply_to: str | None = None) -> None:
    """Queue requests for suite "doubles"."""

    async def work() -> None:
        broker = connect_broker(url)
        mailbox: Any = await broker.requests("doubles")
        for body in bodies:
            await mailbox.send(body, reply_to=reply_to)
        while (await mailbox.depth()).waiting and "nonsense" in bodies:
            await mailbox.receive(10, 60, 0)
        await broker.close()

    asyncio.run(work())


@pytest.mark.proves("R67")
def test_a_fleet_runs_on_the_stores_own_database(
    cli: Cli, evals: Path, pg_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_STORE", pg_url)
    command = [
        sys.executable,
        "-m",
        "fairtrial.cli",
        "worker",
        "evals.py",
        "--mailbox",
        pg_url,
        "--name",
        "w1",
        "--json",
    ]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        try:
            done = cli("run", "evals.py", "--mailbox", pg_url, "--quiet")
            assert (done.code, done.out) == (0, "doubles@1:baseline  pass rate 75.0%, 4 scored, 0 errors\n"), done.err
            facts = cli("fleet", "doubles", "--mailbox", pg_url, "--json").json
        finally:
            worker.terminate()
            said, log = worker.communicate(timeout=60)
    assert worker.returncode == 0, log
    assert '"received": 4' in said
    (suite,) = facts["suites"]
    assert (suite["waiting"], suite["in_flight"], [one["name"] for one in suite["workers"]]) == (0, 0, ["w1"])
    assert SECRET not in said + log + done.err


def test_dead_letters_are_listed_retried_and_dropped(cli: Cli, evals: Path, pg_url: str) -> None:
    send(pg_url, "nonsense", "nonsense")
    listed = cli("fleet", "dlq", "list", "doubles", "--mailbox", pg_url, "--json").json["letters"]
    assert len(listed) == 2
    assert "nonsense" in cli("fleet", "dlq", "show", "doubles", listed[0]["id"], "--mailbox", pg_url).out
    assert cli("fleet", "dlq", "retry", "doubles", listed[0]["id"], "--mailbox", pg_url, "--force").code == 0
    assert cli("fleet", "dlq", "drop", "doubles", "--all", "--mailbox", pg_url).code == 0
    assert cli("fleet", "dlq", "list", "doubles", "--mailbox", pg_url, "--json").json["letters"] == []
    assert cli("fleet", "doubles", "--mailbox", pg_url).out.splitlines()[1].split()[:2] == ["doubles", "1"]
    done = cli("fleet", "dlq", "list", "dubbles", "--mailbox", pg_url)
    assert "did you mean doubles" in done.err


def test_requests_of_unknown_runs_are_purged(cli: Cli, evals: Path, pg_url: str) -> None:
    cli("run", "evals.py", "--quiet")
    send(pg_url, EvalRequest(sample=Sample("s", 1)), reply_to="doubles.results.gone")
    done = cli("fleet", "doubles", "--purge", "--yes", "--mailbox", pg_url, "--json")
    assert done.json["removed"] == 1, done.err


def test_doctor_checks_the_queue_and_creates_no_tables(cli: Cli, pg_url: str) -> None:
    def checks(url: str) -> dict[str, tuple[str, str]]:
        done = cli("doctor", "--mailbox", url, "--json")
        assert SECRET not in done.out + done.err
        return {one["name"]: (one["status"], one["detail"]) for one in done.json["checks"]}

    found = checks(pg_url)
    assert found["queue"][0] == "ok"
    assert "PostgreSQL" in found["queue"][1]
    assert found["queue rights"] == ("ok", "the first worker or client can create the tables")
    with psycopg.connect(pg_url, autocommit=True) as admin:
        assert admin.execute("SELECT to_regclass('mailbox_messages')").fetchone() == (None,)
        send(pg_url, EvalRequest(sample=Sample("s", 1)))
        assert checks(pg_url)["queue rights"] == ("ok", "a message was sent, received and acknowledged")
        assert admin.execute("SELECT name FROM mailbox_queues").fetchall() == [("doubles.requests",)]
        role = psycopg.sql.Identifier(f"reader_{pg_url.rpartition('/')[2]}")
        admin.execute(psycopg.sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, SECRET))
        admin.execute(psycopg.sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {}").format(role))
    reader = pg_url.replace("tester:", f"reader_{pg_url.rpartition('/')[2]}:")
    assert checks(reader)["queue rights"][0] == "warning"
    assert checks(pg_url.replace(SECRET, "wrong-password"))["queue"][0] == "failed"
