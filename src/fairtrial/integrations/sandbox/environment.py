"""Sandboxes: environments in which code that a model wrote can run."""

from __future__ import annotations

import base64
import posixpath
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Protocol, Self

import anyio

from fairtrial.base.foreign import ExpansionBudget, expand, limit_factor
from fairtrial.base.plugins import load_plugin
from fairtrial.base.system import require_posix
from fairtrial.errors import ConfigurationError, EnvironmentMismatchError, SandboxError
from fairtrial.integrations.sandbox.settings import (
    MIB,
    ExceededLimit,
    ExecResult,
    RawResult,
    SandboxCommand,
    SandboxLimits,
    SandboxSettings,
)
from fairtrial.trials.environment import check_state

_STATE_LIMIT = 64 * MIB
_TOOL_OUTPUT = 20_000  # Characters of each stream that a model gets to read.
_ARCHIVE = ("tar", "--format=gnu", "--sort=name", "--numeric-owner", "--owner=0", "--group=0", "-cf", "-", ".")


class SandboxBackend(Protocol):
    """What a kind of sandbox does; `Sandbox` adds files, tools, saved states and one command at a time."""

    @property
    def work(self) -> str:
        """The working directory, as commands see it."""
        ...

    @property
    def path(self) -> str:
        """The PATH of commands."""
        ...

    @property
    def enforcement(self) -> str:
        """What enforces the limits of memory and processes."""
        ...

    async def start(self) -> None:
        """Start it; raises SandboxUnavailableError if it cannot isolate."""
        ...

    async def run(self, command: SandboxCommand) -> RawResult:
        """Run a command to its end, or to one of its limits."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


def backend_of(settings: SandboxSettings) -> SandboxBackend:
    """Return the backend of a kind. There is no fallback from one kind to another."""
    require_posix("a sandbox works", "run what needs one there, or in a Linux of Windows (WSL 2)")
    kind = load_plugin("sandboxes", settings.kind.partition(":")[0], "the kind of a sandbox")
    backend: SandboxBackend = kind(settings)
    return backend


class Sandbox:
    """An environment that runs commands isolated from this machine, with limits; files last until it is closed.

        async with Sandbox() as sandbox:
            await sandbox.write_file("fib.py", code)
            result = await sandbox.exec(["python3", "fib.py"], timeout=10)

    It starts with the first command. If the machine does not allow isolation, that raises `SandboxUnavailableError`;
    it never runs a command with less isolation than asked for. Commands run one at a time, and whatever a command
    started ends with it. A subclass with its own `defaults` can be saved and restored with those.

    Args:
        kind: "bwrap" (the default, Linux), "docker", "podman", "inspect:NAME" for a provider of Inspect, or
            "unsafe-local", which isolates nothing.
        network: Whether commands may use the network of this machine, loopback included.
        readable: Files and directories of this machine that commands may read, at the same path.
        env: Environment variables of every command; nothing else is taken from this process.
        limits: What one command may use.
        image: The image of a container; for docker and podman.
    """

    env_kind = "fairtrial.sandbox"
    version = "1"
    defaults: ClassVar[SandboxSettings] = SandboxSettings()

    def __init__(
        self,
        kind: str | None = None,
        *,
        network: bool | None = None,
        readable: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
        image: str | None = None,
    ) -> None:
        changes: dict[str, Any] = {
            "kind": kind,
            "network": network,
            "readable": None if readable is None else tuple(str(path) for path in readable),
            "env": None if env is None else dict(env),
            "limits": limits,
            "image": image,
        }
        self.settings = replace(self.defaults, **{key: value for key, value in changes.items() if value is not None})
        self._backend = backend_of(self.settings)
        self._started = False
        self._closed = False
        self._lock = anyio.Lock()

    @property
    def enforcement(self) -> str:
        """What enforces the limits of memory and processes, once it has started.

        "cgroup": the kernel; the memory of all commands counts together with what their files take. "supervisor": a
        process that measures 20 times a second and kills; a command can exceed the limit of memory for as long.
        "container": docker or podman. "provider": Inspect's. "none".
        """
        return self._backend.enforcement

    async def __aenter__(self) -> Self:
        async with self._lock:
            await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if not self._started:
            await self._backend.start()
            self._started = True

    async def exec(
        self,
        cmd: Sequence[str],
        *,
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command and return what it wrote; a failure is a result, not an exception.

        Args:
            cmd: The program and its arguments; no shell is involved.
            input: Its standard input.
            cwd: Where it starts, relative to the working directory of the sandbox.
            env: Further environment variables.
            timeout: Seconds, instead of those of the limits.
            user: The user of a container.

        Raises:
            SandboxUnavailableError: This machine does not allow isolation.
            SandboxError: The sandbox is closed or has ended.
        """
        return (await self._run(cmd, input, cwd, env, timeout, user)).as_text()

    async def _run(
        self,
        cmd: Sequence[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        output: int | None = None,
    ) -> RawResult:
        if isinstance(cmd, str) or not cmd:
            raise ConfigurationError(
                f"cmd must be the program and its arguments (got {cmd!r}); for a shell, ['bash', '-c', '...']"
            )
        usual = self.settings.limits
        limits = replace(
            usual,
            seconds=usual.seconds if timeout is None else timeout,
            output=usual.output if output is None else output,
        )
        data = input.encode("utf-8", "surrogatepass") if isinstance(input, str) else input or b""
        async with self._lock:
            await self._start()
            work = self._backend.work
            variables = {"PATH": self._backend.path, "HOME": work, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108
            return await self._backend.run(
                SandboxCommand(
                    tuple(cmd),
                    data,
                    posixpath.join(work, cwd or ""),
                    {**variables, **self.settings.env, **(env or {})},
                    limits,
                    user,
                )
            )

    async def read_bytes(self, path: str) -> bytes:
        """Return the content of a file, up to the limit of `disk`; the path is resolved inside the sandbox."""
        disk = self.settings.limits.disk
        result = await self._run(["cat", "--", path], env={"LC_ALL": "C"}, output=disk)
        if result.truncated:
            raise SandboxError(f"cannot read {path!r} in the sandbox: it is larger than {disk} bytes")
        _raise_for(result, "read", path)
        return result.stdout

    async def read_file(self, path: str) -> str:
        """Return the text of a file; the path is resolved inside the sandbox. Bytes that are not UTF-8 are replaced."""
        return (await self.read_bytes(path)).decode("utf-8", "replace")

    async def write_file(self, path: str, contents: str | bytes) -> None:
        """Write a file, and the directories above it; the path is resolved inside the sandbox."""
        script = 'mkdir -p -- "$1" && cat > "$2"'
        folder = posixpath.dirname(path) or "."
        result = await self._run(["sh", "-c", script, "sh", folder, path], contents, env={"LC_ALL": "C"})
        _raise_for(result, "write", path)

    async def close(self) -> None:
        """End everything in the sandbox and delete its files."""
        if not self._closed:
            self._closed = True
            await self._backend.close()

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the tools that agents get: `bash` and `python`."""
        return (self.bash, self.python)

    async def bash(self, command: Annotated[str, "a Bash script; files last, background processes do not"]) -> str:
        """Run a Bash script in a sandbox and return what it printed."""
        return describe_result(await self.exec(["bash", "-c", command]), self.settings.limits)

    async def python(self, code: Annotated[str, "a Python program; print what you want to see"]) -> str:
        """Run a Python program in a sandbox and return what it printed."""
        return describe_result(await self.exec(["python3", "-"], input=code), self.settings.limits)

    async def serialize(self) -> dict[str, Any]:
        """Return the files of the working directory; what is in /tmp and in memory is not saved."""
        if self.settings != self.defaults:
            raise EnvironmentMismatchError(
                "only a sandbox with the settings of its class can be saved, as data must not decide what is allowed\n"
                "  class MySandbox(Sandbox): defaults = SandboxSettings(...)"
            )
        archive = await self._run(_ARCHIVE, output=_STATE_LIMIT)
        if archive.truncated or archive.returncode != 0:
            reason = f"more than {_STATE_LIMIT} bytes" if archive.truncated else archive.as_text().stderr.strip()
            raise EnvironmentMismatchError(f"the files of the sandbox cannot be saved: {reason}")
        packed = base64.b64encode(zlib.compress(archive.stdout)).decode()
        return {"env_kind": self.env_kind, "version": self.version, "files": packed}

    @classmethod
    async def deserialize(cls, data: dict[str, Any]) -> Self:
        """Return a sandbox with the settings of this class and the saved files."""
        check_state(data, env_kind=cls.env_kind, version=cls.version)
        try:
            packed = base64.b64decode(data["files"], validate=True)
            archive = expand(packed, "zlib", ExpansionBudget("the saved files", int(_STATE_LIMIT * limit_factor())))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"the state of environment {cls.env_kind!r} has no readable files ({error})"
            raise EnvironmentMismatchError(problem) from None
        sandbox = cls()
        try:
            result = await sandbox.exec(["tar", "-xpf", "-"], input=archive)
        except BaseException:
            await sandbox.close()
            raise
        if not result.success:
            await sandbox.close()
            raise EnvironmentMismatchError(f"the files of the sandbox cannot be restored: {result.stderr.strip()}")
        return sandbox


def _raise_for(result: RawResult, action: str, path: str) -> None:
    """Raise what Python would raise for a file of this machine."""
    if result.returncode == 0 and result.limit is None:
        return
    reason = f"limit of {result.limit} exceeded" if result.limit else result.as_text().stderr.strip()
    message = f"cannot {action} {path!r} in the sandbox: {reason}"
    for text, error in _FILE_ERRORS.items():
        if text in reason:
            raise error(message)
    raise SandboxError(message)


_FILE_ERRORS: dict[str, type[OSError]] = {
    "No such file or directory": FileNotFoundError,
    "Directory nonexistent": FileNotFoundError,  # So says dash.
    "Is a directory": IsADirectoryError,
    "Not a directory": NotADirectoryError,
    "Permission denied": PermissionError,
    "Read-only file system": PermissionError,
}


def describe_result(result: ExecResult, limits: SandboxLimits) -> str:
    """Return a result as text for a model: what was printed, and how it ended if not well."""
    parts = [_shorten(result.stdout)]
    if result.stderr:
        parts.append(f"stderr:\n{_shorten(result.stderr)}")
    if result.limit is not None:
        parts.append(f"[{limit_reason(result.limit, limits)}]")
    elif result.returncode != 0:
        parts.append(f"[exit status {result.returncode}]")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "[no output]"


def limit_reason(limit: ExceededLimit, limits: SandboxLimits, seconds: float | None = None) -> str:
    """Return the sentence that says for which limit a command was killed."""
    if limit == "time":
        return f"killed after {limits.seconds if seconds is None else seconds:g} s"
    if limit == "memory":
        return f"killed: more than {limits.memory // MIB} MiB of memory"
    return f"killed: more than {getattr(limits, limit)} {limit}"


def _shorten(text: str) -> str:
    if len(text) <= _TOOL_OUTPUT:
        return text
    half = _TOOL_OUTPUT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
