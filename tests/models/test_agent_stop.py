"""Ends of agents that tools decide, and parameters of the first turn."""

from __future__ import annotations

from typing import Any

from fairtrial import Dataset, EvalReport, EvalSuite, Sample, ToolCall, ToolInvoked, agent_task, exact_match
from fairtrial.integrations.model_server import ModelServer, ParsedRequest, Reply, ToolCallReply
from fairtrial.models import AgentEnded, OpenAIAdapter, ScriptedAdapter, StopAgent
from fairtrial.models.limiter import NO_RETRY, Unlimited


def look(city: str) -> str:
    """Look at a city."""
    return f"{city} is large."


def submit(answer: str) -> None:
    """Submit the answer."""
    raise StopAgent(answer)


async def deny() -> None:
    """Ask for approval, which is denied."""
    raise StopAgent


async def run(model: Any, **options: Any) -> EvalReport:
    data = Dataset([Sample("1", "q", "Paris")], name="d")
    agent = agent_task(model, tools=[look, submit, deny], **options)
    return await EvalSuite("a", data, agent, exact_match).run(store="memory:")


async def test_a_tool_ends_the_agent_with_its_output_and_calls_beside_it_finish() -> None:
    calls = [ToolCall("submit", {"answer": "Paris"}), ToolCall("look", {"city": "Paris"})]
    model = ScriptedAdapter([calls, "never asked for"])
    (result,) = (await run(model)).results
    assert (result.outcome, result.output, result.passed) == ("scored", "Paris", True)
    ended = result.session[AgentEnded].latest()
    assert ended is not None
    assert (ended.reason, ended.turns, ended.detail) == ("terminated", 1, "the tool 'submit' ended it")
    made = {call.name: (call.result, call.error) for call in result.session[ToolInvoked].all()}
    assert made == {"submit": ("Paris", None), "look": ("Paris is large.", None)}


async def test_without_an_output_the_last_text_is_scored() -> None:
    with ModelServer([Reply("Paris", (ToolCallReply("deny", {}),)), Reply("never asked for")]) as server:
        model = OpenAIAdapter("m", base_url=f"{server.base_url}/v1", api_key="k", retry=NO_RETRY, limiter=Unlimited())
        (result,) = (await run(model)).results
        assert server.stats().requests == 1
    assert (result.outcome, result.output) == ("scored", "Paris")


async def test_parameters_of_the_first_turn_do_not_hold_in_the_next() -> None:
    def answer(request: ParsedRequest) -> Reply:
        if request.body.get("tool_choice") == "required":
            return Reply("", (ToolCallReply("look", {"city": "Paris"}),))
        return Reply("Paris")

    with ModelServer(answer) as server:
        given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited()}
        model = OpenAIAdapter("m", base_url=f"{server.base_url}/v1", **given)
        options: dict[str, Any] = {"params": {"seed": 7}, "first_params": {"tool_choice": "required"}, "max_turns": 6}
        (result,) = (await run(model, **options)).results
        bodies = [request.body for request in server.requests()]
    assert result.output == "Paris"
    assert [(body.get("tool_choice"), body["seed"]) for body in bodies] == [("required", 7), (None, 7)]
