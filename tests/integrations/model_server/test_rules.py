"""Rules that choose the reply to a request."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fairtrial.integrations.model_server import (
    FaultRule,
    ParsedMessage,
    ParsedRequest,
    RateLimited,
    Replies,
    Reply,
    Rule,
    Script,
    ServerConfig,
    ToolCallReply,
    UniformLatency,
    Usage,
    WrongShape,
    count_tokens,
)
from fairtrial.integrations.model_server.rules import Speaker, normalise


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request(*texts: str, system: str = "", **body: Any) -> ParsedRequest:
    """A conversation in which user and assistant take turns."""
    turns = [ParsedMessage("user" if index % 2 == 0 else "assistant", text, {}) for index, text in enumerate(texts)]
    first = [ParsedMessage("system", system, {})] if system else []
    return ParsedRequest(1, "openai", "m", (*first, *turns), body, digest="")


async def said(replies: Replies, *requests: ParsedRequest) -> list[str]:
    speaker = Speaker(normalise(replies))
    return [(await speaker.reply(one)).content for one in requests]


@pytest.mark.parametrize("replies", [None, [], ()])
async def test_no_replies_mean_an_echo(replies: Replies) -> None:
    assert await said(replies, request("a"), request("b", "x", "c"), request()) == ["a", "c", ""]


@pytest.mark.parametrize("replies", ["always", Reply("always"), lambda asked: "always", Rule("", "always")])
async def test_one_reply_answers_everything(replies: Replies) -> None:
    assert await said(replies, request("a"), request("b")) == ["always", "always"]


async def test_a_list_of_replies_is_said_in_order_and_then_echoes() -> None:
    assert await said(["one", Reply("two")], *[request("x")] * 3) == ["one", "two", "x"]


async def test_a_script_may_repeat_its_last_reply() -> None:
    assert await said(Script(("one", "two"), then="repeat_last"), *[request("x")] * 4) == ["one", "two", "two", "two"]


async def test_a_script_per_conversation_has_a_place_in_each() -> None:
    script = Script(("one", "two"), per="conversation")
    anna, bert = request("anna"), request("bert")
    assert await said(script, anna, bert, anna, bert, anna) == ["one", "one", "two", "two", "anna"]


async def test_a_script_per_turn_gives_a_retried_request_the_same_reply() -> None:
    script = Script(("one", "two"), per="turn")
    first, second = request("q"), request("q", "one", "more")
    assert await said(script, first, first, second, second) == ["one", "one", "two", "two"]


async def test_a_script_starts_again_after_a_reset() -> None:
    speaker = Speaker(normalise(["one", "two"]))
    before = await speaker.reply(request("x"))
    speaker.reset()
    assert (before, await speaker.reply(request("x"))) == (Reply("one"), Reply("one"))


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"metadata": {"conversation": "c"}, "user": "u"}, "c"),
        ({"metadata": {"user_id": "i"}}, "i"),
        ({"metadata": {}, "user": "u"}, "u"),
        ({"metadata": 5}, "first words"),
        ({}, "first words"),
    ],
)
def test_a_conversation_is_named_by_the_client_or_by_its_first_message(body: dict[str, Any], key: str) -> None:
    assert request("first words", "answer", "more", **body).conversation == key


async def test_scripts_may_be_kept_for_one_conversation_key() -> None:
    rules = [Rule("^anna$", Script(("a1", "a2")), where="conversation"), Rule("^bert$", "b", where="conversation")]
    anna, bert = request("x", user="anna"), request("x", user="bert")
    assert await said(rules, anna, bert, anna, bert, anna) == ["a1", "b", "a2", "b", "x"]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("last_user", "third"),
        ("last", "fourth"),
        ("system", "rules"),
        ("conversation", "first"),
        ("anywhere", "second"),
    ],
)
async def test_a_pattern_is_looked_for_where_the_rule_says(where: Any, found: str) -> None:
    asked = request("first", "second", "third", "fourth", system="rules")
    words = ["first", "second", "third", "fourth", "rules"]
    matching = [word for word in words if await said(Rule(word, "yes", where=where), asked) == ["yes"]]
    assert found in matching
    assert where == "anywhere" or matching == [found]


async def test_a_pattern_for_the_last_message_does_not_match_an_empty_conversation() -> None:
    assert await said(Rule("", "yes", where="last"), request()) == [""]


async def test_the_first_rule_that_has_a_reply_wins() -> None:
    async def slowly(asked: ParsedRequest) -> Reply:
        return Reply(f"async {asked.last_user}")

    rules: Replies = [
        Rule("one", "1"),
        Rule(lambda asked: asked.last_user == "two", lambda asked: None),
        Rule("two|three", slowly),
        Script(("four",)),
    ]
    assert await said(rules, *map(request, ("one", "two", "three", "x", "x"))) == [
        "1",
        "async two",
        "async three",
        "four",
        "x",
    ]


async def test_a_required_tool_that_is_not_offered_is_not_called() -> None:
    asked = ParsedRequest(1, "openai", "m", (), {}, digest="", required_tool="absent")
    assert (await Speaker(()).reply(asked)).tool_calls == ()


def test_a_list_of_unlike_things_is_refused() -> None:
    mixed: Replies = [Rule("a", "b"), "c"]
    with pytest.raises(TypeError, match="got a list with str and others"):
        normalise(mixed)


def test_invalid_configurations_are_refused_when_they_are_written() -> None:
    with pytest.raises(ValueError, match="at least one reply"):
        Script(())
    with pytest.raises(ValueError, match="invalid regular expression"):
        Rule("(", "x")
    with pytest.raises(ValueError, match="either text or output"):
        Reply("text", output={})
    nonsense: list[dict[str, Any]] = [
        {"max_concurrent": 0},
        {"requests_per_second": 0.0},
        {"burst": 2},
        {"requests_per_second": 1.0, "burst": 0},
        {"stream_interval": -1.0},
        {"log_limit": -1},
    ]
    for options in nonsense:
        with pytest.raises(ValueError):
            ServerConfig(**options)


def test_usage_counts_text_and_calls_unless_it_is_given() -> None:
    reply = Reply("12345", tool_calls=(ToolCallReply("name", {"a": 1}),))
    assert count_tokens("") == 0
    assert reply.usage_for(7) == Usage(7, 2 + 1 + 2)
    assert Reply("x", usage=Usage(1, 2)).usage_for(7) == Usage(1, 2)


def test_a_configuration_is_the_same_after_a_round_trip_through_json() -> None:
    config = ServerConfig.of(
        [
            Rule("a", Reply("b", tool_calls=(ToolCallReply("t", {"x": [1]}, id="i"),), usage=Usage(1, 2))),
            Script((Reply(output={"k": None}), "text"), per="turn", then="repeat_last"),
            Rule("c", Script(("d",)), where="system"),
        ],
        {
            "faults": [WrongShape({"a": 1}), FaultRule(RateLimited(1.5, "date"), 0.25, numbers=(1, 2), by="content")],
            "latency": UniformLatency(0.1, 0.2),
            "max_concurrent": 5,
            "requests_per_second": 2.5,
            "burst": 3,
            "models": ["a", "b"],
            "seed": 9,
        },
    )
    assert ServerConfig.from_json(config.to_json()) == config


def test_a_script_file_may_be_terse() -> None:
    config = ServerConfig.from_json('{"replies": ["one", {"text": "two"}], "faults": {"kind": "hang"}, "latency": 0.5}')
    assert config.replies == normalise(["one", Reply("two")])
    assert config.faults[0].fault.kind == "hang"
    assert config.latency.at(0.3) == 0.5
    assert ServerConfig.from_json("{}") == ServerConfig()


@pytest.mark.parametrize(
    "script",
    [
        '{"replys": []}',
        '{"faults": [{"kind": "earthquake"}]}',
        '{"replies": [{"txt": "x"}]}',
        '{"latency": "long"}',
        "{",
    ],
)
def test_a_script_file_with_a_mistake_is_refused(script: str) -> None:
    with pytest.raises(ValidationError):
        ServerConfig.from_json(script)


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig.of(lambda asked: "x", {}),
        ServerConfig.of(Rule(lambda asked: True, "x"), {}),
        ServerConfig.of(None, {"faults": FaultRule(RateLimited(), when=lambda asked: True)}),
    ],
)
def test_a_configuration_with_functions_cannot_be_written_as_json(config: ServerConfig) -> None:
    with pytest.raises(TypeError, match="got a function"):
        config.to_json()
