"""An agent written with pydantic-ai, evaluated as it is; its tools and tokens are recorded into the session.

pip install "pydantic-ai-slim[openai]"
python examples/pydantic_ai_agent.py            # against a model server started for the occasion
"""

from __future__ import annotations

from pydantic_ai import Agent
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from fairtrial import (
    Dataset,
    EvalReport,
    PromptExecuted,
    Session,
    TokenUsage,
    ToolInvoked,
    TrialContext,
    all_of,
    contains,
    evaluate_sync,
    token_usage_under,
    tool_called,
)
from fairtrial.testing.model_server import ModelServer, Reply, Script, ToolCall

QUESTIONS = Dataset.of({"What is the weather in Oslo?": "snow"}, name="weather")


def make_agent(base_url: str) -> Agent[None, str]:
    """The agent somebody else wrote."""
    agent = Agent(OpenAIChatModel("test-model", provider=OpenAIProvider(base_url=base_url, api_key="none")))

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


def main() -> EvalReport:
    turns = Script((Reply(tool_calls=(ToolCall("weather", {"city": "Oslo"}),)), "Expect snow in Oslo."), per="turn")
    with ModelServer(turns) as server:
        agent = make_agent(f"{server.base_url}/v1")

        async def ask(question: str, ctx: TrialContext) -> str:
            result = await agent.run(question)
            record(ctx.session, result.all_messages())
            return result.output

        return evaluate_sync(QUESTIONS, ask, all_of(contains, tool_called("weather"), token_usage_under(1_000)))


if __name__ == "__main__":
    print(main())
