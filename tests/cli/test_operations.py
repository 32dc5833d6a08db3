"""Logs as JSON, and `--health-port` of commands."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from tests.cli.conftest import Cli
from tests.cli.test_screens import environment
from tests.redis_server import RedisServer, free_port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_everything_a_run_says_beside_its_report_is_json(
    cli: Cli, evals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_LOG_FORMAT", "json")
    text = evals.read_text().replace(
        "    if number ==", '    __import__("logging").warning("number %d", number)\n    if number =='
    )
    evals.write_text(text)
    done = cli("run", "evals.py", "--fail-under", "0.9")
    assert done.code == 1
    said = records(done.err)
    run_id = open_store().runs()[0].run_id
    (record,) = (record for record in said if record["message"] == "number 3")
    assert (record["run"], record["trial"], record["level"]) == (run_id, f"{run_id}/baseline/three#0", "warning")
    assert said[-1]["level"] == "error"
    assert said[-1]["message"].startswith("exit 1: 75.0% passed")


def test_the_setting_of_the_environment_counts_and_errors_are_json(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_LOG_FORMAT", "json")
    done = cli("run", "nothing.py")
    assert done.code == 2
    first = records(done.err)[0]
    assert (first["level"], first["logger"]) == ("error", "fairtrial.cli")
    monkeypatch.setenv("FAIRTRIAL_LOG_FORMAT", "xml")
    assert cli("run", "nothing.py").err.startswith("error: FAIRTRIAL_LOG_FORMAT must be text or json (got 'xml')")


def test_logging_is_as_before_once_the_command_has_ended(
    cli: Cli, evals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_LOG_FORMAT", "json")
    ours, root = logging.getLogger("fairtrial"), logging.getLogger()
    before = root.handlers[:], ours.handlers[:], ours.level, ours.propagate
    cli("run", "evals.py")
    assert (root.handlers[:], ours.handlers[:], ours.level, ours.propagate) == before


def test_a_worker_logs_json_with_its_name(evals: Path, server: RedisServer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fairtrial.cli", "worker", "evals.py", "--mailbox", server.url, "--name", "w1",
         "--until-empty", "--empty-seconds", "0"],
        env=environment(FAIRTRIAL_LOG_FORMAT="json"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = records(done.stderr)
    assert said[0]["message"].startswith("worker w1 takes work of suite 'doubles'")
    assert all(record["level"] == "info" for record in said)


def test_a_run_answers_probes_while_it_goes_on(cli: Cli, evals: Path) -> None:
    port = free_port()
    look = f"from urllib.request import urlopen\n    print(urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    evals.write_text(
        evals.read_text().replace("    if number ==", f"    {look}\n    if number ==").replace("(inline=True)", "()")
    )
    done = cli("run", "evals.py", "--quiet", "--health-port", str(port))
    assert done.code == 0, done.err
    assert 'fairtrial_run_trials{run="' in done.out
    assert 'state="planned",suite="doubles"} 4.0' in done.out
