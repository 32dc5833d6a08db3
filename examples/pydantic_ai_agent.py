"""An agent written with pydantic-ai, evaluated as it is; its tools and tokens are recorded into the session.

pip install "pydantic-ai-slim[openai]"
python examples/pydantic_ai_agent.py            # against a model server started for the occasion
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from fairtrial import (
    Dataset,
    EvalReport,
    EvalSuite,
    PromptExecuted,
    Session,
    TokenUsage,
    ToolInvoked,
    TrialContext,
    all_of,
    contains,
    tool_called,
)
from fairtrial.integrations.model_server import ModelServer, Reply, Script, ToolCallReply
from fairtrial.scoring import token_usage_under

QUESTIONS = Dataset.of({"What is the weather in Oslo?": "snow"}, name="weather")


def make_agent(client: AsyncOpenAI) -> Agent[None, str]:
    """The agent somebody else wrote."""
    agent = Agent(OpenAIChatModel("test-model", provider=OpenAIProvider(openai_client=client)))

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"snow in {city}"

    return agent


def record(session: Session, messages: list[ModelRequest | ModelResponse]) -> None:
    """What the agent did, as our events."""
    calls: dict[str, ToolCallPart] = {}
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                calls[part.tool_call_id] = part
            elif isinstance(part, ToolReturnPart):
                call = calls[part.tool_call_id]
                session.record(ToolInvoked(call.tool_name, call.args_as_dict(), part.content, success=True))
        if isinstance(message, ModelResponse):
            usage = TokenUsage(message.usage.input_tokens, message.usage.output_tokens)
            session.record(PromptExecuted(adapter="pydantic-ai", model=message.model_name or "", usage=usage))


async def ask(question: str, ctx: TrialContext) -> str:
    """The agent as a task; it was opened once for the whole run."""
    agent: Agent[None, str] = ctx.shared
    result = await agent.run(question)
    record(ctx.session, result.all_messages())
    return result.output


def main() -> EvalReport:
    turns = Script(
        (Reply(tool_calls=(ToolCallReply("weather", {"city": "Oslo"}),)), "Expect snow in Oslo."), per="turn"
    )
    with ModelServer(turns) as server:

        @asynccontextmanager
        async def opened() -> AsyncIterator[Agent[None, str]]:
            async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
                yield make_agent(client)

        evaluator = all_of(contains, tool_called("weather"), token_usage_under(1_000))
        suite = EvalSuite("weather", QUESTIONS, ask, evaluator, lifespan=opened)
        return suite.run_sync(store="memory:")


if __name__ == "__main__":
    print(main())
