"""Suites, observers and stores for tests of fleet clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match
from fairtrial.runs.events import RunEvent


def never(given: Any) -> Any:
    raise AssertionError("the client must not execute tasks")


def suite_of(count: int = 60, *, evaluator: Any = exact_match, experiments: Any = (), **settings: Any) -> EvalSuite:
    data = Dataset([Sample(f"s{i}", i, i) for i in range(count)], name="numbers")
    config = EvalConfig(**{"grace_seconds": 0.2, **settings})
    return EvalSuite("numbers", data, never, evaluator, experiments=experiments, config=config, version="1")


async def until(met: Callable[[], bool]) -> None:
    """Wait for something to have happened, for as long as the test's own time limit allows."""
    while not met():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)


class Watcher:
    def __init__(self) -> None:
        self.events: list[RunEvent] = []

    def publish(self, event: RunEvent) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ == name]
