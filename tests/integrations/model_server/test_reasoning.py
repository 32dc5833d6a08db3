"""Reasoning on the model server, and the refusals of providers whose models reason: official SDKs, unpatched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from fairtrial.integrations.model_server import CutOff, FaultRule, ModelServer, Reply, Script, ToolCallReply, Usage
from fairtrial.integrations.model_server.faults import ReasoningNotReturned, TemperatureRefused, ToolsNeedResponses

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
ANTHROPIC_TOOL: Any = {"name": "weather", "input_schema": SCHEMA}
CALLS = (
    ToolCallReply("weather", {"city": "Oslo"}, thought_signature="c2lnbmVk"),
    ToolCallReply("weather", {"city": "Rome"}),
)
THOUGHT = "I must look it up, for both."
TURNS = Script((Reply(tool_calls=CALLS, reasoning=THOUGHT, redacted_reasoning="b3BhcXVl"), "Snow."), per="turn")


class Person(BaseModel):
    name: str
    age: int


class Talk:
    """One tool conversation through an official SDK: what the first answer was, and how it is sent back."""

    def __init__(self, base_url: str, *, stream: bool) -> None:
        self.stream = stream
        self.openai = openai.OpenAI(base_url=base_url + "/v1", api_key="test", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=base_url, api_key="test", max_retries=0)

    def chat(self, messages: list[Any], **options: Any) -> Any:
        """The assistant's message as a plain object."""
        given: Any = {"model": "m", "messages": messages, "tools": [CHAT_TOOL], **options}
        if not self.stream:
            return self.openai.chat.completions.create(**given).choices[0].message.model_dump(exclude_none=True)
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for chunk in self.openai.chat.completions.create(**given, stream=True):
            delta = chunk.choices[0].delta.model_dump(exclude_none=True)
            message["content"] += delta.get("content", "")
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for piece in delta.get("tool_calls", ()):
                if piece.pop("index") == len(message["tool_calls"]):
                    message["tool_calls"].append(piece)
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += piece["function"]["arguments"]
        return message

    def responses(self, items: Any, **options: Any) -> openai.types.responses.Response:
        given: Any = {"model": "m", "input": items, "tools": [RESPONSES_TOOL], "store": False, **options}
        if not self.stream:
            whole: openai.types.responses.Response = self.openai.responses.create(**given)
            return whole
        *_, last = self.openai.responses.create(**given, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        response: openai.types.responses.Response = last.response
        return response

    def messages(self, messages: list[Any], **options: Any) -> anthropic.types.Message:
        given: Any = {"model": "m", "messages": messages, "tools": [ANTHROPIC_TOOL], "max_tokens": 1000, **options}
        if not self.stream:
            whole: anthropic.types.Message = self.anthropic.messages.create(**given)
            return whole
        with self.anthropic.messages.stream(**given) as events:
            return events.get_final_message()

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()


type MakeTalk = Callable[[ModelServer], Talk]


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def talk_to(request: pytest.FixtureRequest) -> Iterator[MakeTalk]:
    talks: list[Talk] = []

    def make(server: ModelServer) -> Talk:
        talks.append(Talk(server.base_url, stream=request.param))
        return talks[-1]

    yield make
    for talk in talks:
        talk.close()


@pytest.fixture
def strict() -> Iterator[ModelServer]:
    with ModelServer(TURNS, faults=ReasoningNotReturned()) as server:
        yield server


def ask(text: str = "How is the weather?") -> list[Any]:
    return [{"role": "user", "content": text}]


def chat_results(message: Any) -> list[Any]:
    return [message, *({"role": "tool", "tool_call_id": c["id"], "content": "snow"} for c in message["tool_calls"])]


def test_chat_completions_refuse_tool_calls_without_their_reasoning(strict: ModelServer, talk_to: MakeTalk) -> None:
    talk = talk_to(strict)
    first = talk.chat(ask())
    assert first["reasoning_content"] == THOUGHT
    assert first["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "c2lnbmVk"}}
    assert "extra_content" not in first["tool_calls"][1]
    assert talk.chat([*ask(), *chat_results(first)])["content"] == "Snow."

    without = copy.deepcopy(first)
    del without["reasoning_content"]
    with pytest.raises(openai.BadRequestError, match="`reasoning_content` in the thinking mode must be passed back"):
        talk.chat([*ask(), *chat_results(without)])

    for signature in (None, {"google": {"thought_signature": "c2lnbmVK"}}):
        without = copy.deepcopy(first)
        without["tool_calls"][0]["extra_content"] = signature
        with pytest.raises(openai.BadRequestError, match="missing a thought_signature"):
            talk.chat([*ask(), *chat_results(without)])
    assert strict.stats().by_fault == {"reasoning_not_returned": 3}


def test_responses_refuse_tool_calls_without_their_reasoning_item(strict: ModelServer, talk_to: MakeTalk) -> None:
    talk = talk_to(strict)
    first = talk.responses("How is the weather?")
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "function_call", "function_call"]
    items: list[Any] = [item.model_dump(exclude_unset=True) for item in first.output]
    assert items[0]["summary"] == [{"type": "summary_text", "text": THOUGHT}]
    assert items[0]["encrypted_content"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "snow"}
        for item in items
        if item["type"] == "function_call"
    ]
    assert talk.responses([*ask(), *items, *results]).output_text == "Snow."

    with pytest.raises(openai.BadRequestError, match="without its required 'reasoning' item: 'rs_1'"):
        talk.responses([*ask(), *items[1:], *results])
    changed = [{**items[0], "encrypted_content": "x"}, *items[1:]]
    with pytest.raises(openai.BadRequestError, match="could not be verified") as refused:
        talk.responses([*ask(), *changed, *results])
    assert refused.value.code == "invalid_encrypted_content"


def test_anthropic_refuses_tool_calls_without_their_thinking(strict: ModelServer, talk_to: MakeTalk) -> None:
    talk = talk_to(strict)
    first = talk.messages(ask(), system="Be brief.")
    blocks: list[Any] = [block.model_dump(exclude_none=True) for block in first.content]
    assert [block["type"] for block in blocks] == ["thinking", "redacted_thinking", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["data"]) == (THOUGHT, "b3BhcXVl")
    assert blocks[0]["signature"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "snow"} for block in blocks[2:]]

    def second(content: list[Any]) -> anthropic.types.Message:
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
        return talk.messages([*ask(), *turns], system="Be brief.")

    assert second(blocks).content[0].text == "Snow."  # type: ignore[union-attr]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0\.type: Expected `thinking`"):
        second(blocks[2:])
    for changed in (
        [{**blocks[0], "thinking": "Something else."}, *blocks[1:]],
        [{**blocks[0], "signature": "x"}, *blocks[1:]],
        [blocks[0], *blocks[2:]],
    ):
        with pytest.raises(
            anthropic.BadRequestError, match="blocks in the latest assistant message cannot be modified"
        ):
            second(changed)


def test_each_answer_has_a_signature_of_its_own_unless_it_is_given(talk_to: MakeTalk) -> None:
    with ModelServer(Reply("ok", reasoning="same")) as server:
        talk = talk_to(server)
        signatures = {talk.messages(ask()).content[0].signature for _ in range(2)}  # type: ignore[union-attr]
    assert len(signatures) == 2
    with ModelServer(Reply("ok", reasoning="same", signature="mine")) as server:
        assert talk_to(server).messages(ask()).content[0].signature == "mine"  # type: ignore[union-attr]


def test_tools_on_chat_completions_are_refused_unless_reasoning_is_off(talk_to: MakeTalk) -> None:
    with ModelServer("ok", faults=ToolsNeedResponses()) as server:
        talk = talk_to(server)
        with pytest.raises(
            openai.BadRequestError, match="Function tools with reasoning_effort are not supported for m"
        ):
            talk.chat(ask())
        assert talk.chat(ask(), reasoning_effort="none")["content"] == "ok"
        assert talk.chat(ask(), tools=openai.omit)["content"] == "ok"
        assert talk.responses("hi").output_text == "ok"
        assert talk.messages(ask()).content[0].text == "ok"  # type: ignore[union-attr]
        assert server.stats().by_fault == {"tools_need_responses": 1}


def test_a_reasoning_model_refuses_a_temperature(talk_to: MakeTalk) -> None:
    with ModelServer("ok", faults=TemperatureRefused()) as server:
        talk = talk_to(server)
        with pytest.raises(openai.BadRequestError, match="'temperature' does not support 0 with this model") as refused:
            talk.chat(ask(), temperature=0)
        assert refused.value.code == "unsupported_value"
        with pytest.raises(openai.BadRequestError, match="'temperature' is not supported with this model"):
            talk.responses("hi", temperature=0)
        with pytest.raises(anthropic.BadRequestError, match="`temperature` may only be set to 1"):
            talk.messages(ask(), extra_body={"temperature": 0})
        assert talk.chat(ask(), temperature=1)["content"] == "ok"


def test_an_answer_is_cut_off_at_the_requests_limit_reasoning_included(talk_to: MakeTalk) -> None:
    long = Reply("An answer of many words.", reasoning="Thinking of it.", tool_calls=())
    with ModelServer(long, faults=CutOff()) as server:
        talk = talk_to(server)
        answer = talk.messages(ask(), max_tokens=6)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 6)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[1].text == "An answe"  # type: ignore[union-attr]
        response = talk.responses("hi", max_output_tokens=2)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert (response.incomplete_details.reason, response.output_text) == ("max_output_tokens", "")
        assert talk.responses("hi").output_text == long.text
    with ModelServer(long, faults=FaultRule(CutOff(5))) as server:
        talk = talk_to(server)
        assert talk.chat(ask())["content"] == "An a"
        assert talk.responses("hi").output_text == "An a"


def test_responses_give_structured_output_refusals_and_usage(talk_to: MakeTalk) -> None:
    with ModelServer() as server:
        talk = talk_to(server)
        parsed = talk.openai.responses.parse(model="m", input="who?", text_format=Person)
        assert parsed.output_parsed == Person(name="", age=0)
        forced = talk.responses("x", tool_choice={"type": "function", "name": "weather"}).output[0]
        assert forced.type == "function_call"
        assert forced.arguments == '{"city": ""}'
        assert talk.responses([{"role": "user", "content": [{"type": "input_text", "text": "parts"}]}]).output_text
        with talk.openai.responses.stream(model="m", input="in pieces, all of them") as events:
            assert events.get_final_response().output_text == "in pieces, all of them"
    with ModelServer(Reply(refusal="No.")) as server:
        message = talk_to(server).responses("x").output[0]
        assert message.type == "message"
        assert message.content[0].type == "refusal"
        assert message.content[0].refusal == "No."
    usage = Usage(1000, 50, cached_tokens=800, reasoning_tokens=30, cache_write_tokens=100)
    with ModelServer(Reply("ok", usage=usage)) as server:
        talk = talk_to(server)
        found = talk.responses("x").usage
        assert found is not None
        assert (found.input_tokens, found.output_tokens, found.total_tokens) == (1000, 50, 1050)
        assert (found.input_tokens_details.cached_tokens, found.input_tokens_details.cache_write_tokens) == (800, 100)
        assert found.output_tokens_details.reasoning_tokens == 30
        counted = talk.messages(ask()).usage
        assert counted.output_tokens_details is not None
        assert (counted.input_tokens, counted.cache_creation_input_tokens) == (100, 100)
        assert counted.output_tokens_details.thinking_tokens == 30


def test_what_the_responses_endpoint_cannot_serve_is_refused(talk_to: MakeTalk) -> None:
    with ModelServer() as server:
        talk = talk_to(server)
        for problem, options in (
            ("keeps no responses", {"previous_response_id": "resp_1"}),
            ("list of at least one item", {"input": []}),
            ("of type 'computer_call' are not served", {"input": [{"type": "computer_call"}]}),
            ("each must be a function with a name", {"tools": [{"type": "function"}]}),
            ("each must be a function with a name", {"tools": [{"type": "custom", "name": "shell"}]}),
        ):
            with pytest.raises(openai.BadRequestError, match=problem):
                talk.responses(**{"items": "x", **options})


def test_the_same_conversation_counts_the_same_tokens_in_every_protocol(strict: ModelServer, talk_to: MakeTalk) -> None:
    talk = talk_to(strict)
    first = talk.chat(ask())
    talk.chat([*ask(), *chat_results(first)])
    answer = talk.responses(ask())
    items: list[Any] = [item.model_dump(exclude_unset=True) for item in answer.output]
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "snow"} for call in calls]
    talk.responses([*ask(), *items, *results])
    message = talk.messages(ask())
    blocks: list[Any] = [block.model_dump(exclude_none=True) for block in message.content]
    done = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "snow"} for b in blocks if b["type"] == "tool_use"
    ]
    talk.messages([*ask(), {"role": "assistant", "content": blocks}, {"role": "user", "content": done}])
    seen = [(request.protocol, request.turn, request.input_tokens) for request in strict.requests()]
    assert seen == [(p, t, n) for p in ("openai", "responses", "anthropic") for t, n in ((0, 5), (1, 7))]
