"""Drive suites as sessions of OpenEnv with its own harness.

python openenv_program.py FOLDER   prints a line of JSON; scripts/peers trainers makes the environment for it
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from openenv.core.harness import HarnessRunLimits, MCPHarnessAdapter, ModelStepResult, build_harness_rollout_func
from openenv.core.llm_client import LLMResponse
from openenv.core.llm_client import ToolCall as OpenEnvCall

from fairtrial import rl
from tests.rl.trainers import counter_suites
from tests.rl.trainers.checks import Checks

Counter = counter_suites.Counter


def model_step_builder(trainer: Any, session: Any) -> Any:
    """A model that adds five and says so."""
    turns: list[int] = []

    def step(messages: Any, tools: Any, sampling: Any) -> Any:
        turns.append(1)
        if len(turns) == 1:
            call = OpenEnvCall(id="c1", name=tools[0].name, args={"number": 5})
            return ModelStepResult(LLMResponse(content="", tool_calls=[call]), [1, 2], [3, 4], [-0.1, -0.2])
        return ModelStepResult(LLMResponse(content="done", tool_calls=[]), [1, 2, 3, 4, 5], [6], [-0.3])

    return step


def main() -> int:
    checks = Checks()
    rollouts = build_harness_rollout_func(
        session_factory=rl.openenv_sessions(counter_suites.suite),
        harness_adapter=MCPHarnessAdapter(),
        model_step_builder=model_step_builder,
        limits=HarnessRunLimits(max_turns=4),
    )
    made = rollouts([{"sample_id": "five"}, "six", next(iter(counter_suites.data))], None)
    rewards = next(value for name, value in made.items() if "reward" in name)
    checks.add("OpenEnv: rewards equal Score.reward", list(rewards) == [1.0, 0.5, 1.0], rewards)
    closed = Counter.opened == Counter.closed == 3
    checks.add("every environment is closed", closed, f"{Counter.opened} opened, {Counter.closed} closed")
    session = rl.openenv_sessions(counter_suites.suite).create("five")
    failed = session.call_tool("add", {"number": -1})
    checks.add("a failed tool call is shown to the model", "only numbers" in str(failed.error), failed.error)
    session.close()
    checks.add("a session that is not verified is closed", Counter.opened == Counter.closed == 4)
    return checks.finish()


if __name__ == "__main__":
    raise SystemExit(main())
