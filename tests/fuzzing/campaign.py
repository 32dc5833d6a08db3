"""Executes a reader with changed inputs, and judges what comes of it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import fairtrial
from fairtrial.errors import FairtrialError, MissingExtraError
from tests.fuzzing.readers import Reader

MAX_SECONDS = 5.0  # Of CPU time, for an input of at most 256 KiB.
MAX_MEMORY = 768 << 20  # More than before it was read.
_OURS = str(Path(fairtrial.__file__).parent)
_TOOL = 4


@dataclass(frozen=True)
class Crash:
    """An input that a reader neither read nor refused as it should.

    `problem` is what went wrong and where: inputs with the same one are counted as the same crash.
    """

    problem: str
    data: bytes
    trace: str


class TooSlow(BaseException):
    """The time of an input is over. Not an Exception, so that nobody takes it for an error of the input."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Interrupt what takes too much CPU time."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def execute(reader: Reader, data: bytes) -> Crash | None:
    """Read an input; returns what is wrong with the reader, if anything."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with time_limit():
            reader.read(data)
    except MissingExtraError:
        raise
    except FairtrialError as error:
        if reader.file not in str(error):
            return _crash(data, error, "no file name")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return _crash(data, error, type(error).__name__)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Crash("memory", data, f"grew by {grown:,} bytes") if grown > MAX_MEMORY else None


def _crash(data: bytes, error: BaseException, kind: str) -> Crash:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_OURS)]
    place = f"{os.path.relpath(frames[-1].filename, _OURS)}:{frames[-1].name}" if frames else "elsewhere"
    shown = "".join(traceback.format_exception(error))
    return Crash(f"{kind} in {place}", data, shown if len(shown) < 8000 else f"{shown[:4000]}\n...\n{shown[-4000:]}")


@dataclass
class Campaign:
    """Many executions of one reader. With `guided`, inputs that reach lines which none reached before are kept."""

    reader: Reader
    seed: int
    guided: bool = False
    executions: int = 0
    crashes: dict[str, Crash] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def run(self, go_on: Callable[[int], bool]) -> None:
        """Read the valid inputs, which must be possible, and then changed ones for as long as `go_on` says."""
        random, inputs = Random(self.seed), list(self.reader.inputs)
        for data in inputs:
            self.reader.read(data)  # Without limits: modules are loaded here.
            self.executions += 1
        with _new_lines(self.guided) as new_lines:
            while go_on(self.executions):
                new_lines.clear()
                data = self.reader.mutate(random, random.choice(inputs), inputs)
                self.execute(data)
                if new_lines:
                    inputs.append(data)

    def execute(self, data: bytes) -> None:
        """Execute one input."""
        self.executions += 1
        crash = execute(self.reader, data)
        if crash is not None:
            known = self.crashes.get(crash.problem)
            self.counts[crash.problem] = self.counts.get(crash.problem, 0) + 1
            if known is None or len(data) < len(known.data):
                self.crashes[crash.problem] = crash


@contextmanager
def _new_lines(wanted: bool) -> Iterator[set[tuple[str, int]]]:
    """Collect the lines of Fairtrial that are executed for the first time; each is reported once."""
    found: set[tuple[str, int]] = set()
    if not wanted:
        yield found
        return
    monitoring: Any = sys.monitoring

    def seen(code: CodeType, line: int) -> object:
        if code.co_filename.startswith(_OURS):
            found.add((code.co_filename, line))
        return monitoring.DISABLE

    monitoring.use_tool_id(_TOOL, "fuzz")
    monitoring.register_callback(_TOOL, monitoring.events.LINE, seen)
    monitoring.set_events(_TOOL, monitoring.events.LINE)
    monitoring.restart_events()
    try:
        yield found
    finally:
        monitoring.set_events(_TOOL, 0)
        monitoring.free_tool_id(_TOOL)


def until(seconds: float) -> Callable[[int], bool]:
    """Go on for this time."""
    end = time.monotonic() + seconds
    return lambda _executions: time.monotonic() < end
