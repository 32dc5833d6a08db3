"""Sandboxes in containers, without isolation, and for Inspect."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from fairtrial.base.system import kill_group
from fairtrial.errors import ConfigurationError, SandboxError, SandboxUnavailableError
from fairtrial.integrations.sandbox.bwrap import CappedOutput
from fairtrial.integrations.sandbox.settings import (
    ExceededLimit,
    RawResult,
    SandboxCommand,
    SandboxLimits,
    SandboxSettings,
)

_DRAIN_SECONDS = 1.0


async def run_process(
    argv: Sequence[str],
    data: bytes,
    limits: SandboxLimits,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> RawResult:
    """Run a program; its process group is killed when it ends and when its time is over."""
    try:
        process = await anyio.open_process(list(argv), stdin=subprocess.PIPE, env=env, cwd=cwd, start_new_session=True)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        return RawResult(127 if missing else 126, b"", f"{argv[0]}: {error}\n".encode("utf-8", "replace"))
    stdout, stderr = CappedOutput(limits.output), CappedOutput(limits.output)
    limit: ExceededLimit | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_write, process.stdin, data)
            group.start_soon(_read, process.stdout, stdout)
            group.start_soon(_read, process.stderr, stderr)
            with anyio.move_on_after(limits.seconds) as scope:
                await process.wait()
            if scope.cancelled_caught:
                limit = "time"
            _kill_group(process)
            # A process that left the group may keep a pipe open.
            group.cancel_scope.deadline = anyio.current_time() + _DRAIN_SECONDS
    finally:
        _kill_group(process)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    returncode = -signal.SIGKILL if process.returncode is None else process.returncode
    return RawResult(returncode, bytes(stdout.data), bytes(stderr.data), limit, stdout.truncated or stderr.truncated)


def _kill_group(process: Process) -> None:
    kill_group(process.pid)


async def _write(stream: ByteSendStream | None, data: bytes) -> None:
    if stream is not None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await stream.send(data)
        with contextlib.suppress(OSError, anyio.BrokenResourceError):
            await stream.aclose()


async def _read(stream: ByteReceiveStream | None, output: CappedOutput) -> None:
    if stream is not None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in stream:
                output.add(chunk)


class LocalBackend:
    """Commands without isolation, for code that you trust. Memory, processes, disk and network are not limited."""

    enforcement = "none"

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self.work = ""

    @property
    def path(self) -> str:
        """The PATH of commands."""
        return os.environ.get("PATH", os.defpath)

    async def start(self) -> None:
        """Make the working directory."""
        self.work = tempfile.mkdtemp(prefix="fairtrial-unsafe-local-")

    async def run(self, command: SandboxCommand) -> RawResult:
        """Run a command as this user."""
        if command.user is not None:
            raise ConfigurationError(f"an unsafe-local sandbox cannot change the user (got user={command.user!r})")
        return await run_process(command.argv, command.input, command.limits, env=command.env, cwd=command.cwd)

    async def close(self) -> None:
        """Delete the working directory."""
        if self.work:
            shutil.rmtree(self.work, ignore_errors=True)


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
    argv = [engine, "run", "--interactive", "--rm", "--init", "--name", name, "--label", "fairtrial.sandbox=1"]
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
        output = b""
        with anyio.move_on_after(_START_SECONDS):
            while process.stdout is not None and _READY not in output:
                try:
                    output += await process.stdout.receive()
                except anyio.EndOfStream:
                    break
        return _READY in output

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


_TASK = "fairtrial"


def find_provider(name: str) -> Any:
    """Return the class of a provider that Inspect knows by this name."""
    try:
        from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
    except ImportError as error:
        raise SandboxUnavailableError(
            f"sandbox inspect:{name} needs inspect-ai: pip install inspect-ai ({error})"
        ) from None
    try:
        return registry_find_sandboxenv(name)
    except ValueError as error:
        raise SandboxUnavailableError(f"Inspect has no sandbox provider {name!r}: {error}") from None


class InspectBackend:
    """One sample of a provider of Inspect. Its own limits apply; ours of time and output are added."""

    work = ""
    path = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    enforcement = "provider"

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._name = settings.kind.partition(":")[2]
        self._provider: Any = None
        self._environments: dict[str, Any] = {}

    async def start(self) -> None:
        """Start the provider's environments for one sample."""
        self._provider = find_provider(self._name)
        await self._provider.task_init(_TASK, None)
        self._environments = await self._provider.sample_init(_TASK, None, {})

    async def run(self, command: SandboxCommand) -> RawResult:
        """Run a command in the default environment."""
        limits = command.limits
        environment = self._environments.get("default") or next(iter(self._environments.values()))
        try:
            result = await environment.exec(
                list(command.argv),
                input=command.input,
                cwd=command.cwd or None,
                env=dict(command.env),
                user=command.user,
                timeout=max(1, round(limits.seconds)),
            )
        except TimeoutError:
            return RawResult(-9, b"", b"", "time")
        except UnicodeDecodeError:
            raise SandboxError(
                f"Inspect's provider {self._name!r} returns text only, and {command.argv[0]!r} wrote other bytes"
            ) from None
        except (OSError, ValueError) as error:
            status = 127 if isinstance(error, FileNotFoundError) else 126
            return RawResult(status, b"", f"{command.argv[0]}: {error}\n".encode("utf-8", "replace"))
        except Exception as error:
            written = getattr(error, "truncated_output", None)  # OutputLimitExceededError of Inspect.
            if written is None:
                raise
            return RawResult(-9, written.encode("utf-8", "replace")[: limits.output], b"", None, True)
        stdout, stderr = result.stdout.encode("utf-8", "replace"), result.stderr.encode("utf-8", "replace")
        truncated = len(stdout) > limits.output or len(stderr) > limits.output
        return RawResult(result.returncode, stdout[: limits.output], stderr[: limits.output], None, truncated)

    async def close(self) -> None:
        """Clean up what the provider made."""
        if self._provider is not None:
            await self._provider.sample_cleanup(_TASK, None, self._environments, False)
            await self._provider.task_cleanup(_TASK, None, True)
            self._provider = None
