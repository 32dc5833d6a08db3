"""Write logs of Inspect: python inspect_files.py DIR. Run by scripts/peers files in an environment with inspect-ai."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["INSPECT_DISPLAY"] = "none"

from inspect_ai import Task, eval, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalLog, read_eval_log, write_eval_log
from inspect_ai.model import ChatMessageUser, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, match, mean, scorer, stderr
from inspect_ai.solver import Generate, TaskState, generate, solver, use_tools
from inspect_ai.tool import tool

CITIES = {"Oslo": "snow", "Lima": "fog", "Cairo": "sun", "Bergen": "rain", "Quito": "clouds"}


@tool
def weather():
    async def execute(city: str) -> str:
        """Look up the weather.

        Args:
            city: The city.
        """
        if city == "Quito":
            raise RuntimeError("the station does not answer")
        return CITIES[city] + " " * 200 + "(a long forecast)"

    return execute


@scorer(metrics=[mean(), stderr()])
def words():
    """The number of words: a score outside 0 to 1."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=len(state.output.completion.split()), explanation="counted")

    return score


@scorer(metrics=[{"*": [accuracy(), stderr()]}])
def parts():
    """Two values in one score."""

    async def score(state: TaskState, target: Target) -> Score:
        answer = state.output.completion
        return Score(value={"named": float(target.text in answer), "short": 0.25 if len(answer) > 12 else 1.0})

    return score


@scorer(metrics=[mean()])
def sometimes():
    """A score that is NaN for one sample."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float("nan") if state.sample_id == "Lima" else 1 / 3)

    return score


@solver
def fails_in(city: str):
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id == city and state.epoch == 2:
            raise ValueError(f"no forecast for {city}")
        return state

    return solve


def reply(input, tools, tool_choice, config):
    last = input[-1]
    city = next(city for city in CITIES if any(city in message.text for message in input))
    if tools and last.role == "user":
        output = ModelOutput.for_tool_call("mockllm/model", "weather", {"city": city})
    else:
        text = "Hard to say." if city == "Cairo" else f"Expect {CITIES[city]} in {city}. {'Indeed. ' * 30}"
        output = ModelOutput.from_content("mockllm/model", text)
    output.usage = ModelUsage(input_tokens=40, output_tokens=7, total_tokens=47, input_tokens_cache_read=3)
    return output


def data() -> MemoryDataset:
    return MemoryDataset(
        [
            Sample(
                id=city,
                input=[ChatMessageUser(content=f"What is the weather in {city}?")] if city == "Lima"
                else f"What is the weather in {city}? {'Think. ' * 40}",
                target=target,
                metadata={"north": city in ("Oslo", "Bergen")},
            )
            for city, target in CITIES.items()
        ],
        name="cities",
    )  # fmt: skip


@task
def forecast() -> Task:
    return Task(
        dataset=data(),
        solver=[use_tools(weather()), generate(), fails_in("Bergen")],
        scorer=[match(location="any"), words(), parts(), sometimes()],
        fail_on_error=False,
        epochs=2,
    )


@task
def short() -> Task:
    return Task(dataset=data(), solver=[generate()], scorer=match(location="any"))


def without_paths(log: EvalLog) -> EvalLog:
    """The log without the paths of this machine, which tracebacks contain."""
    text = log.model_dump_json()
    for path, name in (
        (sys.prefix, "/environment"),
        (sys.base_prefix, "/python"),
        (str(Path(__file__).parent), "/project"),
    ):
        text = text.replace(path, name)
    return EvalLog.model_validate_json(text)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    made = {}
    for name, work, format in (("forecast", forecast(), "eval"), ("short", short(), "json")):
        model = get_model("mockllm/model", custom_outputs=reply)
        (log,) = eval(work, model=model, log_dir=str(folder / "logs"), log_format=format)
        write_eval_log(without_paths(read_eval_log(log.location)), str(folder / f"{name}.{format}"))
        Path(log.location).unlink()
        made[f"{name}.{format}"] = {
            f"{score.name}/{metric}": found.value
            for score in log.results.scores
            for metric, found in score.metrics.items()
        }
    (folder / "reported.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
