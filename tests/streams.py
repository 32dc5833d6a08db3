"""Notices that something has closed the streams in which pytest collects output, and opens others.

Twice in some dozens of runs with coverage on Python 3.12.1, and never on 3.13 or 3.14, a process of the tests had one
of them closed in a test that closes nothing, and all tests after it failed. Why is not known. The test in which it
happens still fails; what closed the stream, if it was a call, is printed beside it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator
from tempfile import TemporaryFile
from typing import Any

import pytest
from _pytest.capture import EncodedFile, FDCapture


class _Watched(EncodedFile):
    """Says who closes it."""

    said_to = 2

    def close(self) -> None:
        if not self.closed:
            called = "".join(traceback.format_stack()[:-1])
            references = sys.getrefcount(self)
            os.write(
                self.said_to, f"\n== a stream of the tests, {references} references, is closed in\n{called}".encode()
            )
        super().close()


def _open() -> _Watched:
    # As pytest does.
    raw: Any = TemporaryFile(buffering=0)  # noqa: SIM115 - closed by pytest
    return _Watched(raw, encoding="utf-8", errors="replace", newline="", write_through=True)


def replace_closed(capture: Any) -> list[str]:
    """Replace the streams of pytest that are closed; returns their names."""
    replaced = []
    for name in ("in_", "out", "err"):
        one = getattr(capture, name, None)
        if not isinstance(one, FDCapture):
            continue
        if one.tmpfile.closed:
            replaced.append(name)
            made: Any = open(os.devnull, encoding="utf-8") if name == "in_" else _open()  # noqa: SIM115
            one.tmpfile, before = made, one.tmpfile
            if name != "in_":
                one.syscapture.tmpfile = made  # type: ignore[attr-defined]
                for stream in ("stdout", "stderr"):
                    if getattr(sys, stream) is before:
                        setattr(sys, stream, made)
        elif name != "in_" and type(one.tmpfile) is EncodedFile:
            one.tmpfile.__class__ = _Watched
        if isinstance(one.tmpfile, _Watched):
            one.tmpfile.said_to = capture.err.targetfd_save
    return replaced


def _look(item: pytest.Item, when: str) -> None:
    capture = item.config.pluginmanager.getplugin("capturemanager")
    running = None if capture is None else capture._global_capturing
    if running is not None and (replaced := replace_closed(running)):
        told = f"\n== before the {when} of {item.nodeid}, {', '.join(replaced)} of the tests had been closed\n"
        os.write(running.err.targetfd_save, told.encode())


# Before each step, as pytest then opens its streams for it.


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Look before a test is set up."""
    _look(item, "setup")
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Look before a test is called."""
    _look(item, "call")
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Look before a test is torn down."""
    _look(item, "teardown")
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Let pytest close them at the end."""
    capture = config.pluginmanager.getplugin("capturemanager")
    for one in (getattr(capture._global_capturing, name, None) for name in ("out", "err")) if capture else ():
        if isinstance(one, FDCapture) and isinstance(one.tmpfile, _Watched):
            one.tmpfile.__class__ = EncodedFile  # type: ignore[assignment]
