"""The side of the server that starts child processes, gives them jobs and keeps their answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

from fairtrial.base.system import own_group
from fairtrial.errors import FairtrialError

IDLE_SECONDS = 60.0
_KEPT = 300
_LONGEST_LINE = 256 * 1024 * 1024


class _WorkProcess:
    """One child process, which does one job at a time and ends when it has been idle."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._start = start
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False

    async def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        async with self._lock:
            if self._closed:
                raise FairtrialError("the server is ending")
            if self._idle is not None:
                self._idle.cancel()
            try:
                return await self._ask(job)
            except (OSError, ValueError, asyncio.IncompleteReadError):
                await self._end()
                raise FairtrialError("the process that computes statistics ended unexpectedly; try again") from None
            except BaseException:
                await self._end()  # The answer of a cancelled job must not be taken for that of the next.
                raise
            finally:
                self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.kill)

    async def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fairtrial.viewer.work", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
                **own_group(),  # Ctrl-C in the terminal is for the server, which ends this process.
            )  # fmt: skip
            self._write(self._start)
        self._write(job)
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes")
        await process.stdin.drain()
        line = await process.stdout.readline()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise OSError("no pipe")
        self._process.stdin.write(json.dumps(dict(line)).encode() + b"\n")

    def kill(self) -> None:
        """End the process at once; the next job starts another."""
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _end(self) -> None:
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()  # Else its transport would be closed after the event loop.

    async def close(self) -> None:
        """End the process, and all jobs: one that is just starting must not be left behind in the event loop."""
        self._closed = True
        while self._lock.locked():
            self.kill()
            await asyncio.sleep(0.05)
        await self._end()


class Workbench:
    """Gives jobs to children, one child for statistics and one for searches. Answers are kept by their key."""

    def __init__(self, store_url: str, *, read_only: bool) -> None:
        start = {"store": store_url, "read_only": read_only}
        self._children = {"statistics": _WorkProcess(start), "search": _WorkProcess(start)}
        self._answers: dict[Hashable, asyncio.Task[dict[str, Any]]] = {}

    def start(self, job: Mapping[str, Any], state: Hashable) -> asyncio.Task[dict[str, Any]]:
        """Start a job, or return the one that was started with the same question and the same state of the store."""
        key = (json.dumps(dict(job), sort_keys=True), state)
        task = self._answers.pop(key, None)
        if task is not None and task.done() and (task.cancelled() or task.exception() is not None):
            task = None
        if task is None:
            child = self._children["search" if job["job"] in ("search", "rows") else "statistics"]
            task = asyncio.get_running_loop().create_task(child.do(job))
            task.add_done_callback(_retrieve)
        self._answers[key] = task
        while len(self._answers) > _KEPT:
            self._answers.pop(next(iter(self._answers)))
        return task

    async def answer(self, job: Mapping[str, Any], state: Hashable) -> dict[str, Any]:
        """Do a job. Raises `FairtrialError` with what the child reported."""
        found = await asyncio.shield(self.start(job, state))
        if "error" in found:
            raise FairtrialError(str(found["error"]))
        return found

    async def soon(self, job: Mapping[str, Any], state: Hashable, seconds: float | None) -> dict[str, Any] | None:
        """Do a job; return None if it takes longer or fails. It goes on meanwhile, and its answer is kept.

        Without a number of seconds, it is waited for, and an error is raised.
        """
        if seconds is None:
            return await self.answer(job, state)
        try:
            return await asyncio.wait_for(self.answer(job, state), seconds)
        except (TimeoutError, FairtrialError):
            return None

    async def close(self) -> None:
        """End the children."""
        for child in self._children.values():
            await child.close()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
