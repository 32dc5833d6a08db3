from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_type

import pytest

from fairtrial import ChatMessage, Dataset, EvalSuite, PromptExecuted, Session, TokenUsage, ToolCall, exact_match
from fairtrial.errors import ConfigurationError, OutputParseError, RateLimitedError
from fairtrial.models import MarkdownSection, OutputRepaired, PromptTemplate, ScriptedAdapter
from fairtrial.models.adapter import Completion, PromptResponse, ProviderAdapter, ToolSpec


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    score: float


VERDICT = PromptTemplate[Verdict]("t", "v", "verdict", [MarkdownSection[None]("", "Judge $x", "j")])


def ask(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


async def test_a_list_of_replies_is_used_in_order_and_ends_with_an_error() -> None:
    adapter = ScriptedAdapter(["one", "two"])
    said = [(await adapter.complete(ask("?"))).output for _ in range(2)]
    assert said == ["one", "two"]
    with pytest.raises(ConfigurationError, match="2 replies, and this is call 3"):
        await adapter.complete(ask("?"))
    assert len(adapter.calls) == 3


async def test_a_list_may_start_again() -> None:
    adapter = ScriptedAdapter(["one", "two"], repeat=True)
    assert [(await adapter.complete(ask("?"))).output for _ in range(3)] == ["one", "two", "one"]


async def test_a_mapping_answers_by_the_last_user_message() -> None:
    adapter = ScriptedAdapter({"capital of France": "Paris", "capital": "Rome"})
    assert (await adapter.complete(ask("capital"))).output == "Rome"
    assert (await adapter.complete(ask("the capital of France?"))).output == "Paris"
    with pytest.raises(ConfigurationError, match="no reply to 'weather'"):
        await adapter.complete(ask("weather"))


async def test_a_function_answers_sync_or_async() -> None:
    def shout(messages: Sequence[ChatMessage]) -> str:
        return messages[-1].text.upper()

    async def whisper(messages: Sequence[ChatMessage]) -> str:
        return messages[-1].text.lower()

    assert (await ScriptedAdapter(shout).complete(ask("Hi"))).output == "HI"
    assert (await ScriptedAdapter(whisper).complete(ask("Hi"))).output == "hi"


async def test_an_exception_is_raised_and_the_next_reply_given() -> None:
    adapter = ScriptedAdapter([RateLimitedError("slow down", retry_after=2), "fine"])
    with pytest.raises(RateLimitedError, match="slow down"):
        await adapter.complete(ask("?"))
    assert (await adapter.complete(ask("?"))).output == "fine"


async def test_values_are_sent_as_json_and_read_as_the_type_asked_for() -> None:
    adapter = ScriptedAdapter(
        [Verdict("ok", 1.0), {"reason": "no", "score": 0}, '```json\n{"reason":"f","score":1}\n```']
    )
    completion = await adapter.complete(ask("?"), output_type=Verdict)
    assert_type(completion, Completion[Verdict])
    assert completion.output == Verdict("ok", 1.0)
    assert completion.raw == '{"reason":"ok","score":1.0}'
    response = await adapter.evaluate(VERDICT.bind(x="this"))
    assert_type(response, PromptResponse[Verdict])
    assert response.output == Verdict("no", 0.0)
    assert (await adapter.evaluate(VERDICT.bind(x="this"))).output == Verdict("f", 1.0)


async def test_tool_calls_are_given_with_ids_and_leave_the_output_open() -> None:
    adapter = ScriptedAdapter([ToolCall("add", {"a": 1}), [ToolCall("a"), ToolCall("b", id="mine")]])
    tool = ToolSpec("add", "adds", {"type": "object"})
    one = await adapter.complete(ask("?"), tools=[tool], output_type=Verdict)
    assert one.output is None
    assert one.message.tool_calls == (ToolCall("add", {"a": 1}, "call_0_0"),)
    assert one.finish_reason == "tool_calls"
    two = await adapter.complete(ask("?"))
    assert [call.id for call in two.message.tool_calls] == ["call_1_0", "mine"]


async def test_every_call_is_recorded_with_its_usage_and_its_actor() -> None:
    session = Session()
    adapter = ScriptedAdapter(["abcd"] * 2, model="m")
    await adapter.complete(ask("12345"), session=session, prompt_name="p")
    await adapter.complete(ask("12345"), session=session, actor="judge")
    recorded = session.everything()[PromptExecuted].all()
    assert recorded[0] == PromptExecuted("p", "scripted", "m", TokenUsage(2, 1), "stop")
    assert len(recorded) == 2
    assert len(session[PromptExecuted].all()) == 1


async def test_usage_may_be_given() -> None:
    completion = await ScriptedAdapter(["x"], usage=TokenUsage(7, 8, 1, 0.5)).complete(ask("?"))
    assert completion.usage == TokenUsage(7, 8, 1, 0.5)


async def test_an_answer_that_cannot_be_read_is_repaired_once_and_recorded() -> None:
    session = Session()
    adapter = ScriptedAdapter(["it is fine", Verdict("ok", 1.0)], usage=TokenUsage(1, 2))
    completion = await adapter.complete(ask("?"), output_type=Verdict, session=session, prompt_name="p")
    assert completion.output == Verdict("ok", 1.0)
    assert completion.usage == TokenUsage(2, 4)
    (repair,) = session[OutputRepaired].all()
    assert (repair.prompt_name, repair.raw, repair.repaired) == ("p", "it is fine", True)
    assert "not JSON" in repair.problem
    assert [message.role for message in adapter.calls[1].messages] == ["user", "assistant", "user"]
    assert "not JSON" in adapter.calls[1].text
    assert len(session[PromptExecuted].all()) == 2


async def test_an_answer_that_stays_unreadable_is_an_error_with_the_answer() -> None:
    session = Session()
    adapter = ScriptedAdapter(["nope", '{"reason": 1}', "unused"])
    with pytest.raises(OutputParseError, match="did not answer with a Verdict, even when asked again") as caught:
        await adapter.complete(ask("?"), output_type=Verdict, session=session)
    assert caught.value.raw == '{"reason": 1}'
    assert len(adapter.calls) == 2
    assert [event.repaired for event in session[OutputRepaired].all()] == [False]


async def test_an_unreadable_answer_without_a_session_is_repaired_too() -> None:
    adapter = ScriptedAdapter(["nope", "[1, 2]"])
    assert (await adapter.complete(ask("?"), output_type=list[int])).output == [1, 2]


async def test_a_prompt_answered_with_tool_calls_has_no_output() -> None:
    with pytest.raises(OutputParseError, match="answered with tool calls"):
        await ScriptedAdapter([ToolCall("x")]).evaluate(VERDICT.bind(x=1))


async def test_codec_marks_in_an_answer_are_ordinary_text() -> None:
    adapter = ScriptedAdapter(['["\\ufdd0nan", "a\\u0000b"]', '"\\ufdd0nan"', '"\\ufdd0nan"'])
    assert (await adapter.complete(ask("?"), output_type=list[str])).output == ["\ufdd0nan", "a\0b"]
    with pytest.raises(OutputParseError):
        await adapter.complete(ask("?"), output_type=float)


async def test_the_calls_can_be_looked_at() -> None:
    adapter = ScriptedAdapter(["x"], params={"temperature": 0, "seed": 1})
    await adapter.complete(ask("hello"), params={"seed": 2}, actor="judge")
    (call,) = adapter.calls
    assert (call.text, call.actor, call.output_type) == ("hello", "judge", str)
    assert call.params == {"temperature": 0, "seed": 2}


def test_a_script_is_a_list_a_mapping_or_a_function() -> None:
    with pytest.raises(ConfigurationError, match="replies of ScriptedAdapter must be"):
        ScriptedAdapter("text")


def test_it_is_a_provider_adapter() -> None:
    adapter: ProviderAdapter = ScriptedAdapter([])
    assert (adapter.name, adapter.model) == ("scripted", "scripted")


async def test_a_call_takes_a_text_or_mappings_in_place_of_messages() -> None:
    adapter = ScriptedAdapter(["one", "two"])
    assert (await adapter.complete("Say one.")).text == "one"
    system = {"role": "system", "content": "Be brief."}
    assert (await adapter.complete([system, ChatMessage("user", "Say two.")])).text == "two"
    assert [call.messages for call in adapter.calls] == [
        (ChatMessage("user", "Say one."),),
        (ChatMessage("system", "Be brief."), ChatMessage("user", "Say two.")),
    ]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (ChatMessage("user", "Hi"), r"a text or a list of ChatMessages \(got ChatMessage\)"),
        ({"role": "user", "content": "Hi"}, r"a text or a list of ChatMessages \(got dict\)"),
        (None, r"a text or a list of ChatMessages \(got NoneType\)"),
        (["Hi"], r"messages\[0\] must be a ChatMessage or a mapping \(got str\)"),
        ([{"role": "user"}], r"messages\[0\] must have 'role', 'content' and at most 'name' \(got 'role'\)"),
        ([{"role": "user", "content": "Hi", "tool_calls": []}], "'content', 'tool_calls'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]: ChatMessage\.content must be text"),
    ],
)
async def test_a_call_with_something_else_is_refused_with_an_example(messages: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        await ScriptedAdapter(["one"]).complete(messages)  # type: ignore[arg-type]  # what users pass
    assert "ChatMessage(" in str(caught.value)


def test_a_blocking_call_is_recorded_in_its_trial() -> None:
    adapter = ScriptedAdapter(["four"], usage=TokenUsage(3, 1))

    def answer(question: str) -> str:
        completion = adapter.complete_sync(question)
        assert_type(completion, Completion[str])
        return completion.text

    suite = EvalSuite("s", Dataset.of([("two and two", "four")]), answer, exact_match)
    report = suite.run_sync(store="memory:")
    assert (report.pass_rate, report.total_tokens) == (1.0, 4)
