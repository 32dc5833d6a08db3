"""Suites that processes of a trainer can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairtrial import Dataset, EvalSuite, Metric, Sample, Score, ScriptedAdapter, Trajectory, agent_task, tool_called

calls: list[Any] = []


@dataclass(frozen=True)
class Sum:
    left: int
    right: int


def letters(output: str, sample: Sample[Any, Any]) -> Score:
    """Count the letters of an answer; refuses to score an answer with a question mark."""
    calls.append(output)
    if "?" in output:
        raise ValueError("questions have no score")
    share = sum(map(str.islower, output)) / max(len(output), 1)
    return Score(
        metrics=(
            Metric("letters", share, weight=2.0),
            Metric("sum", sample.input.left, 1.0),
            Metric("length", len(output)),
        )
    )


async def letters_async(output: str, sample: Sample[Any, Any]) -> Score:
    return letters(output, sample)


def turns(trajectory: Trajectory, sample: Sample[Any, Any]) -> float:
    return 1.0 / len(trajectory.messages)


data = Dataset([Sample("a", Sum(1, 2), "3"), Sample("b", Sum(0, 5), "5", {"level": 1})], name="sums")
task = agent_task(
    ScriptedAdapter(["abc"], repeat=True),
    system="Be brief.",
    prepare_messages=lambda sample: [{"role": "user", "content": f"{sample.input.left}+{sample.input.right}"}],
)
suite = EvalSuite("sums", data, task, letters)
async_suite = EvalSuite("async-sums", data, task, letters_async)
turns_suite = EvalSuite("turns", data, task, turns)
tool_suite = EvalSuite("tools", data, task, tool_called("add"))
