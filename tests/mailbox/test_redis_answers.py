"""The parser of answers of Redis that hold many messages."""

from __future__ import annotations

import asyncio
import random
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis.asyncio.connection
from redis._parsers import Encoder, _AsyncRESP2Parser
from redis.exceptions import BusyLoadingError, InvalidResponse, NoScriptError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from fairtrial.mailbox import RedisConnection
from fairtrial.mailbox.redis.answers import BulkParser, parser_options

_ENCODER: Any = cast(Any, Encoder)("utf-8", "strict", False)


def written(value: Any) -> bytes:
    """An answer in the protocol of Redis."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    if isinstance(value, str):
        return value.encode() + b"\r\n"
    return b"*%d\r\n" % len(value) + b"".join(map(written, value))


def answer(chance: random.Random, depth: int = 4) -> Any:
    kind = chance.randrange(9 if depth else 6)
    if kind == 0:
        return None
    if kind == 1:
        return chance.randrange(-(10**12), 10**12)
    if kind == 2:
        return chance.choice(["+OK", "+", "*-1", "-ERR no such key", "-NOSCRIPT none"])
    if kind < 6:
        return chance.choice([b"", b"\r\n", b"$3\r\n", b"\x00\xff*2\r\n:1", chance.randbytes(chance.randrange(300))])
    return [answer(chance, depth - 1) for _ in range(chance.randrange(6))]


def parser_of(kind: type[Any]) -> tuple[Any, asyncio.StreamReader]:
    """A parser with the stream that it reads, as a connection makes them."""
    stream = asyncio.StreamReader()
    parser = kind(65536)
    parser.on_connect(SimpleNamespace(_reader=stream, encoder=_ENCODER))
    return parser, stream


async def parsed(kind: type[Any], pieces: list[bytes], count: int) -> list[Any]:
    """The answers that a parser reads from a stream on which these pieces arrive one after another."""
    parser, stream = parser_of(kind)

    async def feed() -> None:
        for piece in pieces:
            stream.feed_data(piece)
            await asyncio.sleep(0)
        stream.feed_eof()

    feeding = asyncio.create_task(feed())
    answers = [await parser.read_response() for _ in range(count)]
    await feeding
    return answers


def comparable(value: Any) -> Any:
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return (type(value), str(value)) if isinstance(value, Exception) else value


@pytest.mark.parametrize("seed", range(30))
async def test_answers_are_those_of_redis_py_wherever_they_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    answers = [answer(chance) for _ in range(6)]
    data = b"".join(map(written, answers))
    cuts = sorted({0, len(data), *(chance.randrange(len(data)) for _ in range(chance.choice([0, 3, 60])))})
    pieces = [data[start:end] for start, end in pairwise(cuts)]
    expected = await parsed(_AsyncRESP2Parser, [data], len(answers))
    assert comparable(await parsed(BulkParser, pieces, len(answers))) == comparable(expected)


@pytest.mark.parametrize(
    "part", [b"", b"*2\r\n", b"*2\r\n:1\r\n", b"$5\r\nab", b"$5\r\nabcde\r", b":1", b"*1\r\n$3\r\n"]
)
async def test_a_connection_that_ends_within_an_answer_is_an_error(part: bytes) -> None:
    with pytest.raises(RedisConnectionError, match="closed the connection"):
        await parsed(BulkParser, [part] if part else [], 1)


async def test_errors_of_the_server_are_returned_and_those_of_the_connection_raised() -> None:
    found, missing = await parsed(BulkParser, [b"-NOSCRIPT No matching script\r\n-ERR what\r\n"], 2)
    assert (type(found), type(missing)) == (NoScriptError, ResponseError)
    with pytest.raises(BusyLoadingError):
        await parsed(BulkParser, [b"-LOADING Redis is loading\r\n"], 1)
    with pytest.raises(InvalidResponse, match="not an answer of Redis"):
        await parsed(BulkParser, [b"?1\r\n"], 1)
    unconnected, _ = parser_of(BulkParser)
    unconnected.on_disconnect()
    with pytest.raises(RedisConnectionError, match="is closed"):
        await unconnected.read_response()


async def test_what_follows_an_answer_is_kept_until_the_connection_is_opened_again() -> None:
    parser, stream = parser_of(BulkParser)
    stream.feed_data(b":1\r\n:2\r\n")
    assert await parser.read_response() == 1
    assert await parser.read_response() == 2
    stream.feed_data(b":3\r\n:4\r\n")
    assert await parser.read_response() == 3
    parser.on_connect(SimpleNamespace(_reader=stream, encoder=None))
    stream.feed_data(b":5\r\n")
    assert await parser.read_response() == 5


async def test_connections_that_wait_for_messages_have_this_parser(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RedisConnection(redis_url) as connection:
        reader = await connection.reader("key")
        assert await reader.read("ECHO", b"x" * 300_000) == b"x" * 300_000
        assert isinstance(reader._client.connection._parser, BulkParser)
        await connection.give_back(reader)
    monkeypatch.setattr(redis.asyncio.connection, "DefaultParser", object)  # As with hiredis, which is faster.
    assert parser_options() == {}


async def test_a_redis_py_without_the_classes_that_the_parser_extends_parses_itself(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fairtrial.mailbox.redis.answers", None)  # Its import fails.
    async with RedisConnection(redis_url) as connection:
        reader = await connection.reader("key")
        assert await reader.read("ECHO", b"x") == b"x"
        parser = reader._client.connection._parser
        await connection.give_back(reader)
        assert not isinstance(parser, BulkParser)
