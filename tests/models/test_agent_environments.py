"""Agents in environments, what stops them, and tools that the provider runs."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import ContentBlockParam
from pydantic import TypeAdapter

from fairtrial import (
    AnthropicAdapter,
    ChatMessage,
    ConfigurationError,
    Dataset,
    EvalConfig,
    EvalContext,
    EvalReport,
    EvalSuite,
    Sample,
    Score,
    ToolCall,
    ToolInvoked,
    contains,
    exact_match,
)
from fairtrial.integrations.model_server import FaultRule, ModelServer, ParsedRequest, Reply, ToolCallReply, WrongShape
from fairtrial.models import AgentEnded, OpenAIAdapter, Prices, ScriptedAdapter, StopAgent, agent_task
from fairtrial.models.gemini import GeminiAdapter
from fairtrial.models.limiter import NO_RETRY, Unlimited
from fairtrial.trials import EnvironmentRegistry, EnvironmentSaved

# Environments in runs: reached by evaluators, saved, restored.


class Drawer:
    ENV_KIND = "drawer"
    VERSION = "1.0"

    def __init__(self, held: list[str] | None = None) -> None:
        self.held = list(held or ())
        self.closed = False

    async def put(self, thing: str) -> str:
        """Put something in."""
        self.held.append(thing)
        return "done"

    def tools(self) -> list[Any]:
        return [self.put]

    def close(self) -> None:
        self.closed = True

    async def serialize(self) -> dict[str, Any]:
        return {"env_kind": self.ENV_KIND, "version": self.VERSION, "held": self.held}

    @staticmethod
    async def deserialize(data: dict[str, Any]) -> Drawer:
        return Drawer(data["held"])


class Stuck(Drawer):
    async def serialize(self) -> dict[str, Any]:
        raise RuntimeError("the disk is full")


def _put(thing: str) -> ToolCall:
    return ToolCall("put", {"thing": thing})


def holds_a_pen(output: str, expected: str, environment: Drawer) -> Score:
    assert not environment.closed
    return Score(float("pen" in environment.held))


def _suite(task: Any, evaluator: Any = holds_a_pen, **config: Any) -> EvalSuite:
    return EvalSuite("drawers", Dataset([Sample("a", "Put a pen in.")]), task, evaluator, config=EvalConfig(**config))


@pytest.mark.proves("R135")
def test_evaluators_reach_the_environment_of_a_trial_while_it_is_open() -> None:
    made: list[Drawer] = []

    def factory(sample: Sample[Any, Any]) -> Drawer:
        made.append(Drawer())
        return made[-1]

    def in_context(sample: Sample[Any, Any], output: str, *, context: EvalContext) -> tuple[Score, ...]:
        return (Score(float("pen" in context.environment.held), name="pen"),)

    for evaluator in (holds_a_pen, in_context):
        task = agent_task(ScriptedAdapter([_put("pen"), "ok"]), environment_factory=factory)
        assert _suite(task, evaluator).run_sync(store="memory:").pass_rate == 1.0
    assert [drawer.closed for drawer in made] == [True, True]


@pytest.mark.proves("R135")
def test_the_state_at_the_end_is_recorded_and_another_trial_starts_from_it() -> None:
    registry = EnvironmentRegistry(Drawer)
    task = agent_task(
        ScriptedAdapter([_put("pen"), "ok"]), environment_factory=lambda sample: Drawer(["ink"]), environments=registry
    )
    report = _suite(task).run_sync(store="memory:")
    saved = report.results[0].session[EnvironmentSaved].latest()
    assert saved is not None
    assert saved.state == {"env_kind": "drawer", "version": "1.0", "held": ["ink", "pen"]}
    again = agent_task(ScriptedAdapter(["ok"]), environment_factory=lambda sample: saved.state, environments=registry)
    assert _suite(again).run_sync(store="memory:").pass_rate == 1.0
    refused = agent_task(ScriptedAdapter(["ok"]), environment_factory=lambda sample: saved.state)
    assert "give agent_task environments=" in str(_suite(refused).run_sync(store="memory:").results[0].error)


@pytest.mark.proves("R135")
@pytest.mark.parametrize(("kept", "held"), [(True, ["pen", "nib"]), (False, ["nib"])])
def test_a_retry_starts_from_the_last_state_if_asked(kept: bool, held: list[str]) -> None:
    task = agent_task(
        ScriptedAdapter([_put("pen"), RuntimeError("the model is away"), _put("nib"), "ok"]),
        environment_factory=lambda sample: Drawer(),
        environments=EnvironmentRegistry(Drawer),
        continue_on_retry=kept,
    )
    report = _suite(task, max_retries=1).run_sync(store="memory:")
    saved = report.results[0].session[EnvironmentSaved].all()
    assert [state.state["held"] for state in saved] == [["pen"], held]


@pytest.mark.proves("R135")
def test_state_that_cannot_be_saved_is_recorded_as_such_and_costs_no_result() -> None:
    task = agent_task(
        ScriptedAdapter([_put("pen"), "ok"]),
        environment_factory=lambda sample: Stuck(),
        environments=EnvironmentRegistry(Stuck),
    )
    report = _suite(task).run_sync(store="memory:")
    assert report.pass_rate == 1.0
    saved = report.results[0].session[EnvironmentSaved].latest()
    assert saved is not None
    assert saved.error == "RuntimeError: the disk is full"
    with pytest.raises(ConfigurationError, match="continue_on_retry needs environments"):
        agent_task(ScriptedAdapter([]), continue_on_retry=True)


# Ends of agents that tools decide, and parameters of the first turn.


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


# Tools that run at the provider: what they did is sent back, their cost is not left out, pauses are continued.


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CITED = {"type": "web_search_result_location", "cited_text": "Paris is", "encrypted_index": "e1", "title": "Atlas",
         "url": "https://example.org/atlas"}  # fmt: skip
FOUND = {"type": "web_search_result", "encrypted_content": "c1", "title": "Atlas", "url": "https://example.org/atlas"}
BLOCKS: tuple[dict[str, Any], ...] = (
    {"type": "text", "text": "Let me look. ", "citations": []},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "capital of France"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [FOUND]},
    {"type": "text", "text": "It is Paris. ", "citations": [CITED]},
)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def claude(server: ModelServer, **more: Any) -> AnthropicAdapter:
    given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited(), "params": {"tools": [SEARCH]}}
    return AnthropicAdapter("claude-opus-4-5", base_url=server.base_url, **{**given, **more})


def content_sent(request: ParsedRequest, place: int) -> Any:
    """The content of a message, valid by the types of the SDK; without the marks for the cache."""
    kind: TypeAdapter[Any] = TypeAdapter(ContentBlockParam)
    sent = request.body["messages"][place]["content"]
    for block in sent:
        kind.validate_python(block)
    return [{key: value for key, value in block.items() if key != "cache_control"} for block in sent]


async def test_what_a_hosted_tool_did_is_sent_back_beside_own_calls(stream: bool) -> None:
    own = ToolCallReply("look", {"city": "Paris"}, id="toolu_1")
    with ModelServer([Reply("", (own,), hosted=BLOCKS), Reply("Paris is large.")]) as server:
        model = claude(server, stream=stream)
        data = Dataset([Sample("1", "The capital of France?", "Paris")], name="d")
        report = await EvalSuite("hosted", data, agent_task(model, tools=[look]), contains).run(store="memory:")
        _, second = server.requests()
    assert report.pass_rate == 1.0
    sent = content_sent(second, 1)
    assert sent == [*BLOCKS, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Paris"}}]
    assert [result["tool_use_id"] for result in second.body["messages"][2]["content"]] == ["toolu_1"]


async def test_a_pause_in_the_work_of_a_hosted_tool_is_continued(stream: bool) -> None:
    turns = [
        Reply("", hosted=BLOCKS[:2], finish_reason="pause_turn"),
        Reply("", hosted=BLOCKS[2:3], finish_reason="pause_turn"),
        Reply("", hosted=BLOCKS[3:]),
    ]
    with ModelServer([*turns, Reply("Yes.")]) as server:
        async with claude(server, stream=stream) as model:
            found = await model.complete("The capital of France?")
            said = [ChatMessage("user", "The capital of France?"), found.message, ChatMessage("user", "Sure?")]
            await model.complete(said)
        requests = server.requests()
    assert found.text == "Let me look. It is Paris. "
    assert found.finish_reason == "end_turn"
    assert content_sent(requests[1], 1) == [*BLOCKS[:2]]
    assert content_sent(requests[2], 1) == [*BLOCKS[:3]]
    assert content_sent(requests[3], 1) == [*BLOCKS]


async def test_searches_have_a_price_or_the_cost_is_unknown(stream: bool) -> None:
    with ModelServer(Reply("", hosted=BLOCKS)) as server:
        async with claude(server, stream=stream, prices_of="anthropic") as model:
            listed = (await model.complete("q")).usage
        async with claude(server, stream=stream, prices=Prices(5, 25)) as model:
            given = (await model.complete("q")).usage
    assert listed is not None
    assert given is not None
    tokens = (listed.input_tokens * 5 + listed.output_tokens * 25) / 1e6
    assert listed.cost_usd == pytest.approx(tokens + 0.01)  # $10 for 1,000 searches.
    assert given.cost_usd is None


async def test_a_search_of_responses_is_sent_back_with_its_reasoning() -> None:
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Paris."}]},
    ]
    body = {"model": "m", "status": "completed", "output": items}
    with ModelServer("Yes.", faults=FaultRule(WrongShape(body), numbers=(1,))) as server:
        given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited()}
        async with OpenAIAdapter("gpt-6", api="responses", base_url=f"{server.base_url}/v1", **given) as model:
            first = await model.complete("q", params={"tools": [{"type": "web_search"}]})
            await model.complete([ChatMessage("user", "q"), first.message, ChatMessage("user", "Sure?")])
        sent = server.requests()[1].body["input"]
    assert first.text == "Paris."
    assert sent[1:-1] == items


async def test_code_that_google_ran_is_sent_back() -> None:
    parts = [
        {"executableCode": {"language": "PYTHON", "code": "print(6 * 7)"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "42\n"}},
        {"text": "It is 42."},
    ]
    body = {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}]}
    with ModelServer("Yes.", faults=FaultRule(WrongShape(body), numbers=(1,))) as server:
        given: dict[str, Any] = {"api_key": "k", "retry": NO_RETRY, "limiter": Unlimited()}
        async with GeminiAdapter("g", base_url=f"{server.base_url}/v1beta", **given) as model:
            first = await model.complete("6 * 7?", params={"tools": [{"codeExecution": {}}]})
            await model.complete([ChatMessage("user", "6 * 7?"), first.message, ChatMessage("user", "Sure?")])
        sent = server.requests()[1].body["contents"]
    assert first.text == "It is 42."
    assert sent[1]["parts"] == parts
