"""What a turn of an agent costs beyond the model and the tool, against a bare loop.

    python benchmarks/agent_turns.py [--trials 40] [--turns 20] [--rounds 5]

Both loops call the same scripted model through the same adapter, and the same async tool once per turn. The bare loop
keeps the messages; it records nothing, checks nothing and has no limits. The agent runs in a trial, so its figure
includes the recorded session with its snapshot. CPU time, rounds interleaved, medians: the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fairtrial import ChatMessage, Experiment, Sample, ToolCall, TrialKey
from fairtrial.models import ScriptedAdapter, agent_task, trim_history
from fairtrial.models.tools import Tool, tool_message
from fairtrial.scoring import exact_match, resolve
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task


async def price(product: str) -> float:
    """The price of a product in euros."""
    return 2.5


def model(turns: int) -> ScriptedAdapter:
    def reply(messages: Any) -> Any:
        said = sum(message.role == "assistant" for message in messages)
        return "done" if said >= turns else ToolCall("price", {"product": "pen"}, f"c{said}")

    return ScriptedAdapter(reply)


async def bare(turns: int) -> None:
    adapter, tool = model(turns), Tool(price)
    messages = [ChatMessage("user", "go")]
    while True:
        completion = await adapter.complete(messages, tools=(tool.spec,))
        messages.append(completion.message)
        if not completion.message.tool_calls:
            break
        for call in completion.message.tool_calls:
            messages.append(tool_message(call, str(await price(**call.arguments))))
    assert completion.text == "done"


async def agent(turns: int, **hooks: Any) -> None:
    task = agent_task(model(turns), tools=[price], max_turns=turns + 1, **hooks)
    rules = TrialRules((resolve_task(task),), (Experiment(),), resolve(exact_match))
    result = await run_trial(rules, TrialKey("run", "baseline", "s"), 0, Sample("s", "go", "done"), 0)
    assert result.passed


async def hooked(turns: int) -> None:
    await agent(turns, before_request=trim_history(10**6), before_tool=lambda call: None, max_result_chars=1000)


WAYS: dict[str, Callable[[int], Awaitable[None]]] = {"bare": bare, "agent": agent, "hooks": hooked}


async def measure(trials: int, turns: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds per turn of each way, in each round."""
    costs: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        for name in WAYS if number % 2 else reversed(WAYS):
            before = time.process_time()
            for _ in range(trials):
                await WAYS[name](turns)
            if number:  # The first round loads what is loaded once.
                costs[name].append((time.process_time() - before) / (trials * turns))
    return costs


def main() -> None:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    costs = asyncio.run(measure(given.trials, given.turns, given.rounds))
    each = {name: statistics.median(values) * 1e6 for name, values in costs.items()}
    kept = True
    for name, what, limit in (("agent", "a turn of an agent", 5.0), ("hooks", "a turn of an agent with hooks", 6.0)):
        ratio = statistics.median(one / other for one, other in zip(costs[name], costs["bare"], strict=True))
        cpu = {"cpu_us": each[name], "bare_cpu_us": each["bare"]}
        kept &= figure(f"{what}, against a bare loop", ratio, "x the CPU time", at_most=limit, **cpu)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
