"""The manifests, the unit and the array script under `deploy/`: valid for the tools that read them, and consistent."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import psycopg
import pytest

from fairtrial.cli import command_worker
from fairtrial.mailbox import PostgresConnection, PostgresMailbox
from tests.test_deploy import DEPLOY, read_yaml

pytestmark = pytest.mark.proves("R83", "R84")

VERSION = "1.36"
MANIFESTS = ("kubernetes.yaml", "kubernetes-job.yaml", "keda-postgresql.yaml", "keda-sqs.yaml")
KEDA: dict[str, Any] = json.loads(Path(__file__).with_name("keda_schema.json").read_text())
UNIT = DEPLOY / "fairtrial-worker@.service"
ARRAY = (DEPLOY / "slurm.sbatch").read_text()


def objects(name: str) -> list[dict[str, Any]]:
    return read_yaml((DEPLOY / name).read_text())


def validate(manifest: dict[str, Any]) -> None:
    if manifest["apiVersion"].startswith("keda.sh/"):
        jsonschema.Draft202012Validator(KEDA).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_valid(name: str) -> None:
    for manifest in objects(name):
        validate(manifest)


def test_the_validators_notice_mistakes() -> None:
    jsonschema.Draft202012Validator.check_schema(KEDA)
    (job,) = objects("kubernetes-job.yaml")
    for change in ({"paralelism": 3}, {"parallelism": "ten"}):
        with pytest.raises(kubernetes_validate.ValidationError):
            validate({**job, "spec": {**job["spec"], **change}})
    for name in MANIFESTS[2:]:
        scaled = next(manifest for manifest in objects(name) if manifest["kind"] == "ScaledObject")
        for wrong in ({"queueLenght": "64"}, {"queueLength": 64}):
            broken = copy.deepcopy(scaled)
            broken["spec"]["triggers"][0]["metadata"] |= wrong
            with pytest.raises(jsonschema.ValidationError):
                validate(broken)


def test_the_job_is_the_deployment_with_an_end() -> None:
    """Also what is tested of the Deployment's pods: user, file system, limits, probes, secrets."""
    (job,) = objects("kubernetes-job.yaml")
    deployment = next(manifest for manifest in objects("kubernetes.yaml") if manifest["kind"] == "Deployment")
    once, always = (copy.deepcopy(manifest["spec"]["template"]) for manifest in (job, deployment))
    assert once["spec"].pop("restartPolicy") == "OnFailure"
    args, served = (template["spec"]["containers"][0].pop("args") for template in (once, always))
    assert once == always
    at = args.index("--until-empty")
    assert args[:at] + args[at + 3 :] == served
    assert args[at + 1] == "--empty-seconds"
    assert float(args[at + 2]) >= 60  # The pods may start before their client.
    assert "completions" not in job["spec"]  # Or the Job would start pods after the end of the work.


@pytest.mark.parametrize("name", MANIFESTS[2:])
def test_other_queues_scale_the_same_deployment(name: str) -> None:
    authentication, scaled = objects(name)
    redis = next(manifest for manifest in objects("kubernetes.yaml") if manifest["kind"] == "ScaledObject")
    (trigger,), (by_redis,) = scaled["spec"].pop("triggers"), redis["spec"].pop("triggers")
    assert scaled == redis
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    target = {"postgresql": "targetQueryValue", "aws-sqs-queue": "queueLength"}[trigger["type"]]
    assert trigger["metadata"][target] == by_redis["metadata"]["streamLength"]


def test_the_scalers_count_the_requests_of_the_suite() -> None:
    query = objects("keda-postgresql.yaml")[1]["spec"]["triggers"][0]["metadata"]["query"]
    assert "name = 'suite.requests'" in query
    queue = objects("keda-sqs.yaml")[1]["spec"]["triggers"][0]["metadata"]["queueURL"]
    assert queue == f"fairtrial-suite-requests-{hashlib.sha256(b'suite.requests').hexdigest()[:16]}"


def test_the_query_of_the_scaler_counts_what_is_waiting_delayed_and_in_flight(pg_url: str) -> None:
    """The very query of the manifest, in a database with more than the requests of its suite."""
    query = objects("keda-postgresql.yaml")[1]["spec"]["triggers"][0]["metadata"]["query"]

    async def fill() -> None:
        async with PostgresConnection(pg_url) as connection:
            await PostgresMailbox("suite.results.run", object, connection).send_all(["a result"] * 3)
            await PostgresMailbox("other.requests", object, connection).send_all(["of another suite"] * 5)
            async with PostgresMailbox("suite.requests", object, connection) as requests:
                await requests.send_all(list(range(20)))
                taken = await requests.receive(8, 60, 0)
                await taken[0].dead_letter("cannot be done")
                await taken[1].nack(600)
                await taken[2].acknowledge()

    with psycopg.connect(pg_url, autocommit=True) as connection:
        asyncio.run(fill())
        assert connection.execute(query).fetchall() == [(20 - 1 - 1,)]
        # The rights that the comment of the manifest names are enough.
        connection.execute("CREATE ROLE keda")
        try:
            connection.execute("GRANT SELECT ON mailbox_queues, mailbox_messages TO keda")
            connection.execute("SET ROLE keda")
            assert connection.execute(query).fetchall() == [(18,)]
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP OWNED BY keda")
            connection.execute("DROP ROLE keda")


def worker_flags(command: str) -> dict[str, str]:
    source = Path(command_worker.__file__).read_text()
    words = command.replace("\\\n", " ").split()
    flags = {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    assert all(f'"{flag}"' in source for flag in flags)
    return flags


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    text = UNIT.read_text()
    (command,) = re.findall(r"^ExecStart=(\S+) (worker .*)$", text, re.MULTILINE)
    installed = tmp_path / UNIT.name
    installed.write_text(text.replace(command[0], sys.executable).replace("/srv/evals\n", f"{tmp_path}\n"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", installed], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) >= int(worker_flags(command[1])["--drain"]) + 30
    installed.write_text(text.replace(command[0], sys.executable).replace("Restart=always", "Restart=alway"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", installed], capture_output=True, text=True)
    assert "Failed to parse" in done.stderr


def test_the_array_drains_before_its_time_is_over_and_gives_its_signals_to_the_worker() -> None:
    command = ARRAY[ARRAY.index("exec fairtrial worker ") :]
    assert ARRAY.endswith(command)  # The last command, and in place of the shell.
    (seconds,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", ARRAY, re.MULTILINE)
    assert int(seconds) >= int(worker_flags(command)["--drain"]) + 30
    assert "\n#SBATCH --requeue\n" in ARRAY
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"], check=True)
