"""Run a program on this machine with a time limit and capped output, for the kinds of sandbox that need no more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from fairtrial.integrations.sandbox.pumps import CappedOutput
from fairtrial.integrations.sandbox.settings import ExceededLimit, RawResult, SandboxLimits

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
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
