"""Rules that choose the reply to a request."""

from __future__ import annotations

import asyncio
import datetime
import enum
import statistics
import uuid
from collections import Counter
from typing import Annotated, Any, Literal

import aiohttp
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from fairtrial.integrations.model_server import ModelServer, Replies, Reply, Script, ToolCallReply, Usage, count_tokens
from fairtrial.integrations.model_server.config import FaultPlan, FaultRule, ServerConfig
from fairtrial.integrations.model_server.faults import RateLimited, ServerFailed, WrongShape
from fairtrial.integrations.model_server.reply import (
    FixedLatency,
    LogNormalLatency,
    ParsedMessage,
    ParsedRequest,
    UniformLatency,
    draw,
)
from fairtrial.integrations.model_server.rules import Rule, Speaker, UnsatisfiedSchemaError, minimal_instance, normalise
from fairtrial.integrations.model_server.service import TokenBucket


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


# Faults, latencies and quotas depend on the seed and not on timing.


def numbered(number: int, text: str = "hi", attempt: int = 1) -> ParsedRequest:
    return ParsedRequest(number, "openai", "m", (ParsedMessage("user", text, {}),), {}, digest=text, attempt=attempt)


def faulty(plan: FaultPlan, count: int = 1000) -> list[int]:
    return [number for number in range(1, count + 1) if plan.fault(numbered(number)) is not None]


def test_the_same_seed_gives_the_same_faults_and_another_seed_others() -> None:
    rules = [FaultRule(RateLimited(), 0.3), FaultRule(ServerFailed(), 0.1)]
    first, again, other = (FaultPlan(rules, seed=seed) for seed in (7, 7, 8))
    assert faulty(first) == faulty(again)
    assert faulty(first) != faulty(other)


def test_a_probability_is_the_share_of_requests() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), 0.3), FaultRule(ServerFailed(), 0.5)], seed=1)
    kinds = Counter(fault.kind for number in range(20_000) if (fault := plan.fault(numbered(number))))
    # The second rule is asked only where the first has passed, and draws for itself: half of seven tenths.
    assert kinds["rate_limited"] / 20_000 == pytest.approx(0.3, abs=0.02)
    assert kinds["server_failed"] / 20_000 == pytest.approx(0.35, abs=0.02)


def test_the_order_of_asking_does_not_matter() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), 0.5)], seed=3)
    forwards = {number: plan.fault(numbered(number)) for number in range(100)}
    backwards = {number: plan.fault(numbered(number)) for number in reversed(range(100))}
    assert forwards == backwards


def test_by_content_the_number_of_the_request_does_not_matter_but_the_attempt_does() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), 0.5, by="content")], seed=3)
    texts = [f"text {index}" for index in range(200)]
    early = [plan.fault(numbered(index, text)) for index, text in enumerate(texts)]
    late = [plan.fault(numbered(1000 - index, text)) for index, text in enumerate(texts)]
    retried = [plan.fault(numbered(index, text, attempt=2)) for index, text in enumerate(texts)]
    assert early == late
    assert early != retried


def test_schedules_name_requests_by_number() -> None:
    assert faulty(FaultPlan([FaultRule(RateLimited(), numbers=(2, 3, 500))])) == [2, 3, 500]
    assert faulty(FaultPlan([FaultRule(RateLimited(), every=250)])) == [250, 500, 750, 1000]
    assert faulty(FaultPlan([FaultRule(RateLimited(), 0.0)])) == []
    assert faulty(FaultPlan([FaultRule(RateLimited(), every=2, numbers=(1, 2, 3))])) == [2]


def test_a_predicate_decides_from_the_request() -> None:
    plan = FaultPlan([FaultRule(RateLimited(), when=lambda asked: asked.number > 998)])
    assert faulty(plan) == [999, 1000]


async def test_two_servers_of_one_seed_fail_the_same_requests_at_any_concurrency() -> None:
    rules = [FaultRule(RateLimited(), 0.2, by="content"), FaultRule(ServerFailed(), 0.2, by="content")]

    async def statuses(concurrency: int, latency: UniformLatency) -> dict[int, int]:
        async with (
            ModelServer(faults=rules, seed=11, latency=latency) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session,
        ):

            async def ask(index: int) -> tuple[int, int]:
                body = {"model": "m", "messages": [{"role": "user", "content": f"question {index}"}]}
                async with session.post(server.base_url + "/v1/chat/completions", json=body) as answer:
                    return index, answer.status

            return dict(await asyncio.gather(*map(ask, range(100))))

    alone = await statuses(1, UniformLatency(0, 0))
    crowded = await statuses(25, UniformLatency(0, 0.01))
    assert alone == crowded
    assert set(alone.values()) == {200, 429, 500}


@given(st.lists(st.one_of(st.integers(), st.text()), min_size=1))
def test_a_draw_is_in_the_unit_interval_and_repeatable(parts: list[int | str]) -> None:
    value = draw(*parts)
    assert 0 <= value < 1
    assert draw(*parts) == value


def test_draws_are_spread_evenly() -> None:
    values = [draw("spread", index) for index in range(10_000)]
    assert statistics.fmean(values) == pytest.approx(0.5, abs=0.02)
    assert statistics.pstdev(values) == pytest.approx((1 / 12) ** 0.5, abs=0.01)


def test_latencies_have_their_distributions() -> None:
    quantiles = [(index + 0.5) / 1000 for index in range(1000)]
    assert {FixedLatency(0.2).at(quantile) for quantile in quantiles} == {0.2}
    uniform = [UniformLatency(1, 3).at(quantile) for quantile in quantiles]
    assert min(uniform) == pytest.approx(1, abs=0.01)
    assert max(uniform) == pytest.approx(3, abs=0.01)
    tailed = [LogNormalLatency(0.1, 1.0, maximum=2.0).at(quantile) for quantile in quantiles]
    assert statistics.median(tailed) == pytest.approx(0.1, rel=0.01)
    # One standard deviation up, a log-normal of sigma 1 is e times its median.
    assert tailed[841] == pytest.approx(0.1 * 2.71828, rel=0.02)
    assert max(tailed) == 2.0
    assert LogNormalLatency(0.1).at(0.0) >= 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_latency_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds"):
        FixedLatency(seconds)


def test_a_uniform_latency_has_its_ends_in_order() -> None:
    with pytest.raises(ValueError, match="low must be at most high"):
        UniformLatency(2, 1)


def test_a_quota_grants_a_burst_and_then_its_rate() -> None:
    now = 0.0
    bucket = TokenBucket(2.0, 3, clock=lambda: now)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now = 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


def test_the_default_burst_of_a_quota_is_that_of_one_second() -> None:
    quick, slow = (TokenBucket(rate, clock=lambda: 0.0) for rate in (5.0, 0.1))
    assert sum(quick.take() for _ in range(20)) == 5
    assert sum(slow.take() for _ in range(20)) == 1


@pytest.mark.parametrize(("rate", "burst"), [(0.0, None), (-1.0, None), (1.0, 0)])
def test_a_quota_that_makes_no_sense_is_refused(rate: float, burst: int | None) -> None:
    with pytest.raises(ValueError):
        TokenBucket(rate, burst)


# The least instance of a JSON schema is valid, and the same every time.


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Node(BaseModel):
    value: int
    next: Node | None
    children: list[Node]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(gt=3, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=2)]


class Everything(BaseModel):
    pet: Annotated[Dog | Cat, Field(discriminator="kind")]
    colour: Colour
    tags: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2)]
    pair: tuple[int, str]
    ratio: Annotated[float, Field(gt=0, lt=1)]
    born: datetime.date
    at: datetime.datetime
    key: uuid.UUID
    counts: dict[str, int]
    code: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    anything: Any
    yes: bool
    optional: int | None = None


@pytest.mark.parametrize("kind", [Node, Cat, Dog, Everything, list[Node], int | None, dict[str, Cat], Colour])
def test_pydantic_accepts_what_is_made_from_its_own_schema(kind: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    schema = adapter.json_schema()
    instance = minimal_instance(schema)
    jsonschema.validate(instance, schema)
    adapter.validate_python(instance)
    assert minimal_instance(schema) == instance


@pytest.mark.parametrize(
    ("schema", "least"),
    [
        ({}, None),
        ({"const": 5}, 5),
        ({"enum": ["b", "a"]}, "b"),
        ({"type": ["null", "string"]}, None),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "integer", "maximum": -3}, -3),
        ({"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5}, 5),
        ({"type": "integer", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "exclusiveMaximum": -3}, -4),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0.3}, 0.5),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "number", "exclusiveMinimum": 2}, 3),
        ({"type": "number", "exclusiveMaximum": -2}, -3),
        ({"type": "number", "minimum": 1.5}, 1.5),
        ({"minimum": 7}, 7),
        ({"minLength": 2}, "aa"),
        ({"items": {"type": "string"}, "minItems": 1}, [""]),
        ({"required": ["a"], "properties": {"a": {"type": "string"}, "b": {}}}, {"a": ""}),
        ({"type": "object", "required": ["unknown"]}, {"unknown": None}),
        ({"type": "string", "pattern": "^x-", "examples": ["x-1"]}, "x-1"),
        ({"type": "string", "pattern": "^a+$", "minLength": 9}, "aaaaaaaaa"),
        ({"type": "string", "format": "unheard-of"}, ""),
        ({"oneOf": [{"enum": []}, {"type": "boolean"}]}, False),
        (
            {"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"required": ["a", "b"]}, True]},
            {"a": 1, "b": None},
        ),
        ({"$ref": "#/$defs/a~1b", "description": "x", "$defs": {"a/b": {"const": 1}}}, 1),
        (
            {
                "allOf": [{"$ref": "#/$defs/x"}, {"required": ["a"]}],
                "$defs": {"x": {"properties": {"a": {"const": 2}}}},
            },
            {"a": 2},
        ),
        ({"type": "array", "uniqueItems": True, "minItems": 1}, [None]),
    ],
)
def test_the_least_instance(schema: dict[str, Any], least: Any) -> None:
    instance = minimal_instance(schema)
    assert instance == least
    jsonschema.validate(instance, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#", "description": "with a sibling"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "other.json"},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"enum": []},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "number", "minimum": 2, "exclusiveMaximum": 2},
        {"type": "string", "pattern": "^never guessed$"},
        {"type": "quaternion"},
        {"type": "array", "minItems": 1, "items": False},
        {"type": "array", "minItems": 2, "uniqueItems": True},
        {"allOf": [False]},
        {"anyOf": []},
    ],
)
def test_what_cannot_be_made_is_said(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsatisfiedSchemaError, match="add a rule to the server"):
        minimal_instance(schema)


SCALARS = st.one_of(
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 9),
    ),
    st.builds(lambda n: {"type": "string", "minLength": n}, st.integers(0, 5)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"enum": ["x", 1]}, {"const": [1]}]),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda item, n: {"type": "array", "items": item, "minItems": n}, inner, st.integers(0, 2)),
        st.builds(
            lambda fields: {"type": "object", "properties": fields, "required": sorted(fields)[:2]},
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_the_least_instance_of_any_plain_schema_is_valid(schema: dict[str, Any]) -> None:
    jsonschema.validate(minimal_instance(schema), schema)
