"""Suspects run alone: a trial that may have killed its worker gets a process of its own to die in.

Two ways. A forked child needs nothing, but inherits what its parent was doing: clients that belong to another event
loop, locks that another thread held. A fresh process of the worker's own command starts clean; the worker's entry
point uses it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from fairtrial.errors import CodecError
from fairtrial.fleet.wire import EvalReply, EvalRequest, MainLoopResult
from fairtrial.offload import ChildDiedError, IsolatedError, run_isolated

if TYPE_CHECKING:
    from fairtrial.fleet.eval_loop import EvalLoop

type Solo = Callable[[EvalRequest], Awaitable[EvalReply]]
"""Executes one request where a crash hurts nobody. Raises `ChildDiedError` if it crashed."""

_MAX_REPLY = 64 * 1024 * 1024
NOT_STARTED = b"!"
"""What a process writes, with the reason behind it, that could not even begin with its trial."""


class ForkedSolo:
    """Executes a request in a forked child process.

    Args:
        loop: What executes it.
        answer: What a MainLoop elsewhere answered already, if the task is elsewhere.
    """

    def __init__(self, loop: EvalLoop, answer: MainLoopResult | None = None) -> None:
        self._loop = loop
        self._answer = answer

    async def __call__(self, request: EvalRequest) -> EvalReply:
        """The reply. A cancelled wait kills the child."""

        def in_child() -> bytes:  # pragma: no cover - runs in the child
            return asyncio.run(self._loop.execute_alone(request, self._answer)).to_wire()

        return EvalReply.from_wire(await run_isolated(in_child, kind=bytes))


class SubprocessSolo:
    """Executes a request in a fresh process.

    Args:
        command: What to start. It must end in `serve_alone`, with the descriptor it is given as its last argument.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def __call__(self, request: EvalRequest) -> EvalReply:
        """The reply. A cancelled wait kills the process, and what it started."""
        reader, writer = os.pipe()  # Not its standard output: user code may print.
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(writer),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(writer,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            answer, _ = await asyncio.gather(_read_all(reader), _feed(process, request.to_wire()))
            code = await process.wait()
        finally:
            if process.returncode is None:
                _kill_group(process.pid)
                await process.wait()
        if not answer:
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ChildDiedError(f"the process for this one trial ended without an answer ({ended})")
        if answer.startswith(NOT_STARTED):  # Not the trial's fault: tried again, as the policy says.
            raise IsolatedError(
                f"a process for this one trial could not begin: {answer[1:].decode('utf-8', 'replace')}"
            )
        return EvalReply.from_wire(answer)


def serve_alone(loop: EvalLoop, descriptor: int) -> None:
    """The other end of `SubprocessSolo`: execute the request on standard input, write the reply, end."""
    request = EvalRequest.from_wire(sys.stdin.buffer.read())
    answer = asyncio.run(loop.execute_alone(request)).to_wire()
    with os.fdopen(descriptor, "wb") as out:
        out.write(answer)


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None  # noqa: S101 - it was asked for
    try:
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # It died before it had read all; its silence says the rest.


async def _read_all(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader(limit=1 << 20)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb")
    )
    received = bytearray()
    try:
        while piece := await stream.read(1 << 20):
            received += piece
            if len(received) > _MAX_REPLY:
                raise CodecError(f"a reply of more than {_MAX_REPLY} bytes")
    finally:
        transport.close()
    return bytes(received)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
