"""A suite with an agent, a tool and an environment, and how many of its environments were opened and closed."""

from __future__ import annotations

import time
from typing import Any

from fairtrial import Dataset, EvalConfig, EvalSuite, Metric, Sample, Score
from fairtrial.data.session import ToolInvoked
from fairtrial.data.session.views import SessionView
from fairtrial.models import ScriptedAdapter, agent_task


class Counter:
    """Counts what is added to it."""

    env_kind = "counter"
    version = "1.0"
    opened = 0
    closed = 0

    def __init__(self, sample: Sample[Any, Any]) -> None:
        if sample.metadata.get("broken"):
            raise OSError("no room for a counter")
        self.sample = sample
        self.total = 0
        self.is_open = True
        type(self).opened += 1

    def tools(self) -> list[Any]:
        def add(number: int, times: int = 1) -> int:
            """Add a number to the counter."""
            if number < 0:
                raise ValueError("only numbers of at least 0")
            if number > 100:
                time.sleep(1.0)  # Longer than the time limit of the suite with limits.
            self.total += number * times
            return self.total

        return [add]

    async def serialize(self) -> dict[str, Any]:
        return {"env_kind": self.env_kind, "version": self.version, "total": self.total}

    @staticmethod
    async def deserialize(data: dict[str, Any]) -> Counter:
        raise NotImplementedError

    async def close(self) -> None:
        assert self.is_open
        self.is_open = False
        type(self).closed += 1


def score(output: str, expected: int, session: SessionView, environment: Any = None) -> Score:
    """Reward the right total, by the environment itself, and a reply with lower-case letters."""
    letters = sum(map(str.islower, output)) / max(len(output), 1)
    return Score(
        metrics=(
            Metric("right", float(environment.total == expected), 1.0),
            Metric("letters", letters, 1.0),
            Metric("calls", len(session[ToolInvoked].all())),
        )
    )


data = Dataset(
    [Sample("five", "Count to five.", 5), Sample("six", "Count to six.", 6)],
    name="counts",
)
broken_data = Dataset([*data, Sample("broken", "Count.", 1, {"broken": True})], name="broken-counts")
agent = agent_task(ScriptedAdapter(["five"], repeat=True), environment_factory=Counter, max_turns=3, name="counting")
suite = EvalSuite("counter", data, agent, score, config=EvalConfig(max_concurrent=4), version="1")
broken_suite = EvalSuite("broken-counter", broken_data, agent, score, version="1")
limited_suite = EvalSuite("limited-counter", data, agent, score, config=EvalConfig(timeout_seconds=0.3), version="1")
