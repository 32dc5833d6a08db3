"""Traces as an application sends them, for tests of the watch over live traffic."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from fairtrial.integrations.tracing.live import LiveWatch
from fairtrial.runs.runner import Interrupt
from tests.integrations.tracing.traced_app import post

LONG = 120.0


def trace_id(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


def span(
    number: int, *, answer: str = "yes", parent: str = "", span_id: str = "1" * 16, **facts: str
) -> dict[str, Any]:
    """A request of an application, with a question and an answer."""
    attributes = {"input.value": f"question {number}", "output.value": answer, **facts}
    moment = time.time_ns()
    return {
        "traceId": trace_id(number),
        "spanId": span_id,
        "parentSpanId": parent,
        "name": "POST /ask",
        "startTimeUnixNano": str(moment),
        "endTimeUnixNano": str(moment + 1_000_000),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
    }


def send(url: str, spans: Sequence[Mapping[str, Any]]) -> int:
    """Send spans in one request; returns the status of the answer."""
    return post(url, {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]})


def until(met: Callable[[], bool], what: str, *, seconds: float = LONG) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def watching(watch: LiveWatch) -> Iterator[str]:
    """Run a watch in a thread during the block; yields its address."""
    interrupt, problems = Interrupt(), []

    def work() -> None:
        try:
            anyio.run(watch.run, interrupt)
        except BaseException as error:
            problems.append(error)

    with watch.receiver.running():
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield watch.receiver.endpoint
        finally:
            interrupt()
            thread.join(LONG)
    if problems:
        raise problems[0]
