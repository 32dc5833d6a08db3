"""An agent with typed tools, scored by its answer and by how it got there.

python examples/tool_agent.py                   # against a model server started for the occasion
ANTHROPIC_API_KEY=... python examples/tool_agent.py --model claude-sonnet-4-5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Annotated, Any

from fairtrial import Dataset, EvalReport, all_of, contains, evaluate_sync, tool_called
from fairtrial.integrations.model_server import ModelServer, Reply, Script, ToolCallReply
from fairtrial.models import AnthropicAdapter, ProviderAdapter, agent_task, tool_schema_accuracy
from fairtrial.scoring import tool_not_called

ORDERS = {"A17": "shipped on Monday"}


def look_up_order(number: Annotated[str, "as printed on the receipt"]) -> str:
    """The state of an order."""
    return ORDERS.get(number, "unknown")


def refund(number: str, amount: float) -> str:
    """Pays money back. Only for orders that were lost."""
    return f"refunded {amount} for {number}"


TOOLS: list[Callable[..., Any]] = [look_up_order, refund]
QUESTIONS = Dataset.of({"Where is my order A17?": "Monday"}, name="orders")
EVALUATOR = all_of(contains, tool_called("look_up_order"), tool_not_called("refund"), tool_schema_accuracy(TOOLS))


def run(adapter: ProviderAdapter) -> EvalReport:
    agent = agent_task(adapter, tools=TOOLS, system="You help customers. Look things up; never guess.", max_turns=5)
    return evaluate_sync(QUESTIONS, agent, EVALUATOR)


def main(model: str | None = None) -> EvalReport:
    if model is not None:
        return run(AnthropicAdapter(model=model))
    turns = Script(
        (Reply(tool_calls=(ToolCallReply("look_up_order", {"number": "A17"}),)), "It was shipped on Monday."),
        per="turn",
    )
    with ModelServer(turns) as server:
        return run(AnthropicAdapter(model="test-model", base_url=server.base_url, api_key="none"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    print(main(parser.parse_args().model))
