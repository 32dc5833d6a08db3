"""The kinds "docker" and "podman": one container per sandbox, by the command line of the engine.

The container lives as long as the standard input of `docker run`: if this process is killed, it ends and is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from dataclasses import replace

import anyio
from anyio.abc import Process

from fairtrial.errors import SandboxUnavailableError
from fairtrial.integrations.sandbox.processes import run_process
from fairtrial.integrations.sandbox.settings import RawResult, SandboxCommand, SandboxSettings

_START_SECONDS = 120.0  # The image may have to be pulled.
_GRACE_SECONDS = 10.0
_READY = b"fairtrial-sandbox-ready"
_WAIT = f"echo {_READY.decode()}; read _"
_USER = "1000:1000"
_KILLED = 137
_NOFILE = 1024


def run_arguments(engine: str, settings: SandboxSettings, name: str) -> list[str]:
    """Return the command that starts a container which waits for commands."""
    limits = settings.limits
    argv = [
        engine,
        "run",
        "--interactive",
        "--rm",
        "--init",
        "--name",
        name,
        "--label",
        "fairtrial.integrations.sandbox=1",
    ]
    argv += ["--network", "bridge" if settings.network else "none"]
    argv += ["--user", _USER, "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"]
    argv += ["--memory", str(limits.memory), "--memory-swap", str(limits.memory)]
    argv += ["--pids-limit", str(limits.processes + 2), "--ulimit", f"nofile={_NOFILE}", "--ulimit", "core=0"]
    argv += ["--ulimit", f"fsize={limits.disk}"]
    for path in ("/box", "/tmp"):  # noqa: S108
        options = f"rw,exec,nosuid,nodev,size={limits.disk},nr_inodes={limits.files},mode=1777"
        argv += ["--tmpfs", f"{path}:{options}"]
    for path in settings.readable:
        argv += ["--mount", f"type=bind,source={path},target={path},readonly"]
    return [*argv, "--workdir", "/box", "--entrypoint", "sh", settings.image, "-c", _WAIT]


def exec_arguments(engine: str, name: str, command: SandboxCommand) -> list[str]:
    """Return the command that runs a command in the container; `timeout` kills its process group there."""
    argv = [engine, "exec", "--interactive", "--workdir", command.cwd]
    for key, value in command.env.items():
        argv += ["--env", f"{key}={value}"]
    if command.user is not None:
        argv += ["--user", command.user]
    return [*argv, name, "timeout", "-s", "KILL", f"{command.limits.seconds:g}", *command.argv]


class ContainerBackend:
    """A container that runs commands one by one. What a command leaves in the background lasts until `close`."""

    work = "/box"
    path = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    enforcement = "container"

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self.name = f"fairtrial-{uuid.uuid4().hex}"
        self._engine = ""
        self._process: Process | None = None

    async def start(self) -> None:
        """Start the container."""
        engine = shutil.which(self.settings.kind)
        if engine is None:
            raise SandboxUnavailableError(f"cannot make a {self.settings.kind} sandbox: {self.settings.kind} not found")
        self._engine = engine
        self._process = await anyio.open_process(
            run_arguments(engine, self.settings, self.name), stdin=subprocess.PIPE, start_new_session=True
        )
        if not await self._is_ready(self._process):
            reason = await self._first_errors(self._process)
            await self.close()
            raise SandboxUnavailableError(f"cannot make a {self.settings.kind} sandbox: {reason}")

    @staticmethod
    async def _is_ready(process: Process) -> bool:
        said = b""
        with anyio.move_on_after(_START_SECONDS):
            while process.stdout is not None and _READY not in said:
                try:
                    said += await process.stdout.receive()
                except anyio.EndOfStream:
                    break
        return _READY in said

    @staticmethod
    async def _first_errors(process: Process) -> str:
        with anyio.move_on_after(1):
            if process.stderr is not None:
                try:
                    return (await process.stderr.receive(4096)).decode("utf-8", "replace").strip()
                except anyio.EndOfStream:
                    pass
        return f"it did not start within {_START_SECONDS:.0f} s"

    async def run(self, command: SandboxCommand) -> RawResult:
        """Run a command in the container."""
        limits = replace(command.limits, seconds=command.limits.seconds + _GRACE_SECONDS)
        started = anyio.current_time()
        result = await run_process(
            exec_arguments(self._engine, self.name, command), command.input, limits, env=os.environ
        )
        late = anyio.current_time() - started >= command.limits.seconds
        return replace(result, limit="time") if late and result.returncode in (_KILLED, -9) else result

    async def close(self) -> None:
        """Remove the container with its files."""
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            limits = replace(self.settings.limits, seconds=30.0)
            await run_process([self._engine, "rm", "--force", self.name], b"", limits, env=os.environ)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.aclose()
