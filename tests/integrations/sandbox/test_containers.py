"""The command lines of docker and podman. No container is started here: no engine is part of the test environment."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fairtrial.errors import SandboxUnavailableError
from fairtrial.integrations.sandbox import Sandbox, SandboxLimits, SandboxSettings
from fairtrial.integrations.sandbox.container import exec_arguments, run_arguments
from fairtrial.integrations.sandbox.settings import SandboxCommand


def pairs(argv: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(argv))


def test_a_container_starts_without_network_privileges_or_writable_image_and_with_limits() -> None:
    limits = SandboxLimits(memory=2**30, processes=50, disk=2**20, files=100)
    settings = SandboxSettings(kind="podman", limits=limits, readable=("/data",), image="python:3.13")
    argv = run_arguments("podman", settings, "box-1")
    assert argv[:6] == ["podman", "run", "--interactive", "--rm", "--init", "--name"]
    assert pairs(argv) >= {
        ("--network", "none"),
        ("--user", "1000:1000"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--memory", "1073741824"),
        ("--memory-swap", "1073741824"),
        ("--pids-limit", "52"),
        ("--ulimit", "nofile=1024"),
        ("--ulimit", "fsize=1048576"),
        ("--tmpfs", "/box:rw,exec,nosuid,nodev,size=1048576,nr_inodes=100,mode=1777"),
        ("--mount", "type=bind,source=/data,target=/data,readonly"),
        ("--entrypoint", "sh"),
    }
    assert "--read-only" in argv
    assert argv[-3:] == ["python:3.13", "-c", "echo fairtrial-sandbox-ready; read _"]
    assert ("--network", "bridge") in pairs(run_arguments("docker", SandboxSettings(network=True), "box-1"))


def test_a_command_runs_in_its_directory_with_its_variables_and_its_time_limit() -> None:
    command = SandboxCommand(("ls", "-l"), b"", "/box/a", {"KEY": "a b"}, SandboxLimits(seconds=2.5), "root")
    assert exec_arguments("docker", "box-1", command) == [
        *("docker", "exec", "--interactive", "--workdir", "/box/a", "--env", "KEY=a b", "--user", "root"),
        *("box-1", "timeout", "-s", "KILL", "2.5", "ls", "-l"),
    ]


async def test_a_missing_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for kind in ("docker", "podman"):
        with pytest.raises(SandboxUnavailableError, match=f"{kind} not found"):
            await Sandbox(kind).exec(["true"])


async def test_an_engine_that_fails_is_refused_with_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 125\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailableError, match="Cannot connect to the Docker daemon"):
        await Sandbox("docker").exec(["true"])
