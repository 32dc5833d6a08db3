"""Code that a model writes, run against tests in a sandbox; pass@k from repeats.

python examples/sandboxed_code.py               # against a model server started for the occasion
OPENAI_API_KEY=... python examples/sandboxed_code.py --model gpt-5-mini
"""

from __future__ import annotations

import argparse

from fairtrial import Dataset, EvalConfig, EvalReport, OpenAIAdapter, Sample, evaluate_sync
from fairtrial.integrations.model_server import ModelServer, Reply, Script, ToolCallReply
from fairtrial.integrations.sandbox import Sandbox, SandboxLimits, runs_tests
from fairtrial.models import ProviderAdapter, agent_task

LIMITS = SandboxLimits(seconds=20, memory=512 * 2**20)
PROBLEMS = Dataset(
    [
        Sample(
            "fibonacci",
            "Write a Python function fib(n) that returns the n-th Fibonacci number; fib(0) is 0. Try it first.",
            "assert [fib(n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]\n",
        )
    ],
    name="problems",
)
CODE = "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"


def sandbox(_sample: object = None) -> Sandbox:
    return Sandbox(limits=LIMITS)


def run(adapter: ProviderAdapter) -> EvalReport:
    agent = agent_task(adapter, environment_factory=sandbox, max_turns=8)  # Its tools: bash and python.
    return evaluate_sync(PROBLEMS, agent, runs_tests(sandbox=sandbox), config=EvalConfig(repeats=2))


def main(model: str | None = None) -> EvalReport:
    if model is not None:
        return run(OpenAIAdapter(model=model))
    tried = Reply(tool_calls=(ToolCallReply("python", {"code": f"{CODE}\nprint(fib(7))"}),))
    with ModelServer(Script((tried, f"```python\n{CODE}```"), per="turn")) as server:
        return run(OpenAIAdapter(model="test-model", base_url=server.base_url + "/v1", api_key="none"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    print(main(parser.parse_args().model))
