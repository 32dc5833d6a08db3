"""The manifests, the unit and the array script under `deploy/`: valid for the tools that read them, and consistent."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import psycopg
import pytest
import redis
import yaml
from psycopg import conninfo

from fairtrial import Dataset, EvalSuite, Sample, exact_match, open_store
from fairtrial.base import metrics
from fairtrial.cli.app import command_tree
from fairtrial.fleet import EvalLoop, EvalReply, EvalRequest, LoopGroup
from fairtrial.fleet.ops.health import STALL_SECONDS, Probe, exposition
from fairtrial.mailbox import InMemoryMailbox, PostgresConnection, PostgresMailbox
from fairtrial.mailbox.redis.receive import Keys
from fairtrial.viewer.team.config import read_settings
from fairtrial.viewer.team.serve import TeamServer
from tests.redis_server import free_port

pytestmark = pytest.mark.proves("R83", "R84")

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
VERSION = "1.36"
MANIFESTS = ("kubernetes.yaml", "kubernetes-job.yaml", "keda-postgresql.yaml", "keda-sqs.yaml", "kubernetes-view.yaml",
             "kubernetes-serve.yaml")  # fmt: skip
SCALERS = MANIFESTS[2:4]
KEDA: dict[str, Any] = json.loads(Path(__file__).with_name("keda_schema.json").read_text())
UNIT = DEPLOY / "fairtrial-worker@.service"
VIEW_UNIT = DEPLOY / "fairtrial-view.service"
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
    for name in SCALERS:
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


@pytest.mark.parametrize("name", SCALERS)
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


def options_of(*names: str) -> set[str]:
    command: Any = command_tree()
    for name in names:
        command = command.commands[name]
    return {option for parameter in command.params for option in parameter.opts}


def worker_flags(command: str) -> dict[str, str]:
    words = command.replace("\\\n", " ").split()
    flags = {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    assert set(flags) <= options_of("worker")
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


def test_the_unit_of_the_viewer_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    text = VIEW_UNIT.read_text()
    (program, command) = re.findall(r"^ExecStart=(\S+) (view .*)$", text, re.MULTILINE)[0]
    installed = tmp_path / VIEW_UNIT.name
    installed.write_text(text.replace(program, sys.executable).replace("/srv/evals\n", f"{tmp_path}\n"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", installed], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert {word.partition("=")[0] for word in command.split()[1:]} <= options_of("view")
    # The token is a credential, on no command line and in no environment; the state outlives a restart.
    assert "LoadCredential=token:" in text
    assert "--token-file=%d/token" in command
    (folder,) = re.findall(r"^StateDirectory=(\S+)$", text, re.MULTILINE)
    assert f"\nEnvironment=FAIRTRIAL_CACHE_DIR=%S/{folder}\n" in text
    # All that the unit of workers denies is denied here.
    hardening = re.compile(r"^(?:Protect|Private|Restrict|NoNew|Capability)\w+=.*$", re.MULTILINE)
    assert set(hardening.findall(UNIT.read_text())) <= set(hardening.findall(text))


def write_team(folder: Path, port: int) -> Path:
    """The file of a team with one project."""
    (folder / "team.toml").write_text(
        f"""url = "https://evals.example.org"\nlisten = "127.0.0.1:{port}"\n[identity]\nkind = "oidc"
issuer = "https://login.example.org"\nclient_id = "fairtrial"\n[projects.support]\nstore = "support.db"\n"""
    )
    return folder / "team.toml"


class TestTeam:
    """The manifest and the service of a team's viewer."""

    @pytest.fixture
    def parts(self) -> dict[str, Any]:
        return {one["kind"]: one for one in objects("kubernetes-serve.yaml")}

    @pytest.fixture
    def serve(self, parts: dict[str, Any]) -> Any:
        (only,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
        return only

    def test_it_is_as_closed_as_the_pods_of_workers(
        self, parts: dict[str, Any], serve: Any, container: Any, pod: Any
    ) -> None:
        own = parts["Deployment"]["spec"]["template"]["spec"]
        assert own["securityContext"] == pod["securityContext"]
        assert own["automountServiceAccountToken"] is False
        assert serve["securityContext"] == container["securityContext"]
        limits = {"cpu", "memory", "ephemeral-storage"}
        assert set(serve["resources"]["limits"]) == set(serve["resources"]["requests"]) == limits
        assert all("sizeLimit" in one["emptyDir"] for one in own["volumes"] if "emptyDir" in one)
        text = (DEPLOY / "kubernetes-serve.yaml").read_text()
        for key in re.findall(r"^ +(?:- )?key: (\S+)$", text, re.MULTILINE):
            assert re.search(rf"--from-(literal|file)={re.escape(key)}=", text), key
        secret = [one["valueFrom"] for one in serve["env"] if one["name"] == "FAIRTRIAL_CLIENT_SECRET"]
        assert secret == [{"secretKeyRef": {"name": "fairtrial-serve", "key": "client-secret"}}]

    def test_names_and_ports_fit_each_other(self, parts: dict[str, Any], serve: Any, compose: Any) -> None:
        ports = {one["name"]: one["containerPort"] for one in serve["ports"]}
        deployment, policy = parts["Deployment"]["spec"], parts["NetworkPolicy"]["spec"]
        assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == [ports["http"], ports["health"]]
        assert f"--health-port={ports['health']}" in serve["args"]
        assert f'listen = "0.0.0.0:{ports["http"]}"' in (DEPLOY / "kubernetes-serve.yaml").read_text()
        assert {serve[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness")} == {"/live"}
        assert serve["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "health"}
        labels = deployment["template"]["metadata"]["labels"]
        assert parts["Service"]["spec"]["selector"] == labels == policy["podSelector"]["matchLabels"]
        (served,) = parts["Service"]["spec"]["ports"]
        assert served["targetPort"] == "http"  # The port of probes and metrics is in no Service.
        (rule,), (tls,) = parts["Ingress"]["spec"]["rules"], parts["Ingress"]["spec"]["tls"]
        assert [rule["host"]] == tls["hosts"]
        assert rule["http"]["paths"][0]["backend"]["service"]["name"] == parts["Service"]["metadata"]["name"]
        assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
        service = compose["services"]["serve"]
        assert service["ports"] == [f"127.0.0.1:{ports['http']}:{ports['http']}"]
        assert f"http://127.0.0.1:{ports['health']}/live" in service["healthcheck"]["test"][-1]
        assert service["image"] == serve["image"] == compose["services"]["worker"]["image"]
        cache = service["environment"]["FAIRTRIAL_CACHE_DIR"]
        assert {"name": "FAIRTRIAL_CACHE_DIR", "value": cache} in serve["env"]
        assert [cache] == [one["mountPath"] for one in serve["volumeMounts"] if one["name"] == "cache"]
        assert f"serve:{cache}" in service["volumes"]
        assert f"RUN mkdir {Path(cache).name}\n" in (DEPLOY / "Dockerfile").read_text()

    def test_its_command_serves_and_passes_its_probes(self, serve: Any, tmp_path: Path) -> None:
        public, health = free_port(), free_port()
        write_team(tmp_path, public)
        words = [word.replace("/etc/fairtrial", str(tmp_path)).replace("8080", str(health)) for word in serve["args"]]
        environment = {**os.environ, "FAIRTRIAL_HEALTH_HOST": "127.0.0.1"}
        process = subprocess.Popen([sys.executable, "-m", "fairtrial.cli", *words], cwd=tmp_path, env=environment)
        try:
            deadline = time.monotonic() + 60
            while self.status(health, "/live") != 200:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            paths = [serve[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
            assert [self.status(health, path) for path in [*paths, "/metrics"]] == [200] * 4
            assert self.status(public, "/metrics") != 200
            assert self.status(public, "/healthz") == 200
        finally:
            process.terminate()
            assert process.wait(60) == 0

    @staticmethod
    def status(port: int, path: str) -> int:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", path, headers={"Host": "evals.example.org"})
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()


class TestViewer:
    """The manifest of the viewer, and its very command against a database that it can only read."""

    @pytest.fixture
    def parts(self) -> dict[str, Any]:
        return {one["kind"]: one for one in objects("kubernetes-view.yaml")}

    @pytest.fixture
    def view(self, parts: dict[str, Any]) -> Any:
        (only,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
        return only

    def test_it_is_as_closed_as_the_pods_of_workers(
        self, parts: dict[str, Any], view: Any, container: Any, pod: Any
    ) -> None:
        own = parts["Deployment"]["spec"]["template"]["spec"]
        assert own["securityContext"] == pod["securityContext"]
        assert own["automountServiceAccountToken"] is False
        assert view["securityContext"] == container["securityContext"]
        assert (
            set(view["resources"]["limits"])
            == {"cpu", "memory", "ephemeral-storage"}
            == set(view["resources"]["requests"])
        )
        assert view["image"] == container["image"]
        text = (DEPLOY / "kubernetes-view.yaml").read_text()
        for key in re.findall(r"^ +(?:- )?key: (\S+)$", text, re.MULTILINE):
            assert f"--from-literal={key}=" in text
        assert all("value" not in one for one in view["env"] if one["name"] == "FAIRTRIAL_STORE")

    def test_names_ports_and_volumes_fit_each_other(self, parts: dict[str, Any], view: Any) -> None:
        flags = dict(word.lstrip("-").partition("=")[::2] for word in view["args"][1:])
        assert {word.partition("=")[0] for word in view["args"][1:]} <= options_of("view")
        (port,) = view["ports"]
        (served,), (inward,) = parts["Service"]["spec"]["ports"], parts["NetworkPolicy"]["spec"]["ingress"]
        assert int(flags["port"]) == port["containerPort"] == inward["ports"][0]["port"]
        assert served["targetPort"] == port["name"] == view["readinessProbe"]["tcpSocket"]["port"]
        (rule,), (tls,) = parts["Ingress"]["spec"]["rules"], parts["Ingress"]["spec"]["tls"]
        assert [flags["trusted-host"]] == [rule["host"]] == tls["hosts"]
        (backend,) = rule["http"]["paths"]
        assert backend["backend"]["service"] == {
            "name": parts["Service"]["metadata"]["name"],
            "port": {"name": served["name"]},
        }
        labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert (
            parts["Service"]["spec"]["selector"]
            == labels
            == parts["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
        )
        mounts = {mount["mountPath"]: mount for mount in view["volumeMounts"]}
        assert mounts[str(Path(flags["token-file"]).parent)]["readOnly"] is True
        (cache,) = [one["value"] for one in view["env"] if one["name"] == "FAIRTRIAL_CACHE_DIR"]
        volumes = {volume["name"]: volume for volume in parts["Deployment"]["spec"]["template"]["spec"]["volumes"]}
        claim = volumes[mounts[cache]["name"]]["persistentVolumeClaim"]["claimName"]
        assert claim == parts["PersistentVolumeClaim"]["metadata"]["name"]
        assert view["livenessProbe"]["exec"] == view["startupProbe"]["exec"]
        assert parts["Deployment"]["spec"]["replicas"] == 1  # Sessions and the volume are of one pod.

    def test_its_command_serves_a_role_that_can_only_read_and_a_restart_signs_nobody_out(
        self, view: Any, pg_url: str, tmp_path: Path
    ) -> None:
        suite = EvalSuite("seen", Dataset([Sample("a", 1, 1)], name="numbers"), lambda number: number, exact_match)
        store = open_store(pg_url)
        suite.run_sync(store=store)
        store.close()
        text = (DEPLOY / "kubernetes-view.yaml").read_text()
        grants = re.findall(r"^#   ((?:CREATE ROLE|GRANT|ALTER DEFAULT) .*?;)", text, re.MULTILINE)
        assert len(grants) == 4
        token, port = "a token of sixteen or more", free_port()
        (tmp_path / "token").write_text(token)
        words = [
            word.replace("7878", str(port)).replace("/run/secrets/fairtrial", str(tmp_path)) for word in view["args"]
        ]
        role = conninfo.make_conninfo(pg_url, user="fairtrial_view", password="PASSWORD")
        facts = conninfo.conninfo_to_dict(role)
        url = f"postgresql://fairtrial_view:PASSWORD@{facts['host']}:{facts['port']}/{facts['dbname']}"
        environment = {**os.environ, "FAIRTRIAL_STORE": url, "FAIRTRIAL_CACHE_DIR": str(tmp_path / "state")}
        probe = [word.replace("7878", str(port)) for word in view["livenessProbe"]["exec"]["command"]]
        with psycopg.connect(pg_url, autocommit=True) as connection:
            for grant in grants:
                connection.execute(grant)
            try:
                first = self.started(words, environment, tmp_path)
                address = re.findall(r"^open http://\S+?/(\w+/)", first[1], re.MULTILINE)[0]
                assert token not in first[1]
                assert subprocess.run([sys.executable, *probe[1:]], check=False).returncode == 0
                assert self.asked(port, f"/{address}", {})[0] == 401
                form = urlencode({"token": token, "to": ""}).encode()
                origin = {"Origin": "https://evals.example.org", "Content-Type": "application/x-www-form-urlencoded"}
                status, headers, _ = self.asked(port, f"/{address}login", origin, form)
                assert status == 303
                assert "; Secure" in headers["set-cookie"]
                cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
                assert "seen" in self.asked(port, f"/{address}", cookie)[2]
                self.ended(first[0])
                assert subprocess.run([sys.executable, *probe[1:]], capture_output=True, check=False).returncode != 0
                second = self.started(words, environment, tmp_path)
                assert f"/{address}" in second[1]
                assert self.asked(port, f"/{address}", cookie)[0] == 200
                self.ended(second[0])
                with (
                    psycopg.connect(role) as reader,
                    pytest.raises(psycopg.errors.InsufficientPrivilege),
                ):
                    reader.execute("DELETE FROM runs")
            finally:
                connection.execute("DROP OWNED BY fairtrial_view")
                connection.execute("DROP ROLE fairtrial_view")

    def started(self, words: list[str], environment: dict[str, str], folder: Path) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fairtrial.cli", *words],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        said = ""
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if line.startswith("stop with"):
                return process, said
        raise AssertionError(said)

    def ended(self, process: subprocess.Popen[str]) -> None:
        process.terminate()
        process.communicate(timeout=60)

    def asked(
        self, port: int, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, dict[str, str], str]:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET" if body is None else "POST", path, body, {"Host": "evals.example.org", **headers})
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        connection.close()
        return found


def test_the_array_drains_before_its_time_is_over_and_gives_its_signals_to_the_worker() -> None:
    command = ARRAY[ARRAY.index("exec fairtrial worker ") :]
    assert ARRAY.endswith(command)  # The last command, and in place of the shell.
    (seconds,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", ARRAY, re.MULTILINE)
    assert int(seconds) >= int(worker_flags(command)["--drain"]) + 30
    assert "\n#SBATCH --requeue\n" in ARRAY
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"], check=True)


# The files in `deploy/` match the code: files, flags, ports, paths, times and permissions.


DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


class StrictLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML's own loader would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"duplicate key {key!r}{node.start_mark}")
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> list[Any]:
    return list(yaml.load_all(text, StrictLoader))


@pytest.fixture(scope="module")
def compose() -> Any:
    (found,) = read_yaml((DEPLOY / "compose.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, Any]:
    return {one["kind"]: one for one in read_yaml((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def pod(kubernetes: dict[str, Any]) -> Any:
    return kubernetes["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    (only,) = pod["containers"]
    return only


@pytest.fixture(scope="module")
def pods(kubernetes: dict[str, Any]) -> list[Any]:
    """Of the workers and of the client."""
    return [kubernetes[kind]["spec"]["template"]["spec"] for kind in ("Deployment", "Job")]


@pytest.fixture(scope="module")
def containers(pods: list[Any]) -> list[Any]:
    return [container for pod in pods for container in pod["containers"]]


def flags(command: list[str]) -> dict[str, str]:
    assert command[:2] == ["worker", "evals/suite.py"]
    rest = command[2:]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def image_command() -> list[str]:
    found = re.search(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    command: list[str] = json.loads(found[1])
    return command


def all_commands(compose: Any, container: Any) -> list[list[str]]:
    return [compose["services"]["worker"]["command"], container["args"], image_command()]


def test_the_commands_have_only_flags_that_workers_know(compose: Any, container: Any) -> None:
    given = {flag for command in all_commands(compose, container) for flag in flags(command)}
    # The group's own settings are there whichever command passes them on.
    settings = inspect.signature(LoopGroup).parameters
    assert {flag[2:].replace("-", "_") for flag in given if "health" in flag} <= set(settings)
    assert given <= options_of("worker")


def test_the_composed_client_leaves_the_work_to_the_workers_and_reads_their_queue(compose: Any) -> None:
    client, worker = (compose["services"][name] for name in ("client", "worker"))
    # Without --mailbox the trials would be executed in the client.
    assert client["command"] == ["run", worker["command"][1], "--mailbox", "--health-port", "8080"]
    assert "http://127.0.0.1:8080/health" in client["healthcheck"]["test"][-1]
    assert client["environment"]["FAIRTRIAL_MAILBOX"] == worker["environment"]["FAIRTRIAL_MAILBOX"]


def test_probes_ask_for_pages_that_exist_where_they_are_served(container: Any) -> None:
    (port,) = container["ports"]
    command = flags(container["args"])
    assert command["--health-port"] == str(port["containerPort"])
    assert command["--health-host"] == "0.0.0.0"  # Probes come from outside the pod.
    pages = set(re.findall(r'"(/[a-z]+)": self\._', inspect.getsource(Probe)))
    assert pages == {"/live", "/ready", "/health", "/metrics"}
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in asked.values()} == {port["name"]}
    assert [asked[name]["path"] for name in asked] == ["/live", "/live", "/ready"]
    # A probe waits longer than the page takes when the loop is stuck, and a short stall kills nobody.
    liveness = container["livenessProbe"]
    assert liveness["timeoutSeconds"] > 1
    stall = inspect.signature(LoopGroup).parameters["stall_seconds"].default
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= stall


def test_metrics_are_scraped_where_they_are_served(kubernetes: dict[str, Any], container: Any) -> None:
    notes = kubernetes["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == flags(container["args"])["--health-port"]
    assert notes["prometheus.io/path"] == "/metrics"


def test_a_drain_ends_before_the_kill(compose: Any, pod: Any, container: Any) -> None:
    assert pod["terminationGracePeriodSeconds"] >= int(flags(container["args"])["--drain"]) + 30
    worker = compose["services"]["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) >= int(flags(worker["command"])["--drain"]) + 30


def test_the_composed_workers_check_themselves_where_they_listen(compose: Any) -> None:
    worker = compose["services"]["worker"]
    command = flags(worker["command"])
    assert f"http://{command['--health-host']}:{command['--health-port']}/live" in worker["healthcheck"]["test"][-1]


def test_the_composed_watch_receives_where_it_is_asked_and_its_runs_are_those_of_the_alarm(compose: Any) -> None:
    watch, alarm = (compose["services"][name] for name in ("watch", "alarm"))
    assert watch["command"][:3] == ["watch", "start", "evals/live.py"]
    given = dict(zip(watch["command"][3::2], watch["command"][4::2], strict=True))
    assert set(given) <= options_of("watch", "start")
    port = given["--receive"]
    assert given["--host"] == "0.0.0.0"  # Its container's own; the machine publishes it on the loopback interface.
    assert watch["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"('127.0.0.1', {port})" in watch["healthcheck"]["test"][-1]
    assert alarm["command"] == ["watch", "alarm", "live"]
    assert alarm["environment"]["FAIRTRIAL_STORE"] == watch["environment"]["FAIRTRIAL_STORE"]
    installed = (DEPLOY / "requirements.txt").read_text()
    assert all(f"\n{name}==" in installed for name in ("aiohttp", "opentelemetry-proto"))


def test_a_composed_watch_starts_takes_traces_and_passes_its_health_check(compose: Any, tmp_path: Path) -> None:
    service, port = compose["services"]["watch"], str(free_port())
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "live.py").write_text((ROOT / "examples" / "live.py").read_text())
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]
    words = [{"4318": port, "0.0.0.0": "127.0.0.1"}.get(word, word) for word in words]
    environment = os.environ | {"FAIRTRIAL_STORE": str(tmp_path / "runs.db")}
    process = subprocess.Popen([sys.executable, "-m", "fairtrial.cli", *words], cwd=tmp_path, env=environment)
    try:
        _, _, check = service["healthcheck"]["test"][1:]
        deadline = time.monotonic() + 60
        while subprocess.run([sys.executable, "-c", check.replace("4318", port)], stderr=subprocess.DEVNULL).returncode:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        connection = HTTPConnection("127.0.0.1", int(port), timeout=10)
        connection.request("POST", "/v1/traces", b"{}", {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_workers_are_scaled_on_the_stream_they_read(kubernetes: dict[str, Any], container: Any) -> None:
    scaled = kubernetes["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == kubernetes["Deployment"]["metadata"]["name"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["stream"] == Keys.of("suite.requests").stream
    assert trigger["metadata"]["streamLength"] == flags(container["args"])["--concurrency"]
    assert trigger["authenticationRef"]["name"] == kubernetes["TriggerAuthentication"]["metadata"]["name"]
    assert "replicas" not in kubernetes["Deployment"]["spec"]  # Two hands on one wheel.


def test_secrets_come_from_secrets(compose: Any, kubernetes: dict[str, Any], containers: list[Any]) -> None:
    plain = ("JOB_UID", "FAIRTRIAL_HEALTH_HOST")
    variables = [variable for each in containers for variable in each["env"] if variable["name"] not in plain]
    assert all("secretKeyRef" in variable["valueFrom"] for variable in variables)
    for name in ("redis", "postgres"):  # Not in the environment, which `docker inspect` shows.
        service = compose["services"][name]
        assert service["secrets"] == [f"{name}_password"]
        assert compose["secrets"][f"{name}_password"] == {"environment": f"{name.upper()}_PASSWORD"}
        assert not [key for key in service.get("environment", {}) if re.fullmatch(".*(PASSWORD|AUTH)", key)]
    text = (DEPLOY / "kubernetes.yaml").read_text()
    for key in re.findall(r"^ +key: (\S+)$", text, re.MULTILINE):
        assert f"--from-literal={key}=" in text  # The comment that makes the secret makes all of it.
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD$|KEY|AUTH", name) or value.startswith("${")


def test_nothing_runs_as_root_or_writes_where_it_need_not(compose: Any, pods: list[Any], containers: list[Any]) -> None:
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user is not None
    for pod in pods:
        assert pod["securityContext"]["runAsUser"] == int(user[1]) > 0
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
    for container in containers:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert {compose["services"][name]["user"] for name in ("redis", "postgres")} == {"redis", "postgres"}
    assert DOCKERFILE.rindex("USER ") > DOCKERFILE.rindex("RUN pip")


def test_everything_has_limits(compose: Any, pods: list[Any], containers: list[Any]) -> None:
    for container in containers:
        assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
        assert set(container["resources"]["requests"]) == {"cpu", "memory", "ephemeral-storage"}
    assert all("sizeLimit" in volume["emptyDir"] for pod in pods for volume in pod["volumes"])
    for service in compose["services"].values():
        assert {"mem_limit", "cpus", "pids_limit"} <= set(service)
    # Redis refuses what is sent before the kernel kills it.
    maxmemory = re.search(r"^maxmemory (\d+)gb$", (DEPLOY / "redis.conf").read_text(), re.MULTILINE)
    assert maxmemory is not None
    assert int(compose["services"]["redis"]["mem_limit"].removesuffix("g")) > int(maxmemory[1])


def test_the_network_policy_covers_workers_and_client_and_leaves_them_only_what_they_need(
    kubernetes: dict[str, Any],
) -> None:
    policy = kubernetes["NetworkPolicy"]["spec"]
    for kind in ("Deployment", "Job"):
        labels = kubernetes[kind]["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (inward,) = policy["ingress"]
    assert inward["ports"] == [{"protocol": "TCP", "port": 8080}]
    assert inward["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    ports = [sorted({port["port"] for port in rule["ports"]}) for rule in policy["egress"]]
    assert ports == [[53], [6379], [5432], [443]]
    (outside,) = policy["egress"][-1]["to"]
    for private in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"):
        assert private in outside["ipBlock"]["except"]


def test_the_client_runs_the_suite_of_the_workers_and_is_probed_where_it_listens(kubernetes: dict[str, Any]) -> None:
    (client,) = kubernetes["Job"]["spec"]["template"]["spec"]["containers"]
    (worker,) = kubernetes["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert client["args"][:3] == ["run", worker["args"][1], "--mailbox"]
    given = dict(zip(client["args"][3::2], client["args"][4::2], strict=True))
    # The same for every pod of a Job, and another for the next Job: a restarted pod executes nothing twice.
    label = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    assert {"name": "JOB_UID", "valueFrom": label} in client["env"]
    assert given.pop("--once") == "$(JOB_UID)"
    assert given == {"--health-port": str(client["ports"][0]["containerPort"])}
    assert {"--mailbox", "--once", *given} <= options_of("run")
    assert {"name": "FAIRTRIAL_HEALTH_HOST", "value": "0.0.0.0"} in client["env"]
    assert client["livenessProbe"]["httpGet"] == {"path": "/live", "port": client["ports"][0]["name"]}


def test_images_are_named_plainly_and_the_image_is_made_of_files_that_exist(compose: Any, container: Any) -> None:
    (python,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.12\.\d+-slim-[a-z]+", python)  # Down to the patch.
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${PYTHON_IMAGE}"] * 2
    services = compose["services"]
    assert services["worker"]["build"]["args"]["PYTHON_IMAGE"] == f"${{PYTHON_IMAGE:-{python}}}"
    own = {services[name]["image"] for name in ("worker", "client", "watch", "alarm")}
    assert own | {container["image"]} == {"fairtrial-worker"}
    assert services["watch"]["build"] == services["worker"]["build"]
    for name in ("redis", "postgres"):
        assert re.fullmatch(rf"\$\{{{name.upper()}_IMAGE:-{name}:\d+(\.\d+)+\}}", services[name]["image"])
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert names == [
        "deploy/build-requirements.txt", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src",
        "deploy/requirements.txt",
    ]  # fmt: skip
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for name in names:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).is_file()
    assert (DEPLOY / compose["services"]["worker"]["build"]["context"]).resolve() == ROOT


def test_the_image_installs_the_versions_that_were_tested_and_checks_their_hashes() -> None:
    installs = re.findall(r"pip install ((?:[^&\n]|\\\n)*)", DOCKERFILE.partition("ARG ")[2])
    from_files = [line for line in installs if "--requirement" in line]
    assert len(from_files) == 2
    assert all("--require-hashes --only-binary :all:" in line for line in from_files)
    assert all("--no-index" in line for line in installs if line not in from_files)
    done = subprocess.run([sys.executable, ROOT / "scripts" / "constraints", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the image installs what was tested\n")
    for name in ("requirements.txt", "build-requirements.txt"):
        assert "://" not in (DEPLOY / name).read_text()
    installed = (DEPLOY / "requirements.txt").read_text()
    assert all(f"\n{name}==" in installed for name in ("redis", "psycopg", "psycopg-binary", "openai", "anthropic"))


def test_redis_starts_as_composed_with_its_user_its_limits_and_nobody_else(compose: Any, tmp_path: Path) -> None:
    shell, option, script = compose["services"]["redis"]["command"]
    port = free_port()
    script = script.replace("$$", "$").replace("/etc/fairtrial", str(DEPLOY)).replace("/data", str(tmp_path))
    script = script.rstrip("\n") + f" --bind 127.0.0.1 --port {port} --logfile {tmp_path}/log\n"
    (tmp_path / "redis_password").write_text("abc123def")
    script = script.replace("/run/secrets", str(tmp_path))
    process = subprocess.Popen([shell, option, script], cwd=tmp_path)
    try:
        client = redis.Redis(port=port, username="fairtrial", password="abc123def", protocol=2)
        for _ in range(500):
            try:
                client.ping()
                break
            except redis.exceptions.ConnectionError:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.02)
        info: Any = client.info()
        assert (info["aof_enabled"], info["maxmemory_policy"]) == (1, "noeviction")
        assert info["maxmemory"] > 0
        client.close()
        with redis.Redis(port=port, protocol=2) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
            nobody.ping()
        assert (tmp_path / "users.acl").stat().st_mode & 0o077 == 0
    finally:
        process.terminate()
        process.wait(20)


def test_a_key_that_is_written_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="duplicate key 'a'"):
        read_yaml("b: 1\nc:\n  a: 1\n  a: 2\n")


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    (found,) = read_yaml((DEPLOY / "alerts.yaml").read_text())
    (group,) = found["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_alerts_and_the_runbook_name_metrics_that_are_exported(
    alerts: list[dict[str, Any]], tmp_path: Path
) -> None:
    mailbox = InMemoryMailbox("jobs", EvalRequest)
    loop = EvalLoop(requests=mailbox, loop=str, evaluator=exact_match, results=InMemoryMailbox("results", EvalReply))
    group = LoopGroup([loop], health_port=0, watch={"jobs": mailbox})
    group._depths.depths["jobs"] = await mailbox.depth()
    assert group._health is not None
    with metrics.track_run("run", "suite", 1):
        page = await group._health._metrics()
        own = exposition(group._pages.families())
    team = TeamServer(read_settings(write_team(tmp_path, 7879)))
    own += await team._metrics()
    for viewer in team.viewers.values():
        viewer.store.close()
    team._database.close()
    exported = set(re.findall(r"^# TYPE (\S+)", page.body + own, re.MULTILINE))
    exported |= {f"{one.name}{end}" for one in metrics.HISTOGRAMS for end in ("_bucket", "_sum", "_count")}
    named = {name for rule in alerts for name in re.findall(r"\bfairtrial_\w+", rule["expr"])}
    assert len(named) > 10
    assert named - exported == set()
    runbook = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"`(fairtrial_\w+)", runbook))
    assert shown - exported == set()
    assert {one.name for one in (*metrics.HISTOGRAMS, *metrics.MEASURES)} <= shown


def test_every_alert_has_its_paragraph_in_the_runbook(alerts: list[dict[str, Any]]) -> None:
    runbook = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
    names = [rule["alert"] for rule in alerts]
    assert re.findall(r"^### (\w+)$", runbook, re.MULTILINE) == names
    for rule in alerts:
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
    # The rule of a stuck event loop and the probe agree.
    assert f"silence_seconds > {STALL_SECONDS:g}" in alerts[0]["expr"]
