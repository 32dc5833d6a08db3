"""Suites and worlds for tests of reinforcement learning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fairtrial import ChatMessage, Dataset, EvalConfig, EvalSuite, Metric, Sample, Score, ToolCall, Trajectory
from fairtrial.models import AgentEnded, BaseAdapter, ModelCall, ModelReply
from fairtrial.trials import TrialContext


def guess(question: str, ctx: TrialContext) -> str:
    """Answer at random, by the seed of the trial; fails and is cut off now and then."""
    draw = random.Random(ctx.seed).random()
    ctx.session.record(ChatMessage("user", question))
    if draw < 0.1:
        raise RuntimeError("the tool broke")
    said = "yes" if draw < 0.6 else "no"
    ctx.session.record(ChatMessage("assistant", said))
    if draw > 0.9:
        ctx.session.record(AgentEnded("truncated", 1, "1 turns"))
    return said


def judge(output: str, expected: str) -> Score:
    if output == "no" and expected == "never":
        raise ValueError("no opinion")
    right = float(output == expected)
    return Score(metrics=(Metric("right", right, weight=2.0), Metric("length", len(output))))


def questions(count: int = 6) -> Dataset[str, str]:
    return Dataset(
        [Sample(f"q{i}", f"is {i} even?", ("yes", "no", "never")[i % 3]) for i in range(count)], name="questions"
    )


def suite_of(count: int = 6, **settings: Any) -> EvalSuite:
    config = EvalConfig(**{"repeats": 4, "seed": 3, **settings})
    return EvalSuite("guesses", questions(count), guess, judge, config=config, version="1")


class Lock:
    """A lock of three pins; an agent that presses them in order opens it."""

    env_kind = "lock"
    version = "1.0"
    opened = 0
    closed = 0

    def __init__(self, pins: Sequence[int] = ()) -> None:
        self.pins = list(pins)
        type(self).opened += 1

    def tools(self) -> list[Any]:
        def press(pin: int) -> str:
            """Press a pin."""
            self.pins.append(pin)
            return "click" if pin == len(self.pins) else "clunk"

        return [press]

    async def serialize(self) -> dict[str, Any]:
        return {"env_kind": self.env_kind, "version": self.version, "pins": list(self.pins)}

    @classmethod
    async def deserialize(cls, data: dict[str, Any]) -> Lock:
        return cls(data["pins"])

    def close(self) -> None:
        type(self).closed += 1


class Presser(BaseAdapter):
    """Presses the three pins, each right with a probability of 0.6."""

    def __init__(self, seed: int = 0, right: float = 0.6) -> None:
        super().__init__(name="presser", model="presser")
        self._random = random.Random(seed)
        self._right = right

    async def _send(self, call: ModelCall) -> ModelReply:
        pressed = sum(message.role == "tool" for message in call.messages)
        if pressed == 3:
            return ModelReply(ChatMessage("assistant", "done"), None, "stop", "presser")
        pin = pressed + 1 if self._random.random() < self._right else 9
        asked = ToolCall("press", {"pin": pin}, f"c{pressed}")
        return ModelReply(ChatMessage("assistant", "", (asked,)), None, "tool_calls", "presser")


def opened(trajectory: Trajectory, sample: Sample[Any, Any]) -> float:
    return float([message.text for message in trajectory.messages if message.role == "tool"] == ["click"] * 3)
