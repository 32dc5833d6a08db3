"""A task of Inspect with 200 samples as a suite; a program of `scripts/peers files inspect` runs it in several ways."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["INSPECT_DISPLAY"] = "none"

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, match, mean, scorer
from inspect_ai.solver import TaskState, generate, system_message, use_tools
from inspect_ai.tool import tool

from fairtrial import EvalConfig
from fairtrial.integrations.inspect import suite as inspect_suite

SAMPLES = 200


@tool
def add():
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: The first.
            y: The second.
        """
        return x + y

    return execute


@scorer(metrics=[mean()])
def length():
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=len(state.output.completion), explanation="letters")

    return score


def reply(input, tools, tool_choice, config):
    """Ask the tool, then answer; every seventh answer is wrong. Every call leaves a line in a file."""
    if os.environ.get("CALLS"):
        with Path(os.environ["CALLS"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
    x, y = (int(number) for number in next(m for m in input if m.role == "user").text.split("+"))
    if input[-1].role != "tool":
        output = ModelOutput.for_tool_call("mockllm/model", "add", {"x": x, "y": y})
    else:
        wrong = 1 if x % 7 == 0 else 0
        output = ModelOutput.from_content("mockllm/model", f"The sum is {int(input[-1].text) + wrong}")
    output.usage = ModelUsage(input_tokens=20, output_tokens=5, total_tokens=25)
    return output


@task
def sums() -> Task:
    samples = [Sample(id=f"s{n}", input=f"{n}+{n * 3 % 11}", target=str(n + n * 3 % 11)) for n in range(SAMPLES)]
    return Task(
        dataset=MemoryDataset(samples, name="sums"),
        solver=[system_message("Use the tool."), use_tools(add()), generate()],
        scorer=[match(), length()],
    )


def model():
    return get_model("mockllm/model", custom_outputs=reply, memoize=False)


suite = inspect_suite(sums, model={"mock": model()}, config=EvalConfig(max_concurrent=4))
