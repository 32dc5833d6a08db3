from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from fairtrial import Attachment, ChatMessage, Dataset, EvalConfig, EvalSuite, Sample, Score, ToolCall
from fairtrial.data.session import PromptExecuted, TokenUsage, ToolInvoked
from fairtrial.errors import ConfigurationError, DatasetError, ModelAuthError, ModelUnavailableError
from fairtrial.models import (
    AgentEnded,
    ConversationEnded,
    ScriptedAdapter,
    StopAgent,
    UserBriefed,
    agent_task,
    conversation_task,
    recorded_user,
    simulated_user,
)
from fairtrial.rl.local_model import with_adapter
from fairtrial.trials.context import TrialContext
from fairtrial.trials.result import EvalResult
from tests.models.test_agent import run

END = ToolCall("end_conversation", {"reason": "it works"})


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def always(output: Any) -> Score:
    return Score(1.0)


def said(session: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in session.trajectory.messages]


async def talk(task: Any, sample: Sample[Any, Any] | None = None, **rules: Any) -> tuple[EvalResult, Any]:
    return await run(task, sample=sample or Sample("s", "a new lamp"), scorer=always, **rules)


async def test_an_agent_and_a_simulated_user_speak_in_turns_until_the_user_calls_its_tool() -> None:
    agent = ScriptedAdapter(["Which lamp?", [ToolCall("order", {"item": "red"}, "c1")], "Ordered."])
    user = ScriptedAdapter(["I want a lamp.", "The red one. GOODBYE", [END]])
    ordered: list[str] = []

    def order(item: str) -> str:
        ordered.append(item)
        return "ok"

    result, session = await talk(conversation_task(agent_task(agent, tools=[order]), simulated_user(user)))
    assert (result.outcome, result.output, ordered) == ("scored", "Ordered.", ["red"])
    assert said(session) == [
        ("user", "I want a lamp."),
        ("assistant", "Which lamp?"),
        ("user", "The red one. GOODBYE"),  # No word ends a conversation.
        ("assistant", ""),
        ("tool", "ok"),
        ("assistant", "Ordered."),
    ]
    assert session.everything()[ConversationEnded].all() == (ConversationEnded("user", 2, "it works"),)
    assert session[AgentEnded].all() == (AgentEnded("terminated", 3, "it works"),)  # Its calls of the model.
    # Each side sees the words of the other as those of its user, and nothing of the other's tools.
    assert [(m.role, m.text) for m in user.calls[-1].messages[1:]] == [
        ("user", "(The conversation begins. Write your first message.)"),
        ("assistant", "I want a lamp."),
        ("user", "Which lamp?"),
        ("assistant", "The red one. GOODBYE"),
        ("user", "Ordered."),
    ]
    assert [m.role for m in agent.calls[-1].messages] == ["user", "assistant", "user", "assistant", "tool"]


async def test_what_a_user_does_is_counted_apart_and_hidden_from_evaluators_of_the_agent() -> None:
    agent = ScriptedAdapter(["Restart it.", "Good."], usage=TokenUsage(10, 5, cost_usd=0.25))
    user = ScriptedAdapter(
        ["It is broken.", [ToolCall("restart", {}, "u1")], "It works now.", [END]],
        usage=TokenUsage(100, 50, cost_usd=2.0),
    )
    task = conversation_task(agent, simulated_user(user, tools=[restart]))
    result, session = await talk(task)
    assert (result.usage, result.judge_cost_usd) == (TokenUsage(20, 10, cost_usd=0.5), 8.0)
    assert result.score is not None
    assert (result.score.metric("user_tokens"), result.score.metric("user_cost_usd")) == (600.0, 8.0)
    assert result.metadata["user"] == {"tokens": 600, "cost_usd": 8.0}
    assert session[ToolInvoked].all() == ()
    assert len(session[PromptExecuted].all()) == 2
    own = session.everything()
    assert [event.name for event in own[ToolInvoked].all()] == ["restart", "end_conversation"]
    actors = {event.actor for event in own.envelopes if "PromptExecuted" in event.kind}
    assert actors == {"task", "user"}
    spoken = [event.actor for event in own.envelopes if event.kind == "fairtrial:ChatMessage"]
    assert spoken == ["user", "task", "user", "task"]


def restart() -> str:
    return "restarted"


async def test_the_brief_comes_from_texts_fields_and_functions_of_the_sample() -> None:
    user = ScriptedAdapter([[END]])
    sample: Sample[Any, Any] = Sample("s", {"wish": "a refund"}, metadata={"facts": {"order": "A7", "paid": 12}})
    simulated = simulated_user(
        user, goal="input.wish", persona=lambda sample: f"customer {sample.id}", knows="metadata.facts"
    )
    _result, session = await talk(conversation_task(ScriptedAdapter(["hm"]), simulated), sample)
    assert session[UserBriefed].latest() == UserBriefed("a refund", "customer s", "- order: A7\n- paid: 12")
    prompt = user.calls[0].messages[0].text
    for part in ("a refund", "customer s", "- order: A7\n- paid: 12", "end_conversation"):
        assert part in prompt
    with pytest.raises(DatasetError, match=r"sample 't' has no metadata\.facts, which is the knows of its user"):
        simulated.brief(Sample("t", {"wish": "x"}))
    with pytest.raises(DatasetError, match="sample 't': a simulated user must have a goal"):
        simulated_user(user).brief(Sample("t", None))


async def test_the_agent_still_acts_when_a_user_ends_with_a_last_message() -> None:
    agent = ScriptedAdapter(["Shall I?", [ToolCall("restart", {}, "c1")], "Done."])
    last = ChatMessage("assistant", "Yes, do it.", (END,))
    task = conversation_task(agent_task(agent, tools=[restart]), simulated_user(ScriptedAdapter(["Help", last])))
    result, session = await talk(task)
    assert result.output == "Done."
    assert session[ToolInvoked].all()[0].name == "restart"


async def test_a_conversation_ends_by_the_state_of_the_environment() -> None:
    class Shop:
        orders = 0

        def tools(self) -> Sequence[Any]:
            return [self.order]

        def order(self) -> str:
            self.orders += 1
            return "ok"

    agent = ScriptedAdapter(["Sure?", [ToolCall("order", {}, "c1")], "Ordered."])
    task = conversation_task(
        agent_task(agent, environment_factory=lambda _sample: Shop()),
        ["One lamp", "Yes", "Never said"],
        ends_when=lambda shop: shop.orders == 1,
    )
    result, session = await talk(task)
    assert (result.output, session[ConversationEnded].latest()) == ("Ordered.", ConversationEnded("state", 2))


async def test_a_conversation_ends_at_its_limit_of_turns_and_counts_as_truncated() -> None:
    agent = ScriptedAdapter(["a", "b", "c"])
    result, session = await talk(conversation_task(agent, lambda messages: f"turn {len(messages)}", max_turns=2))
    assert (result.outcome, result.output) == ("scored", "b")
    assert session[AgentEnded].all() == (AgentEnded("truncated", 2, "2 turns"),)
    assert said(session)[-2:] == [("user", "turn 2"), ("assistant", "b")]


async def test_a_tool_of_the_agent_ends_the_conversation_with_its_output() -> None:
    def transfer() -> None:
        raise StopAgent("to a human")

    agent = agent_task(ScriptedAdapter(["Hm", [ToolCall("transfer", {}, "c1")]]), tools=[transfer])
    result, session = await talk(conversation_task(agent, ["Help", "Help!", "never"]))
    assert result.output == "to a human"
    assert session[ConversationEnded].latest().reason == "agent"
    assert [end.reason for end in session[AgentEnded].all()] == ["terminated"]


async def test_limits_of_an_agent_hold_for_each_answer() -> None:
    calls = [[ToolCall("restart", {}, f"c{n}")] for n in range(4)]
    agent = agent_task(ScriptedAdapter([calls[0], "one", calls[1], "two", *calls[2:]]), tools=[restart], max_turns=2)
    _result, session = await talk(conversation_task(agent, ["a", "b", "c", "d"]))
    assert [text for role, text in said(session) if role == "user"] == ["a", "b", "c"]
    assert session[AgentEnded].latest() == AgentEnded("truncated", 6, "2 turns", name="agent")


async def test_the_end_of_a_conversation_names_the_agent_its_calls_and_the_model_that_took_over() -> None:
    down = ScriptedAdapter([ModelUnavailableError("down")], retry=None)
    spare = ScriptedAdapter([[ToolCall("restart", {}, "c1")], "Done.", "Good."], model="spare-1")
    agent = agent_task(down, tools=[restart], fallback=spare, name="helper")
    _result, session = await talk(conversation_task(agent, ["Help", "Thanks"]))
    (ended,) = session[AgentEnded].all()
    assert (ended.reason, ended.turns, ended.fallback, ended.name) == ("terminated", 3, "spare-1", "helper")
    assert ended.duration_ms is not None
    assert {call.prompt_name for call in session[PromptExecuted].all()} == {"helper"}
    assert session.everything()[ConversationEnded].all() == (ConversationEnded("user", 2),)


async def test_functions_speak_for_both_sides_and_a_greeting_comes_first() -> None:
    async def agent(messages: Sequence[ChatMessage], ctx: TrialContext) -> str:
        return f"{ctx.sample.id}: {len(messages)}"

    def user(messages: Sequence[ChatMessage]) -> str | None:
        return f"heard {messages[-1].text}" if len(messages) < 4 else None

    result, session = await talk(conversation_task(agent, user, greeting="Hello!"))
    assert said(session) == [
        ("assistant", "Hello!"),
        ("user", "heard Hello!"),
        ("assistant", "s: 2"),
        ("user", "heard s: 2"),
        ("assistant", "s: 4"),
    ]
    assert result.output == "s: 4"


def test_a_recorded_user_repeats_neither_prepared_messages_nor_failed_attempts() -> None:
    down = ModelUnavailableError("down", retry_after=0.0)
    user = simulated_user(ScriptedAdapter(["A lamp", down, "One lamp", [END]], retry=None))
    agent = agent_task(
        ScriptedAdapter(["Which?"], repeat=True),
        prepare_messages=lambda _sample: [ChatMessage("user", "An example"), ChatMessage("assistant", "Its answer")],
    )
    suite = EvalSuite(
        "talk", Dataset([Sample("a", "x")]), conversation_task(agent, user), always, config=EvalConfig(max_retries=1)
    )
    (result,) = suite.run_sync(store="memory:").results
    assert (result.outcome, result.attempt) == ("scored", 2)
    assert recorded_user([result]).conversations == {("a", 0): (ChatMessage("user", "One lamp"),)}


def test_a_recorded_user_also_says_what_the_input_of_another_task_was() -> None:
    echo = agent_task(ScriptedAdapter(["Hello"], repeat=True))
    report = EvalSuite("echo", Dataset([Sample("a", "Hi")]), echo, always).run_sync(store="memory:")
    assert recorded_user(report.results).conversations == {("a", 0): (ChatMessage("user", "Hi"),)}


def test_a_recorded_user_says_the_same_to_another_agent() -> None:
    data: Dataset[str, Any] = Dataset([Sample("a", "x"), Sample("b", "y")])
    first = EvalSuite(
        "talk", data, conversation_task(ScriptedAdapter(["one"], repeat=True), lambda m: None if m else "Hi"), always
    ).run_sync(store="memory:")
    again = conversation_task(ScriptedAdapter(["two"], repeat=True), recorded_user(first.results))
    second = EvalSuite("talk", data, again, always).run_sync(store="memory:")
    assert [said(result.session) for result in second.results] == [[("user", "Hi"), ("assistant", "two")]] * 2
    other: Dataset[str, Any] = Dataset([Sample("c", "x")])
    third = EvalSuite("talk", other, again, always).run_sync(store="memory:")
    assert third.errors == {"user_error": 1}


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        ([""], "said nothing, and did not end"),
        ([ModelAuthError("no key")], "could not speak: ModelAuthError: no key"),
        ([[ToolCall("restart", {}, "u")]] * 10, "called tools in 10 turns without a message"),
    ],
)
async def test_a_user_that_cannot_speak_is_an_error_of_its_own_and_not_of_the_agent(
    replies: list[Any], problem: str
) -> None:
    user = simulated_user(ScriptedAdapter(replies), tools=[restart])
    result, _session = await talk(conversation_task(ScriptedAdapter([]), user))
    assert (result.outcome, result.stage) == ("user_error", "task")
    assert problem in (result.error or "")


@pytest.mark.parametrize("user", [lambda messages: 1 / 0, simulated_user(ScriptedAdapter([]), goal="metadata.goal")])
def test_an_error_in_the_code_or_data_of_a_user_is_no_error_of_the_agent(user: Any) -> None:
    made = conversation_task(ScriptedAdapter([]), user)
    report = EvalSuite("talk", Dataset([Sample("a", "x")]), made, always).run_sync(store="memory:")
    assert report.errors == {"user_error": 1}
    assert "the user failed: " in (report.results[0].error or "")


def test_a_mistake_in_the_code_of_a_user_stops_the_run_and_names_its_line() -> None:
    def user(messages: Sequence[ChatMessage]) -> str:
        return str(cast("Any", messages).last)

    data: Dataset[str, Any] = Dataset([Sample(f"s{n}", "x") for n in range(30)])
    task = conversation_task(ScriptedAdapter(["a"], repeat=True), user)
    config = EvalConfig(max_same_errors=5)
    report = EvalSuite("talk", data, task, always, config=config).run_sync(store="memory:")
    assert report.run.status == "incomplete"
    assert "the user failed: AttributeError" in str(report.run.noted.stopped)
    assert "test_conversations.py:" in str(report.run.noted.stopped)


async def test_a_user_that_could_not_be_reached_is_tried_again_with_the_trial() -> None:
    user = ScriptedAdapter([ModelUnavailableError("down", retry_after=0.0), "Hi", [END]], retry=None)
    task = conversation_task(ScriptedAdapter(["Hello"]), simulated_user(user))
    result, _session = await talk(task, max_retries=1)
    assert (result.outcome, result.attempt) == ("scored", 2)


async def test_an_error_of_the_agent_stays_an_error_of_the_task() -> None:
    task = conversation_task(ScriptedAdapter([ModelAuthError("no key")]), ["Hi"])
    result, session = await talk(task)
    assert (result.outcome, session[AgentEnded].latest().reason) == ("task_error", "error")


async def test_a_user_may_show_a_picture() -> None:
    picture = Attachment("0" * 64, "image/png", 3, "picture.png")
    message = ChatMessage("user", ("What is this?", picture))
    agent = ScriptedAdapter(["A lamp."])
    await talk(conversation_task(agent, lambda messages: None if messages else message))
    assert agent.calls[0].messages[0].content == ("What is this?", picture)


def test_the_policy_of_a_conversation_can_be_replaced_for_training() -> None:
    policy = ScriptedAdapter(["new"], repeat=True)
    task = conversation_task(agent_task(ScriptedAdapter(["old"])), ["Hi"])
    suite: Any = EvalSuite("talk", Dataset([Sample("a", "x")]), task, always)
    report = EvalSuite("talk", suite.dataset, with_adapter(suite, policy), always).run_sync(store="memory:")
    assert [result.output for result in report.results] == ["new"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda agent: conversation_task(agent, []), "must have at least one message"),
        (lambda agent: conversation_task(agent, "Hi"), "must be simulated_user"),
        (lambda agent: conversation_task(3, ["Hi"]), "agent of a conversation must be"),
        (lambda agent: conversation_task(agent, ["Hi"], max_turns=0), "max_turns must be at least 1"),
        (lambda agent: simulated_user(agent, goal=cast("Any", 3)), "goal must be a text"),
        (lambda agent: simulated_user(agent, rules=" "), "rules must say"),
        (lambda agent: simulated_user(agent, tools=[lambda x, /: x]), "must have a name|positional"),
        (lambda agent: recorded_user([]), "no result has a message of a user"),
    ],
)
def test_a_conversation_that_cannot_work_is_refused_at_once(make: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make(ScriptedAdapter([]))
