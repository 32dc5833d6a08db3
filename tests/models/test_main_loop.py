"""The loop of a task, agents in environments, and tools that the provider runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from anthropic.types import ContentBlockParam
from pydantic import BaseModel, TypeAdapter

from fairtrial import AnthropicAdapter, Dataset, EvalSuite, OpenAIAdapter, Sample, Session, TrialContext, TrialKey, task
from fairtrial.data.session import ChatMessage, PromptExecuted, TokenUsage, ToolCall, restore_session
from fairtrial.errors import ConfigurationError, ModelUnavailableError
from fairtrial.fleet import MainLoop
from fairtrial.integrations.model_server import FaultRule, ModelServer, ParsedRequest, Reply, ToolCallReply, WrongShape
from fairtrial.models import MarkdownSection, Prices, Prompt, PromptTemplate, ScriptedAdapter, agent_task, prompt_task
from fairtrial.models.gemini import GeminiAdapter
from fairtrial.models.limiter import NO_RETRY, Unlimited
from fairtrial.scoring import EvalContext, Score, all_of, contains, exact_match, resolve, token_usage_under
from fairtrial.trials import EnvironmentRegistry, EnvironmentSaved, EvalConfig, EvalResult, Experiment, current_trial
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, slots=True)
class QAParams:
    question: str


class QAModel(BaseModel):
    question: str


@dataclass(frozen=True, slots=True)
class Answer:
    text: str


QA = PromptTemplate[Answer]("qa", "answer", "qa", [MarkdownSection[QAParams]("", "$question", "q")])
STYLED = PromptTemplate[str]("qa", "s", "styled", [MarkdownSection[None]("", "$question in $style style", "q")])


@dataclass(frozen=True, slots=True)
class Noted:
    what: str


class QALoop(MainLoop[str, Answer]):
    def initialize(self, input: str) -> tuple[Prompt[Answer], Session]:
        session = Session()
        session.record(Noted(input))
        return Prompt(QA).bind(QAParams(input)), session


class SlowLoop(QALoop):
    async def initialize(self, input: str) -> tuple[Prompt[Answer], Session]:  # type: ignore[override]  # async works too
        return Prompt(QA).bind(QAParams(input)), current_trial().session


async def run(
    fn: Any, given: Any = "why", *, scorer: Any = exact_match, params: Any = None, expected: Any = None, **rules: Any
) -> EvalResult:
    experiment = Experiment(params=params or {})
    chosen = TrialRules((resolve_task(fn),), (experiment,), resolve(scorer), **rules)
    sample = Sample("s", given, Answer("because") if expected is None else expected)
    return await run_trial(chosen, TrialKey("r", "baseline", "s"), 0, sample, 0)


@pytest.mark.proves("R64")
async def test_a_loop_executes_the_prompt_it_initialises() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("because")], usage=TokenUsage(1, 2)))
    response, session = await loop.execute("why")
    assert response.output == Answer("because")
    assert response.usage == TokenUsage(1, 2)
    assert session[Noted].all() == (Noted("why"),)
    assert [message.text for message in session.trajectory.messages] == ["why", '{"text":"because"}']
    assert session[PromptExecuted].all()[0].prompt_name == "qa"


@pytest.mark.proves("R64")
async def test_a_loop_executes_any_task() -> None:
    def shout(text: str, ctx: TrialContext) -> str:
        ctx.session.record(Noted(text))
        assert current_trial() is ctx
        return text.upper()

    async def count(text: str) -> dict[str, int]:
        return {"n": len(text)}

    response, session = await MainLoop(shout).execute("hi")
    assert response.output == response.completion.raw == "HI"
    assert session[Noted].all() == (Noted("hi"),)
    assert (await MainLoop(count).execute("hi"))[0].output == {"n": 2}
    assert (await MainLoop(task(inline=True)(lambda text: object())).execute("hi"))[0].completion.raw.startswith("<obj")


async def test_what_a_task_opened_is_closed_after_execution() -> None:
    closed: list[str] = []

    async def work(text: str, ctx: TrialContext) -> str:
        ctx.resources.callback(closed.append, text)
        return text

    await MainLoop(work).execute("x")
    assert closed == ["x"]


@pytest.mark.proves("R64")
async def test_a_loop_is_a_task_and_its_record_is_in_the_trials() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("because")], usage=TokenUsage(1, 2)))
    result = await run(loop, scorer=all_of(exact_match, token_usage_under(3)))
    assert (result.outcome, result.output, result.passed) == ("scored", Answer("because"), True)
    assert result.usage == TokenUsage(1, 2)
    assert result.snapshot is not None
    assert restore_session(result.snapshot)[Noted].all() == (Noted("why"),)
    resolved = resolve_task(loop)
    assert (resolved.name, resolved.output_type) == ("QALoop", Answer)


async def test_a_retried_loop_is_judged_by_its_last_attempt() -> None:
    adapter = ScriptedAdapter([ModelUnavailableError("gone"), Answer("because")], usage=TokenUsage(1, 1))
    result = await run(QALoop(adapter=adapter), scorer=token_usage_under(2), max_retries=1)
    assert result.passed
    assert result.snapshot is not None
    recorded = restore_session(result.snapshot)
    assert [(found.attempt, found.data) for found in recorded.envelopes if found.kind.endswith("Noted")] == [
        (1, {"what": "why"}),
        (2, {"what": "why"}),
    ]


async def test_a_loop_may_record_in_the_trials_session_itself() -> None:
    result = await run(SlowLoop(adapter=ScriptedAdapter([Answer("because")])))
    assert result.passed
    assert result.snapshot is not None
    assert len(restore_session(result.snapshot)[PromptExecuted].all()) == 1


async def test_a_loop_around_a_task_is_that_task() -> None:
    def shout(text: str) -> str:
        return text.upper()

    result = await run(MainLoop(shout), expected="WHY")
    assert result.passed
    resolved = resolve_task(MainLoop(shout))
    assert (resolved.name, resolved.output_type) == ("shout", str)


async def test_a_loop_keeps_its_adapter_and_has_a_short_repr() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("because")]))
    assert (await loop.execute("why"))[0].output == Answer("because")
    assert isinstance(loop.adapter, ScriptedAdapter)
    assert repr(loop) == "<QALoop>"


def test_a_loop_needs_a_task_or_an_initialize_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match="either a task or an initialize"):
        MainLoop()
    with pytest.raises(ConfigurationError, match="either a task or an initialize"):
        QALoop(str.upper, adapter=ScriptedAdapter([]))
    with pytest.raises(ConfigurationError, match="must have adapter"):
        QALoop()
    with pytest.raises(NotImplementedError):
        MainLoop(str.upper).initialize("x")


class Untyped(MainLoop):
    def initialize(self, input: Any) -> Any:
        return QA.bind(question=input), Session()


def test_a_loop_that_names_no_types_gives_anything() -> None:
    assert resolve_task(Untyped(adapter=ScriptedAdapter([]))).output_type is object


@pytest.mark.parametrize("given", ["why", QAParams("why"), QAModel(question="why"), {"question": "why"}])
async def test_a_prompt_with_a_model_is_a_task(given: Any) -> None:
    adapter = ScriptedAdapter({"why": Answer("because")})
    prompted = prompt_task(QA, adapter)
    result = await run(prompted, given)
    assert result.passed
    assert result.snapshot is not None
    spoken = restore_session(result.snapshot).trajectory.messages
    assert spoken[0] == ChatMessage("user", "why")
    assert len(spoken) == 2
    assert (resolve_task(prompted).name, resolve_task(prompted).output_type) == ("qa", Answer)


async def test_parameters_the_input_does_not_have_come_from_the_experiment() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True)
    for given in ("why", {"question": "why"}):
        assert (await run(prompt_task(STYLED, adapter), given, params={"style": "terse"}, expected="ok")).passed
    assert {call.text for call in adapter.calls} == {"why in terse style"}


async def test_an_input_that_is_not_the_parameters_needs_a_function() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True)
    refused = await run(prompt_task(STYLED, adapter), "why")
    assert refused.outcome == "task_error"
    assert "needs $question, $style (got an input of type str)" in str(refused.error)
    assert 'columns={"input": ["question", "style"]}, or --column input=question,style)' in str(refused.error)
    split = prompt_task(
        STYLED, adapter, params=lambda text: dict(zip(("question", "style"), text.split(), strict=True))
    )
    assert (await run(split, "why plain", expected="ok")).passed


def test_a_prompt_that_no_input_fills_is_refused_before_the_first_trial() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True)

    def suite(*inputs: object, **params: str) -> EvalSuite[Any, Any, Any]:
        experiments = [Experiment("e", params=params, task=prompt_task(STYLED, adapter))]
        return EvalSuite(
            "styled", Dataset.of([(one, "ok") for one in inputs]), None, exact_match, experiments=experiments
        )

    with pytest.raises(ConfigurationError, match=r"sample '\w+': prompt .* needs \$question, \$style"):
        suite("why", "how").run_sync(store="memory:")
    assert len(adapter.calls) == 0
    assert suite("why", "how", style="terse").run_sync(store="memory:").pass_rate == 1.0
    mixed = suite("why", {"question": "why", "style": "terse"}).run_sync(store="memory:")
    assert (mixed.pass_rate_all, dict(mixed.errors)) == (0.5, {"task_error": 1})


def test_prompts_work_under_any_event_loop() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("a"), Answer("b")]))
    answers = [anyio.run(loop.execute, "x", backend=backend)[0].output for backend in ("asyncio", "trio")]
    assert answers == [Answer("a"), Answer("b")]


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


def look(city: str) -> str:
    """Look at a city."""
    return f"{city} is large."


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
